"""Random recipes and command lines: each is accepted, or refused in sentences with exit code 2 within two seconds."""

import functools
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.forkserver import ROOT
from tests.fuzz import harness
from tests.fuzz.command_line import train
from tests.fuzz.harness import HUGE, ODD_LITERALS, ODD_TEXT
from titanlike.config.schema import SchemaKey, describe
from titanlike.recipe import PretrainRecipe, to_toml
from titanlike.run.start import Arguments
from titanlike.tools.programs import load_known

KEYS = describe(PretrainRecipe)
NAMES = sorted({key.name for key in KEYS})
DEBUG = ROOT / "train_configs/debug.toml"
RECIPES = sorted((ROOT / "train_configs").rglob("*.toml"))
# Keys whose strings name something that has to exist.
PATHS = ("program", "data.path", "data.validation_path", "tokenizer.encoding", "compile.backend")
OWN_SECTIONS = ("lora", "preference", "distillation", "teacher")  # of programs other than that of KEYS
TRAILING = ("\ndim = 3", " # comment", "\n[x]", ",", ", 1", "]")  # after a value on the command line


def valid(key: SchemaKey, rng: random.Random) -> str:
    """Returns a TOML value of the key's type and range, which other keys may contradict."""
    if key.choices:
        return f'"{rng.choice(key.choices)}"'
    if key.type == "boolean":
        return rng.choice(("true", "false"))
    if key.type.startswith("integer"):
        return str(rng.choice((key.default, 1, 2, 8, 64, 1024, 10**6)))
    if key.type.startswith("number"):
        return repr(rng.choice((key.default, 0.5, 0.125, 1e-3, 0.1)))
    return (
        json.dumps(key.default)
        if key.name in PATHS or not key.is_string
        else _quoted(rng.choice(("", "a", "ü", "\\", '"', " 'x' ")))
    )


def nonsense(key: SchemaKey, rng: random.Random) -> str:
    """Returns a TOML value that the key can never have."""
    values = ["{a = 1}", "{}", "2024-01-01", "[" * 400 + "]" * 400, "[[1]]", HUGE]
    integer, number = key.type.startswith("integer"), key.type.startswith("number")
    if key.is_string:
        values += ["3", "1.5", "true", "[]", '["a"]', '"\\u0000"', "nan"]
        values += ['"no such choice"', '""', '"\\n"'] if key.choices else []
    elif integer:
        values += ['"3"', "3.0", "true", "nan", "inf", "[3]", "1e400", str(2**64), str(10**30), "0x" + "f" * 5000]
        values += ["-7"] if ">=" in key.type else []
    elif number:
        values += ['"3"', "true", "nan", "-inf", "inf", "[3.0]", "1e400", "1e308", "-1.5"]
        values += ["0", "0.0"] if "> 0" in key.type else []
        values += ["1.5"] if re.search(r"<=? 1(\.0)?\b(?!\d)", key.type) else []
    elif key.type == "boolean":
        values += ["1", "0", '"true"', "nan", "[]"]
    elif key.type.startswith("list"):
        values += ["3", "nan", "true", "[true]", "[{}]", "[nan]", "[2024-01-01]"]
        values += ["['a']", "[1e308]", "[-1]"] if "strings" not in key.type else ["[1]", '["\\u0000"]']
    return rng.choice(values)


def plausible(key: SchemaKey, rng: random.Random) -> str:
    """Returns a TOML value of the key's type, of any size."""
    if key.choices:
        return f'"{rng.choice(key.choices)}"'
    if key.is_string:
        return _quoted(rng.choice(ODD_TEXT) + rng.choice(ODD_TEXT))
    if key.type == "boolean":
        return rng.choice(("true", "false"))
    if key.type.startswith("integer"):
        return str(
            rng.choice((rng.randint(-2, 9), rng.randint(0, 4096), 10 ** rng.randint(0, 20), 2 ** rng.randint(0, 70)))
        )
    if key.type.startswith("number"):
        return repr(rng.choice((rng.random(), 10.0 ** rng.randint(-320, 308), float(rng.randint(-2, 9)))))
    if "integers" in key.type:
        return repr([rng.randint(-1, 9) for _ in range(rng.choice((0, 1, 2, 4, 1000)))])
    if "strings" in key.type:
        return f"[{', '.join(_quoted(rng.choice(ODD_TEXT)) for _ in range(rng.randint(0, 3)))}]"
    return repr([10.0 ** rng.randint(-320, 308) for _ in range(rng.randint(0, 3))])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def misspelled(name: str, rng: random.Random) -> str:
    """Returns the name of a key with a typing error."""
    section, _, leaf = name.rpartition(".")
    position = rng.randrange(len(leaf))
    wrong = rng.choice(
        (leaf[:position] + leaf[position + 1 :], leaf[:position] + "z" + leaf[position:], leaf[::-1], leaf.upper())
    )
    found = f"{section}.{wrong}" if section else wrong
    return found if wrong and found not in (*NAMES, "extends") and "." in found else f"{section or 'run'}.no_such_key"


def write_recipe(folder: Path, *lines: str, name: str = "recipe.toml", base: Path | None = None) -> Path:
    """Writes a recipe of dotted keys that extends a shipped one."""
    extends = [f"extends = {_quoted(str(base))}"] if base else []
    (folder / name).write_text("\n".join([*extends, *lines, ""]))
    return folder / name


def assert_round_trip(argv: Sequence[str], folder: Path) -> None:
    """The resolved recipe of a command line is accepted, and is the same recipe."""
    arguments = Arguments(argv)
    recipe = load_known(arguments.recipe, arguments.overrides)
    resolved = folder / "resolved.toml"
    resolved.write_text(to_toml(recipe), encoding="utf-8")
    assert load_known(resolved, {}) == recipe


# Recipe files.


def values_case(rng: random.Random, folder: Path) -> None:
    """A shipped recipe with values that are nonsense, plausible or odd."""
    lines, refused = [], False
    every = ("valid", "nonsense", "plausible", "odd", "unknown")
    count, kinds = rng.choice(((1, every), (1, ("nonsense",)), (3, ("valid",)), (5, every)))
    base, check = (DEBUG, "check") if count < 5 else (rng.choice([*RECIPES, None]), rng.choice(("check", "preflight")))
    for name in rng.sample(NAMES, count):
        key = rng.choice([key for key in KEYS if key.name == name])
        kind = rng.choice(kinds)
        if kind == "unknown":
            lines.append(f"{misspelled(name, rng)} = 3")
        else:
            makers = {"valid": valid, "nonsense": nonsense, "plausible": plausible}
            value = makers.get(kind, lambda *_: rng.choice(ODD_LITERALS))(key, rng)
            lines.append(f"{name} = {value}")
        refused |= kind in ("nonsense", "unknown")
    path = write_recipe(folder, *lines, base=base)
    argv = [str(path), f"--{check}={rng.choice((1, 2, 8, 64, 1000))}"]
    outcome = train(argv, folder)
    assert not (refused and outcome.accepted), f"accepted: {lines}"
    if outcome.accepted:
        assert_round_trip(argv, folder)


def program_case(rng: random.Random, folder: Path) -> None:
    """A recipe of another program, with values of the sections that only this one has."""
    base = DEBUG.with_name(f"{rng.choice(('finetune', 'dpo', 'distill'))}_debug.toml")
    recipe = load_known(base, {})
    keys = [key for key in describe(type(recipe)) if key.name.partition(".")[0] in OWN_SECTIONS]
    lines, refused = dict[str, str](), False
    for key in rng.sample(keys, rng.choice((1, 1, 3))):
        kind = rng.choice(("valid", "plausible", "nonsense"))
        lines[key.name] = {"valid": valid, "plausible": plausible, "nonsense": nonsense}[kind](key, rng)
        # Keys of several families of models have one name: what no string may be is valid for none.
        refused |= kind == "nonsense" and not key.name.startswith("teacher.")
    path = write_recipe(folder, *(f"{name} = {value}" for name, value in lines.items()), base=base)
    argv = [str(path), f"--check={rng.choice((1, 2, 8))}"]
    outcome = train(argv, folder)
    assert not (refused and outcome.accepted), f"accepted: {lines}"
    if outcome.accepted:
        assert_round_trip(argv, folder)


def text_case(rng: random.Random, folder: Path) -> None:
    """The text of a shipped recipe with random damage."""
    recipe = rng.choice(RECIPES)
    data = recipe.read_bytes().replace(b'extends = "', f'extends = "{recipe.parent}/'.encode())
    for _ in range(rng.choice((1, 1, 3, 20))):
        start = rng.randrange(len(data) + 1)
        stop = min(start + rng.choice((0, 0, 1, 10, 100)), len(data))
        odd = rng.choice(ODD_TEXT).encode()
        middle = rng.choice((b"", odd, odd, data[start:stop] * 2, bytes([rng.randrange(256)]), b"\0", b"\n[x]\n"))
        data = data[:start] + middle + data[stop:]
    (folder / "recipe.toml").write_bytes(data)
    argv = ["recipe.toml", f"--check={rng.choice((1, 8, 16))}"]
    if train(argv, folder).accepted:
        assert_round_trip([str(folder / "recipe.toml"), *argv[1:]], folder)


def structure_case(rng: random.Random, folder: Path) -> None:
    """Recipes whose structure no program expects."""
    (folder / "folder.toml").mkdir()
    (folder / "loop.toml").symlink_to("loop.toml")
    (folder / "self.toml").symlink_to("recipe.toml")
    write_recipe(folder, "training.steps = 3", name="other.toml")
    deep = ".".join("a" * 1000)
    extends = [
        "2024-01-01", '"a\\u0000b"', '"loop.toml"', '"self.toml"', '"recipe.toml"', '"folder.toml"', "3", "[]", "{}", "nan",
        '""', '"."', '"/dev/zero"', f'"{"x" * 300}"', f'"{"x/" * 3000}"', '"a\\nb.toml"', "true", '"other.tom"', "12:00:00",
    ]  # fmt: skip
    text = rng.choice(
        [
            *(f"extends = {value}" for value in rng.sample(extends, 4)),
            *(f"{key} = {value}" for key in ("program", "run", "model", "model.name", "model.size", "training")
              for value in rng.sample(ODD_LITERALS, 2) if value not in ("{}", "'1'")),
            'program = "\\u0000"', f'program = "{"x" * 300}"', 'program = ".."', 'program = ""', "program = {}", "program.x = 3",
            f"{deep} = 1", f"training.{deep} = 1", f"[{deep}]", f"[training.{deep}]", f"[[{deep}]]", "[[training]]",
            f"training.steps = {HUGE}", f"x = {'[' * 100_000}", f"{'x' * 100_000} = 1", '"" = 1', '"a.b" = 1', '"a\\nb" = 1',
            '[""]\n"" = 1', '["\\u001b[2J"]\nx = 1', '[training]\n"\\u2028" = 1', "[training]\n[training]", "\0", "training", "[",
            "'training.steps' = 3", '"model.dim" = 3', '[model."dim"]', "extends.x = 1", "[extends]", "[[extends]]",
        ]
    )  # fmt: skip
    write_recipe(folder, text)
    outcome = train(["recipe.toml", "--check=1"], folder)
    assert not outcome.accepted, f"accepted: {text[:200]}"


def file_name_case(rng: random.Random, folder: Path) -> None:
    """Recipes in files and folders of any name, and paths that are no recipes. The name of the run is derived from them."""
    name = rng.choice(ODD_TEXT).replace("/", "_")[:200] + rng.choice(ODD_TEXT).replace("/", "_")[:40]
    name = rng.choice(
        (f"{name}.toml", f".{name}.toml", f"debug {name}.toml", "debug (1).toml", ".toml", f"{'ü' * 120}.toml")
    )
    inside = folder / rng.choice(("run", "my run", ".hidden", "a\nb", "ü", "(1)"))
    inside.mkdir()
    write_recipe(inside, "run.name = 'given'" if rng.random() < 0.3 else "", name=name, base=RECIPES[0])
    if rng.random() < 0.4:
        (inside / "environment.json").write_text("{}")  # a run directory
    argv = [str((inside if rng.random() < 0.8 else Path(inside.name)) / name), "--check=1"]
    if rng.random() < 0.3:
        argv[0] = rng.choice(
            ("", "/", "/dev/zero", "x" * 300, "x/" * 3000, "a\nb", str(inside), "no.toml", "\udcff.toml", "a\udc80")
        )
    train(argv, folder)


# Command lines.


def override_case(rng: random.Random, folder: Path) -> None:
    """Values on the command line, which are text for some keys and TOML for others."""
    argv, names, refused = list[str](), set[str](), False
    # One mistake in a valid recipe, or any number.
    every = ("valid", "nonsense", "plausible", "odd", "unknown", "trailing")
    count, kinds = rng.choice(((1, every), (1, ("trailing",)), (3, ("valid",)), (5, every)))
    recipe, check = (DEBUG, "check") if count < 5 else (rng.choice(RECIPES), rng.choice(("check", "preflight")))
    for _ in range(count):
        key = rng.choice(KEYS)
        kind = rng.choice(kinds)
        text = rng.choice(ODD_TEXT)
        if kind == "nonsense" and not key.is_string:
            text = nonsense(key, rng)
        elif kind == "nonsense" and key.choices:
            text = rng.choice(("no such choice", "", "'", "0"))
        elif kind in ("valid", "plausible") and not key.is_string:
            text = {"valid": valid, "plausible": plausible}[kind](key, rng)
        elif kind == "valid":
            text = str(json.loads(valid(key, rng)))
        elif kind == "trailing" and not key.is_string:
            text = valid(key, rng) + rng.choice(TRAILING)
        elif kind == "unknown":
            text = "3"
        else:
            kind = "odd"
        name = misspelled(key.name, rng) if kind == "unknown" else key.name
        if name in names:  # the last value of a key counts
            continue
        names.add(name)
        argv += (
            [f"--{name}", text] if text and not text.startswith("--") and rng.random() < 0.5 else [f"--{name}={text}"]
        )
        refused |= kind in ("nonsense", "unknown", "trailing")
    argv = [str(recipe), *argv, f"--{check}={rng.choice((1, 2, 8))}"]
    outcome = train(argv, folder)
    assert not (refused and outcome.accepted), f"accepted: {argv}"
    if outcome.accepted:
        assert_round_trip(argv, folder)


def words_case(rng: random.Random, folder: Path) -> None:
    """Command lines of words in any order: options, halves of options, values, paths."""
    numbers = ("1", "8", "0", "-1", "²", "٣", "1.0", "1e3", " 8", "1_0", "", HUGE, str(10**12), "nan", "true", "\udcff")
    words = [
        "--check", "--preflight", "--resolved", "--help", "-h", "-", "--", "---", "-x", "--=", "--=3", "=", "--\udcff=3",
        "--\udcff", "--check=8", "--training", "--steps=3", "--training.step=3", "--training.steps", "--Training.steps=3",
        "--training.steps.x=3", "--training.steps=3", "--a.b.c=3", f"--{'a.' * 1000}b=3", "--.=3", "--..=3", "--.steps=3",
        "--training.=3", "--program=nope", "--program=", "--program=..", "--run.name=\udcff", "--extends=x", "--model=3",
        "--model={}", "recipe.toml", str(RECIPES[0]), "a b", "--trainingsteps=3",
        *(f"--check={text}" for text in numbers), *(f"--preflight={text}" for text in numbers),
        "--checkpoint.tries=1", "--instances=3", f"--{'x' * 100_000}=1", f"--training.steps={HUGE}", "\n", "--\n=3",
    ]  # fmt: skip
    argv = [rng.choice(words) if rng.random() < 0.8 else rng.choice(numbers) for _ in range(rng.randint(1, 4))]
    if not {"--help", "-h", "--resolved"} & set(argv):
        argv.append("--check=1")
    outcome = train(argv, folder)
    wrong = {
        "-x", "--=3", "--\udcff=3", "--steps=3", "--training.step=3", "--.=3", "--a.b.c=3", "--check=²", "--check=-1",
    }  # fmt: skip
    if wrong & set(argv) and not {"--help", "-h"} & set(argv):
        assert not outcome.accepted, f"accepted: {argv}"


CASES: dict[harness.Case, int] = {
    values_case: 40, program_case: 20, text_case: 20, structure_case: 20, file_name_case: 10, override_case: 30,
    words_case: 20,
}  # fmt: skip


@harness.tiers
@pytest.mark.parametrize("case", CASES)
def test_random_cases_are_accepted_or_refused_in_a_sentence(case: harness.Case, further: bool) -> None:
    harness.run_cases(case, CASES[case], further)


main = functools.partial(harness.main, CASES)

if __name__ == "__main__":
    main()
