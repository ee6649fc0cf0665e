"""The tests of a change, by what imports what. `pytest --changed` runs those of what differs from HEAD, the nearest ones first.

The distance of a test file to a module is the number of imports between them. A file that is no module, such as a recipe, is near
to what names it or its folder. Test files at a distance of 1 or 2 find four fifths of the errors of tests/mutations.jsonl.
"""

import ast
import functools
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ROOTS = (ROOT, ROOT / "examples")  # the import path of the tests
MAX_DISTANCE = 2
PROGRAM = re.compile(r"(titanlike|recipes|examples|benchmarks|sagemaker)[./][\w./]+")  # a string that names one


def changed_files(revision: str = "HEAD") -> list[str]:
    """Returns the files that differ from a revision, with those that git does not know yet."""
    commands = (["diff", "--name-only", revision], ["ls-files", "--others", "--exclude-standard"])
    return [
        file
        for words in commands
        for file in subprocess.check_output(["git", *words], cwd=ROOT, text=True).splitlines()
    ]


def near_tests(changed: Iterable[str]) -> list[str]:
    """Returns the test files that are near to files, the nearest ones first, and among these those of the same subject."""
    found = set()
    for test in ROOT.glob("tests/**/test_*.py"):
        file = str(test.relative_to(ROOT))
        for each in changed:
            if (distance := _distance(file, each)) <= MAX_DISTANCE:
                is_same_subject = not _words(file).isdisjoint(_words(each))
                found.add((distance - is_same_subject, len(_reached(file)), file))
    return list(dict.fromkeys(file for *_, file in sorted(found)))


def _words(file: str) -> set[str]:
    return {*re.split(r"[/_.]", file)} - {"tests", "test", "py", "titanlike", "tools"}


def _distance(test: str, changed: str) -> int:
    reached = _reached(test)
    if changed.endswith(".py"):
        return reached.get(changed, MAX_DISTANCE + 1)
    path = Path(changed)
    names = {changed, path.name, *(str(parent) for parent in path.parents if parent.name)}
    return min(
        (reached[file] + 1 for file in reached if not _named(file).strings.isdisjoint(names)), default=MAX_DISTANCE + 1
    )


@functools.cache
def _reached(test: str) -> dict[str, int]:
    """Returns the modules within the maximum distance of a test file, and the distance of each."""
    found, level = {test: 0}, {test}
    for distance in range(1, MAX_DISTANCE + 1):
        level = {module for file in level for module in _named(file).modules} - found.keys()
        found |= dict.fromkeys(level, distance)
    return found


class Named(NamedTuple):
    """What a file names: the modules that it imports anywhere, starts as a program or runs as a command, and all strings."""

    modules: frozenset[str]
    strings: frozenset[str]


@functools.cache
def _named(file: str) -> Named:
    found: set[str | None] = set()
    strings = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        match node:
            case ast.Import(names):
                found |= {_module(name.name) for name in names}
            case ast.ImportFrom(module=str(package), names=names):
                found |= {module for name in names for module in _origins(package, name.name)}
            case ast.Call(func=ast.Name(id="cli"), args=[ast.Constant(value=str(command)), *_]):
                found.add(_module(f"titanlike.tools.cli.{command.replace('-', '_')}"))
            case ast.Constant(value=str(text)):
                strings.add(text)
                if PROGRAM.fullmatch(text):
                    found.add(_module(text.removesuffix(".py").replace("/", ".")))
    return Named(frozenset(module for module in found if module and module != file), frozenset(strings))


@functools.cache
def _module(name: str) -> str | None:
    """Returns the file of a module of this repository."""
    for root in ROOTS:
        for path in (root / f"{name.replace('.', '/')}.py", root / name.replace(".", "/") / "__init__.py"):
            if path.exists():
                return str(path.relative_to(ROOT))
    return None


def _origins(package: str, name: str) -> Iterator[str | None]:
    """Yields the modules of `from package import name`: a submodule, or those from which the package imports the name."""
    if submodule := _module(f"{package}.{name}"):
        yield submodule
    elif (module := _module(package)) and module.endswith("/__init__.py"):
        yield from _exports(module).get(name, [module])
    else:
        yield module


@functools.cache
def _exports(package: str) -> dict[str, list[str | None]]:
    """Returns the modules from which a package imports each name."""
    found = defaultdict(list)
    for node in ast.parse((ROOT / package).read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found[alias.name].append(_module(node.module))
    return found
