"""Checks of the evaluation section of a recipe. Does not import torch."""

import glob
from collections import Counter
from pathlib import Path

from titanlike.config import UserError
from titanlike.config.sections import Evaluation
from titanlike.inference.tasks import read_task, task_name


def evaluation_problems(section: Evaluation) -> list[str]:
    """Returns the contradictions between keys."""
    if len(section.tasks) != len(section.formats):
        return [
            f"evaluation.formats has {len(section.formats)} formats for the {len(section.tasks)} files of evaluation.tasks; give "
            "one each"
        ]
    names = Counter(map(task_name, (*section.tasks, *section.data)))
    problems = [
        f"{count} files of evaluation have the name {name!r}, which names their metrics; rename one"
        for name, count in names.items()
        if count > 1
    ]
    if section.interval and not names:
        problems.append(
            "evaluation.interval is set, but there is nothing to evaluate; set evaluation.tasks and evaluation.formats, or "
            "evaluation.data"
        )
    return problems


def missing_files(section: Evaluation) -> list[str]:
    """Returns the files that are missing on this machine, or that are not tasks."""
    problems = [
        f"evaluation.data: {path!r} does not exist; give a text file, a folder, a pattern or token shards"
        for path in section.data
        if "://" not in path and not Path(path).exists() and not glob.glob(path, recursive=True)
    ]
    for file, format in zip(section.tasks, section.formats, strict=True):
        try:
            read_task(file, format)
        except UserError as problem:
            problems.append(f"evaluation.tasks: {problem}")
    return problems
