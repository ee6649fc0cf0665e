"""Every fenced block of every page is valid: a command for the program that it names, code, a part of a recipe, or output.

A command is parsed by its own program, and its recipe is checked as at a start, but nothing trains here. `.ci/run` and
`tests/packaging` run the commands that install and train. A block that no rule covers fails.
"""

import argparse
import ast
import importlib
import inspect
import json
import math
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tomli
from torch.distributed.run import get_args_parser

from tests.launching import ROOT
from tests.programs import INSTALLED, PAGES, blocks
from titanlike.config import UserError
from titanlike.config.layout import DIMENSIONS
from titanlike.config.shipped import recipe_path
from titanlike.recipe import PretrainRecipe, load
from titanlike.run.checks import check_recipe
from titanlike.run.start import DEFAULT_RECIPE, Arguments
from titanlike.tools.cli.command import refuse_unknown
from titanlike.tools.cli.interchange import with_source
from titanlike.tools.cli.main import build_parser
from titanlike.tools.clusters.sagemaker.job import parse_channels
from titanlike.tools.planning.hardware import load_hardware
from titanlike.tools.programs import load_known, recipe_types
from titanlike.tools.stages import load_stages
from titanlike.tools.sweep.config import load_sweep
from titanlike.tools.verify.options import parse_layout, parse_mesh
from titanlike.tools.verify.small_recipe import fitting_batch

EXTRAS = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
COMMANDS = ("bash",)
OUTPUT = ("", "text")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def fenced(page: Path) -> list[Block]:
    """Returns the blocks of a page, or the indented commands in the docstring of an example."""
    text = page.read_text()
    if page.suffix == ".txt":  # the record of a terminal
        return [Block(page, 1, "text", text)]
    if page.suffix == ".py":
        lines = [line for line in (ast.get_docstring(ast.parse(text)) or "").splitlines() if line.startswith("    ")]
        return [Block(page, 1, "bash", "\n".join(map(str.strip, lines)))] if lines else []
    found = [
        Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2])
        for match in re.finditer(r"^```(\S*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    ]
    assert 2 * len(found) == text.count("```"), f"{page.name} has a block that is not closed, or indented"
    return found


OTHERS = [*sorted((ROOT / "examples").glob("*.py")), *sorted((ROOT / "docs/captures").glob("*.txt"))]
OTHERS += sorted((ROOT / "docs/api").glob("*.md"))
BLOCKS = [block for page in (*PAGES, *OTHERS) for block in fenced(page)]


FOREIGN = {"torchtitan.toml", "job.json", "pretrain_llama.sh", "config.json"}  # files of other programs
IMPORTED: set[str] = set()  # recipes that a block makes of them, or `titanlike init` in a block of the page


def commands(text: str) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yields the words of each command of a line of the shell, and the variables before it."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        lexer.whitespace_split = True
        for is_operator, group in groupby(lexer, lambda word: word in ("&&", "|", ";")):
            words = [] if is_operator else list(group)
            variables = {}
            while words and re.match(r"[A-Z_]+=", words[0]):
                name, _, variables[name] = words.pop(0).partition("=")
            if words:
                yield words, variables


def check_command(words: Sequence[str], variables: dict[str, str]) -> None:
    """Raises an error if a command is not valid."""
    program, *rest = words
    assert program in PROGRAMS, f"{program}: no rule covers this program"
    for word in words:  # files of this repository
        path = Path(re.sub(r"\.py:\w+$", ".py", word.rpartition("=")[2]))
        is_here = path.parts and not path.is_absolute() and Path(path.parts[0]).exists()
        assert not is_here or path.exists(), f"{path} does not exist"
    PROGRAMS[program](rest, variables)


def train(words: Sequence[str], variables: dict[str, str]) -> None:
    arguments = Arguments(words, many=True)
    if arguments.recipe.name in IMPORTED or arguments.recipe.parts[0] == "runs":
        return
    if len(arguments.recipes) > 1:
        load_stages(arguments.recipes, arguments.overrides)
    recipe = load_known(arguments.recipe, arguments.overrides)
    processes = int(variables.get("NPROC", 1 if arguments.recipe == DEFAULT_RECIPE else 8))
    check_recipe(recipe, arguments.check or processes)


def titanlike(words: Sequence[str], variables: dict[str, str]) -> None:
    if words[0] == "train":
        return train(words[1:], variables)
    arguments, overrides = build_parser().parse_known_args(with_source([*words]))
    refuse_unknown(arguments, overrides)
    if words[:2] == ["recipes", "copy"]:  # the next lines use it
        arguments.run(arguments)
    elif words[0] == "import":
        IMPORTED.add(arguments.recipe.name)
    elif words[0] == "sweep" and arguments.sweep.suffix == ".toml":
        load_sweep(arguments.sweep, Arguments([str(arguments.sweep), *overrides]).overrides)
    elif words[0] in ("plan", "launch", "profile", "verify", "data"):
        if words[0] == "verify" and ".py:" in arguments.recipe:  # a module of the reader's
            assert arguments.compile or parse_mesh(arguments.layout)
            return None
        if words[0] == "plan" and len(arguments.recipe) > 1:
            return train([*arguments.recipe, *overrides], {"NPROC": arguments.gpus})
        named = recipe_path(str(getattr(arguments, "recipe", None) or getattr(arguments, "path", "")))
        named = recipe_path("".join(arguments.recipe)) if words[0] == "plan" else named
        if named.suffix != ".toml" and (words[0] in ("data", "profile") or arguments.calibrate):  # no recipe
            return None
        if named.name in FOREIGN or named.name in IMPORTED:
            load_hardware(arguments.hardware)
            return None
        command_line = Arguments([str(named), *overrides])
        layout = parse_layout(arguments.layout) if getattr(arguments, "layout", None) else {}
        keys = {f"parallelism.{key}": value for key, value in layout.items()}
        recipe = load_known(named, command_line.overrides | keys)
        if layout:
            processes = math.prod(int(layout[name]) for name in DIMENSIONS)
            batch = fitting_batch(vars(recipe.parallelism.resolve(processes)), processes)  # as the command chooses it
            keys |= {key: str(value) for key, value in batch.items()}
            check_recipe(load_known(named, command_line.overrides | keys), processes)
        elif words[:2] == ["launch", "sagemaker"]:
            parse_channels(arguments.channels)
            processes = 1 if arguments.simulate else load_hardware(arguments.instance_type).gpus_per_node
            check_recipe(recipe, arguments.nodes * processes)
        elif words[0] == "launch":
            check_recipe(recipe, arguments.nodes * arguments.gpus_per_node)
        elif words[0] == "plan":
            load_hardware(arguments.hardware)
    return None


class Parsed(Exception):
    """The command line was accepted by the program's own parser."""


def run_module(name: str, words: list[str]) -> None:
    """Parses the command line of a module with its `main`, which ends there."""
    if name == "venv":
        return
    is_package = (ROOT / name.replace(".", "/")).is_dir()
    module = importlib.import_module(f"{name}.__main__" if is_package else name)
    takes_case = hasattr(module, "main") and bool(inspect.signature(module.main).parameters)
    main = getattr(module, "main", partial(runpy.run_path, str(module.__file__), run_name="__main__"))
    parse = argparse.ArgumentParser.parse_known_args

    def parse_known_args(self: argparse.ArgumentParser, *_: Any) -> None:
        raise Parsed(parse(self)[0])

    def parse_args(self: argparse.ArgumentParser, *_: Any) -> None:
        found, rest = parse(self)
        assert not rest, f"{name}: unknown {rest}"
        raise Parsed(found)

    patches = {"parse_known_args": parse_known_args, "parse_args": parse_args}
    with mock.patch.multiple(argparse.ArgumentParser, **patches), mock.patch.object(sys, "argv", [name, *words]):
        try:
            main(int(words[0]), "1") if takes_case else main()  # a random case of a fuzz test
        except Parsed as parsed:
            (found,) = parsed.args
        else:
            return
    if hasattr(found, "command"):
        check_command(found.command, {})


def python(words: Sequence[str], variables: dict[str, str]) -> None:
    first, *rest = words
    if first == "-c":
        ast.parse(rest[0])
    elif first == "-m":
        run_module(rest[0], rest[1:])
    elif first.startswith("recipes/"):
        train(rest, variables | {"NPROC": variables.get("NPROC", "1")})
    elif first.startswith("sagemaker/"):
        titanlike(["launch", "sagemaker", *rest], variables)
    else:
        run_module(".".join(Path(first).with_suffix("").parts), rest)


def torchrun(words: Sequence[str], variables: dict[str, str]) -> None:
    options = get_args_parser().parse_args(words)
    script, arguments = options.training_script, options.training_script_args
    if script.startswith("recipes/"):
        train(arguments, variables | {"NPROC": options.nproc_per_node})


def pip(words: Sequence[str], variables: dict[str, str]) -> None:
    assert words[0] == "install"
    for extras in re.findall(r"(?:^|\s)(?:\.|titanlike)\[(.*?)\]", " ".join(words)):
        assert set(extras.split(",")) <= EXTRAS.keys(), extras


def pytest_(words: Sequence[str], variables: dict[str, str]) -> None:
    options = argparse.ArgumentParser()
    options.add_argument("-m", default="")
    options.add_argument("-n")
    options.add_argument("--changed", action="store_true")
    options.add_argument("paths", nargs="*", type=lambda path: Path(path).resolve(strict=True))
    assert set(re.findall(r"\w+", options.parse_args(words).m)) <= {"slow", "every", "minutes", "and", "or", "not"}


def docker(words: Sequence[str], variables: dict[str, str]) -> None:
    """Needs GPUs and an image: the arguments after the image are those of a run."""
    image = next(word for word in words if word.startswith("registry/"))
    Arguments(words[words.index(image) + 1 :])


def any_words(words: Sequence[str], variables: dict[str, str]) -> None:
    """A program of the system, or one that CI runs."""


def srun(words: Sequence[str], variables: dict[str, str]) -> None:
    check_command([word for word in words if not word.startswith("--ntasks")], variables)


SYSTEM = [
    "ruff",
    "mypy",
    "sphinx-build",
    "bash",
    ".ci/busy",
    "prometheus",
    "cp",
    "mv",
    "hf",
    "printf",
    "aws",
    "git",
    "cd",
    "ls",
    "sed",
    "grep",
]
PROGRAMS: dict[str, Callable[[Sequence[str], dict[str, str]], None]] = {
    "./run_train.sh": train, "titanlike": titanlike, "python": python, "python3": python, "torchrun": torchrun, "pip": pip,
    "peers/bin/pip": pip, "new/bin/pip": pip, "hf/bin/pip": pip, "pytest": pytest_, "docker": docker,
    "srun": srun, "venv/bin/torchrun": torchrun,
    **dict.fromkeys((*SYSTEM, "llama-cli", "mlx_lm.generate", "vllm"), any_words),
}  # fmt: skip


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files of the clone, in which a block may write others."""
    for path in ROOT.iterdir():
        if path.name not in ("runs", ".git"):
            (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check_toml(block: Block, folder: Path) -> None:
    """Loads a part of a recipe, of a sweep file, or of the recipe of a copied program."""
    values = tomli.loads(block.text)
    for path in (ROOT / "train_configs").glob("*.toml"):
        (folder / path.name).symlink_to(path)
    (folder.parent / "train.toml").symlink_to(ROOT / "train_configs/debug.toml")  # a reader's
    file = folder / "block.toml"
    file.write_text(block.text)
    if "project" in values:
        hooks = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
        assert values["project"]["entry-points"].keys() <= hooks.keys()
    elif "dollars_per_gpu_hour" in values:
        load_hardware(str(file))
    elif "search" in values or "resources" in values:
        if "search" not in values:
            file.write_text(f'recipe = "debug"\n[search."optimizer.lr"]\nvalues = [1e-3]\n{block.text}')
        load_sweep(file, {})
    elif "noise" in values:
        names: dict[str, Any] = {"__name__": __name__, "PretrainRecipe": PretrainRecipe}
        exec(blocks(block.page, "python")[0], names)
        assert load(names["NoisyRecipe"], file).noise.scale == 0.01
    else:
        program = values.get("program", "finetune" if "lora" in values else "pretrain")
        recipe = load(recipe_types().get(program, PretrainRecipe), file)
        if {"program", "model", "data"} <= values.keys():  # a whole recipe, and not a part of one
            check_recipe(recipe, 8)


def check_python(text: str) -> None:
    """Compiles code and imports what it takes from a library. The SageMaker SDKs are tested in environments of their own, and
    `my_config` and `my_model` of docs/extending.md in tests/recipes."""
    compile(text, "<block>", "exec")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith(("sagemaker", "my_config")):
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                assert alias.name == "my_model" or importlib.import_module(alias.name)


def check_output(text: str) -> None:
    """A line of output is not a command, unless it begins with a prompt: then it is one, refused with the error below it."""
    lines = text.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("$ "):
            for words, variables in commands(re.sub(r" {2,}\(.*\)$", "", line[2:])):
                if following.startswith("error: "):
                    with pytest.raises(UserError, match=f"^{re.escape(following.removeprefix('error: '))}$"):
                        check_command(words, variables)
                else:
                    check_command(words, variables)
        else:
            assert not re.match(r"(titanlike|python|pip|\./run_train\.sh|torchrun) ", line), "tag the block with bash"


def test_the_blocks_of_all_pages_are_found() -> None:
    pages = {block.page.name for block in BLOCKS}
    assert pages > {"README.md", "sagemaker.md", "extending.md", "sagemaker_estimator.py"}
    assert len(BLOCKS) > 80 and {block.text for block in BLOCKS} >= {*INSTALLED}


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_valid(block: Block, clone: Path) -> None:
    if block.language in COMMANDS:
        if block.text in INSTALLED:  # tests/packaging runs it
            return
        IMPORTED.clear()
        IMPORTED.update(re.findall(r"titanlike init (\S+\.toml)", block.page.read_text()))
        for found in re.findall(r"titanlike plan (\S+) .*--write (\S+\.toml)", block.page.read_text()):
            (clone / found[1]).write_text(f'extends = "{recipe_path(found[0])}"\n')  # as the search does
        for words, variables in commands(block.text):
            check_command(words, variables)
    elif block.language in ("python", "py"):
        check_python(block.text)
    elif block.language == "toml":
        (clone / "mine").mkdir()
        check_toml(block, clone / "mine")
    elif block.language == "json":
        json.loads(block.text)
    elif block.language == "{toctree}":
        pages = [line for line in block.text.splitlines() if line and not line.startswith(":")]
        assert pages and all((block.page.parent / f"{page}.md").exists() for page in pages), pages
    elif block.language == "{eval-rst}":
        for name in re.findall(r"^\.\. automodule:: (\S+)", block.text, flags=re.MULTILINE):
            importlib.import_module(name)
    else:
        assert block.language in OUTPUT, f"no rule covers a block of {block.language}"
        check_output(block.text)
