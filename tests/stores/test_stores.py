"""Checkpoints and text on S3, Google Cloud Storage and Azure Blob Storage, which emulators serve to the ranks of a job."""

import importlib.util
import os
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.faults.faulty import Fault
from tests.faults.starting import Starter
from tests.faults.undisturbed import Trained, assert_as_undisturbed, resume
from tests.launching import SMALL, losses, run
from tests.stores.conftest import Bucket
from titanlike.checkpoint.remote import RemoteStore

if "NODE_MODULES" not in os.environ or not all(importlib.util.find_spec(name) for name in ("adlfs", "gcsfs")):
    pytest.skip("requires emulators, which .ci/run installs", allow_module_level=True)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning"),  # of aiohttp, by adlfs
]

REMOTE = "titanlike.checkpoint.remote.RemoteStore"
FILES = ("manifest.json", "rank-00000.safetensors", "rank-00001.safetensors", "state.json")


def test_a_store_publishes_and_deletes_checkpoints(bucket: Bucket) -> None:
    store = RemoteStore(f"{bucket.url}/runs/r")
    assert store.steps() == [] and store.read_file("owner.json") is None
    content = os.urandom(6_000_000)  # more than one part of an upload
    for step in (2, 4):
        store.begin(step, len(content))
        with store.create(step, "rank-00000.safetensors") as file:
            file.write(content)
        assert step not in store.steps()
        with store.create(step, "manifest.json") as file:
            file.write(b"{}")
        assert step not in store.steps()
        store.publish(step)
    store.write_file("owner.json", "first")
    store.write_file("owner.json", "second")
    assert (store.steps(), store.read_file("owner.json")) == ([2, 4], b"second")
    remote = store.open(4, "rank-00000.safetensors")
    assert remote.size() == len(content)
    assert bytes(remote.read(1_000, 5_000)) == content[1_000:6_000]
    assert bytes(store.open(4, "rank-00000.safetensors", download=True).read(0, len(content))) == content
    store.remove(2)
    store.archive(4)
    assert store.steps() == []
    assert bucket.names("runs/r") == {
        "owner.json", "step-00000004.archived/manifest.json", "step-00000004.archived/rank-00000.safetensors",
    }  # fmt: skip
    store.begin(6, 1)
    with store.create(6, "rank-00000.safetensors") as file:
        file.write(b"interrupted")
    store.begin(8, 1)  # deletes what the save of step 6 left
    assert not [name for name in bucket.names("runs/r") if name.startswith("step-00000006")]
    path = f"{store.root}/step-00000004.archived/rank-00000.safetensors"
    assert bucket.files.cat_file(path) == content


def test_a_run_resumes_bit_exactly(bucket: Bucket, tmp_path: Path) -> None:
    options = SMALL | {"run.name": "r", "checkpoint.dir": f"{bucket.url}/checkpoints", "checkpoint.interval": "2"}
    first = run(tmp_path, variables={"NPROC": "2"}, **options)
    assert (first.returncode, first.stderr) == (0, "")
    expected = losses(tmp_path / "runs/r")
    steps = {f"step-0000000{step}/{file}" for step in (4, 6) for file in FILES}
    assert bucket.names("checkpoints/r") == {"latest", "owner.json", *steps}

    # A truncated shard is reported, and the run resumes from the previous checkpoint, with the same results.
    path = f"{bucket.root}/checkpoints/r/step-00000006/rank-00001.safetensors"
    bucket.files.pipe_file(path, bucket.files.cat_file(path)[:-8])
    again = run(tmp_path, variables={"NPROC": "2"}, **options)
    assert again.returncode == 0, again.stderr
    assert f"{bucket.url}/checkpoints/r/step-00000006/rank-00001.safetensors" in again.stderr
    assert "falling back to the previous checkpoint" in again.stderr
    assert "resumed at step 4\n" in again.stdout
    assert losses(tmp_path / "runs/r") == expected and set(expected) == set(range(1, 7))


def test_a_store_that_is_lost_during_a_save(
    bucket: Bucket, starter: Starter, undisturbed: Trained, tmp_path: Path
) -> None:
    """The run stops after the retries of the client, and resumes when the store is there again."""
    options = {"checkpoint.dir": f"{bucket.url}/remote", "checkpoint.mode": "sync", "checkpoint.max_failures": "1"}
    job = starter.start(tmp_path, Fault(f"{REMOTE}.begin", step=4, do="mark four, await gone"), **options)
    job.wait_for(tmp_path / "four.mark")
    bucket.proxy.closed = True
    (tmp_path / "gone.mark").touch()
    try:
        assert job.wait(seconds=400) == [2, 2], job.output
    finally:
        bucket.proxy.closed = False
    assert "error: the save failed: " in job.output
    assert "the last valid checkpoint is of step 2\n" in job.output
    assert "resumed at step 2\n" in resume(starter, tmp_path, **options).output
    bucket.download("remote/run", tmp_path / "copy")
    assert_as_undisturbed(tmp_path, undisturbed, tmp_path / "copy")


def test_a_run_reads_text_and_sends_tensorboard_events(bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    for number in range(3):
        text = "".join(f"{number} times {other} is {number * other}\n" for other in range(400))
        (tmp_path / f"corpus/{number}.txt").write_text(text)
        bucket.files.pipe_file(f"{bucket.root}/corpus/{number}.txt", text.encode())
    found = {}
    for name, path in {"local": f"{tmp_path}/corpus/*.txt", "remote": f"{bucket.url}/corpus/*.txt"}.items():
        options = SMALL | {"run.name": name, "checkpoint.enabled": "false", "data.source": "text", "data.path": path}
        events = {"metrics.trackers": '["tensorboard"]', "metrics.tensorboard_dir": f"{bucket.url}/events"}
        job = run(tmp_path, **options | events)
        assert job.returncode == 0, job.stderr
        found[name] = losses(tmp_path / "runs" / name)
        bucket.download(f"events/{name}", tmp_path / f"{name}-events")
        scalars = EventAccumulator(str(tmp_path / f"{name}-events"))
        scalars.Reload()
        sent = {event.step: event.value for event in scalars.Scalars("train/loss")}
        assert sent == pytest.approx(found[name], rel=1e-6)
    assert found["local"] == found["remote"] and len(found["local"]) == 6
