"""Plants small errors in the code, one at a time in a copy of the repository, and records which the tests find.

    python -m tests.mutations map                                               # once: which tests execute which functions
    python -m tests.mutations run --files 'titanlike/models/*.py' --number 50 --seed 1
    python -m tests.mutations table                                             # what was found, and the survivors

An error is a small change of an expression or a statement: `OPERATORS` lists the kinds. It is tested first with the test files that
call its function, the most specific ones first, and then with all default tests. Each result is a line of `RESULTS`: an interrupted
round goes on where it stopped. An error without an effect is marked there by hand, as `"equivalent": "the reason"`.
"""

import argparse
import ast
import copy
import fnmatch
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tests/mutations.jsonl"
MAP = ROOT / ".mutations/map.json"
SOURCES = ("titanlike/*.py", "recipes/*.py")
MAX_FIRST = 12  # test files of the first stage
TIMEOUT = 1800  # seconds; an error may make a test wait forever

SWAPPED_NAMES = {
    "float32": "bfloat16", "bfloat16": "float32", "min": "max", "max": "min", "any": "all", "all": "any", "sum": "mean",
    "mean": "sum",
    "loss_groups": "model_groups", "model_groups": "loss_groups", "shard": "replicate", "replicate": "shard", "tensor": "context",
    "context": "tensor", "floor": "ceil", "ceil": "floor", "append": "extend", "rank": "world_size", "dim": "head_dim",
}  # fmt: skip
COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn,
    ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
COMPUTED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}


@dataclass(frozen=True)
class Mutation:
    """A change of the text of a node. `number` distinguishes equal ones in a function."""

    file: str
    function: str
    kind: str
    before: str
    after: str
    number: int = 0


def constants(node: ast.AST) -> Iterator[ast.AST]:
    """A number that is one larger, or a changed flag."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        value = node.value
        yield ast.Constant(
            not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else 2 * value or 1.0
        )


def comparisons(node: ast.AST) -> Iterator[ast.AST]:
    """Another comparison."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARED:
        yield _with(node, ops=[COMPARED[type(node.ops[0])]()])


def arithmetic(node: ast.AST) -> Iterator[ast.AST]:
    """Another operator, but not between texts."""
    if isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
        operands = (node.left, node.right)
        texts = ast.JoinedStr | ast.Constant | ast.Tuple | ast.List
        if all(_is_number(each) or not isinstance(each, texts) for each in operands):
            yield _with(node, op=COMPUTED[type(node.op)]())


def logic(node: ast.AST) -> Iterator[ast.AST]:
    """`and` for `or`, a condition without its `not`, or with one."""
    if isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.IfExp) and not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp):
        yield _with(node, test=ast.UnaryOp(ast.Not(), node.test))


def arguments(node: ast.AST) -> Iterator[ast.AST]:
    """Two positional arguments swapped."""
    if (
        isinstance(node, ast.Call)
        and len(node.args) > 1
        and not any(isinstance(each, ast.Starred) for each in node.args[:2])
    ):
        first, second, *others = node.args
        if ast.dump(first) != ast.dump(second):
            yield _with(node, args=[second, first, *others])


def keywords(node: ast.AST) -> Iterator[ast.AST]:
    """A call without one of its keyword arguments."""
    if isinstance(node, ast.Call):
        for index, each in enumerate(node.keywords):
            if each.arg:
                yield _with(node, keywords=[*node.keywords[:index], *node.keywords[index + 1 :]])


def names(node: ast.AST) -> Iterator[ast.AST]:
    """Another dtype, reduction, group or size."""
    if isinstance(node, ast.Attribute) and node.attr in SWAPPED_NAMES:
        yield _with(node, attr=SWAPPED_NAMES[node.attr])
    elif isinstance(node, ast.Name) and node.id in ("min", "max", "any", "all"):
        yield _with(node, id=SWAPPED_NAMES[node.id])
    elif isinstance(node, ast.Constant) and node.value in ("float32", "bfloat16"):
        yield ast.Constant(SWAPPED_NAMES[str(node.value)])


def sets(node: ast.AST) -> Iterator[ast.AST]:
    """A set, tuple, list or dictionary of names without one of them."""
    if isinstance(node, ast.Set | ast.Tuple | ast.List) and len(node.elts) > 1 and all(map(_is_name, node.elts)):
        for index in range(len(node.elts)):
            yield _with(node, elts=[*node.elts[:index], *node.elts[index + 1 :]])
    elif (
        isinstance(node, ast.Dict)
        and len(node.keys) > 1
        and all(each is not None and _is_name(each) for each in node.keys)
    ):
        for index in range(len(node.keys)):
            kept = [each for each in range(len(node.keys)) if each != index]
            yield _with(node, keys=[node.keys[each] for each in kept], values=[node.values[each] for each in kept])


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """A call or an update that is left out."""
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield ast.Pass()


OPERATORS: dict[str, Callable[[ast.AST], Iterator[ast.AST]]] = {
    each.__name__: each
    for each in (constants, comparisons, arithmetic, logic, arguments, keywords, names, sets, statements)
}


def _with(node: ast.AST, **changes: Any) -> ast.AST:
    changed = copy.copy(node)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def mutations_of(file: str, text: str) -> Iterator[Mutation]:
    """Yields all errors that can be planted in a file, but for messages, annotations, imports and docstrings."""
    seen: Counter[Any] = Counter()
    for function, node in _nodes(ast.parse(text), ""):
        before = ast.get_source_segment(text, node) if hasattr(node, "lineno") else None
        if before is None:
            continue
        for kind, operator in OPERATORS.items():
            for changed in operator(node):
                after = ast.unparse(ast.fix_missing_locations(changed))
                key = (function, kind, before, after)
                yield Mutation(file, *key, number=seen[key])
                seen[key] += 1


def _nodes(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
    """Yields nodes with the name of their function."""
    if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr | ast.arg):
        return
    yield function, node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}".lstrip(".")
    skipped = {"annotation", "returns", "decorator_list"}
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
        return
    for name, value in ast.iter_fields(node):
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST) and name not in skipped:
                yield from _nodes(each, function)


def planted(mutation: Mutation, text: str) -> str:
    """Returns the text of a file with an error. Raises `LookupError` if it does not have the code any more."""
    seen = 0
    for function, node in _nodes(ast.parse(text), ""):
        if (
            function != mutation.function
            or not hasattr(node, "lineno")
            or ast.get_source_segment(text, node) != mutation.before
        ):
            continue
        after = [ast.unparse(ast.fix_missing_locations(each)) for each in OPERATORS[mutation.kind](node)]
        for _ in range(after.count(mutation.after)):
            if seen == mutation.number:
                return _replaced(text, node, mutation.after)
            seen += 1
    raise LookupError(mutation)


def _replaced(text: str, node: Any, new: str) -> str:
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    content = text.encode()
    start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
    if isinstance(node, ast.expr):
        new = f"({new})"
    return (content[:start] + new.encode() + content[end:]).decode()


class Copy:
    """A copy of the repository, in which tests run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
        )
        for name in map(os.fsdecode, filter(None, listed.stdout.split(b"\0"))):
            if (ROOT / name).is_file():
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes((ROOT / name).read_bytes())
        self.now = time.time()

    def write(self, file: str, text: str) -> None:
        """Writes a file with a new time: Python recompiles a file of the same size only if its time in seconds differs."""
        (self.folder / file).write_text(text)
        self.now += 2
        os.utime(self.folder / file, (self.now, self.now))

    def test(self, tests: list[str], *options: str, **variables: str) -> tuple[str, float]:
        """Returns the first test that fails, or "" if none does, and the seconds that it took."""
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *options, *tests]
        started = time.monotonic()
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=os.environ | variables, capture_output=True, text=True, check=False, timeout=TIMEOUT,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return "timeout", TIMEOUT
        failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        result = "" if not done.returncode else failed[0] if failed else f"exit code {done.returncode}"
        return result, round(time.monotonic() - started, 1)


# What each Python process of the tests does first: it appends each function of this repository to a file when it is first called.
RECORDER = """
import os, sys, threading
if file := os.environ.get("FUNCTIONS_CALLED"):
    root, out, seen = os.environ["FUNCTIONS_ROOT"], os.open(file, os.O_APPEND | os.O_CREAT | os.O_WRONLY), set()
    def record(frame, event, arg):
        code = frame.f_code
        if event == "call" and code not in seen:
            seen.add(code)
            if code.co_filename.startswith(root):
                os.write(out, f"{code.co_filename.removeprefix(root)} {code.co_qualname}\\n".encode())
    sys.setprofile(record)
    threading.setprofile(record)
"""


def record_map(copied: Copy) -> None:
    """Writes which functions each file of default tests calls, in any of its processes."""
    (copied.folder / "sitecustomize.py").write_text(RECORDER)
    found: dict[str, Any] = json.loads(MAP.read_text()) if MAP.exists() else {}
    MAP.parent.mkdir(exist_ok=True)
    for test in sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")):
        if str(test) in found:
            continue
        called = copied.folder / "called"
        called.unlink(missing_ok=True)
        variables = {
            "FUNCTIONS_CALLED": str(called),
            "FUNCTIONS_ROOT": f"{copied.folder}/",
            "PYTHONPATH": str(copied.folder),
        }
        failed, seconds = copied.test([str(test)], "-n", "0", "--maxfail=1000", **variables)
        functions = sorted(set(called.read_text().splitlines())) if called.exists() else []
        found[str(test)] = {"seconds": seconds, "functions": [each.replace(".<locals>", "") for each in functions]}
        MAP.write_text(json.dumps(found))
        print(f"{test}: {len(functions)} functions, {seconds:.0f} s{', ' + failed if failed else ''}", flush=True)


def tests_of(mutation: Mutation, called: dict[str, Any]) -> list[str]:
    """Returns the files of tests that call the function, those that call few others first."""
    names = {f"{mutation.file} {mutation.function or '<module>'}"}
    found = [test for test, each in called.items() if names & set(each["functions"])]
    return sorted(found, key=lambda test: len(called[test]["functions"]))[:MAX_FIRST]


def evaluate(mutation: Mutation, copied: Copy, called: dict[str, Any]) -> dict[str, Any]:
    """Plants an error and tests it. Returns the line of the results."""
    text = (ROOT / mutation.file).read_text()
    copied.write(mutation.file, planted(mutation, text))
    try:
        first = tests_of(mutation, called)
        found, seconds = copied.test(first, "-n", "2") if first else ("", 0.0)
        stage = "tests of the function"
        if not found:
            stage = "default tests"
            found, more = copied.test([])
            seconds += more
    finally:
        copied.write(mutation.file, text)
    return asdict(mutation) | {"found": found, "stage": stage if found else "", "seconds": seconds}


def drawn(files: list[str], number: int, seed: int) -> list[Mutation]:
    """Returns errors of the core, as many of each kind."""
    by_kind: dict[str, list[Mutation]] = defaultdict(list)
    for path in sorted(each for source in SOURCES for each in ROOT.glob(source.replace("*", "**/*"))):
        name = str(path.relative_to(ROOT))
        if "tools" not in path.parts and any(fnmatch.fnmatch(name, pattern) for pattern in files):
            for mutation in mutations_of(name, path.read_text()):
                by_kind[mutation.kind].append(mutation)
    rng = random.Random(seed)
    for found in by_kind.values():
        rng.shuffle(found)
    kinds = sorted(by_kind)
    return [
        each for row in range(number) for kind in kinds if row < len(by_kind[kind]) for each in [by_kind[kind][row]]
    ][:number]


def table(results: list[dict[str, Any]]) -> str:
    """Returns what was found by area of the code, and the survivors."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for each in results:
        state = "equivalent" if each.get("equivalent") else "found" if each["found"] else "survived"
        for area in ("/".join(each["file"].split("/")[:2]), "all"):
            rows[area][state] += 1
    lines = ["| Code | Found | Survived | Equivalent |", "|---|---|---|---|"]
    lines += [
        f"| {area} | {row['found']} | {row['survived']} | {row['equivalent']} |" for area, row in sorted(rows.items())
    ]
    total = rows["all"]["found"] + rows["all"]["survived"]
    lines += ["", f"{100 * rows['all']['found'] / max(total, 1):.0f}% of {total} found", ""]
    for each in results:
        if not each["found"] and not each.get("equivalent"):
            lines.append(f"{each['file']} {each['function']}: {' '.join(each['before'].split())} -> {each['after']}")
    return "\n".join(lines)


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("map", "run", "table"))
    parser.add_argument("--files", nargs="*", default=["*"], help="run: patterns of files (default: the core)")
    parser.add_argument("--number", type=int, default=20, help="run: number of errors (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="run: which errors are drawn (default: 0)")
    options = parser.parse_args()
    results = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    if options.command == "table":
        print(table(results))
        return 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copied = Copy(Path(folder))
        if options.command == "map":
            record_map(copied)
            return 0
        called = json.loads(MAP.read_text()) if MAP.exists() else {}
        done = {tuple(each[name] for name in Mutation.__dataclass_fields__) for each in results}
        for mutation in drawn(options.files, options.number, options.seed):
            if tuple(asdict(mutation).values()) in done:
                continue
            result = evaluate(mutation, copied, called) | {"seed": options.seed}
            with RESULTS.open("a") as out:
                print(json.dumps(result, ensure_ascii=False), file=out)
            found = result["found"] or "NOT FOUND"
            print(
                f"{mutation.file} {mutation.function} {mutation.kind}: {found} ({result['seconds']:.0f} s)", flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
