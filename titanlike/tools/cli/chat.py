"""`titanlike generate --chat`: a conversation in the terminal, or over a pipe. Imports torch late, to start fast."""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from titanlike.config import UserError
from titanlike.config.base import shown
from titanlike.distributed import environment

if TYPE_CHECKING:
    import torch

    from titanlike.data.tokens.tokenizer import Tokenizer
    from titanlike.interop.weights import Weights
    from titanlike.parallelisms.mesh import Mesh
    from titanlike.tools.inference.chat import Chat

HELP = "/reset forgets the conversation; /exit or Ctrl-D ends; Ctrl-C stops an answer"


def chat(
    arguments: argparse.Namespace,
    messages: Sequence[str],
    stop: Sequence[str],
    weights: "Weights",
    tokenizer: "Tokenizer",
    mesh: "Mesh",
    device: "torch.device",
) -> None:
    """Answers messages in their order or, if there are none, the lines of standard input."""
    from titanlike.distributed import process_group
    from titanlike.inference.sampling import Sampling
    from titanlike.interop.generation_config import chat_template, stop_tokens
    from titanlike.models.common.layers import attention_backend
    from titanlike.tools.inference.cached_logits import CachedLogits
    from titanlike.tools.inference.chat import Chat
    from titanlike.tools.inference.load import default_dtype, load_for_generation

    template, is_trained = chat_template(weights, tokenizer)
    ends = stop_tokens(weights, tokenizer, template)
    if not is_trained:
        process_group.warn(
            f"{shown(str(weights.path))} is not known to be fine-tuned on chats, so its answers may be none; using {template.name}"
        )
    model = load_for_generation(weights, mesh, device, arguments.dtype or default_dtype(device))
    cached = CachedLogits(
        model, mesh, max_new_tokens=arguments.tokens, max_length=weights.config.max_seq_len, device=device
    )
    # Text that the terminal cannot show, and bytes that are no text, must not end the command.
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    with attention_backend("auto"), cached:
        conversation = Chat(
            cached,
            template,
            Sampling(arguments.temperature, arguments.top_k, arguments.top_p),
            seed=arguments.seed,
            system=arguments.system,
            stop=stop,
            stop_tokens=ends,
        )
        if not messages and sys.stdin.isatty() and sys.stdout.isatty():
            _in_terminal(conversation, is_json=arguments.json)
        else:
            for message in _commands(messages or (line.rstrip("\r\n") for line in sys.stdin), conversation):
                _print_answer(conversation, message, is_json=arguments.json)


def _in_terminal(conversation: "Chat", *, is_json: bool) -> None:
    with suppress(ImportError):
        import readline  # noqa: F401  `input` then edits the line and has a history
    print(HELP, file=sys.stderr, flush=True)
    for message in _commands(_typed_lines(), conversation):
        with _interruptible() as is_interrupted:
            try:
                _print_answer(conversation, message, is_json=is_json, is_interrupted=is_interrupted)
            except UserError as error:
                environment.print_error(error)


def _typed_lines() -> Iterator[str]:
    """Yields what the user types after a prompt, until Ctrl-D. Ctrl-C drops the line."""
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print(flush=True)
        except EOFError:
            print(flush=True)
            return


def _commands(lines: Iterable[str], conversation: "Chat") -> Iterator[str]:
    """Yields the lines that are messages, and executes the others."""
    for line in lines:
        if line.strip() == "/exit":
            return
        if line.strip() == "/reset":
            conversation.reset()
        elif line.strip():
            yield line


def _print_answer(
    conversation: "Chat", message: str, *, is_json: bool, is_interrupted: Callable[[], bool] = lambda: False
) -> None:
    if is_json:
        text = conversation.answer(message, lambda _: None, is_interrupted)
        print(json.dumps({"prompt": message, "text": text}, ensure_ascii=False), flush=True)
    else:
        conversation.answer(message, lambda text: print(text, end="", flush=True), is_interrupted)
        print(flush=True)


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Makes Ctrl-C a request, which the yielded function returns: an answer ends between two tokens, so that the KV cache stays
    consistent. The second Ctrl-C raises `KeyboardInterrupt`."""
    received: list[int] = []

    def request(number: int, _: object) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, request)
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGINT, before)
