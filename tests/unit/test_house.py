"""The house stays one that can be walked through: who imports whom, and who reads the environment."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "titanlike"

# From the top to the bottom. A module imports from its own floor or a lower one, never from a higher one.
FLOORS = [
    {"cli"},
    {"verify"},
    {"run_folder", "resume"},
    {"transform", "start"},
    {"check", "generate"},
    {"optimizer"},
    {"parallelisms", "float8", "data", "adamw", "checkpoint", "metrics"},
    {"models", "loss"},
    {"signals"},
    {"distributed", "lock", "noise", "quietly", "readback", "rng", "roll_call", "watch"},
    {"dtensor", "environment"},
    {"config"},
]
SOURCES = sorted(PACKAGE.rglob("*.py"))


def floor(module: str) -> int:
    name = module.split(".")[1] if "." in module else ""
    for number, members in enumerate(FLOORS):
        if name in members:
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


def test_every_module_has_a_floor() -> None:
    named = set().union(*FLOORS)
    assert {path.stem for path in PACKAGE.iterdir() if path.stem not in ("__init__", "__pycache__")} == named


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_imports_go_downward(path: Path) -> None:
    here = module_of(path)
    for target in imports(path):
        assert not target.startswith(("recipes", "tests")), f"{here} imports {target}"
        if target.startswith("titanlike."):
            assert floor(target) >= floor(here), f"{here} imports {target}, which stands above it"


@pytest.mark.parametrize("path", [p for p in SOURCES if p.stem != "environment"], ids=module_of)
def test_only_environment_touches_the_environment(path: Path) -> None:
    assert not any(word in path.read_text() for word in ("os.environ", "getenv")), (
        "ask titanlike.distributed.environment"
    )


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_a_file_fits_one_subject(path: Path) -> None:
    most = 450 if path == PACKAGE / "config" / "sections.py" else 320  # all keys on one page, each with its reason
    assert len(path.read_text().splitlines()) <= most, "ask what second subject moved in"
