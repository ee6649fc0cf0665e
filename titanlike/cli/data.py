"""`titanlike data ...`: text into token shards, and tokenizers of one's own. No torch, and nothing slow before it is needed."""

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from titanlike.cli import data_inspect
from titanlike.config import UserError
from titanlike.config.sections import Tokenizer as Section
from titanlike.distributed import environment

if TYPE_CHECKING:
    from titanlike.data.prepare.prepare import Progress
    from titanlike.data.text.documents import Fields
    from titanlike.data.token_shards import Manifest

QUIET = 10.0  # seconds between two lines, where there is no terminal
LIVE = 0.5  # seconds between two looks of a terminal's one line
INPUT = """\
a file, a folder, a quoted pattern such as 'corpus/**/*.txt', or an address such as s3://bucket/folder,
https://host/part-{000..127}.jsonl.gz or 'hf://datasets/OWNER/NAME/**/*.parquet'. A text file is a document; of .jsonl, .json
(one object a line) and .parquet each record is one; .gz and .zst are unpacked"""

PREPARE = """\
Makes token shards of text: a folder that a recipe reads with data.source = "shards". Works on all cores, in memory that does not
grow with the text. Stopped or killed at any time, the same command goes on where it was, and comes to the same to the last bit,
whatever the number of workers.

  titanlike data prepare corpus.jsonl --out tokens --tokenizer gpt2
  titanlike data prepare 'data/**/*.parquet' --out tokens --tokenizer tokenizer.json --text-field content --validation 0.005
  titanlike data prepare 'hf://datasets/OWNER/NAME/**/*.parquet' --out tokens --tokenizer llama3/tokenizer.model"""

TRAIN = """\
Trains a byte-pair tokenizer on text. A name that ends in .json makes a tokenizer.json that Hugging Face's tokenizers read, and a
tokenizer_config.json beside it; any other name makes a rank file, which is faster to encode with. Both make the same tokens.

  titanlike data train-tokenizer corpus.jsonl --out tokenizer.json --vocab-size 32000
  titanlike data train-tokenizer corpus/ --out tokenizer.model --vocab-size 50000 --limit-bytes 1000000000"""


def add(commands: Any) -> None:
    """Add `data` and its own commands to those of `titanlike`."""
    data = commands.add_parser("data", help="make token shards of text, look at them, or train a tokenizer")
    below = data.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    raw = argparse.RawDescriptionHelpFormatter
    make = below.add_parser("prepare", help="make token shards of text", description=PREPARE, formatter_class=raw)
    make.add_argument("inputs", nargs="+", metavar="INPUT", help=INPUT.replace("\n", " ").replace("%", "%%"))
    make.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the folder to make")
    make.add_argument(
        "--tokenizer", required=True, metavar="ENCODING",
        help="as in a recipe: bytes, a tiktoken encoding such as gpt2, or a file such as tokenizer.json or tokenizer.model",
    )  # fmt: skip
    make.add_argument(
        "--special", choices=["eos", "bos", "both"], default="eos",
        help="the special tokens of each document: eos closes it, bos opens it (eos)",
    )  # fmt: skip
    make.add_argument("--eos", default="", metavar="TOKEN", help="what closes a document (the tokenizer's own)")
    make.add_argument("--bos", default="", metavar="TOKEN", help="what opens a document (the tokenizer's own)")
    _add_fields(make)
    make.add_argument(
        "--prompt-field", default="", metavar="NAME", help="text before the text that is given, and not learnt"
    )
    make.add_argument(
        "--validation", type=float, default=0.0, metavar="SHARE",
        help='a share of the documents, such as 0.005, for a split "validation": which, their text decides (0)',
    )  # fmt: skip
    make.add_argument(
        "--workers", type=_count, metavar="N", help="processes (one a core); each has a unit of text in hand"
    )
    train = below.add_parser("train-tokenizer", help="train a tokenizer", description=TRAIN, formatter_class=raw)
    train.add_argument("inputs", nargs="+", metavar="INPUT", help="text, as for prepare")
    train.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to write")
    train.add_argument(
        "--vocab-size", type=_count, default=32000, metavar="N", help="tokens, the special ones counted (32000)"
    )
    train.add_argument(
        "--limit-bytes", type=_count, default=256 * 2**20, metavar="N",
        help="read so many bytes of text at most, a share of each file (268435456)",
    )  # fmt: skip
    _add_fields(train)
    data_inspect.add(below)


def _add_fields(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text-field", default="text", metavar="NAME", help="where in a record its text is (text)")
    parser.add_argument(
        "--bad-records", choices=["stop", "skip"], default="stop",
        help="at a record that cannot be read: stop and name it, or leave it out and count it (stop)",
    )  # fmt: skip


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Do what this command line says, or say what is wrong with it."""
    if arguments.data_command == "inspect":
        data_inspect.run(arguments, overrides)
        return
    from titanlike.data.text.documents import BadRecord, Fields

    fields = Fields(arguments.text_field, getattr(arguments, "prompt_field", ""), "--text-field")
    try:
        (_prepare if arguments.data_command == "prepare" else _train)(arguments, fields)
    except BadRecord as error:
        environment.fail(UserError(f"{error}; --bad-records skip leaves such records out"))
    except UserError as error:
        words = str(error).replace("tokenizer.encoding", "--tokenizer")
        for role in ("eos", "bos"):
            words = words.replace(f"tokenizer.{role}", f"--{role}")
        environment.fail(UserError(words))


def _prepare(arguments: argparse.Namespace, fields: "Fields") -> None:
    from titanlike.data.prepare.prepare import prepare

    section = Section(arguments.tokenizer, arguments.special, arguments.eos, arguments.bos)
    screen = Screen()
    # Ctrl-C has things to tidy up here, and to say.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        manifest = prepare(
            arguments.inputs,
            arguments.out,
            section,
            fields=fields,
            validation_share=arguments.validation,
            workers=arguments.workers,
            bad=arguments.bad_records,
            tell=screen.show,
        )
    except KeyboardInterrupt:
        screen.close()
        _stopped(arguments.out)
    finally:
        screen.close()
    _sum_up(arguments.out, manifest, screen.last)


def _stopped(out: Path) -> NoReturn:
    print(f"stopped; the same command goes on from here, in {out}.partial", file=sys.stderr)
    sys.exit(128 + signal.SIGINT)


def _sum_up(out: Path, manifest: "Manifest", last: "Progress | None") -> None:
    """What there is now, and what to write into a recipe."""
    from titanlike.data.token_shards import totals

    counts = {split: totals(shards) for split, shards in manifest.splits.items()}
    tokens = sum(number for number, _ in counts.values())
    ratio = manifest.source["text_bytes"] / tokens
    print(f"{out}{' is complete already' if last and last.complete else ''}")
    for split, (number, documents) in counts.items():
        none = "" if documents else "; give a larger --validation and another --out, if you want some"
        print(f"  {split:<11} {documents:,} documents, {number:,} tokens{none}")
    print(f"  {ratio:.2f} bytes of text a token", end="")
    if last and not last.complete:
        rate = last.tokens / max(last.seconds, 1e-9)
        again = ", the rest by earlier starts" if last.before else ""
        print(f"; {last.tokens:,} tokens in {last.seconds:.1f} s, {short(rate)} tokens/s{again}", end="")
    print()
    if manifest.source["empty"]:
        print(f"  {manifest.source['empty']:,} documents without text are left out")
    if manifest.skipped:
        print(f"  {manifest.skipped:,} bad records are left out:")
        for example in manifest.source["skipped"]:
            print(f"    {example}")
        if manifest.skipped > len(manifest.source["skipped"]):
            print("    ...")
    print(f"\nA recipe reads it with\n\n{recipe_lines(out, manifest)}", end="")


def recipe_lines(out: Path, manifest: "Manifest") -> str:
    """The sections of a recipe that reads these shards."""
    tokenizer, file = manifest.tokenizer, manifest.source["tokenizer_file"]
    values = {"encoding": str(out / file) if file else tokenizer["encoding"]}
    values |= {key: tokenizer[key] for key in ("special", "eos", "bos") if tokenizer[key] != getattr(Section(), key)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    fits = -(-tokenizer["vocab_size"] // 64) * 64
    return "\n".join(
        [
            *("[data]", 'source = "shards"', f"path = {json.dumps(str(out))}", "", "[tokenizer]", *lines, ""),
            *("[model]", f"vocab_size = {fits}    # {tokenizer['vocab_size']} at least", ""),
        ]
    )


def _train(arguments: argparse.Namespace, fields: "Fields") -> None:
    from titanlike.data.text.train_tokenizer import train

    started = time.monotonic()
    trained = train(
        arguments.inputs,
        arguments.out,
        arguments.vocab_size,
        fields=fields,
        limit_bytes=arguments.limit_bytes,
        skip=arguments.bad_records == "skip",
    )
    print(
        f"{arguments.out}: {trained.vocab_size:,} tokens, from {size_of(trained.text_bytes)} of text in "
        f"{time.monotonic() - started:.1f} s; {trained.bytes_per_token:.2f} bytes of text a token"
    )
    if trained.skipped:
        print(f"  {trained.skipped:,} bad records were left out")
    if trained.vocab_size < arguments.vocab_size:
        print(f"  fewer than {arguments.vocab_size:,}: no other pair is there twice; give more text for more tokens")
    print(f"\nNext:\n\n  titanlike data prepare {' '.join(arguments.inputs)} --out tokens --tokenizer {arguments.out}")


class Screen:
    """How far it is: a live line on a terminal, elsewhere a line now and then."""

    def __init__(self) -> None:
        self.last: Progress | None = None
        self._whole = False  # and shown so
        self._told = time.monotonic() - QUIET + 2.0  # soon once, to see that it goes
        self._bar: Any = None
        if sys.stdout.isatty():
            from rich import progress
            from rich.console import Console

            columns = (progress.BarColumn(bar_width=16), progress.TextColumn("{task.description}", markup=False))
            self._bar = progress.Progress(*columns, console=Console(highlight=False), auto_refresh=False)
            self._task = self._bar.add_task("starting", total=None)
            self._bar.start()

    def show(self, progress: "Progress") -> None:
        """Show how far it is."""
        self.last = progress
        whole, pause = progress.done >= progress.total, LIVE if self._bar else QUIET
        if self._whole or progress.complete or (time.monotonic() - self._told < pause and not whole):
            return
        self._whole = whole
        self._told = time.monotonic()
        if self._bar is None:
            print(line(progress), flush=True)
        else:
            self._bar.update(
                self._task, completed=progress.done, total=max(progress.total, 1), description=line(progress)
            )
            self._bar.refresh()

    def close(self) -> None:
        """Leave the live line as it stands."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def line(progress: "Progress") -> str:
    """One line of progress."""
    seconds = max(progress.seconds, 1e-9)
    now = progress.done - progress.before
    left = seconds * (progress.total - progress.done) / now if now else None
    minutes, rest = divmod(round(left or 0), 60)
    hours, minutes = divmod(minutes, 60)
    clock = f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
    return (
        f"{progress.done / max(progress.total, 1):4.0%}  {size_of(progress.done)} of {size_of(progress.total)}  "
        f"{size_of(now / seconds)}/s  {short(progress.tokens / seconds)} tokens/s  {short(progress.tokens)} tokens  "
        f"{'?' if left is None else clock} left"
    )


def short(value: float) -> str:
    """A number in few signs."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if value >= unit:
            return f"{value / unit:.1f}{name}"
    return f"{value:.0f}"


def size_of(value: float) -> str:
    """A number of bytes in few signs."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if value >= unit:
            return f"{value / unit:.1f} {name}"
    return f"{value:.0f} B"


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 on")
    return int(text)
