"""Terms that the project has replaced by the standard ones do not return: not in code, documentation, recipes or `--help`."""

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from titanlike.cli.main import build_parser
from titanlike.config import PretrainRecipe
from titanlike.config.load import RENAMED
from titanlike.config.schema import help_text
from titanlike.run.start import USAGE

ROOT = Path(__file__).parents[2]
CODE = ("titanlike", "sagemaker", "recipes", "examples", "benchmarks", "tests")
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "pyproject.toml",
    "run_train.sh",
    ".ci/*",
    "docs/*.md",
    "train_configs/**/*.toml",
)

# Retired term: the standard one. A name is flagged where it is defined or imported, so attributes of other libraries are not.
IDENTIFIERS = {
    "quietly": "suppress_warnings",
    "spread": "hash_u32",
    "seeing": "param_override",
    "readback|Readback": "async_d2h",
    "roll_call|RollCall": "heartbeat",
    "Sign": "Heartbeat",
    "Watch": "Watchdog",
    "patient|someone_is_patient|PATIENCE": "pause",
    "Stop": "GracefulShutdown",
    "leave": "barrier_and_exit",
    "agree": "broadcast_object",
    "same_everywhere": "assert_equal_across_ranks",
    "sum_over": "all_reduce_sum",
    "sharers": "shard_groups",
    "gather_along": "all_gather",
    "scatter_sum_along": "reduce_scatter",
    "adds_up": "reduce_output",
    "takes": "input_layout",
    "take_mine": "refresh_local_params",
    "places": "position_ids",
    "apart": "document_separator",
    "learnt": "loss_mask",
    "given": "prompt, or what the value is",
    "odds": "probs",
    "head_loss": "chunked_linear_cross_entropy",
    "loss_in_place": "cross_entropy_inplace",
    "averages|AVERAGES": "moments",
    "windows": "sequences",
    "feed|Feed": "source, BatchSource",
    "lane|lanes|Lane": "reader, readers",
    "Place": "Cursor",
    "patiently": "retry",
    "show": "inspect, print",
    "Saved": "CheckpointMetadata",
    "Piece": "ShardSpec",
    "set_aside|put_aside|aside": "archive",
    "settle": "wait",
    "news": "poll",
    "tidy": "prune",
    "point_at": "update_latest",
    "allows": "should_step",
    "here|there": "what the value is",
    "mine|theirs": "local, remote",
    "beginning": "resume_message",
    "farewell": "shutdown_message",
    "watching": "monitor",
    "parcel": "bundle",
    "talk|talks": "communicate",
    "told|tells": "log, report",
    "said|say|says": "output, message",
}

# The same for names that are standard in other folders.
LOCAL_IDENTIFIERS = {
    "titanlike": {
        "noise": "counter_rng",
        "FLOORS": "LAYERS",
        "ask": "all_reduce_sum",
        "answer|answers": "result, response",
    },
    "titanlike/models": {"words": "vocab", "visible": "document_causal_mask"},
    "titanlike/optim": {"levels|LEVELS": "codebook"},
    "titanlike/parallelisms": {"words": "vocab", "visible": "document_causal_mask"},
    "sagemaker": {"machines|Machine|MACHINES": "instances", "sent": "job_status"},
}

# Matched in text of any kind: code, comments, docstrings, messages and pages. A space also matches a line break.
PHRASES = {
    # The examples in the guide to the language, before the change.
    r"gone on with|killed and gone": "resumed",
    r"sees its parameters otherwise": "substitutes parameters during the forward pass",
    r"what ranks tell each other": "rank heartbeats",
    r"(be|is|are) no more there": "unpublish",
    r"the talk of": "collectives",
    r"which a large vocabulary has need of": "saves memory with large vocabularies",
    r"smaller than some hundred": "below a few hundred",
    r"nothing speaks against": "valid for",
    r"are not looked for": "not checked",
    r"taken away now and then": "interrupted",
    r"count the wait for data and leave out": "includes data wait and excludes",
    r"with another program, model, data": "with a different model, data or optimizer",
    # Headings.
    r"#+ (the folders|a save|a start|a stop|who talks, and when|documents apart)(?=\n)": "a standard heading",
    # Words and turns of phrase.
    r"who talks|talk(s|ed|ing)?": "communicate",
    r"(go(es|ing)?|gone|went) on (from|with|where|again|as if)": "resume, continue",
    r"tak(es?|en|ing) (it |them |(the|a|that) run )?up again|tak(es?|en|ing) (the|a|that) run up": "resume",
    r"(put )?in the place of": "replace",
    r"(put|set) aside": "archive",
    r"by chance": "stochastic, at random",
    r"learnt": "learned; in the loss",
    r"roll(-| )call": "heartbeat",
    r"quietly": "suppress_warnings",
    r"told( apart)?": "reported; distinguished",
    r"(is|are|was|were|be|been) said": "is printed, is logged",
    r"heard (of|from)": "received",
    r"watch(dog)?\.(beat|patient)": "watchdog.step, watchdog.pause",
    r"people read": "",
    r"one after the other": "in sequence",
    r"so many(?! \w+ that)": "a number of",
    r"let(s|ting)? go of": "free",
    r"documents apart": "document masking",
    r"rules of the house|house rules": "conventions",
    r"front door": "entry point",
    r"has need of": "needs",
    r"whole checkpoints?": "complete checkpoint",
    r"come[sn]? out even": "divide evenly",
    r"spot capacity: cheaper": "spot instances",
    # Modules, keys and values that have been renamed.
    r"titanlike[./](transform|noise|quietly|readback|roll_call|signals|watch|adamw|run_folder)(?=\.py|\.\w+ import| import)":
        "the present name of the module",
    r"(?<![\w/.])(quietly|noise|readback|roll_call|adamw|run_folder|transform|windows|parcel|watching|senders|sent|data/order|data/show|data/units|sagemaker/limits)\.py":
        "the present name of the module",
    r"optimizer\.state(?= = [\"'(]?(full|8bit|bfloat16))|(?<!\w)state = '(8bit|bfloat16)'": "optimizer.state_dtype",
    r"hang_seconds|validation_every|async_tensor": "the present name of the key",
    **{re.escape(old) + r"(?![\w.(\[])": new for old, new in RENAMED.items() if old != "optimizer.state"},
}  # fmt: skip
# For text in lower case, which takes a tenth of the time of `re.IGNORECASE`.
PATTERN = re.compile(
    r"(?<!\w)(?:" + "|".join(f"(?:{phrase})" for phrase in PHRASES).replace(" ", r"[\s#>\"']+") + r")(?!\w)"
)
EXEMPT = {Path(__file__).resolve(), ROOT / "titanlike/config/load.py"}  # they contain the retired terms


def files() -> Iterator[Path]:
    for folder in CODE:
        yield from sorted((ROOT / folder).rglob("*.py"))
    for pattern in PAGES:
        yield from sorted(ROOT.glob(pattern))


def phrases_in(text: str) -> Iterator[tuple[int, str]]:
    """Yields the line number and the text of each retired phrase."""
    for match in PATTERN.finditer(text.lower()):
        yield text.count("\n", 0, match.start()) + 1, " ".join(match[0].split())


def definitions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the line number and name of everything that a module defines or imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("titanlike"):
            yield from ((node.lineno, name) for name in (node.module or "").split("."))
            yield from ((node.lineno, alias.name) for alias in node.names)


def identifiers_in(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line number and text of each retired identifier, the name of the file included."""
    place = path.relative_to(ROOT).as_posix()
    retired = [
        *IDENTIFIERS,
        *(n for folder, names in LOCAL_IDENTIFIERS.items() if place.startswith(folder) for n in names),
    ]
    pattern = re.compile(rf"_*(test_)?({'|'.join(retired)})")
    found = [(1, path.stem), *definitions(ast.parse(path.read_text()))]
    yield from ((line, name) for line, name in found if pattern.fullmatch(name))


def test_no_retired_phrase_is_used() -> None:
    hits = [
        f"{path.relative_to(ROOT)}:{line}: {phrase}"
        for path in files()
        if path.resolve() not in EXEMPT
        for line, phrase in phrases_in(path.read_text())
    ]
    assert not hits, "retired phrases (see PHRASES in this file):\n" + "\n".join(hits)


def test_no_retired_identifier_is_defined() -> None:
    hits = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files()
        if path.suffix == ".py"
        for line, name in identifiers_in(path)
    ]
    assert not hits, "retired identifiers (see IDENTIFIERS in this file):\n" + "\n".join(hits)


def help_pages(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yields the help of a command and of its subcommands."""
    yield parser.format_help()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from help_pages(subparser)


def test_no_retired_phrase_is_in_help() -> None:
    launch = subprocess.run(
        [sys.executable, "sagemaker/launch.py", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    pages = [
        help_text(PretrainRecipe, USAGE, ""),
        help_text(PretrainRecipe, "", "all"),
        launch.stdout,
        *help_pages(build_parser()),
    ]
    assert not [f"{page.splitlines()[0]}: {phrase}" for page in pages for _, phrase in phrases_in(page)]


def test_retired_terms_are_found_and_standard_ones_are_not() -> None:
    text = "The run is gone on\n# with. Ranks talk\nto each other; `data.ahead` = 3, optimizer.state = '8bit', async_tensor = true"
    found = [(line, phrase) for line, phrase in phrases_in(text)]
    assert found == [
        (1, "gone on # with"), (2, "talk"), (3, "data.ahead"), (3, "optimizer.state"), (3, "async_tensor"),
    ]  # fmt: skip
    standard = (
        "optimizer.state[parameter], optimizer.state_dtype, async_tensor_parallel, checkpoint.allow_changed, given a mesh, "
        "so many tokens that it overflows, stochastic rounding, the order of the transforms, a wall, rolls back, in place"
    )
    assert not list(phrases_in(standard))
    names = [
        name for _, name in definitions(ast.parse("from titanlike.utils import quietly\nx.order = news = 1\ny.head()"))
    ]
    assert {"quietly", "order", "news"} <= set(names) and "head" not in names
