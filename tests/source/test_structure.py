"""The structure of the package: what imports what, and where the environment and private names of PyTorch are used."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from itertools import accumulate
from pathlib import Path

import pytest
import tomli

from benchmarks.mutations import known_errors

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "titanlike"
DATA, TOOLS = PACKAGE / "data", PACKAGE / "tools"

# From top to bottom: a package imports only from lower layers. Packages of one layer do not import each other.
CORE = [
    {"run"},
    {"inference"},
    {"parallelize", "interop"},
    {"parallelisms", "float8", "optim", "data", "metrics"},
    {"checkpoint"},
    {"recipe"},
    {"models"},
    {"losses"},
    {"distributed"},
    {"hardware", "utils"},
    {"config"},
]
LAYERS_OF_DATA = [{"batches"}, {"tokens"}, {"documents"}]
LAYERS_OF_TOOLS = [
    {"cli"},
    {"clusters", "comparison", "doctor", "migration", "new_recipe", "null_gpu", "stages", "sweep", "verify"},
    {"adapter", "data", "gguf_file", "harness", "planning", "programs", "trace"},
    {
        "arguments",
        "gguf_vocabulary",
        "html_page",
        "inference",
        "metrics_file",
        "output_files",
        "rich_console",
        "schema",
    },
]
MAX_CORE_LINES = 29_644
SOURCES = sorted(PACKAGE.rglob("*.py"))
CORE_SOURCES = [path for path in SOURCES if TOOLS not in path.parents and path.name != "__main__.py"]


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path) -> list[str]:
    """Returns what a module imports, inside of functions too."""
    return list(imports_of(parsed(path)))


def imports_of(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


NULL_GPU = {module_of(path) for path in SOURCES if TOOLS / "null_gpu" in path.parents}


def package_of(name: str) -> str:
    return name.split(".")[0]


def layer(layers: list[set[str]], package: str) -> int:
    """Returns the number of a package's layer; the number of layers for a package's `__init__.py`."""
    return next((number for number, members in enumerate(layers) if package in members), len(layers))


def upward(folder: Path, layers: list[set[str]], sources: list[Path]) -> Iterator[str]:
    """Yields the imports between the packages of a folder that do not go to a lower layer."""
    prefix = f"{module_of(folder)}."
    for path in sources:
        package = package_of(module_of(path).removeprefix(prefix))
        for target in imports(path):
            other = package_of(target.removeprefix(prefix))
            if target.startswith(prefix) and other != package and layer(layers, other) <= layer(layers, package):
                yield f"{module_of(path)} imports {target}"


@pytest.mark.parametrize(
    ("folder", "layers"),
    [(PACKAGE, [{"__main__"}, {"tools"}, *CORE]), (DATA, LAYERS_OF_DATA), (TOOLS, LAYERS_OF_TOOLS)],
)
def test_every_package_has_a_layer(folder: Path, layers: list[set[str]]) -> None:
    found = {path.stem for path in folder.iterdir() if path.stem not in ("__init__", "__pycache__")}
    assert found == set().union(*layers)


def test_imports_go_downward() -> None:
    assert list(upward(PACKAGE, [{"__main__"}, {"tools"}, *CORE], SOURCES)) == []
    assert list(upward(DATA, LAYERS_OF_DATA, [path for path in SOURCES if DATA in path.parents])) == []
    assert list(upward(TOOLS, LAYERS_OF_TOOLS, [path for path in SOURCES if TOOLS in path.parents])) == []
    assert [name for path in SOURCES for name in imports(path) if name.split(".")[0] in ("recipes", "tests")] == []


def test_configs_import_no_torch() -> None:
    folders = ("config/*.py", "recipe/*.py", "models/*/*config.py", "models/families.py")
    configs = [path for folder in folders for path in PACKAGE.glob(folder)]
    assert len(configs) > 30
    assert [module_of(path) for path in configs for name in imports(path) if name.split(".")[0] == "torch"] == []


def test_the_core_never_imports_a_tool() -> None:
    # Neither by a statement nor by a name that importlib would get.
    assert [module_of(path) for path in CORE_SOURCES if "titanlike.tools" in path.read_text()] == []


def test_what_programs_import() -> None:
    """What runs before training imports no torch, and pre-training knows nothing of chats."""
    names = "run.start run.launch tools.cli.main tools.cli.data tools.data.prepare tools.data.train_tokenizer tools.data.workers"
    code = f"import sys, {', '.join(f'titanlike.{name}' for name in names.split())}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    found, files = {}, {module_of(path).removesuffix(".__init__"): path for path in SOURCES}
    pending = [("recipes.pretrain", ROOT / "recipes/pretrain.py")]
    while pending:
        name, path = pending.pop()
        found[name] = path
        at_import = ast.Module([node for node in parsed(path).body if isinstance(node, ast.ImportFrom)], [])
        modules = {part for full in imports_of(at_import) for part in accumulate(full.split("."), "{}.{}".format)}
        pending += [(module, files[module]) for module in modules & files.keys() - found.keys()]
    assert len(found) > 60 and not [name for name in found if name.endswith(".chats")]


def test_the_core_keeps_its_budget_of_lines() -> None:
    assert sum(len(path.read_text().splitlines()) for path in CORE_SOURCES) <= MAX_CORE_LINES


def test_every_dependency_is_imported() -> None:
    lines = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    imported = {name.partition(".")[0] for path in SOURCES for name in imports(path)}
    modules = packages_distributions()
    found = {each.replace("_", "-").lower() for name in imported for each in modules.get(name, ())}
    # Which torch.utils.tensorboard imports.
    assert {re.split("[<>=]", line)[0] for line in lines} - found <= {"tensorboard"}


@pytest.mark.parametrize("program", sorted((ROOT / "recipes").glob("*.py")), ids=lambda program: program.stem)
def test_a_program_is_short(program: Path) -> None:
    tree = ast.parse(program.read_text())
    (main,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    assert main.name == "main" and (main.end_lineno or 0) - main.lineno <= 110
    assert sum(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(tree)) <= 20
    assert "pipeline" not in program.read_text().replace("mesh.pipeline", "").lower()


def test_only_four_modules_the_null_gpu_and_sagemaker_read_environment_variables() -> None:
    names = "distributed.environment distributed.launch_config distributed.sagemaker utils.system"
    readers = {f"titanlike.{name}" for name in names.split()} | NULL_GPU  # which sets variables for a command
    jobs = TOOLS / "clusters/sagemaker"  # on this machine the variables of AWS, in a container its own
    readers |= {module_of(path) for path in jobs.glob("*.py")}
    texts = {module_of(path): path.read_text() for path in SOURCES}
    assert {name for name, text in texts.items() if "os.environ" in text or "getenv" in text} <= readers


def test_private_names_of_torch_are_used_in_one_module_of_the_library_one_of_the_planner_and_the_null_gpu() -> None:
    # The launcher overrides methods of torchrun's agent, which `compat.REQUIRED` has.
    allowed = {
        "titanlike.utils.compat",
        "titanlike.distributed.torchrun",
        "titanlike.tools.planning.torch_internals",
        *NULL_GPU,
    }
    assert [name for path in SOURCES if module_of(path) not in allowed for name in private_names(path)] == []


def private_names(path: Path) -> Iterator[str]:
    """Yields names with a leading underscore that a module takes from torch."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in ("torch", "dist", "collectives", "pipelining", "F"):
                yield f"{path}:{node.lineno}: {ast.unparse(node)}"
    for name in imports(path):
        if name.startswith("torch.") and any(part.startswith("_") for part in name.split(".")):
            yield f"{path}: import of {name}"


def test_known_errors_match_the_code() -> None:
    for error, (start, end) in known_errors().items():
        code = (ROOT / error.file).read_bytes()
        ast.parse(code[:start] + error.after.encode() + code[end:], error.kind)
