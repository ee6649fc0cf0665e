"""What a kill, or a full disk, may do to the folder of a run."""

from pathlib import Path

import pytest

from tests.training import tiny
from titanlike.config import UserError
from titanlike.run.run_dir import RunDirectory


@pytest.mark.parametrize("victim", ["recipe", "environment", "metrics"])
def test_a_start_that_is_cut_short_leaves_whole_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """Half of a recipe is a recipe too: one that leaves the rest as it is by default."""
    recipe = tiny(tmp_path, "run")
    run = RunDirectory(recipe)
    run.open(recipe, "cpu", 2, resumed_step=0)
    run.metrics.write_text('{"step": 1}\n{"step": 2}\n')
    before = {path: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
    write = Path.write_text

    def cut_short(path: Path, text: str) -> int:
        if not path.name.startswith(victim):
            return write(path, text)
        write(path, text[: len(text) // 2])
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "write_text", cut_short)
    with pytest.raises(
        UserError, match=r"run cannot be written to: the disk is full; put that right, or choose another run\.dir"
    ):
        run.open(recipe, "cpu", 1, resumed_step=2)
    kept = [path for path in before if path.stem == victim]
    assert kept and all(path.read_bytes() == before[path] for path in kept)
