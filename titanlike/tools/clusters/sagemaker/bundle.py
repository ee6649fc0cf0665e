"""The files that a job needs: the library, the recipe's program, the recipe as one file, the tokenizer and its chat template."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata as installed
from pathlib import Path

import tomli
from packaging.requirements import Requirement

from titanlike import __version__
from titanlike.config.shipped import PROGRAMS, REPOSITORY
from titanlike.recipe import PretrainRecipe, load
from titanlike.recipe.load import joined
from titanlike.run.checks import check_recipe
from titanlike.run.hooks import registered
from titanlike.run.start import program_of
from titanlike.tools.clusters.cluster_job import extras_of
from titanlike.tools.programs import SHIPPED, known_sections, options_of, run_program

RECIPE = "recipe.toml"
LIBRARY = ("titanlike/**/*.py", "titanlike/hardware/*.toml", f"{PROGRAMS.relative_to(REPOSITORY)}/*.py")
HOOKS = ("titanlike.checked", "titanlike.completed", "titanlike.out_of_memory")


@dataclass(frozen=True)
class Bundle:
    """The content of a job's files, and how they are started."""

    contents: Mapping[str, bytes]  # by path in the job
    arguments: Sequence[str]  # of ./run_train.sh: the recipe in the bundle, then overrides
    recipe: PretrainRecipe  # the recipe with the overrides applied

    def write(self, folder: Path) -> None:
        """Writes all files below a folder."""
        for name, content in self.contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def make_bundle(
    path: Path,
    overrides: Mapping[str, str],
    num_processes: int,
    *,
    job_keys: Callable[[Mapping[str, str]], Mapping[str, str]] = dict,
    s3: bool = True,
) -> Bundle:
    """Checks a recipe for a number of processes, and collects the job's files. `job_keys` adds the keys that the job sets to the
    overrides."""
    values = dict(overrides)
    program = program_of(path, values.pop("program", None))
    files = {
        str(file.relative_to(REPOSITORY)): file
        for pattern in LIBRARY
        for file in REPOSITORY.glob(pattern)
        if "__pycache__" not in file.parts
    }
    if program.parent == PROGRAMS:
        name = program.stem
    else:
        name = f"program/{program.name}"
        files |= {f"program/{file.name}": file for file in program.parent.glob("*.py")}
    if program in SHIPPED:
        recipe = load(SHIPPED[program], path, dict(job_keys(values)))
        check_recipe(recipe, num_processes)
    else:
        # The program's own sections are unknown here, so the program checks its recipe itself.
        arguments = [str(path), *options_of(job_keys(overrides))]
        run_program(program, *arguments, f"--check={num_processes}")
        recipe = known_sections(run_program(program, *arguments, "--resolved"))
    tokenizer = Path(recipe.tokenizer.encoding)
    if (tokenizer / "tokenizer.json").is_file():  # a model's folder
        tokenizer /= "tokenizer.json"
    if tokenizer.is_file():
        # A tokenizer.json has its special tokens and its chat template in files beside it.
        beside = [tokenizer.with_name(name) for name in ("tokenizer_config.json", "chat_template.jinja")]
        files |= {f"tokenizer/{file.name}": file for file in (tokenizer, *beside) if file.is_file()}
        values["tokenizer.encoding"] = f"tokenizer/{tokenizer.name}"
    if template := getattr(recipe.data, "chat_template", ""):
        files["chat_template/template.jinja"] = Path(template)
        values["data.chat_template"] = "chat_template/template.jinja"
    texts = {
        RECIPE: joined(path, SHIPPED.get(program), program=name),
        "requirements.txt": requirements(recipe, s3=s3),
        **metadata(),
    }
    contents = {name: file.read_bytes() for name, file in files.items()}
    contents |= {name: text.encode() for name, text in texts.items()}
    return Bundle(dict(sorted(contents.items())), [RECIPE, *(f"--{k}={v}" for k, v in values.items())], recipe)


def metadata() -> dict[str, str]:
    """Returns the files by which Python finds the hooks of the library (`titanlike.run.hooks`), which a job does not install."""
    own = {group: [each for each in registered(group) if each.value.startswith("titanlike.")] for group in HOOKS}
    groups = ["\n".join([f"[{group}]", *(f"{each.name} = {each.value}" for each in own[group])]) for group in HOOKS]
    folder = f"titanlike-{__version__}.dist-info"
    return {
        f"{folder}/METADATA": f"Metadata-Version: 2.1\nName: titanlike\nVersion: {__version__}\n",
        f"{folder}/entry_points.txt": "\n\n".join(groups) + "\n",
    }


def requirements(recipe: PretrainRecipe, *, s3: bool) -> str:
    """Returns the requirements that the job's image must satisfy. The image's torch is never replaced."""
    is_json = recipe.tokenizer.encoding.endswith(".json") or Path(recipe.tokenizer.encoding).is_dir()
    needs_data = (recipe.data.reads_paths and recipe.data.source != "shards") or is_json
    extras = {"s3": s3, "data": needs_data, **{name: True for name in extras_of(recipe) if name not in ("data", "s3")}}
    return "".join(f"{line}\n" for line in _dependencies([name for name, needed in extras.items() if needed]))


def _dependencies(extras: Sequence[str]) -> list[str]:
    """Returns the dependencies of the library with these extras: of the clone's pyproject.toml, or of the installed package."""
    if (REPOSITORY / "pyproject.toml").is_file():
        project = tomli.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
        return [*project["dependencies"], *(line for name in extras for line in project["optional-dependencies"][name])]
    found = map(Requirement, installed.requires("titanlike") or ())
    needed = (
        each for each in found if not each.marker or any(each.marker.evaluate({"extra": x}) for x in ("", *extras))
    )
    return list(dict.fromkeys(f"{each.name}{each.specifier}" for each in needed))
