"""Structure of the package: import layers, environment variables and file sizes."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.planted_errors import ERRORS, Planted

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "titanlike"

# From top to bottom: a package imports only from lower layers. Packages of one layer do not import each other.
LAYERS = [
    {"cli"},
    {"verify", "sweep"},
    {"run"},
    {"comparison"},
    {"planning"},
    {"inference"},
    {"parallelize", "interop"},
    {"parallelisms", "float8", "optim", "data", "metrics"},
    {"checkpoint"},
    {"models"},
    {"distributed"},
    {"utils"},
    {"config"},
]
SOURCES = sorted(PACKAGE.rglob("*.py"))


def package(module: str) -> str:
    """Returns the package of a module: `data` for titanlike.data.text.files."""
    return module.split(".")[1] if "." in module else ""


def layer(module: str) -> int:
    for number, members in enumerate(LAYERS):
        if package(module) in members:
            return number
    return len(LAYERS)  # titanlike/__init__.py, which has the version only


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_every_package_has_a_layer_and_there_are_no_other_top_level_modules() -> None:
    members = set().union(*LAYERS)
    assert {path.stem for path in PACKAGE.iterdir() if path.stem not in ("__init__", "__pycache__")} == members
    assert {path.stem for path in PACKAGE.glob("*.py")} == {"__init__", "parallelize", "verify"}


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_imports_go_downward(path: Path) -> None:
    module = module_of(path)
    for target in imports(path):
        assert not target.startswith(("recipes", "tests")), f"{module} imports {target}"
        if target.startswith("titanlike.") and package(target) != package(module):
            assert layer(target) > layer(module), f"{module} imports {target}, which is not in a lower layer"


READERS = ("distributed/environment.py", "utils/system.py")


@pytest.mark.parametrize("path", [p for p in SOURCES if not p.as_posix().endswith(READERS)], ids=module_of)
def test_only_two_modules_read_environment_variables(path: Path) -> None:
    assert not any(word in path.read_text() for word in ("os.environ", "getenv")), f"use one of {READERS}"


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_a_file_has_a_limited_number_of_lines(path: Path) -> None:
    limit = 500 if path == PACKAGE / "config" / "sections.py" else 320  # all keys with their documentation in one file
    assert len(path.read_text().splitlines()) <= limit, "a file has one subject: split it"


@pytest.mark.parametrize("error", ERRORS.values(), ids=list(ERRORS))
def test_planted_errors_match_the_code(error: Planted) -> None:
    assert (ROOT / error.file).read_text().count(error.old) == 1
    assert all((ROOT / path).exists() for path in error.tests.split())


PRIVATE_ROOTS = {"torch", "dist", "collectives", "pipelining", "F"}
# Overrides of the launcher's agent, which `compat.REQUIRED` has.
PRIVATE_ALLOWED = {"titanlike.utils.compat", "titanlike.cli.torchrun"}


def private_names(path: Path) -> Iterator[str]:
    """Names with a leading underscore that a module takes from torch, except for modules that are documented as public."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in PRIVATE_ROOTS:
                yield f"{path}:{node.lineno}: {ast.unparse(node)}"
    for name in imports(path):
        if name.startswith("torch.") and any(part.startswith("_") for part in name.split(".")):
            yield f"{path}: import of {name}"


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_private_apis_of_torch_are_used_in_one_module(path: Path) -> None:
    if module_of(path) not in PRIVATE_ALLOWED:
        assert list(private_names(path)) == []
