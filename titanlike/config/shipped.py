"""The programs and recipes that the package ships, in a clone and in an installation, and the command that trains. No torch."""

import shlex
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
REPOSITORY = PACKAGE.parent  # of a clone; otherwise the folder that the package is installed in


def shipped_folder(name: str) -> Path:
    """Returns `recipes` or `train_configs`: a wheel has them inside of the package (pyproject.toml), a clone beside it."""
    return PACKAGE / name if (PACKAGE / name).is_dir() else REPOSITORY / name


PROGRAMS = shipped_folder("recipes")
RECIPES = shipped_folder("train_configs")


def shipped_recipes() -> dict[str, Path]:
    """Returns the shipped recipes by name, such as `debug` and `study/float8`."""
    return {path.relative_to(RECIPES).with_suffix("").as_posix(): path for path in sorted(RECIPES.rglob("*.toml"))}


def recipe_path(text: str) -> Path:
    """Returns the path of a recipe on the command line, which may be the name of a shipped one. It need not exist."""
    return shipped_recipes().get(text, Path(text))


def train_command() -> str:
    """Returns the command that trains, as it is written in the working directory."""
    script, here = REPOSITORY / "run_train.sh", Path("run_train.sh")
    is_clone = script.is_file()
    if is_clone and here.is_file() and here.samefile(script):
        return "./run_train.sh"
    is_installed = not is_clone or Path(sys.executable).with_name("titanlike").exists()
    return "titanlike train" if is_installed else shlex.quote(str(script))
