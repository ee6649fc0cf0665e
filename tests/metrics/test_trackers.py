"""Trackers in threads, records on a full disk, and the Prometheus endpoint."""

import errno
import json
import logging
import math
import os
import shutil
import socket
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.launching import free_port
from titanlike.config import UserError
from titanlike.config.sections import Metrics
from titanlike.metrics import services, trackers
from titanlike.metrics.prometheus import PrometheusEndpoint
from titanlike.metrics.records import Records
from titanlike.metrics.trackers import BackgroundTracker, RunInfo, Values
from titanlike.recipe import PretrainRecipe
from titanlike.run.checks import check_machine


class Recorder:
    """A tracker that keeps its records, and waits for `go` before each."""

    location = "here"

    def __init__(self) -> None:
        self.go, self.steps, self.closed = threading.Event(), list[int](), False

    def log(self, step: int, values: Values) -> None:
        self.go.wait()
        if values.get("fail"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True


def messages(tracker: BackgroundTracker) -> list[str]:
    found = []
    while not tracker.messages.empty():
        found.append(tracker.messages.get())
    return found


def test_a_slow_tracker_misses_records_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "QUEUE_SIZE", 4)
    recorder = Recorder()
    tracker = BackgroundTracker("T", lambda: recorder)
    for step in range(50):  # none of these calls waits for the tracker
        tracker.log(step, {})
    recorder.go.set()
    tracker.begin_close()
    tracker.close(time.monotonic() + 60)
    assert recorder.steps == list(range(len(recorder.steps)))
    assert 4 <= len(recorder.steps) <= 5
    assert messages(tracker)[-2:] == [
        "warning: T is behind by 4 records; until it catches up, it receives no more",
        f"warning: T has missed {50 - len(recorder.steps)} records; metrics.jsonl has them",
    ]


def test_a_tracker_that_does_not_answer_is_left_behind() -> None:
    recorder, abandoned = Recorder(), threading.Event()
    tracker = BackgroundTracker("T", lambda: recorder, abandon=abandoned.set)
    tracker.log(1, {})
    tracker.begin_close()
    tracker.close(time.monotonic())
    assert messages(tracker)[-1] == "warning: T has not answered for 10 s; its last records may be lost"
    assert abandoned.wait(60)
    recorder.go.set()


def test_a_tracker_that_fails_is_disabled_and_says_so_once() -> None:
    recorder = Recorder()
    recorder.go.set()
    tracker = BackgroundTracker("T", lambda: recorder)
    tracker.log(1, {})
    tracker.log(2, {"fail": 1.0})
    tracker._thread.join(60)
    tracker.log(3, {})
    tracker.begin_close()
    tracker.close(time.monotonic() + 60)
    assert recorder.steps == [1]
    assert messages(tracker)[1:] == ["warning: T is disabled, training continues: No space left on device"]
    missing = BackgroundTracker("T", lambda: recorder, "no_such_package")
    missing.log(1, {})
    missing.close(time.monotonic() + 60)
    assert messages(missing) == ["warning: T is disabled, training continues: No module named 'no_such_package'"]


def test_tensorboard_has_the_recipe_and_survives_a_deleted_directory(tmp_path: Path) -> None:
    run = RunInfo(tmp_path, 1, "p", "", {"optimizer": {"lr": 0.5, "groups": []}, "recipe": "pretrain"})
    (tmp_path / "recipe.toml").write_text("[optimizer]\nlr = 0.5\n")
    out = Records(run, Metrics(), num_steps=2)
    out.log(1, {"loss": 2.0})
    assert out.close() == []
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (text,) = events.Tensors("recipe/text_summary")
    assert text.tensor_proto.string_val[0] == b"    [optimizer]\n    lr = 0.5\n"
    hparams = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"optimizer.lr" in hparams and b"optimizer.groups" in hparams
    tracker = services.TensorBoardTracker(run)
    tracker._writer.flush()  # its thread would write to the deleted file
    for file in (tmp_path / "tensorboard").iterdir():
        file.unlink()
    (tmp_path / "tensorboard").rmdir()
    tracker.log(2, {"loss": 3.0})
    tracker.close()
    assert scalars(tmp_path / "tensorboard") == [(2, 3.0)]


def scalars(directory: Path) -> list[tuple[int, float]]:
    events = EventAccumulator(str(directory))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("train/loss")]


def test_tensorboard_events_are_in_another_folder_and_those_after_a_resume_replace_others(tmp_path: Path) -> None:
    for start, steps in enumerate(([1, 2, 3, 4], [3, 4, 5])):
        tracker = services.TensorBoardTracker(RunInfo(tmp_path / "runs/a", steps[0], "p", f"{tmp_path}/events", {}))
        for step in steps:
            tracker.log(step, {"loss": start + 0.5})
        tracker.close()
    assert scalars(tmp_path / "events/a") == [(1, 0.5), (2, 0.5), (3, 1.5), (4, 1.5), (5, 1.5)]
    assert not (tmp_path / "runs").exists()


def test_tensorboard_events_are_in_a_store_during_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec  # type: ignore[import-untyped]

    store = fsspec.filesystem("memory")
    monkeypatch.setattr(services, "MAX_EVENT_FILE", 20_000)
    tracker = services.TensorBoardTracker(RunInfo(tmp_path / "a", 1, "p", "memory://events/", {}))
    assert tracker._upload

    def copy() -> Path:
        folder = tmp_path / f"copy-{time.monotonic_ns()}"
        store.get("/events/a", str(folder), recursive=True)
        return folder

    tracker.log(1, {"loss": 1.0})
    tracker.log(2, {"loss": 2.0})
    assert scalars(copy()) == [(1, 1.0)]  # the second upload is not due
    tracker._upload._last -= services.UPLOAD_INTERVAL
    tracker.log(3, {"loss": 3.0, "sample": "x" * 30_000})
    assert scalars(copy()) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    tracker.log(4, {"loss": 4.0})  # in another file
    sent, send = [], store.pipe_file
    monkeypatch.setattr(type(store), "pipe_file", lambda _, path, content: (sent.append(path), send(path, content)))
    tracker._upload._last -= services.UPLOAD_INTERVAL
    tracker.log(5, {"loss": 5.0})
    newest = max((tmp_path / "a/tensorboard").iterdir())
    assert sent == [f"/events/a/{newest.name}"]  # the first has not changed
    tracker.close()
    assert scalars(copy()) == [(step, float(step)) for step in range(1, 6)]


def test_tensorboard_events_are_sent_again_to_a_store_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    store = fsspec.filesystem("memory")
    monkeypatch.setattr(services, "UPLOAD_INTERVAL", 0.0)
    lost = True
    send = type(store).pipe_file

    def pipe_file(self: object, path: str, content: bytes) -> None:
        if lost:
            raise OSError(errno.ECONNREFUSED, "refused")
        send(self, path, content)

    monkeypatch.setattr(type(store), "pipe_file", pipe_file)
    run = RunInfo(tmp_path / "b", 1, "p", "memory://events", {})
    tracker = BackgroundTracker("TensorBoard", lambda: services.TensorBoardTracker(run))
    for step in (1, 2):
        tracker.log(step, {"loss": 1.0})
    while tracker.messages.empty():
        time.sleep(0.01)
    lost = False
    tracker.log(3, {"loss": 1.0})
    tracker.begin_close()
    tracker.close(time.monotonic() + 60)
    assert messages(tracker) == [
        "warning: TensorBoard cannot write to memory://events/b, and tries again until it can: "
        "ConnectionRefusedError(111, 'refused')"
    ]
    store.get("/events/b", str(tmp_path / "copy"), recursive=True)
    assert [step for step, _ in scalars(tmp_path / "copy")] == [1, 2, 3]

    lost = True  # until the end
    run = RunInfo(tmp_path / "c", 1, "p", "memory://events", {})
    tracker = BackgroundTracker("TensorBoard", lambda: services.TensorBoardTracker(run))
    tracker.log(1, {"loss": 1.0})
    tracker.begin_close()
    tracker.close(time.monotonic() + 60)
    assert messages(tracker)[-1] == (
        "warning: TensorBoard could not write its last events to memory://events/c; "
        f"{tmp_path / 'c/tensorboard'} has all of them"
    )


LAYERS = {f"layers/{number}": 1.0 for number in range(1000)}
RECIPE = {"optimizer": {"groups": "x" * 600}, "model": {f"size_{number}": number for number in range(100)}}


def start_twice(tracker: str, package: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records a step in two starts of a run, with a package of mocks: `tests/services` has the real ones."""
    monkeypatch.setitem(sys.modules, tracker, package)
    folder.mkdir()
    told = []
    for _ in range(2):
        started = services.start_tracker(tracker, RunInfo(folder, 1, "p", "", RECIPE))
        started.log(7, {"loss": 2.0, "mfu": None, "sample": "x"} | LAYERS)
        started.begin_close()
        started.close(time.monotonic() + 60)
        told += messages(started)
        assert (started._abandon is services.abandon_wandb) == (tracker == "wandb")
    return told


def test_wandb_receives_the_records_of_all_starts_under_one_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, wandb = tmp_path / "a", MagicMock(**{"init.return_value.url": ""})
    told = start_twice("wandb", wandb, folder, monkeypatch)
    assert told == [f'W&B     offline; "wandb sync {folder}/wandb/offline-run-*" uploads it'] * 2
    settings, identifier = wandb.Settings.return_value, wandb.init.call_args.kwargs["id"]
    services.abandon_wandb()
    assert len(identifier) == 8
    assert wandb.mock_calls == [
        call.Settings(console="off", silent=True, login_timeout=0.1), call.setup(settings),
        call.init(project="p", id=identifier, name="a", resume="allow", dir=str(folder), config=RECIPE, settings=settings),
        call.init().define_metric("step"), call.init().define_metric("*", step_metric="step"),
        call.init().log({"step": 7, "train/loss": 2.0, "train/sample": "x"} | LAYERS), call.init().finish(),
    ] * 2 + [call.teardown()]  # fmt: skip


def test_mlflow_receives_the_records_of_all_starts_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow, values = MagicMock(**{"get_tracking_uri.return_value": "uri"}), lambda *values: values
    mlflow.entities, client = SimpleNamespace(Param=values, Metric=values), mlflow.MlflowClient.return_value
    client.get_experiment_by_name.return_value = SimpleNamespace(experiment_id="e")
    client.create_run.return_value.info.run_id = "r"
    monkeypatch.setattr(time, "time", lambda: 5.0)
    assert start_twice("mlflow", mlflow, tmp_path / "a", monkeypatch) == ["MLflow  run r at uri"] * 2
    params = [("optimizer.groups", "x" * 500), *((f"model.size_{number}", str(number)) for number in range(100))]
    metrics = [(name, value, 5000, 7) for name, value in ({"train/loss": 2.0} | LAYERS).items()]
    logged = [
        call.log_batch("r", metrics=metrics[:1000]), call.log_batch("r", metrics=metrics[1000:]),
        call.log_text("r", "x", "train/sample/step-00000007.txt"), call.set_terminated("r"),
    ]  # fmt: skip
    assert client.mock_calls == [
        call.get_experiment_by_name("p"), call.create_run("e", run_name="a"), call.log_batch("r", params=params[:100]),
        call.log_batch("r", params=params[100:]), call.log_text("r", json.dumps(RECIPE, indent=1), "recipe.toml"),
        *logged, call.update_run("r", status="RUNNING"), *logged,
    ]  # fmt: skip
    assert {logging.getLogger(name).level for name in ("mlflow", "alembic")} == {logging.WARNING}


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    assert all(sample.labels == {"run": "a run"} for sample in samples)
    return {sample.name: sample.value for sample in samples}


def test_prometheus_serves_the_latest_values_and_counts_events() -> None:
    port = int(free_port())
    endpoint = PrometheusEndpoint("127.0.0.1", port, "a run", num_steps=9)
    assert scrape(port)["titanlike_non_finite_total"] == 0
    endpoint.log(3, {"loss": 2.0, "mfu": None, "evaluation/a/acc": 0.5, "sample": "text"})
    endpoint.log(4, {"loss": None, "grad_norm": 1.0})
    endpoint.log(4, {"validation_loss": 2.5})
    endpoint.log(2, {"save_failed": "No space left on device"})
    endpoint.log(5, {"skipped": "the loss is nan on rank 1", "validation_loss": None, "layers/grad_norm/norm": 1.0})
    endpoint.log(5, {"skipped": "the loss is nan on rank 1"})
    for _ in range(3):
        endpoint.log(5, {"loss_spike": 12.0})
    found = scrape(port)
    assert math.isnan(found.pop("titanlike_loss")) and math.isnan(found.pop("titanlike_validation_loss"))
    assert time.time() - found.pop("titanlike_last_record_timestamp_seconds") < 300
    assert found == {
        "titanlike_step": 4, "titanlike_num_steps": 9, "titanlike_grad_norm": 1, "titanlike_loss_spike": 12,
        "titanlike_evaluation_a_acc": 0.5, "titanlike_non_finite_total": 3, "titanlike_failed_saves_total": 1,
        "titanlike_loss_spikes_total": 3,
    }  # fmt: skip
    endpoint.close()
    with pytest.raises(OSError, match="refused"):
        scrape(port)


def test_a_port_in_use_does_not_stop_the_run(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        out = Records(
            RunInfo(tmp_path, 1, "p", "", {}), Metrics(trackers=(), prometheus=f"127.0.0.1:{port}"), num_steps=2
        )
        warning = f"warning: no metrics for Prometheus, training continues: 127.0.0.1:{port}: Address already in use"
        assert (out.log(1, {"loss": 1.0}), out.log(2, {"loss": 1.0}), out.close()) == ([warning], [], [])
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2


def test_missing_packages_are_refused_before_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()  # as W&B leaves it in a working directory: not the package
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(__import__("sys").modules, "wandb", raising=False)
    with pytest.raises(
        UserError, match=r"names 'wandb', which is not installed; run: pip install \"titanlike\[wandb\]\""
    ):
        check_machine(PretrainRecipe(metrics=Metrics(trackers=("wandb",))))
    with pytest.raises(UserError, match=r"metrics\.tensorboard_dir = 'nowhere://events': Protocol not known: nowhere"):
        check_machine(PretrainRecipe(metrics=Metrics(tensorboard_dir="nowhere://events")))


def test_ids_of_services_belong_to_a_run_of_one_name(tmp_path: Path) -> None:
    def run(folder: Path) -> RunInfo:
        return RunInfo(folder, 1, "p", "", {})

    stable, decay, moved = (tmp_path / name for name in ("stable", "decay", "elsewhere/stable"))
    stable.mkdir()
    (stable / "trackers.json").write_text('{"wandb p": "abc"}')  # as earlier versions wrote it
    services._write_id(run(stable), "mlflow p", "def")
    expected = {"run": "stable", "wandb p": "abc", "mlflow p": "def"}
    assert services._read_ids(run(stable)) == expected
    shutil.copytree(stable, decay)
    assert services._read_ids(run(decay)) == {}
    services._write_id(run(decay), "mlflow p", "ghi")
    assert services._read_ids(run(decay)) == {"run": "decay", "mlflow p": "ghi"}
    shutil.copytree(stable, moved)
    assert services._read_ids(run(moved)) == expected
