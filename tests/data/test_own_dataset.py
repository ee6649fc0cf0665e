"""The example of docs/data.md: a user's StatefulDataLoader in a copied recipe, trained and resumed."""

import re
import shutil
from pathlib import Path

from tests.launching import ROOT, SMALL, losses, python, recorded, run
from tests.programs import edited


def write_program(folder: Path) -> str:
    """Writes the example, and a copy of the program and a recipe that use it. Returns the example."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/data.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    [example] = [block for block in blocks if "StatefulDataLoader" in block]
    (folder / "my_data.py").write_text(example)
    program = edited(
        (ROOT / "recipes/pretrain.py").read_text(),
        ("import torch\n", "from my_data import open_sources\nimport torch\n"),
        (
            "device=run.device, **mesh.data_shard(training.seq_len),",
            "device=run.device, open_sources=open_sources, **mesh.data_shard(training.seq_len),",
        ),
    )
    (folder / "mine.py").write_text(program)
    debug = (ROOT / "train_configs/debug.toml").read_text()
    (folder / "mine.toml").write_text(edited(debug, ('program = "pretrain"', 'program = "mine"')))
    return example


def test_a_stateful_dataloader_in_a_copied_recipe_resumes_exactly(tmp_path: Path) -> None:
    example = write_program(tmp_path)
    options = SMALL | {
        "run.name": "run", "checkpoint.interval": "3", "validation.interval": "3", "validation.batches": "2",
    }  # fmt: skip

    inspected = python(tmp_path, "-m", "titanlike.tools.cli.main", "data", "inspect", "mine.toml")
    assert inspected.stdout.startswith(
        "note    mine.py may open other data: this is what the keys of the recipe name\n"
    )
    first = run(tmp_path, "mine.toml", **options)
    assert first.returncode == 0, first.stderr
    assert "24 sequences of a user's loader" in first.stdout
    expected = losses(tmp_path / "runs/run")
    assert set(expected) == {1, 2, 3, 4, 5, 6}
    validated = recorded(tmp_path / "runs/run", "validation_loss")
    assert len(validated) == 2

    shutil.rmtree(tmp_path / "runs/run/checkpoints/step-00000006")
    (tmp_path / "runs/run/metrics.jsonl").unlink()
    resumed = run(tmp_path, "mine.toml", **options)
    assert "resumed at step 3" in resumed.stdout, resumed.stderr
    assert losses(tmp_path / "runs/run") == {step: expected[step] for step in (4, 5, 6)}
    # Including that of step 3, which the deleted file had.
    assert recorded(tmp_path / "runs/run", "validation_loss") == validated

    # Of another size: Python recompiles a file by its size and its time in seconds.
    (tmp_path / "my_data.py").write_text(example.replace("version 1", "version 2.0"))
    refused = run(tmp_path, "mine.toml", **options)
    assert refused.returncode == 2
    assert "trained on other data (fingerprint training of my dataset, version 1, now training of my" in refused.stderr
