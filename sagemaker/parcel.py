"""What a job is sent: the few files that it runs, listed with their sizes, and the recipe as it will be trained."""

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import tomli

from titanlike.config import PretrainRecipe, UserError, load
from titanlike.config.load import joined
from titanlike.distributed import environment
from titanlike.run.preflight import check_recipe
from titanlike.run.start import REPOSITORY, program_of

RECIPE = "recipe.toml"
LIBRARY = ("titanlike/**/*.py", "recipes/*.py", "sagemaker/entry.py", "sagemaker/smoke.py")


@dataclass(frozen=True)
class Parcel:
    """Files by the name that each has in the job."""

    files: Mapping[str, Path]
    texts: Mapping[str, str]  # that are files in the job alone
    words: tuple[str, ...]  # for ./run_train.sh there: the recipe, and the overrides as they were given
    recipe: PretrainRecipe  # what these come to

    def sizes(self) -> dict[str, int]:
        """Bytes of each file."""
        found = {name: path.stat().st_size for name, path in self.files.items()}
        return dict(sorted((found | {name: len(text.encode()) for name, text in self.texts.items()}).items()))

    def lay_into(self, folder: Path) -> None:
        """Write all of it below a folder."""
        for name in [*self.files, *self.texts]:
            content = self.texts[name].encode() if name in self.texts else self.files[name].read_bytes()
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def pack(path: Path, overrides: Sequence[str], num_processes: int, *, s3: bool = True) -> Parcel:
    """Check a recipe for so many processes, and gather what the job needs of it."""
    given = dict(word.removeprefix("--").split("=", 1) for word in overrides)
    program = program_of(path, given.pop("recipe", None))
    files = {
        str(file.relative_to(REPOSITORY)): file
        for pattern in LIBRARY
        for file in REPOSITORY.glob(pattern)
        if "__pycache__" not in file.parts
    }
    if program.parent == REPOSITORY / "recipes":
        name = program.stem
    else:
        name = f"program/{program.name}"
        files |= {f"program/{file.name}": file for file in program.parent.glob("*.py")}
    if program == REPOSITORY / "recipes" / "pretrain.py":
        recipe = load(PretrainRecipe, path, given)
        check_recipe(recipe, num_processes)
    else:
        # A program of one's own has sections that are not known here: it looks at the recipe itself.
        _ask(program, path, *overrides, f"--check={num_processes}")
        recipe = _shipped_part(_ask(program, path, *overrides, "--resolved"))
    words = [RECIPE, *(word for word in overrides if not word.startswith("--recipe="))]
    tokenizer = Path(recipe.tokenizer.encoding)
    if tokenizer.is_file():
        # A tokenizer.json has what it lacks in a file beside it.
        beside = tokenizer.with_name("tokenizer_config.json")
        files |= {f"tokenizer/{file.name}": file for file in (tokenizer, beside) if file.is_file()}
        words = [word for word in words if not word.startswith("--tokenizer.encoding=")]
        words.append(f"--tokenizer.encoding=tokenizer/{tokenizer.name}")
    texts = {RECIPE: joined(path, recipe=name), "requirements.txt": requirements(recipe, s3=s3)}
    return Parcel(files, texts, tuple(words), recipe)


def requirements(recipe: PretrainRecipe, *, s3: bool) -> str:
    """What the job's image has to have, for pip. Its torch stays the one that it has."""
    project = tomli.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(extras["s3"] if s3 else [])]
    if recipe.data.source in ("text", "stream") or recipe.tokenizer.encoding.endswith(".json"):
        wanted += extras["data"]
    return "".join(f"{line}\n" for line in wanted)


def _ask(program: Path, *words: object) -> str:
    """What a program says to these words, or its refusal."""
    command = [sys.executable, str(program), *map(str, words)]
    variables = environment.child_environment({"PYTHONPATH": str(REPOSITORY)})
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    if done.returncode:
        raise UserError("\n".join(line.removeprefix("error: ") for line in done.stderr.splitlines()))
    return done.stdout


def _shipped_part(resolved: str) -> PretrainRecipe:
    """The sections of a resolved recipe that the shipped programs have too."""
    known = {field.name for field in fields(PretrainRecipe)}
    skip, lines = False, []
    for line in resolved.splitlines():
        if line.startswith("["):
            skip = line.strip("[]") not in known
        if not skip:
            lines.append(line)
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write("\n".join(lines))
        file.flush()
        return load(PretrainRecipe, Path(file.name))
