"""Plants small errors in the code, in a copy of the repository, and records which of them the default tests find.

    python -m benchmarks.mutations run --files 'titanlike/models/*.py' --number 50 --seed 1
    python -m benchmarks.mutations known    # the errors of tests/known_errors.txt
    python -m benchmarks.mutations table    # what was found, by area, and what was not

An error is a small change of an expression or a statement. Each is planted alone and tested with the nearest test files
(tests/changed.py). Those that these do not find are planted together, and the default tests run once: for each test that
fails, the error that it finds is bisected.
A result is a line of `RESULTS`. A command that runs again tests only what was not found, and of two results the last one counts.
An error without an effect is marked there by hand, as `"equivalent": "the reason"`.
"""

import argparse
import ast
import functools
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.changed import near_tests

ROOT = Path(__file__).parents[1]
RESULTS, KNOWN = ROOT / "tests/mutations.jsonl", ROOT / "tests/known_errors.txt"
PYTEST = f"{sys.executable} -m pytest -rfE -p no:cacheprovider --deselect=tests/source/test_structure.py"
NEARBY_SECONDS = 60  # of the tests that an error meets alone
STATES = ("found", "not found", "equivalent")
TIMEOUTS = ("3000", "240")  # seconds of tests in parallel, and of some; an error may make a test wait forever

PAIRS = """float32 bfloat16, min max, any all, sum mean, floor ceil, shard replicate, tensor context,
Lt LtE, Gt GtE, Eq NotEq, In NotIn, Is IsNot, And Or, Add Sub, Mult Div, Mod FloorDiv"""  # names and operators
OTHER = {a: b for pair in PAIRS.split(",") for a, b in itertools.permutations(pair.split())}


class Mutation(NamedTuple):
    """A change of the text of a node, the first one in a function that has this text."""

    file: str
    function: str
    kind: str
    before: str
    after: str


def changes(node: ast.AST, is_condition: bool) -> Iterator[tuple[str, ast.AST]]:
    """Yields the kinds of errors that a node may have, and the node with each of them."""

    def changed(**values: Any) -> ast.AST:
        return type(node)(**dict(ast.iter_fields(node)) | values)

    if is_condition and isinstance(node, ast.Name | ast.Attribute | ast.Call):
        yield "negation", ast.UnaryOp(ast.Not(), node)
    match node:
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", ast.Constant(not value if isinstance(value, bool) else value + 1)
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in OTHER:
            yield "name", changed(**{"id" if isinstance(node, ast.Name) else "attr": OTHER[name]})
        case ast.UnaryOp(op=ast.Not()):
            yield "negation", node.operand
        case ast.Compare(ops=[operator]):
            yield "operator", changed(ops=[getattr(ast, OTHER[type(operator).__name__])()])
        case ast.BoolOp(op=operator) | ast.BinOp(op=operator) if type(operator).__name__ in OTHER:
            if not any(isinstance(each, ast.JoinedStr) or _is_text(each) for each in ast.iter_child_nodes(node)):
                yield "operator", changed(op=getattr(ast, OTHER[type(operator).__name__])())
        case ast.Call():
            first, second = [*node.args, None, None][:2]
            is_symmetric = ast.unparse(node.func) in ("max", "min")
            if second and not is_symmetric and not any(isinstance(each, ast.Starred) for each in (first, second)):
                yield "arguments", changed(args=[second, first, *node.args[2:]])
            for each in node.keywords:
                yield "keyword", changed(keywords=[kept for kept in node.keywords if kept is not each])
        case ast.Dict(keys, values) if len(keys) > 1 and all(map(_is_text, keys)):
            for i in range(len(keys)):
                yield "name of a set", changed(keys=keys[:i] + keys[i + 1 :], values=values[:i] + values[i + 1 :])
        case ast.Set(names) | ast.Tuple(names) | ast.List(names) if len(names) > 1 and all(map(_is_text, names)):
            for i in range(len(names)):
                yield "name of a set", changed(elts=names[:i] + names[i + 1 :])
        case ast.AugAssign() | ast.Expr(value=ast.Call()):
            yield "statement", ast.Constant(None)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@functools.cache
def mutations(file: str) -> dict[Mutation, tuple[int, int]]:
    """Returns the errors that can be planted in a file, and the bytes that each of them replaces."""
    content = (ROOT / file).read_bytes()
    starts = [0, *itertools.accumulate(map(len, content.splitlines(keepends=True)))]
    found: dict[Mutation, tuple[int, int]] = {}
    for function, node, is_condition in _nodes(ast.parse(content), ""):
        for kind, changed in changes(node, is_condition):
            start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            error = Mutation(file, function, kind, content[start:end].decode(), f"({ast.unparse(changed)})")
            found.setdefault(error, (start, end))
    return found


def _nodes(node: Any, function: str, is_condition: bool = False) -> Iterator[tuple[str, Any, bool]]:
    """Yields nodes with the name of their function, but for messages, annotations, imports and docstrings."""
    if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr | ast.arg):
        return
    yield function, node, is_condition
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}".lstrip(".")
    for name, value in ast.iter_fields(node):
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST) and name not in ("annotation", "returns", "decorator_list"):
                yield from _nodes(each, function, name == "test")


@functools.cache
def known_errors() -> dict[Mutation, tuple[int, int]]:
    """Returns the errors of `KNOWN`: a name, code and its change in a line. The code may be in any file, wrapped in any way."""
    paths = [path for each in ("titanlike", "recipes", "sagemaker") for path in (ROOT / each).rglob("*.py")]
    texts = {str(path.relative_to(ROOT)): path.read_bytes() for path in paths}
    found = {}
    for name, before, after in (line.split("\t") for line in KNOWN.read_text().splitlines()):
        code = re.compile(rb"\s*".join(re.escape(word.encode()) for word in before.split()))
        places = [(file, match.span()) for file, text in texts.items() for match in code.finditer(text)]
        if len(places) != 1:
            raise LookupError(f"{KNOWN.name}: {name}: found {len(places)} times, not once: {before}")
        found[Mutation(places[0][0], "", name, before, after)] = places[0][1]
    return found


class Copy:
    """A copy of the repository, in which tests run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        left_out = (".git", ".venv*", "*_cache", "__pycache__", "runs", "build", "site")
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*left_out), dirs_exist_ok=True)

    def test(self, errors: list[Mutation], tests: list[str], *options: str) -> tuple[list[str], list[Mutation]]:
        """Runs tests with those errors that do not overlap. Returns the tests that fail, and these errors."""
        spans = dict(itertools.chain(known_errors().items(), *(mutations(each.file).items() for each in errors)))
        changed: dict[str, tuple[bytes, int]] = {}
        planted = []
        for error in sorted(errors, key=lambda each: spans[each], reverse=True):
            start, end = spans[error]
            content, last = changed.get(error.file) or ((ROOT / error.file).read_bytes(), end)
            if end <= last:
                changed[error.file] = content[:start] + error.after.encode() + content[end:], start
                planted.append(error)
        for file, (content, _) in changed.items():
            self._write(file, content)
        failed = self._run(tests, *options)
        for file in changed:
            self._write(file, (ROOT / file).read_bytes())
        return failed, planted

    def _write(self, file: str, content: bytes) -> None:
        (self.folder / file).write_bytes(content)
        # Python recompiles a file of the same size only if its time in seconds differs.
        shutil.rmtree((self.folder / file).parent / "__pycache__", ignore_errors=True)

    def _run(self, tests: list[str], *options: str) -> list[str]:
        command = ["timeout", "-s", "KILL", TIMEOUTS["0" in options], *PYTEST.split(), *options, *tests]
        # A process that is killed must not leave half of a kernel to others.
        environment = os.environ | {
            "PYTHONPATH": str(self.folder),
            "TORCHINDUCTOR_CACHE_DIR": f"{self.folder}/inductor",
        }
        with tempfile.TemporaryFile("w+") as output:  # not a pipe, which a process that is left would hold open
            code = subprocess.call(command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=output)
            output.seek(0)
            failed = re.findall(r"^(?:FAILED|ERROR) ([^\s[]+(?:\[.*?\])?)(?: - |$)", output.read(), re.MULTILINE)
        return failed or [f"exit code {code}"] * (code not in (0, 5))  # 5: no test is selected


def found_nearby(error: Mutation, copied: Copy) -> str:
    """Returns a test that finds an error, from the nearest files until the time is over, or ""."""
    end = time.monotonic() + NEARBY_SECONDS
    for file in near_tests([error.file]):
        if failed := copied.test([error], [file], "-x", "-n", "0")[0]:
            return failed[0]
        if time.monotonic() > end:
            break
    return ""


def evaluate(errors: list[Mutation], copied: Copy, record: Callable[[Mutation, str], None]) -> None:
    """Tests each error alone and then the others together, and records what finds them."""
    left = []
    for error in errors:
        if found := found_nearby(error, copied):
            record(error, found)
        else:
            left.append(error)
    while left:
        print(f"{len(left)} errors are planted together", flush=True)
        failed, planted = copied.test(left, [])
        left = [error for error in left if error not in planted]
        always = copied.test([], failed)[0] if failed else []
        failed = [test for test in failed if test not in always and "::" in test]
        while planted and failed and (failed := copied.test(planted, failed)[0]):
            group = planted  # bisected
            while len(group) > 1:
                half = group[: len(group) // 2]
                group = half if copied.test(half, failed[:1], "-n", "0")[0] else group[len(half) :]
            record(group[0], failed[0])
            planted = [error for error in planted if error not in group]
        for error in planted:
            record(error, "")


def drawn(files: list[str], number: int, seed: int) -> list[Mutation]:
    """Returns errors of the core, each with equal probability."""
    paths = (path.relative_to(ROOT) for path in [*ROOT.glob("recipes/*.py"), *ROOT.glob("titanlike/**/*.py")])
    core = sorted(str(path) for path in paths if "tools" not in path.parts and any(map(path.match, files)))
    errors = [error for file in core for error in mutations(file)]
    return random.Random(seed).sample(errors, min(number, len(errors)))


def table(results: Iterable[dict[str, Any]]) -> str:
    """Returns what was found by area of the code, and what was not."""
    rows, left = defaultdict[str, Counter[str]](Counter), []
    for each in results:
        state = "equivalent" if each.get("equivalent") else "found" if each["found"] else "not found"
        for area in ("/".join(each["file"].split("/")[:2]), f"seed {each['seed']}", "all"):
            rows[area][state] += 1
        if state != "found":
            change = f"{each['before']} -> {each['after']} {each.get('equivalent', '')}"
            left.append(f"{each['file']} {each['function']} {' '.join(change.split())}")
    lines = [
        f"| {area} | " + " | ".join(str(row[state]) for state in STATES) + " |" for area, row in sorted(rows.items())
    ]
    return "\n".join([f"| Code | {' | '.join(STATES)} |", "|---" * 4 + "|", *lines, "", *left])


def main() -> None:
    """Does what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "known", "table"))
    parser.add_argument("--files", nargs="*", default=["*.py"], help="run: patterns of files (default: the core)")
    parser.add_argument("--number", type=int, default=20, help="run: number of errors (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="run: which errors are drawn (default: 0)")
    options = parser.parse_args()
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    results = {Mutation(*(each[name] for name in Mutation._fields)): each for each in lines}
    if options.action == "table":
        return print(table(results.values()))

    def record(error: Mutation, found: str) -> None:
        seed = "known" if options.action == "known" else options.seed
        with RESULTS.open("a") as out:
            out.write(json.dumps(error._asdict() | {"found": found, "seed": seed}, ensure_ascii=False) + "\n")
        print(f"{error.file} {error.function} {error.kind}: {found or 'NOT FOUND'}", flush=True)

    chosen = known_errors() if options.action == "known" else drawn(options.files, options.number, options.seed)
    left = [error for error in chosen if not any(results.get(error, {}).get(key) for key in ("found", "equivalent"))]
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copied = Copy(Path(folder))
        evaluate(left, copied, record)


if __name__ == "__main__":
    main()
