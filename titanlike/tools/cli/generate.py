"""`titanlike generate`: continues prompts with a model, or chats. Imports torch late, to start fast."""

import argparse
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from titanlike.config import UserError
from titanlike.tools.arguments import non_negative_int, positive_int
from titanlike.tools.cli.chat import chat
from titanlike.tools.cli.command import add_command
from titanlike.tools.cli.processes import add_model_options, read_lines, session, start_processes

if TYPE_CHECKING:
    import torch

    from titanlike.data.tokens.tokenizer import Tokenizer

DESCRIPTION = """\
Continues prompts, or chats, with a model. Without --prompt and --prompts, standard input is the prompt. Several prompts are
computed in batches, and printed in their order. NPROC=n shards the model over n processes with tensor parallelism, as torchrun -m
titanlike.tools.cli.main generate does.

An encoder-decoder such as T5 reads the prompt, in which names of special tokens such as <extra_id_0> are these tokens, and
generates a target.

--chat is a conversation: the model answers each prompt, or what is typed, with its chat template. Lines of standard input are
messages too, so that a script can chat over a pipe.

  titanlike generate runs/NAME --prompt "def main" --tokens 100
  titanlike generate llama/ --prompts questions.txt --temperature 0 --stop "\\n\\n" --json > answers.jsonl
  NPROC=8 titanlike generate runs/NAME --step 2000 < prompt.txt
  titanlike generate runs/NAME --chat --system "Answer briefly.\""""


def add(commands: Any) -> None:
    """Adds `generate` to the commands of `titanlike`."""
    parser = add_command(commands, "generate", DESCRIPTION, run)
    add_model_options(parser)
    parser.add_argument("--chat", action="store_true", help="converse with the model; one process")
    parser.add_argument("--system", default="", metavar="TEXT", help="system message of a chat")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="prompt")
    parser.add_argument("--prompts", metavar="FILE", help="file with a prompt in each line, or - for standard input")
    parser.add_argument("--tokens", type=positive_int, default=200, metavar="N", help="most tokens to generate")
    text = "0 always chooses the most likely token; above 1 increases randomness"
    parser.add_argument("--temperature", type=_temperature, default=0.7, metavar="X", help=text)
    text = "sample from the N most likely tokens (default: all)"
    parser.add_argument("--top-k", type=non_negative_int, default=0, metavar="N", help=text)
    text = "sample from the fewest most likely tokens whose probabilities sum to at least P"
    parser.add_argument("--top-p", type=_probability, default=1.0, metavar="P", help=text)
    text = r"end before this text; \n is a line break"
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help=text)
    parser.add_argument("--seed", type=non_negative_int, default=0, metavar="N", help="seed of the random numbers")
    parser.add_argument("--batch-size", type=positive_int, default=16, metavar="N", help="prompts at a time")
    parser.add_argument("--json", action="store_true", help="print a JSON object with prompt and text for each prompt")


def run(arguments: argparse.Namespace) -> None:
    """Runs the command."""
    stop = [text.replace("\\n", "\n").replace("\\t", "\t") for text in arguments.stop]
    if "" in stop:
        raise UserError("--stop: the text is empty; give at least one character")
    if arguments.system and not arguments.chat:
        raise UserError("--system is the system message of a chat; add --chat, or omit it")
    start_processes(default=1)
    prompts = list(arguments.prompt)
    with session(arguments.device) as device:
        from titanlike.distributed import process_group

        if arguments.chat and (count := process_group.world_size()) > 1:
            # The other processes would wait for what the user types, no longer than the timeout of collectives.
            raise UserError(f"--chat runs in one process, not {count}; set NPROC=1, or give prompts without --chat")
        if process_group.is_main():  # processes share standard input
            if arguments.prompts:
                prompts += read_lines(arguments.prompts)
            elif not prompts and not arguments.chat:
                prompts = [sys.stdin.read().removesuffix("\n")]
        prompts = process_group.broadcast_object(prompts)
        if not prompts and (arguments.prompts or not arguments.chat):
            raise UserError(f"{arguments.prompts} has no prompts; give one in each line")
        _generate(arguments, prompts, stop, device)


def _generate(arguments: argparse.Namespace, prompts: list[str], stop: list[str], device: "torch.device") -> None:
    from titanlike.data.tokens.tokenizer import build_tokenizer, with_sentinels
    from titanlike.distributed import process_group
    from titanlike.inference.generation import generate
    from titanlike.inference.logits import NextLogits
    from titanlike.inference.sampling import Sampling
    from titanlike.interop.generation_config import stop_tokens
    from titanlike.interop.weights import open_weights
    from titanlike.models.common.layers import attention_backend
    from titanlike.parallelisms.mesh import build_mesh
    from titanlike.tools.inference.cached_logits import CachedLogits, check_prompts
    from titanlike.tools.inference.decoder_logits import DecoderLogits
    from titanlike.tools.inference.load import default_dtype, load_for_generation

    mesh = build_mesh(device.type, tensor=process_group.world_size())
    share = process_group.rank(), process_group.world_size()
    weights = open_weights(arguments.path, step=arguments.step, verify_share=share)
    max_length = weights.config.max_seq_len
    tokenizer = build_tokenizer(weights.tokenizer, weights.config.vocab_size, str(weights.path))
    if arguments.chat:
        chat(arguments, prompts, stop, weights, tokenizer, mesh, device)
        return
    has_encoder = weights.config.is_encoder_decoder
    if has_encoder:
        tokenizer = with_sentinels(tokenizer, weights.config.vocab_size)
        encoded = [encoder_input(tokenizer, prompt) for prompt in prompts]
    else:
        encoded = [tokenizer.opening(prompt) for prompt in prompts]
        check_prompts(encoded, max_length)
    ends = stop_tokens(weights, tokenizer)
    dtype = arguments.dtype or default_dtype(device)
    model = load_for_generation(weights, mesh, device, dtype, encoder_decoder=has_encoder)
    between = "\n" if has_encoder else ""
    printer = _Printer(prompts, between, is_json=arguments.json) if process_group.is_main() else None
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    with attention_backend("auto"):
        for first in range(0, len(prompts), arguments.batch_size):
            ids = range(first, min(first + arguments.batch_size, len(prompts)))
            starts = [encoded[number] for number in ids]
            next_logits: AbstractContextManager[NextLogits]
            if has_encoder:
                next_logits = nullcontext(DecoderLogits(model, mesh, starts, device))
                starts = [[cast(Any, weights.config).decoder_start_token] for _ in ids]
            else:
                next_logits = CachedLogits(
                    model, mesh, max_new_tokens=arguments.tokens, max_length=max_length, device=device
                )
            with next_logits as logits:
                texts = generate(
                    logits,
                    starts,
                    tokenizer,
                    sampling,
                    max_new_tokens=arguments.tokens,
                    seed=arguments.seed,
                    sequence_ids=ids,
                    max_length=max_length,
                    stop=stop,
                    stop_tokens=ends,
                    on_text=printer.stream if printer else None,
                )
            if printer:
                printer.finish(ids, texts)


def encoder_input(tokenizer: "Tokenizer", text: str) -> list[int]:
    """Encodes an input of an encoder-decoder, in which names of special tokens are these tokens."""
    begin, end = ([] if token is None else [token] for token in (tokenizer.bos, tokenizer.eos))
    return [*begin, *tokenizer.encode_with_special(text)[0].tolist(), *end]


class _Printer:
    """Prints the text of a single prompt as it is generated, and the texts of several prompts in their order."""

    def __init__(self, prompts: list[str], between: str, *, is_json: bool) -> None:
        """`between` is printed after a prompt, before the text."""
        self.prompts, self.between, self.is_json = prompts, between, is_json
        self.is_streaming = len(prompts) == 1 and not is_json
        # Text that the terminal cannot show, in another encoding than UTF-8, must not end the command.
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
        if self.is_streaming:
            print(prompts[0], end=between, flush=True)

    def stream(self, index: int, text: str) -> None:
        if self.is_streaming:
            print(text, end="", flush=True)

    def finish(self, ids: range, texts: list[str]) -> None:
        if self.is_streaming:
            print(flush=True)
            return
        for number, text in zip(ids, texts, strict=True):
            if self.is_json:
                record = {"prompt": self.prompts[number], "text": text}
                print(json.dumps(record, ensure_ascii=False), flush=True)
            else:
                print(
                    f"[{number + 1} of {len(self.prompts)}]\n{self.prompts[number]}{self.between}{text}\n", flush=True
                )


def _temperature(text: str) -> float:
    return _number(text, 0.0, 100.0)


def _probability(text: str) -> float:
    return _number(text, 1e-9, 1.0)


def _number(text: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"expected a number from {least:g} to {most:g}, got {text!r}")
    return value
