"""Checkpoint storage: one directory per step, published atomically.

Files are written into `step-XXXXXXXX.partial`. Once all of them are on the disk, the manifest with their sizes and hashes is
written, and the directory is renamed. Remote stores cannot rename directories: there, a directory is a checkpoint once it contains
its manifest, which is renamed last.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Union

from titanlike.checkpoint.files import MANIFEST, STATE, STEP, LocalFile, ReadableFile, name_of
from titanlike.checkpoint.format import FileDigest
from titanlike.checkpoint.remote import RemoteStore
from titanlike.config import UserError
from titanlike.utils.atomic_write import atomic_write_text, fsync_directory, write_all

FORMAT = 1


class LocationLost(UserError):
    """Another start has taken over the location: this one cannot save again."""


@dataclass(frozen=True)
class CheckpointMetadata:
    """Metadata of a checkpoint."""

    step: int
    recipe: dict[str, Any] = field(default_factory=dict)
    data: str = ""  # fingerprint of the tokens
    layout: dict[str, int] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=dict)  # determines rounding: device type and torch version
    tokenizer: str = ""  # fingerprint
    program: str = ""  # hash of its file
    weights: dict[str, str] = field(default_factory=dict)  # fingerprints of frozen models, by the key of their path
    tokens: int = 0  # trained on so far
    position: list[Any] | None = None  # of a data stream; the position in all other data is a function of the step
    skipped: list[int] = field(default_factory=list)  # recent steps whose update was skipped
    loss_scale: list[float] = field(default_factory=list)  # `LossScale.state`
    versions: dict[str, str] = field(default_factory=dict)  # of libraries
    imported: str = ""  # the program that wrote it, if it was converted: the data and the layout are not known
    optimizer: dict[str, Any] = field(default_factory=dict)  # Python values in its state, by parameter; set by the save


class LocalStore:
    """Checkpoints in a directory of a file system."""

    num_readers = 1  # threads of a rank that read at the same time

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints, in ascending order."""
        try:
            names = [entry.name for entry in self.path.iterdir()]  # glob ignores that a directory cannot be read
        except FileNotFoundError:
            return []
        return sorted(int(match[1]) for name in names if (match := STEP.fullmatch(name)))

    def read_file(self, name: str) -> bytes | None:
        """Returns the content of a file that does not belong to a checkpoint, or None if there is none."""
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def write_file(self, name: str, text: str) -> None:
        """Writes a file that does not belong to a checkpoint, atomically."""
        self.path.mkdir(parents=True, exist_ok=True)
        atomic_write_text(self.path / name, text)

    def begin(self, step: int, size: int) -> None:
        """Begins a checkpoint of `size` bytes: deletes what interrupted saves left, and checks the free space."""
        if not self.path.is_dir():
            raise UserError(f"{self.path} does not exist: the run directory was moved or deleted during training")
        for leftover in self.path.glob("step-*.partial"):
            _delete(leftover)
        free = shutil.disk_usage(self.path).free
        if free < size:
            raise OSError(f"{self.path} has {free:,} bytes free, but a checkpoint takes {size:,}")
        self._partial(step).mkdir()

    @contextmanager
    def create(self, step: int, file: str) -> Iterator[BinaryIO]:
        """Opens a file of a begun checkpoint for writing. It is durable when the block ends."""
        directory = self._partial(step)
        if not directory.is_dir():
            raise UserError(f"{directory} does not exist on this machine: all machines of a job must share {self.path}")
        with (directory / file).open("xb", buffering=0) as stream:
            yield stream
            os.fsync(stream.fileno())

    def publish(self, step: int) -> None:
        """Publishes a checkpoint, and makes that durable. Replaces an earlier checkpoint of the same step."""
        fsync_directory(self._partial(step))
        if os.path.lexists(self.path / name_of(step)):
            self.remove(step)
        self._partial(step).rename(self.path / name_of(step))
        fsync_directory(self.path)

    def update_latest(self, step: int) -> None:
        """Writes the name of a checkpoint to the file `latest`, for the user. Resuming does not read it."""
        atomic_write_text(self.path / "latest", f"{name_of(step)}\n", durable=False)

    def open(self, step: int, file: str, *, download: bool = False) -> ReadableFile:
        """Opens a file of a checkpoint for reading."""
        return LocalFile(self.path / name_of(step) / file)

    def delete_downloads(self) -> None:
        """Without effect: there are none."""

    def remove(self, step: int) -> None:
        """Unpublishes a checkpoint atomically, then deletes it."""
        removed = self.path / f"{name_of(step)}.removed.partial"
        (self.path / name_of(step)).rename(removed)
        _delete(removed)

    def archive(self, step: int) -> None:
        """Unpublishes a checkpoint without deleting it."""
        archived = self.path / f"{name_of(step)}.archived"
        if os.path.lexists(archived):
            _delete(archived)
        (self.path / name_of(step)).rename(archived)

    def _partial(self, step: int) -> Path:
        return self.path / f"{name_of(step)}.partial"


Store = Union[LocalStore, "RemoteStore"]


def _delete(path: Path) -> None:
    """Deletes a directory, or a file or link that has the name of one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def open_store(location: str) -> Store:
    """Opens the store in a directory or at a URL such as s3://bucket/runs."""
    if "://" not in location:
        return LocalStore(Path(location))
    return RemoteStore(location)


def complete(store: Store, metadata: CheckpointMetadata, digests: Mapping[str, FileDigest]) -> None:
    """Adds the metadata and the manifest to the files of all ranks, and publishes the checkpoint. Rank 0 only."""
    state = json.dumps({"format": FORMAT, **asdict(metadata)}, indent=1).encode()
    digests = {**digests, STATE: FileDigest(len(state), hashlib.sha256(state).hexdigest())}
    files = {name: asdict(digest) for name, digest in digests.items()}
    manifest = {"format": FORMAT, "step": metadata.step, "files": files}
    with store.create(metadata.step, STATE) as stream:
        write_all(stream, state)
    with store.create(metadata.step, MANIFEST) as stream:
        write_all(stream, json.dumps({**manifest, "sha256": manifest_hash(manifest)}, indent=1).encode())
    store.publish(metadata.step)


def prune(store: Store, step: int, *, keep: int, keep_every: int) -> None:
    """After a checkpoint was published, updates `latest`, and deletes all but the newest `keep` and every `keep_every`-th step."""
    store.update_latest(step)
    for step in store.steps()[:-keep]:
        if not keep_every or step % keep_every:
            store.remove(step)


def manifest_hash(manifest: Mapping[str, Any]) -> str:
    """Returns the hash of a manifest's content, without the field `sha256`."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
