"""What commands import that are to answer at once: one interpreter runs them one after the other."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.launching import ROOT

PROGRAM = """
import sys
from titanlike.tools.cli.main import main

for words in {commands}:
    sys.argv = ["titanlike", *words]
    try:
        main()
    except SystemExit as end:
        print(f"exit code {{end.code or 0}}")
    imported = sorted({{"torch", "matplotlib"}} & sys.modules.keys())
    print(f"imported {{imported}} after {{words}}")
"""


def test_help_errors_checks_plans_and_comparisons_import_no_torch(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    record = {"step": 1, "loss": 4.0, "tokens": 100, "elapsed_seconds": 2.0}
    (tmp_path / "run/metrics.jsonl").write_text(json.dumps(record) + "\n")
    recipe = str(ROOT / "train_configs/llama3_8b.toml")
    commands = [
        ["train", "--help"],
        ["train", "--training.stepz=3"],
        ["train", recipe, "--check", "64", "--metrics.hardware", "h200"],
        ["plan", recipe, "--gpus=8"],
        ["compare", "run", "--html", "a.html"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(commands=commands)], cwd=tmp_path, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    imported = [line for line in done.stdout.splitlines() if line.startswith("imported ")]
    assert imported == [f"imported [] after {words}" for words in commands]
    assert "usage: titanlike train " in done.stdout
    assert "training.stepz = 3: unknown key" in done.stderr
    # The check also prints the plan.
    assert "valid for 64 processes" in done.stdout
    assert "\non 64 x H200" in done.stdout
    assert "peak, reserved" in done.stdout
    assert (tmp_path / "a.html").exists()
