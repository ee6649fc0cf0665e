"""Runs random cases. A case is a function of a generator, which its name, a seed and its number determine, and of an empty folder.

To try others, with the module of a fuzz test:

    python -m tests.fuzz.test_recipes SEED NUMBER_OF_CASES
    python -m tests.fuzz.test_recipes SEED NAME:NUMBER     # one case
"""

import argparse
import math
import random
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

SEED = 0
Case = Callable[[random.Random, Path], str | None]  # returns what happened, if it tells cases apart

# The parameter of a fuzz test: its first cases, and three times as many others.
tiers = pytest.mark.parametrize(
    "further", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["first", "further"]
)

# Values of recipes and command lines.
HUGE = "9" * 5000
ODD_TEXT = (
    "", " ", "\t", "\n", "a\nb", "x" * 300, "y" * 70_000, "é", "\u0301", "²", "٣", "\u2028", "\u202e", "\x7f", "\x1b[2J",
    "..", "/", "~", "-", "--", "=", "'", '"', "\\", "{}", "[]", "null", "None", "nan", "debug (1)", "a/" * 600, "$HOME", "*", "🤖",
)  # fmt: skip
ODD_LITERALS = (
    "nan", "inf", "-inf", "1e308", "-1e308", "1e400", "5e-324", "-0.0", "0", "-1", "1", "2", "3.0", "true", "false", "'1'", "''",
    str(2**31), str(2**32), str(2**63), str(2**64), str(-(2**63)), str(10**15), str(10**30), HUGE, "0x" + "f" * 5000, "1e5",
    "2024-01-01", "12:30:00", "2024-01-01T00:00:00Z", "{}", "{a = 1}", "[]", "[1]", "['a']", "[[]]", "[1, 'a']", "[nan]", "[0]",
    "[" * 400 + "]" * 400, "{a = " * 400 + "1" + "}" * 400, '"\\u0000"', '"a\\nb"', "'''\na\n'''", "[1e308, 1e308]", '["\\u0000"]',
)  # fmt: skip


def run_case(case: Case, seed: int, number: int) -> str:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        return case(random.Random(f"{case.__name__} {seed} {number}"), Path(folder)) or "passed"


def run_cases(case: Case, count: int, further: bool) -> Counter[str]:
    """Returns how often each thing happened. An error has the command that repeats its case."""
    found: Counter[str] = Counter()
    for number in range(count, 4 * count) if further else range(count):
        try:
            found[run_case(case, SEED, number)] += 1
        except BaseException as error:
            raise AssertionError(f"python -m {case.__module__} {SEED} {case.__name__}:{number}") from error
    return found


def main(cases: Mapping[Case, int]) -> None:
    """Runs cases of another seed, each as often in proportion as given. Prints those that fail, and what happened."""
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("which", help="the number of cases, or one of them as NAME:NUMBER")
    arguments = parser.parse_args()
    name, _, number = arguments.which.rpartition(":")
    found: Counter[str] = Counter()
    for case, count in cases.items():
        numbers = [int(number)] if name else range(math.ceil(int(number) * count / sum(cases.values())))
        for index in numbers if name in ("", case.__name__) else []:
            try:
                found[run_case(case, arguments.seed, index)] += 1
            except Exception:  # noqa: BLE001  the next case is independent
                found["failed"] += 1
                error = ascii(traceback.format_exc()[-1500:]).replace("\\n", "\n")
                print(f"\n{case.__name__}:{index}\n{error}", flush=True)
    print(dict(found))
