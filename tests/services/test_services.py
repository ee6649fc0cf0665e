"""Runs with the real packages of W&B and MLflow, offline. `.ci/run` installs them in an environment of their own."""

import importlib.util
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launching import SMALL, free_port, losses, run

if importlib.util.find_spec("wandb") is None or importlib.util.find_spec("mlflow") is None:
    pytest.skip("W&B and MLflow are not installed; .ci/run installs them", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # warnings of these packages are not ours
OPTIONS = SMALL | {"run.name": "a", "schedule.decay": "none", "sample.tokens": "4", "sample.interval": "2"}


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    """Returns the records in W&B's files, of all starts of a run."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in leveldb_log(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.history.item:
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                found.append({key: json.loads(value) for key, value in items.items()})
    return found


def leveldb_log(content: bytes) -> Iterator[bytes]:
    """Yields the records of a file in the format of LevelDB's log, after a header of 7 bytes."""
    position, record = 7, b""
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:  # the rest of a block
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # complete, or the last part
            yield record
            record = b""


def test_wandb_offline_has_all_records_and_a_resumed_run_keeps_its_id(tmp_path: Path) -> None:
    variables = {"WANDB_MODE": "offline", "HOME": str(tmp_path)}
    for steps in ("4", "6"):
        more = {"metrics.trackers": '["wandb"]', "training.steps": steps, "validation.interval": "2"}
        done = run(tmp_path, variables=variables, **OPTIONS | more)
        assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "a"
    history = wandb_history(folder)
    assert {one["step"]: one["train/loss"] for one in history if "train/loss" in one} == pytest.approx(losses(folder))
    assert [one["step"] for one in history if "validation/loss" in one] == [2, 4, 6]
    assert [one["step"] for one in history if "train/sample" in one] == [2, 4, 6]
    assert len({path.name.rpartition("-")[2] for path in folder.glob("wandb/offline-run-*")}) == 1
    assert done.stdout.count("W&B     offline; ") == 1


def test_mlflow_has_all_records_and_a_resumed_run_is_one_run(tmp_path: Path) -> None:
    import mlflow

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = mlflow.MlflowClient(uri)
    client.create_experiment(
        "p", artifact_location=str(tmp_path / "artifacts")
    )  # creates the database, which takes seconds
    for steps in ("4", "6"):
        more = {"metrics.trackers": '["mlflow"]', "training.steps": steps, "metrics.project": "p"}
        done = run(tmp_path, variables={"MLFLOW_TRACKING_URI": uri}, **OPTIONS | more)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "INFO" not in done.stderr
    (found,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert {metric.step: metric.value for metric in history} == pytest.approx(losses(tmp_path / "runs" / "a"))
    assert found.data.params["optimizer.lr"] == "0.0015"
    assert (found.info.status, found.info.run_name) == ("FINISHED", "a")
    text = (tmp_path / "runs" / "a" / "recipe.toml").read_text().replace("steps = 6", "steps = 4")
    (artifact,) = tmp_path.glob("artifacts/**/recipe.toml")
    assert artifact.read_text() == text


@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_a_server_that_is_down_changes_nothing_else(tmp_path: Path, tracker: str) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    variables = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40, "MLFLOW_TRACKING_URI": url, "HOME": str(tmp_path)}
    variables |= {name: value for name, value in os.environ.items() if name.startswith("XDG")}
    for name, trackers in (("a", "[]"), ("b", f'["{tracker}"]')):
        more = {"run.name": name, "metrics.trackers": trackers}
        done = run(tmp_path, variables=variables, **OPTIONS | more)
        assert done.returncode == 0, done.stdout + done.stderr
    assert losses(tmp_path / "runs" / "a") == losses(tmp_path / "runs" / "b")
    label = {"wandb": "W&B", "mlflow": "MLflow"}[tracker]
    assert done.stdout.count(f"warning: {label} ") == 1
    assert "done: runs/b" in done.stdout
