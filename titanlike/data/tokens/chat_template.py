"""Chat templates: conversations as tokens, and which of them are the assistant's. No torch.

A template is the Jinja program of a Hugging Face tokenizer, and runs in a sandbox. The assistant's part is what the template marks
with `{% generation %}`; in a template without these marks, it is what each message of the assistant adds to the rendering of those
before it. Templates of reasoning models render an answer differently when others follow; a conversation becomes several sequences
then.

The contents of messages cannot become special tokens, so they cannot end a turn or begin one. Before the template runs, names of
special tokens in them are enclosed in characters that are in no text. The rendered text is split there, and the enclosed names are
encoded as plain text.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt

from titanlike.config import UserError
from titanlike.config.base import shown
from titanlike.data.documents.conversations import Conversation, Message, is_answer
from titanlike.data.documents.readers import BadRecord, replace_surrogates
from titanlike.data.tokens.arrays import Flags
from titanlike.data.tokens.template_environment import LABEL, LABEL_END, MARKS, PLAIN, PLAIN_END, template_environment
from titanlike.data.tokens.tokenizer import TokenIDs, Tokenizer, files_of

BUILT_IN_NAME = "the built-in chat template"
REASONING = ("reasoning_content", "reasoning", "thinking")  # fields of the assistant's messages
REPLACED = str.maketrans(dict.fromkeys(MARKS, "\ufffd"))
BUILT_IN = """\
{%- for message in messages -%}
{{- <start> + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + <end> -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + <end> -}}
{%- endif -%}
{{- <after> -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- <start> + 'assistant\\n' -}}{%- endif -%}
"""


class ChatTemplate:
    """Renders conversations and encodes them."""

    def __init__(self, source: str, tokenizer: Tokenizer, *, name: str = "the chat template") -> None:
        self.source = source
        self.name = name
        self.tokenizer = tokenizer
        names = sorted(tokenizer.codec.special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)))
        starts = {name[:size] for name in names for size in range(1, len(name))}
        self._start_of_special = re.compile(f"(?:{'|'.join(map(re.escape, sorted(starts, key=len, reverse=True)))})$")
        self._marks_labels = re.search(r"{%-?\s*generation\s*-?%}", source) is not None
        try:
            self._template = template_environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"{name}, line {error.lineno}: {error.message}") from None
        except (SyntaxError, RecursionError, ValueError):  # of the Python code that Jinja writes
            raise UserError(f"{name} is nested too deeply, or has a number that is too long; simplify it") from None
        self._variables = _token_names(tokenizer)

    @property
    def identity(self) -> list[Any]:
        """What decides the tokens of a conversation, besides the tokenizer's tokens."""
        return [self.source, self._variables]

    def reads(self, name: str) -> bool:
        """Whether the template has a name, such as a field of messages."""
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None

    def encode(self, conversation: Conversation) -> list[tuple[TokenIDs, Flags]]:
        """Returns the tokens of the sequences of a conversation, and which are labels: the assistant's tokens. Each answer is a
        label in one sequence. Raises `BadRecord` if the template does not render the conversation."""
        sequences = []
        for text in self._render_all(conversation):
            parts = list(self._encode_parts(text))
            tokens = np.concatenate([tokens for tokens, _ in parts] or [np.zeros(0, np.uint32)])
            labels = np.concatenate([labels for _, labels in parts] or [np.zeros(0, bool)])
            if not labels.any():
                raise BadRecord(f"{self.name} renders no token of the assistant")
            sequences.append((tokens, labels))
        return sequences

    def opening(self, messages: list[Message]) -> list[int]:
        """Returns the tokens of a conversation up to the assistant's next turn. Raises `BadRecord` if the template does not
        render it."""
        text = self._render(self._escape(messages), None, prompt=True)
        return [token for tokens, _ in self._encode_parts(text) for token in tokens.tolist()]

    def end_of_turn(self) -> int | None:
        """Returns the special token with which the assistant's turns end; None if they end without one. Raises `BadRecord` if
        the template does not render a question and an answer."""
        exchange = Conversation([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        [(tokens, labels)] = self.encode(exchange)
        for token in reversed(tokens[labels].tolist()):
            if token in self.tokenizer.codec.special.values():
                return int(token)
            if self.tokenizer.codec.decode([token]).strip():
                break
        return None

    def _render(self, messages: list[Message], tools: Any, *, prompt: bool = False) -> str:
        try:
            return self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **self._variables
            )
        except Exception as error:  # noqa: BLE001  a template can raise anything
            raise BadRecord(f"{self.name} raises {type(error).__name__}: {shown(str(error))}") from None

    def _render_all(self, conversation: Conversation) -> list[str]:
        """Renders a conversation with marks around the labels, as one or more sequences."""
        for number, message in enumerate(conversation.messages):
            for name in REASONING:
                if message.get(name) and not self.reads(name):
                    raise BadRecord(
                        f"message {number} has the field {name!r}, which {self.name} does not read; set data.chat_template to a "
                        "template that does, or remove the field"
                    )
        tools = self._escape(conversation.tools)
        render = self._render_marked if self._marks_labels else self._render_answers
        problem: BadRecord | None = None
        for messages in _forms_of_tool_calls(conversation.messages):
            escaped = self._escape(messages)
            marked, calls = _mark_calls(escaped)
            try:
                texts = render(escaped, tools)
                written = "".join(render(marked, tools) if calls else [])
            except BadRecord as error:
                problem = problem or error
                continue
            labels = "".join(re.findall(f"{LABEL}(.*?){LABEL_END}", written, re.DOTALL))
            missing = [name for mark, (name, trained) in calls.items() if mark not in (labels if trained else written)]
            if not missing:
                return texts
            problem = problem or BadRecord(
                f"{self.name} does not write the assistant's call of the tool {shown(missing[0])}; set data.chat_template to a "
                "template that does, or leave this record out"
            )
        assert problem
        raise problem

    def _render_marked(self, messages: list[Message], tools: Any) -> list[str]:
        """Renders a conversation with a template that marks the labels, without labels in messages with the weight 0."""
        text, answers = self._render(messages, tools), [each for each in messages if each["role"] == "assistant"]
        if all(map(is_answer, answers)):
            return [text]
        parts = re.split(f"{LABEL}|{LABEL_END}", text)
        if len(parts) != 2 * len(answers) + 1:
            raise BadRecord(
                f"{self.name} marks {len(parts) // 2} parts for {len(answers)} messages of the assistant, so the part of a message "
                "with the weight 0 is not known; mark one for each message"
            )
        for number, message in enumerate(answers):
            if is_answer(message):
                parts[2 * number + 1] = f"{LABEL}{parts[2 * number + 1]}{LABEL_END}"
        return ["".join(parts)]

    def _render_answers(self, messages: list[Message], tools: Any) -> list[str]:
        """Renders each answer as inference does: what it adds to the rendering of the messages before it, which ends with the
        prompt for the assistant. Answers share a sequence as long as the next prompt continues the rendering of the one before."""
        texts = list[str]()
        marked = done = ""  # of the last sequence up to the end of its labels, with and without marks
        for number, message in enumerate(messages):
            if not is_answer(message):
                continue
            prompt = self._render(messages[:number], tools, prompt=True)
            whole = self._render(messages[: number + 1], tools)
            if not whole.startswith(prompt):
                whole = prompt + self._answer_to(messages[:number], tools, prompt, whole)
            start = end = len(prompt)
            if not whole[start:].strip():
                raise BadRecord(f"{self.name} writes nothing of message {number}; leave this record out")
            # White space after the last special token separates this turn from the next one.
            for special in self._special.finditer(whole, start):
                end = special.end()
            end = len(whole) if whole[end:].strip() else end
            if texts and prompt.startswith(done):
                texts.pop()
            else:
                marked = done = ""
            marked += prompt[len(done) :] + LABEL + whole[start:end] + LABEL_END
            done = whole[:end]
            texts.append(marked + whole[end:])
        return texts

    def _answer_to(self, before: list[Message], tools: Any, prompt: str, whole: str) -> str:
        """Returns the answer that ends a rendering which does not begin with the prompt: what follows the generation prompt."""
        shorter = self._render(before, tools)
        generation = prompt.removeprefix(shorter)
        if prompt == generation or not generation or whole.count(generation) != prompt.count(generation):
            raise BadRecord(
                f"{self.name} renders the first {len(before)} messages differently when an answer follows, so the assistant's part "
                "is not known; mark it with {% generation %} and {% endgeneration %} in a copy of the template, and set "
                "data.chat_template"
            )
        return whole.rpartition(generation)[2]

    def _encode_parts(self, text: str) -> list[tuple[TokenIDs, Flags]]:
        """Encodes a rendered text with marks, part by part: a part is plain text, or text with special tokens."""
        parts: list[tuple[TokenIDs, Flags]] = []
        content, spans, labeled, plain = "", list[list[int]](), False, False

        def end_part() -> None:
            if labeled:
                spans[-1][1] = len(content)
            if plain:
                tokens = self.tokenizer.encode(content)
                parts.append((tokens, np.full(len(tokens), labeled)))
            elif content:
                tokens, ends = self.tokenizer.encode_with_special(content)
                parts.append((tokens, _overlaps(ends, spans)))

        for piece in re.split(f"([{MARKS}])", text):
            if piece in (PLAIN, PLAIN_END):
                if plain == (piece == PLAIN):
                    raise BadRecord(f"{self.name} cuts the name of a special token in a message")
                end_part()
                content, spans, plain = "", [[0, 0]] if labeled else [], not plain
            elif piece == LABEL:
                spans, labeled = [*spans, [len(content), len(content)]], True
            elif piece == LABEL_END:
                spans[-1][1], labeled = len(content), False
            else:
                content += piece
        if plain:
            raise BadRecord(f"{self.name} cuts the name of a special token in a message")
        end_part()
        return parts

    def _escape(self, value: Any) -> Any:
        """Encloses the names of special tokens in all text below a value. The start of a name at the end of a text is enclosed
        too: the text that follows could complete it."""
        if isinstance(value, str):
            text = replace_surrogates(value).translate(REPLACED)
            text = self._special.sub(lambda match: f"{PLAIN}{match[0]}{PLAIN_END}", text)
            return self._start_of_special.sub(lambda match: f"{PLAIN}{match[0]}{PLAIN_END}", text)
        if isinstance(value, list):
            return [self._escape(each) for each in value]
        if isinstance(value, dict):
            return {self._escape(key): self._escape(each) for key, each in value.items()}
        return value


def _names_of_calls(message: Message) -> Iterator[str]:
    """Yields the names of the tools that a message calls. Raises `BadRecord` for a call without a name."""
    for call in message.get("tool_calls", ()):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRecord(f"a call of a tool has no name: {shown(json.dumps(call, default=str))}")
        yield function["name"]


def _mark_calls(messages: list[Message]) -> tuple[list[Message], dict[str, tuple[str, bool]]]:
    """Returns messages with a mark in the name of each call of a tool up to the last answer, as other text may have the name, too.
    Of each mark, also returns the name, and whether the call is trained on."""
    last = max((number for number, message in enumerate(messages) if is_answer(message)), default=-1)
    calls, marked = dict[str, tuple[str, bool]](), list[Message]()
    for message in messages[: last + 1]:
        changed = []
        for call, name in zip(message.get("tool_calls", ()), _names_of_calls(message), strict=True):
            mark = f"{PLAIN}{len(calls)}{PLAIN_END}"
            calls[mark] = name, is_answer(message)
            named = {"name": name + mark}
            changed.append(call | ({"function": call["function"] | named} if "function" in call else named))
        marked.append(message | {"tool_calls": changed} if changed else message)
    return marked + messages[last + 1 :], calls


def _forms_of_tool_calls(messages: list[Message]) -> Iterator[list[Message]]:
    """Yields messages in the forms that templates expect: the arguments of a call as an object or as JSON in a text, and a message
    that has calls only with an empty content or with None."""
    if not any(name for message in messages for name in _names_of_calls(message)):
        yield messages
        return
    for content, as_text in itertools.product(("", None), (False, True)):
        yield [
            message
            | {
                "content": message["content"] or content,
                "tool_calls": [_with_arguments(call, as_text) for call in message["tool_calls"]],
            }
            if "tool_calls" in message
            else message
            for message in messages
        ]


def _with_arguments(call: dict[str, Any], as_text: bool) -> dict[str, Any]:
    """Returns a call whose arguments are JSON in a text, or an object."""
    if "function" in call:
        return call | {"function": _with_arguments(call["function"], as_text)}
    arguments = call.get("arguments", {})
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # a template may write any text
            arguments = json.loads(arguments)
    return call | {"arguments": arguments}


def build_chat_template(path: str, tokenizer: Tokenizer) -> ChatTemplate:
    """Returns the template in a file, or, with an empty path, the tokenizer's, or else the built-in one."""
    if path:
        return ChatTemplate(_read(Path(path), "data.chat_template: "), tokenizer, name=path)
    files = files_of(tokenizer.section.encoding)
    if files and files[0].suffix == ".json":
        file = files[0].with_name("chat_template.jinja")
        if file.is_file():
            return ChatTemplate(_read(file), tokenizer, name=str(file))
        found = tokenizer.codec.config.get("chat_template")
        if isinstance(found, list):  # several by name
            named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
            found = named.get("default")
        if isinstance(found, str):
            return ChatTemplate(found, tokenizer, name=f"the chat template in {files[1]}")
    return ChatTemplate(_built_in(tokenizer), tokenizer, name=BUILT_IN_NAME)


def _built_in(tokenizer: Tokenizer) -> str:
    """Returns a template for a tokenizer without one: ChatML if it has these tokens, else each message ends with EOS."""
    start, end, after = "", tokenizer.special_names[tokenizer.separator.token], ""
    if {"<|im_start|>", "<|im_end|>"} <= tokenizer.codec.special.keys():
        start, end, after = "<|im_start|>", "<|im_end|>", "\n"
    template = BUILT_IN
    for name, value in (("<start>", start), ("<end>", end), ("<after>", after)):
        template = template.replace(name, json.dumps(value))
    bos = "" if tokenizer.bos is None else f"{{{{- {json.dumps(tokenizer.special_names[tokenizer.bos])} -}}}}\n"
    return bos + template


def _overlaps(ends: npt.NDArray[np.int64], spans: list[list[int]]) -> Flags:
    """Returns which tokens overlap with one of the spans of characters. Tokens of one character have the same end."""
    begins = np.concatenate([[0], ends])[np.searchsorted(ends, ends)]
    labels = np.zeros(len(ends), bool)
    for start, end in spans:
        labels |= (ends > start) & (begins < end)
    return labels


def _token_names(tokenizer: Tokenizer) -> dict[str, str]:
    """Returns the names of special tokens that a template may use, such as `bos_token`."""
    names = {}
    for key, value in tokenizer.codec.config.items():
        value = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(value, str):
            names[key] = value
    for key, number in (("bos_token", tokenizer.bos), ("eos_token", tokenizer.eos)):
        names |= {} if number is None else {key: tokenizer.special_names[number]}
    return names


def _read(file: Path, prefix: str = "") -> str:
    try:
        return file.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{prefix}{file} cannot be read: {getattr(error, 'strerror', '') or error}") from None
