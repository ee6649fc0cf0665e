"""`titanlike generate --chat`: the answers of transformers, the turns that are kept, and the terminal."""

import dataclasses
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forkserver import Forked
from tests.interop.models import CONFIGS, MemoryWeights, export_model, model_of
from tests.launching import environment
from titanlike.config import UserError
from titanlike.config.sections import Tokenizer
from titanlike.data.tokens.chat_template import build_chat_template
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.inference.generation import generate
from titanlike.inference.sampling import Sampling
from titanlike.interop.generation_config import stop_tokens
from titanlike.parallelisms.mesh import build_mesh
from titanlike.tools.inference.cached_logits import CachedLogits
from titanlike.tools.inference.chat import Chat

MESSAGES = ["hi", "who are you?", "naïve", "and then"]
NO_CHATS = "is not known to be fine-tuned on chats"


def talkative(name: str, **sizes: int) -> Any:
    """Returns a model that ends some answers by itself, and its config."""
    config = dataclasses.replace(CONFIGS[name], vocab_size=257, **sizes)  # type: ignore[type-var]
    model = model_of(config)
    if not config.tied_head:
        with torch.no_grad():
            model.get_parameter("output.weight")[256] *= 2.0
    return model, config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that has a chat template, and one without, whose context takes minutes to fill."""
    path: Path = tmp_path_factory.mktemp("models")
    export_model(*talkative("grouped-query", max_seq_len=512), path / "chat")
    (path / "chat/chat_template.jinja").write_text(build_chat_template("", build_tokenizer(Tokenizer())).source)
    model, config = talkative("grouped-query", max_seq_len=100_000)
    with torch.no_grad():
        model.get_parameter("output.weight")[256] = 0.0  # ends no answer
    export_model(model, config, path / "base")
    return path


def start(folder: Path, *words: str, **streams: Any) -> Forked:
    return Forked(
        [sys.executable, "-m", "titanlike.tools.cli.main", "generate", *words], cwd=folder,
        env=environment(NPROC="1") | streams.pop("variables", {}), start_new_session=True, **streams,
    )  # fmt: skip


def piped(folder: Path, *words: str, text: str = "", **variables: str) -> tuple[str, str]:
    """Runs a chat whose user is a script. Returns what it prints on stdout and stderr."""
    pipe = subprocess.PIPE
    process = start(folder, *words, variables=variables, stdin=pipe, stdout=pipe, stderr=pipe)
    out, errors = process.communicate(text.encode(), timeout=300)
    assert process.returncode == (2 if "error: " in errors.decode() else 0), errors
    return out.decode(), errors.decode()


def chat_with(name: str, tokens: int, *, system: str = "", **sizes: int) -> Chat:
    model, config = talkative(name, **sizes)
    tokenizer = build_tokenizer(Tokenizer())
    template = build_chat_template("", tokenizer)
    cached = CachedLogits(
        model, build_mesh("cpu"), max_new_tokens=tokens, max_length=config.max_seq_len, device=torch.device("cpu")
    )
    ends = stop_tokens(MemoryWeights(model, config, Tokenizer()), tokenizer, template)
    return Chat(cached, template, Sampling(), seed=0, system=system, stop_tokens=ends)


def reference(chat: Chat, messages: list[Any]) -> str:
    """Returns the text that the model continues the rendered conversation with, with a new cache."""
    old, tokenizer = chat.cached, chat.template.tokenizer
    cached = CachedLogits(
        old.model, old.mesh, max_new_tokens=old.max_new_tokens, max_length=old.max_length, device=torch.device("cpu")
    )
    with cached:
        [text] = generate(
            cached, [chat.template.opening(messages)], tokenizer, chat.sampling, seed=0,
            max_new_tokens=old.max_new_tokens, max_length=old.max_length, stop_tokens=chat.stop_tokens,
        )  # fmt: skip
    return text


@pytest.mark.filterwarnings("default")  # those of transformers are not ours
@pytest.mark.parametrize("system", ["", "Answer briefly."])
def test_the_answers_are_those_of_transformers(folder: Path, system: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = (kind.from_pretrained(folder / "chat") for kind in (AutoTokenizer, AutoModelForCausalLM))
    turns = [{"role": "system", "content": system}] if system else []
    expected, lengths = [], []
    for message in MESSAGES:
        turns.append({"role": "user", "content": message})
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        found = model.generate(**prompt, do_sample=False, max_new_tokens=12, pad_token_id=0)
        new = found[0, prompt["input_ids"].shape[1] :]
        expected.append(tokenizer.decode(new, skip_special_tokens=True))
        lengths.append(len(new))
        turns.append({"role": "assistant", "content": expected[-1]})
    assert min(lengths) < 12 == max(lengths), "an answer ends by itself, and another at the limit"
    options = ("--temperature=0", "--tokens=12", f"--system={system}", "--json")
    out, errors = piped(folder, "chat", "--chat", *options, text="\n".join(MESSAGES))
    assert not errors
    assert [json.loads(line) for line in out.splitlines()] == [
        {"prompt": message, "text": text} for message, text in zip(MESSAGES, expected, strict=True)
    ]


@pytest.mark.parametrize("name", ["grouped-query", "Gemma 2", "GPT-2"])
def test_each_turn_continues_the_rendered_conversation(name: str, alone: None) -> None:
    """With the cache of earlier turns, of which only new tokens are computed."""
    chat = chat_with(name, 40, system="Be nice.")
    sizes: list[int] = []
    chat.cached.model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(kwargs["tokens"].shape[1]), with_kwargs=True
    )
    with chat.cached:
        for message in ("hi", "who?"):
            turns = [*chat.system, *chat.turns, {"role": "user", "content": message}]
            sizes.clear()
            pieces: list[str] = []
            answer = chat.answer(message, pieces.append)
            assert answer == "".join(pieces)
            prompt = chat.template.opening(turns)
            known = len(chat.template.opening(turns[:-2])) if message == "who?" else 0
            assert set(sizes[1:]) <= {1} and sizes[0] <= len(prompt) - known
            assert chat.turns[-2:] == [turns[-1], {"role": "assistant", "content": answer}]
        chat.reset()
        again = chat.answer("hi", pieces.append)
    turns = [*chat.system, {"role": "user", "content": "hi"}]
    first = reference(chat, turns)
    assert again == first
    turns += [{"role": "assistant", "content": first}, {"role": "user", "content": "who?"}]
    assert answer == reference(chat, turns)


def test_the_oldest_turns_are_forgotten(alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    chat = chat_with("GPT-2", 20, system="Be nice.", max_seq_len=128)
    with chat.cached:
        for number in range(4):
            before, message = chat.turns, {"role": "user", "content": f"number {number}"}
            answer = chat.answer(message["content"], lambda _: None)
            kept = chat.turns[:-1]
            assert kept[-1] == message and kept[:-1] == before[len(before) - len(kept) + 1 :]
            assert answer == reference(chat, [*chat.system, *kept])
            assert len(chat.template.opening([*chat.system, *kept])) + 20 <= 128
            warning = "warning: the conversation exceeds the context of the model, 128 tokens (model.max_seq_len); "
            dropped = len(before) + 1 - len(kept)
            text = f"forgetting the oldest {'turn' if dropped == 2 else f'{dropped // 2} turns'}\n"
            assert capsys.readouterr().err == (warning + text if dropped else "")
        assert len(chat.turns) < 8
        turns = chat.turns
        with pytest.raises(UserError, match="tokens, but the context of the model is 128 tokens"):
            chat.answer("x" * 128, lambda _: None)
        assert chat.turns is turns
    chat.template._template.render = lambda **_: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"ZeroDivisionError: .*; the template may not support system messages"):
        chat.answer("a", lambda _: None)


def test_an_answer_that_is_interrupted_is_kept_as_far_as_it_went(alone: None) -> None:
    chat, pieces = chat_with("GPT-2", 60), list[str]()
    with chat.cached:
        whole = chat.answer("hi", pieces.append)
        chat.reset()
        pieces.clear()
        answer = chat.answer("hi", pieces.append, lambda: len(pieces) == 3)
        assert answer == "".join(pieces) and whole.startswith(answer) and len(pieces) == 3 and len(answer) < len(whole)
        assert chat.turns[-1] == {"role": "assistant", "content": answer}
        following = chat.answer("go on", pieces.append)
    assert following == reference(chat, chat.turns[:-1])


def test_a_pipe(folder: Path) -> None:
    options = ("--chat", "--temperature=0", "--tokens=9")
    out, errors = piped(folder, "base", *options, text="hi\n\nwho?\n/reset\nhi\r\n/exit\nmore\n")
    assert errors.count("\n") == 1 and NO_CHATS in errors and "using the built-in chat template" in errors
    answers = out.split("\n")
    first, second = (json.loads(line)["text"] for line in piped(
        folder, "base", *options, "--json", "--prompt=hi", "--prompt=who?")[0].splitlines())  # fmt: skip
    assert first != second
    assert answers == [*f"{first}\n{second}\n{first}".split("\n"), ""]
    # Answers to the same question differ, and a seed repeats them.
    random = ("base", "--chat", "--json", "--tokens=9", "--prompts=-", "--temperature=3", "--seed=1")
    text = "hi\n/reset\nhi\n"
    found = [[json.loads(line)["text"] for line in piped(folder, *random, text=text)[0].splitlines()] for _ in "ab"]
    assert found[0] == found[1] and found[0][0] != found[0][1]


def test_mistakes(folder: Path) -> None:
    message = "error: --system is the system message of a chat; add --chat, or omit it\n"
    assert piped(folder, "base", "--system=a") == ("", message)
    message = "error: --chat runs in one process, not 2; set NPROC=1, or give prompts without --chat\n"
    assert piped(folder, "base", "--chat", NPROC="2") == ("", message)
    out, errors = piped(folder, "chat", "--chat", "--temperature=0", text=f"hi\n{'x' * 600}\nhi\n")
    assert out.count("\n") == 1 and errors.startswith("error: prompt 1 has 6") and "to 511 tokens or less" in errors


class Terminal:
    """A chat in a pseudo-terminal."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.screen, inner = pty.openpty()
        self.process = start(folder, *words, stdin=inner, stdout=inner, stderr=inner)
        os.close(inner)

    def type(self, keys: str) -> None:
        os.write(self.screen, keys.encode())

    def until(self, end: str) -> str:
        """Returns what is written up to a text. Its last characters have been written already, if the program waits for keys."""
        found = b""
        while not found.endswith(end.encode()):
            assert select.select([self.screen], [], [], 120)[0], found
            found += os.read(self.screen, 1)
        # Line editing turns bracketed paste on and off.
        return re.sub(r"\x1b\[\?2004[hl]\r?", "", found.decode(errors="replace"))


@pytest.fixture
def terminal(folder: Path) -> Iterator[Terminal]:
    started = Terminal(folder, "base", "--chat", "--temperature=0", "--tokens=90000")
    yield started
    started.process.kill()
    started.process.wait()
    os.close(started.screen)


def test_a_terminal(terminal: Terminal) -> None:
    assert "/exit or Ctrl-D ends; Ctrl-C stops an answer\r\n" in terminal.until("\r\n> ")
    for _ in range(2):
        terminal.type("hi\n")
        terminal.until("hi\r\n")
        terminal.until("a")  # the answer is printed while it is generated; it would take minutes
        terminal.process.send_signal(signal.SIGINT)
        terminal.until("\r\n> ")
    # At the prompt, Ctrl-C drops the line. Python's `input` may miss a signal that arrives just before it waits for keys.
    terminal.type("half of a line")
    terminal.until("half of a line")
    while not select.select([terminal.screen], [], [], 1)[0]:
        terminal.process.send_signal(signal.SIGINT)
    terminal.until("\r\n> ")
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0


def test_a_message_that_is_too_long_does_not_end_a_chat_in_a_terminal(folder: Path) -> None:
    terminal = Terminal(folder, "chat", "--chat", "--temperature=0")
    terminal.until("\r\n> ")
    terminal.type(f"{'x' * 600}\n")
    assert "error: prompt 1 has 6" in terminal.until("\r\n> ")
    terminal.type("hi\n")
    assert "\r\n2\r\n> " in terminal.until("\r\n> ")
    terminal.type("/exit\n")
    assert terminal.process.wait(60) == 0
    os.close(terminal.screen)
