"""The house stays one that can be walked through: who imports whom, and who reads the environment."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "titanlike"

# From the top to the bottom: a package imports from floors below its own. Packages on one floor do not import each other.
FLOORS = [
    {"cli"},
    {"verify"},
    {"run"},
    {"parallelize", "generate"},
    {"parallelisms", "float8", "optim", "data", "metrics"},
    {"checkpoint"},
    {"models"},
    {"distributed"},
    {"utils"},
    {"config"},
]
SOURCES = sorted(PACKAGE.rglob("*.py"))


def package(module: str) -> str:
    """`data` of titanlike.data.text.files."""
    return module.split(".")[1] if "." in module else ""


def floor(module: str) -> int:
    for number, members in enumerate(FLOORS):
        if package(module) in members:
            return number
    return len(FLOORS)  # titanlike/__init__.py: the version


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_every_package_has_a_floor_and_no_other_module_is_at_the_top() -> None:
    named = set().union(*FLOORS)
    assert {path.stem for path in PACKAGE.iterdir() if path.stem not in ("__init__", "__pycache__")} == named
    assert {path.stem for path in PACKAGE.glob("*.py")} == {"__init__", "generate", "parallelize", "verify"}


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_imports_go_downward(path: Path) -> None:
    here = module_of(path)
    for target in imports(path):
        assert not target.startswith(("recipes", "tests")), f"{here} imports {target}"
        if target.startswith("titanlike.") and package(target) != package(here):
            assert floor(target) > floor(here), f"{here} imports {target}, which is not below it"


READERS = ("distributed/environment.py", "utils/system.py")


@pytest.mark.parametrize("path", [p for p in SOURCES if not p.as_posix().endswith(READERS)], ids=module_of)
def test_only_two_modules_read_environment_variables(path: Path) -> None:
    assert not any(word in path.read_text() for word in ("os.environ", "getenv")), f"use one of {READERS}"


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_a_file_fits_one_subject(path: Path) -> None:
    most = 450 if path == PACKAGE / "config" / "sections.py" else 320  # all keys on one page, each with its reason
    assert len(path.read_text().splitlines()) <= most, "ask what second subject moved in"
