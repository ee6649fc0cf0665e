"""`titanlike data`: prepares token shards, inspects them, trains tokenizers. No torch; imports are late to start fast."""

import argparse
import json
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlike.config import UserError
from titanlike.config.sections import Tokenizer as Section
from titanlike.tools.arguments import local_path, non_negative_int, positive_int
from titanlike.tools.cli import data_inspect
from titanlike.tools.cli.command import add_command
from titanlike.utils.live_line import LiveLine

if TYPE_CHECKING:
    from titanlike.data.documents.readers import Fields
    from titanlike.data.tokens.shards import Manifest
    from titanlike.tools.data.prepare import Progress
    from titanlike.tools.data.quality.options import Quality

PLAIN_INTERVAL = 10.0  # seconds between two lines of progress without a terminal
INPUT = (
    "a file, a folder, a quoted pattern such as 'corpus/**/*.txt', or a URL such as s3://bucket/folder, "
    "https://host/part-{000..127}.jsonl.gz or 'hf://datasets/OWNER/NAME/**/*.parquet'. A text file is one document; in .jsonl, "
    ".json, .csv, .tsv, .arrow and .parquet files each record is one; .gz and .zst are decompressed"
)

PREPARE = """\
Tokenizes text into token shards. A recipe reads them with data.source = "shards". Uses all cores, and memory that does not grow
with the text. The same command resumes after an interruption. The result is bit-identical, whatever the number of workers and
interruptions.

  titanlike data prepare corpus.jsonl --out tokens --tokenizer gpt2
  titanlike data prepare 'data/**/*.parquet' --out tokens --tokenizer tokenizer.json --text-field content --validation 0.005
  titanlike data prepare 'hf://datasets/OWNER/NAME/**/*.parquet' --out tokens --tokenizer llama3/tokenizer.model
  titanlike data prepare web.jsonl --out tokens --tokenizer gpt2 --duplicates remove-near --quality default --repeated-lines 20

The folder has a report of what was removed and why, with examples: titanlike data inspect tokens"""

TRAIN = """\
Trains a byte-pair tokenizer. If the name of --out ends in .json, writes a tokenizer.json for Hugging Face's tokenizers, and a
tokenizer_config.json beside it; otherwise a rank file. Both produce the same tokens.

  titanlike data train-tokenizer corpus.jsonl --out tokenizer.json --vocab-size 32000
  titanlike data train-tokenizer corpus/ --out tokenizer.model --vocab-size 50000 --limit-bytes 1000000000"""


def add(commands: Any) -> None:
    """Adds `data` and its subcommands to the commands of `titanlike`."""
    data = add_command(commands, "data", "Tokenizes text into shards, trains a tokenizer, or inspects data.")
    subcommands = data.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    make = add_command(subcommands, "prepare", PREPARE, run)
    make.add_argument("inputs", nargs="+", metavar="INPUT", help=INPUT)
    make.add_argument("--out", type=local_path, required=True, metavar="FOLDER", help="folder to create")
    text = "tokenizer as in a recipe: bytes, a tiktoken encoding such as gpt2, or a file such as tokenizer.json or tokenizer.model"
    make.add_argument("--tokenizer", required=True, metavar="ENCODING", help=text)
    text = "the special tokens of each document: eos at its end, bos at its start"
    make.add_argument("--special", choices=["eos", "bos", "both"], default="eos", help=text)
    for role in ("eos", "bos"):
        text = f"name of the {role.upper()} token (default: the tokenizer's)"
        make.add_argument(f"--{role}", default="", metavar="TOKEN", help=text)
    _add_record_options(make)
    text = "field of a prompt, which precedes the text and is excluded from the loss"
    make.add_argument("--prompt-field", default="", metavar="NAME", help=text)
    text = 'fraction of the documents, such as 0.005, for the split "validation"; a hash of the text selects them'
    make.add_argument("--validation", type=float, default=0.0, metavar="FRACTION", help=text)
    make.add_argument("--test", type=float, default=0.0, metavar="FRACTION", help='the same for the split "test"')
    make.add_argument("--workers", type=positive_int, metavar="N", help="number of processes (default: one per core)")
    _add_quality_options(make.add_argument_group("documents that are worth training on (docs/data.md)"))
    train = add_command(subcommands, "train-tokenizer", TRAIN, run)
    train.add_argument("inputs", nargs="+", metavar="INPUT", help="text, as for prepare")
    train.add_argument("--out", type=local_path, required=True, metavar="FILE", help="file to write")
    text = "number of tokens, including special ones"
    train.add_argument("--vocab-size", type=positive_int, default=32000, metavar="N", help=text)
    text = "most bytes of text to read, from each file in proportion to its size"
    train.add_argument("--limit-bytes", type=positive_int, default=256 * 2**20, metavar="N", help=text)
    _add_record_options(train)
    data_inspect.add(subcommands)


def _add_quality_options(group: Any) -> None:
    text = (
        "a function of your own, such as my_filter.py:keep. It takes the text, or the record if its parameter is called "
        "record, and returns True to keep the document, False to remove it, or its new text"
    )
    group.add_argument("--filter", metavar="FILE.py:FUNCTION", help=text)
    text = (
        "remove documents that are too short, mostly symbols, or repetitive: default, or limits that replace defaults, such as "
        "min_characters=50,max_symbols=0.3"
    )
    group.add_argument("--quality", metavar="LIMITS", help=text)
    text = (
        "count exact copies of an earlier document; also count near copies; remove exact copies; or remove near copies, too. "
        "All but count read the text once more"
    )
    choices = ["count", "count-near", "remove", "remove-near"]
    group.add_argument("--duplicates", choices=choices, default="count", help=text)
    text = "remove lines that N or more documents have, and documents that are mostly such lines (default: 0, which keeps them)"
    group.add_argument("--repeated-lines", type=non_negative_int, default=0, metavar="N", help=text)


def _add_record_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text-field", default="text", metavar="NAME", help="field of a record that has its text")
    text = "stop at a record that cannot be read, or skip and count it"
    parser.add_argument("--bad-records", choices=["stop", "skip"], default="stop", help=text)


def run(arguments: argparse.Namespace) -> None:
    """Prepares shards or trains a tokenizer."""
    from titanlike.data.documents.data_files import DiskFull
    from titanlike.data.documents.readers import BadRecord, Fields

    fields = Fields(arguments.text_field, getattr(arguments, "prompt_field", ""), "--text-field")
    try:
        (_prepare if arguments.data_command == "prepare" else _train)(arguments, fields)
    except DiskFull as error:
        remedy = "free some space, then run the same command to resume, or give an --out on another disk"
        raise UserError(f"{error}; {remedy}") from None
    except BadRecord as error:
        raise UserError(f"{error}; --bad-records skip skips such records") from None
    except UserError as error:
        message = str(error).replace("tokenizer.encoding", "--tokenizer")
        for role in ("eos", "bos", "special"):
            message = message.replace(f"tokenizer.{role}", f"--{role}")
        raise UserError(message) from None


def _prepare(arguments: argparse.Namespace, fields: "Fields") -> None:
    from titanlike.tools.data.prepare import prepare

    section = Section(arguments.tokenizer, arguments.special, arguments.eos, arguments.bos)
    line = LiveLine(plain_interval=PLAIN_INTERVAL, bar=True)
    last = None

    def on_progress(progress: "Progress") -> None:
        nonlocal last
        last = progress
        if not progress.already_complete:
            line.update(progress_text(progress), progress.bytes_read, max(progress.total_bytes, 1))

    signal.signal(signal.SIGINT, signal.default_int_handler)  # raises: Ctrl-C ends the workers and prints how to resume
    try:
        manifest = prepare(
            arguments.inputs, arguments.out, section, fields=fields, validation_share=arguments.validation,
            test_share=arguments.test, quality=_quality_of(arguments),
            workers=arguments.workers, bad=arguments.bad_records, on_progress=on_progress,
        )  # fmt: skip
    except KeyboardInterrupt:
        line.close()
        print(f"stopped; the same command resumes from {arguments.out}.partial", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    finally:
        line.close()
    assert last is not None
    _print_summary(arguments.out, manifest, last)


def _quality_of(arguments: argparse.Namespace) -> "Quality":
    from titanlike.tools.data.quality.filters import open_filter, parse_thresholds
    from titanlike.tools.data.quality.options import Quality

    if arguments.repeated_lines == 1:
        raise UserError("--repeated-lines 1 removes every line; give at least 2, or 0 to keep them")
    limits = parse_thresholds(arguments.quality) if arguments.quality else None
    own = open_filter(arguments.filter) if arguments.filter else None
    return Quality(arguments.duplicates, limits, arguments.repeated_lines, own)


def _print_summary(out: Path, manifest: "Manifest", progress: "Progress") -> None:
    """Prints statistics, and the lines of a recipe that reads the shards."""
    from titanlike.data.tokens.shards import totals
    from titanlike.tools.data.quality.report import read_report, summarize

    counts = {split: totals(shards) for split, shards in manifest.splits.items()}
    bytes_per_token = manifest.source["text_bytes"] / sum(tokens for tokens, _ in counts.values())
    print(f"{out}{' is already complete' if progress.already_complete else ''}")
    for split, (tokens, documents) in counts.items():
        hint = "" if documents else f"; for a {split} split, give a larger --{split} and another --out"
        print(f"  {split:<11} {documents:,} documents, {tokens:,} tokens{hint}")
    speed = ""
    if not progress.already_complete:
        rate = short(progress.tokens / max(progress.seconds, 1e-9))
        earlier = ", the rest before the interruption" if progress.resumed_bytes else ""
        speed = f"; {progress.tokens:,} tokens in {progress.seconds:.1f} s, {rate} tokens/s{earlier}"
    print(f"  {bytes_per_token:.2f} bytes of text per token{speed}")
    report = read_report(str(out))
    if report:
        print("\n".join(f"  {line}" for line in summarize(report)))
    if manifest.source["empty"]:
        print(f"  {manifest.source['empty']:,} documents without text skipped")
    if manifest.skipped:
        examples = manifest.source["skipped"]
        more = ["..."] if manifest.skipped > len(examples) else []
        print("\n    ".join([f"  {manifest.skipped:,} bad records skipped:", *examples, *more]))
    print(f"\nRecipe:\n\n{recipe_lines(out, manifest)}", end="")


def recipe_lines(out: Path, manifest: "Manifest") -> str:
    """Returns the sections of a recipe that reads the shards."""
    tokenizer, file = manifest.tokenizer, manifest.source["tokenizer_file"]
    values = {"encoding": str(out / file) if file else tokenizer["encoding"]}
    values |= {key: tokenizer[key] for key in ("special", "eos", "bos") if tokenizer[key] != getattr(Section(), key)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    vocab_size = -(-tokenizer["vocab_size"] // 64) * 64
    return "\n".join(
        [
            *("[data]", 'source = "shards"', f"path = {json.dumps(str(out))}", "", "[tokenizer]", *lines, ""),
            *("[model]", f"vocab_size = {vocab_size}    # at least {tokenizer['vocab_size']}", ""),
        ]
    )


def _train(arguments: argparse.Namespace, fields: "Fields") -> None:
    from titanlike.tools.data.train_tokenizer import train

    started = time.monotonic()
    trained = train(
        arguments.inputs, arguments.out, arguments.vocab_size, fields=fields, limit_bytes=arguments.limit_bytes,
        skip=arguments.bad_records == "skip",
    )  # fmt: skip
    print(
        f"{arguments.out}: {trained.vocab_size:,} tokens, trained on {size_of(trained.text_bytes)} of text in "
        f"{time.monotonic() - started:.1f} s; {trained.bytes_per_token:.2f} bytes of text per token"
    )
    if trained.skipped:
        print(f"  {trained.skipped:,} bad records skipped")
    if trained.vocab_size < arguments.vocab_size:
        print(f"  fewer than {arguments.vocab_size:,}: no other pair occurs twice; more text yields more tokens")
    prepare = ["titanlike", "data", "prepare", *arguments.inputs, "--out", "tokens", "--tokenizer", str(arguments.out)]
    for name, default in (("text_field", "text"), ("bad_records", "stop")):
        if getattr(arguments, name) != default:
            prepare += [f"--{name.replace('_', '-')}", getattr(arguments, name)]
    print(f"\nNext:\n\n  {shlex.join(prepare)}")


def progress_text(progress: "Progress") -> str:
    """Formats progress as one line."""
    seconds = max(progress.seconds, 1e-9)
    speed = (progress.bytes_read - progress.resumed_bytes) / seconds
    remaining = "?"
    if speed:
        minutes, rest = divmod(round((progress.total_bytes - progress.bytes_read) / speed), 60)
        hours, minutes = divmod(minutes, 60)
        remaining = f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
    number, count = progress.passes
    prefix = f"{progress.stage} ({number} of {count})  " if count > 1 else ""
    tokens = (
        f"{short(progress.tokens / seconds)} tokens/s  {short(progress.tokens)} tokens  " if number == count else ""
    )
    return (
        f"{prefix}{progress.bytes_read / max(progress.total_bytes, 1):4.0%}  "
        f"{size_of(progress.bytes_read)} of {size_of(progress.total_bytes)}  {size_of(speed)}/s  "
        f"{tokens}{remaining} left"
    )


def short(value: float, separator: str = "") -> str:
    """Formats a number with a metric prefix."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if value >= factor:
            return f"{value / factor:.1f}{separator}{prefix}"
    return f"{value:.0f}{separator}"


def size_of(size: float) -> str:
    """Formats a number of bytes."""
    return f"{short(size, ' ')}B"
