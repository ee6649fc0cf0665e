"""The checkpoints of one run, where they are kept: a folder a step, which is either whole or not there.

Files are written into a folder of another name; when all are on the disk, the manifest with their sizes and hashes joins
them, and the folder gets its own name. Until then nothing of what was saved before is touched. On a remote store, which
cannot rename folders, one is a checkpoint as soon as it has its manifest, which gets its name last.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from titanlike.checkpoint.format import CheckpointCorrupt, FileDigest, write_all
from titanlike.config import UserError

STEP = re.compile(r"step-(\d{8,})")
FILE = re.compile(r"rank-\d{5,}\.safetensors|state\.json")
MANIFEST = "manifest.json"
STATE = "state.json"
UNNAMED, ASIDE = f"{MANIFEST}.new", f"{MANIFEST}.aside"  # where folders cannot be renamed
FORMAT = 1


@dataclass(frozen=True)
class CheckpointMetadata:
    """What a checkpoint says of itself."""

    step: int
    recipe: dict[str, Any]
    data: str  # fingerprint of the tokens
    layout: dict[str, int]
    machine: dict[str, str]  # what decides how results are rounded: kind of device, version of torch
    tokenizer: str = ""  # fingerprint
    tokens: int = 0  # seen so far
    position: list[Any] | None = None  # where the data is that is read in order; all other is a function of the step
    skipped: list[int] = field(default_factory=list)  # steps of late that were left out
    versions: dict[str, str] = field(default_factory=dict)  # of libraries


def name_of(step: int) -> str:
    """The folder of a step."""
    return f"step-{step:08d}"


def file_of(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


class Store(Protocol):
    """Where checkpoints are kept. Rank 0 alone calls what changes more than one file."""

    def steps(self) -> list[int]:
        """Steps of which there is a checkpoint, in order."""

    def begin(self, step: int, size: int) -> None:
        """Make room for a checkpoint of so many bytes, which is not there until it is committed."""

    def create(self, step: int, file: str) -> Any:
        """A context in which one file of a checkpoint that was begun is written; what was written lasts when it ends."""

    def commit(self, step: int) -> None:
        """Let it be there."""

    def update_latest(self, step: int) -> None:
        """Say in the file `latest` which one is."""

    def read(self, step: int, file: str) -> bytes:
        """The content of a small file."""

    def fetch(self, step: int, file: str) -> Path:
        """A file as one of this machine."""

    def remove(self, step: int) -> None:
        """Let a checkpoint be no more there, and delete it."""

    def archive(self, step: int) -> None:
        """Let a checkpoint be no more there under its name, without deleting it."""


def open_store(place: str) -> "Store":
    """The checkpoints in a folder, or at an address such as s3://bucket/folder."""
    return Remote(place) if "://" in place else Folder(Path(place))


def commit(store: Store, saved: CheckpointMetadata, files: Mapping[str, FileDigest]) -> None:
    """Add to all ranks' files what the checkpoint says of itself, and its manifest, and let it be there."""
    content = json.dumps({"format": FORMAT, **asdict(saved)}, indent=1).encode()
    with store.create(saved.step, STATE) as stream:
        write_all(stream, memoryview(content))
    sums = {**files, STATE: FileDigest(len(content), hashlib.sha256(content).hexdigest())}
    manifest = {"format": FORMAT, "step": saved.step, "files": {name: asdict(found) for name, found in sums.items()}}
    with store.create(saved.step, MANIFEST) as stream:
        write_all(stream, memoryview(json.dumps({**manifest, "sha256": _own_hash(manifest)}, indent=1).encode()))
    store.commit(saved.step)


def prune(store: Store, step: int, *, keep: int, keep_every: int) -> None:
    """After a commit: name it as the latest, and delete all but the newest few and those of every so many steps."""
    store.update_latest(step)
    for step in store.steps()[:-keep]:
        if not keep_every or step % keep_every:
            store.remove(step)


def read_manifest(store: Store, step: int) -> dict[str, FileDigest]:
    """The files of a checkpoint and what they are recognised by."""
    where = f"{store}/{name_of(step)}"
    try:
        found = json.loads(store.read(step, MANIFEST))
        claimed = found.pop("sha256")
        if claimed != _own_hash(found) or found["step"] != step:
            raise ValueError("its hash is not that of its content")
        if found["format"] == FORMAT:  # another one is no damage: what follows is for those who know it
            files = {name: FileDigest(**said) for name, said in found["files"].items()}
            if not all(FILE.fullmatch(name) for name in files):
                raise ValueError("it names files that no checkpoint has")
            if not {STATE, file_of(0)} <= files.keys():
                raise ValueError(f"it lacks {STATE} or {file_of(0)}")
    except FileNotFoundError:
        raise CheckpointCorrupt(f"{where} has no {MANIFEST}") from None
    except OSError as error:
        raise CheckpointCorrupt(f"{where}/{MANIFEST} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupt(f"{where}/{MANIFEST} is damaged: {error}") from None
    if found["format"] != FORMAT:
        raise UserError(f"{where} is of format {found['format']}; this version of titanlike reads format {FORMAT}")
    return files


def read_state(store: Store, step: int) -> CheckpointMetadata:
    """What a checkpoint says of itself. Its manifest is read, and this file compared with it, before."""
    try:
        found = json.loads(store.read(step, STATE))
        found.pop("format")
        saved = CheckpointMetadata(**found)
        if saved.step != step:
            raise ValueError(f"it is of step {saved.step}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupt(f"{store}/{name_of(step)}/{STATE} is damaged: {error}") from None
    return saved


def _own_hash(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


class Folder:
    """Checkpoints in a folder of a file system."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def steps(self) -> list[int]:
        """Steps of which there is a checkpoint, in order."""
        return sorted(int(found[1]) for entry in self.path.glob("step-*") if (found := STEP.fullmatch(entry.name)))

    def begin(self, step: int, size: int) -> None:
        """Clear what interrupted saves have left, look for room, and make the folder to write into."""
        if not self.path.is_dir():
            raise UserError(f"{self.path} is gone: the run's folder was moved or deleted while it trained")
        for leftover in self.path.glob("*.partial"):
            shutil.rmtree(leftover)
        free = shutil.disk_usage(self.path).free
        if free < size:
            raise OSError(f"{self.path} has {free:,} bytes left, and a checkpoint takes {size:,}")
        self._partial(step).mkdir()

    @contextmanager
    def create(self, step: int, file: str) -> Iterator[BinaryIO]:
        """Write one file; it is on the disk when this ends."""
        if not self._partial(step).is_dir():
            raise UserError(
                f"{self._partial(step)} is not there on this machine: the machines of a job share this folder"
            )
        with (self._partial(step) / file).open("xb", buffering=0) as stream:
            yield stream
            os.fsync(stream.fileno())

    def commit(self, step: int) -> None:
        """Give the folder its name, and have that reach the disk."""
        _sync(self._partial(step))
        if (self.path / name_of(step)).exists():  # this very step was saved before, and trained again since
            self.remove(step)
        self._partial(step).rename(self.path / name_of(step))
        _sync(self.path)

    def update_latest(self, step: int) -> None:
        """Say in the file `latest` which one is."""
        latest = self.path / "latest"
        latest.with_suffix(".new").write_text(f"{name_of(step)}\n")
        latest.with_suffix(".new").replace(latest)

    def read(self, step: int, file: str) -> bytes:
        """The content of a small file."""
        return self.fetch(step, file).read_bytes()

    def fetch(self, step: int, file: str) -> Path:
        """The file."""
        return self.path / name_of(step) / file

    def remove(self, step: int) -> None:
        """Delete it under another name: half of it would not be a checkpoint."""
        leaving = self.path / f"{name_of(step)}.removed.partial"
        (self.path / name_of(step)).rename(leaving)
        shutil.rmtree(leaving)

    def archive(self, step: int) -> None:
        """Give it a name that no checkpoint has."""
        aside = self.path / f"{name_of(step)}.aside"
        if aside.exists():
            shutil.rmtree(aside)
        (self.path / name_of(step)).rename(aside)

    def _partial(self, step: int) -> Path:
        return self.path / f"{name_of(step)}.partial"


class Remote:
    """Checkpoints on a store that fsspec knows, such as s3://bucket/runs. What is read is fetched to this machine."""

    def __init__(self, url: str) -> None:
        import fsspec  # type: ignore[import-untyped]  # only here: it is slow to import, and most runs do without

        try:
            self.files, self.root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UserError(f"checkpoint.dir = {url!r}: {error}") from None
        self.url = url.rstrip("/")
        self.fetched = tempfile.TemporaryDirectory(prefix="titanlike-")

    def __str__(self) -> str:
        return self.url

    def steps(self) -> list[int]:
        """Steps whose folder has a manifest."""
        self.files.invalidate_cache()
        found = [STEP.search(path) for path in self.files.glob(f"{self.root}/step-*/{MANIFEST}")]
        return sorted(int(match[1]) for match in found if match)

    def begin(self, step: int, size: int) -> None:
        """Clear what interrupted saves and deletions have left, and this very step, trained again since."""
        self.files.invalidate_cache()
        for folder in self.files.glob(f"{self.root}/step-*"):
            names = {path.rpartition("/")[2] for path in self.files.ls(folder, detail=False)}
            if not names & {MANIFEST, ASIDE}:
                self.files.rm(folder, recursive=True)
        self.remove(step)
        self.files.makedirs(self._path(step), exist_ok=True)

    @contextmanager
    def create(self, step: int, file: str) -> Iterator[BinaryIO]:
        """Write one file; it is there when this ends. Not the manifest: half of it would make a damaged checkpoint."""
        with self.files.open(self._path(step, UNNAMED if file == MANIFEST else file), "wb") as stream:
            yield stream

    def commit(self, step: int) -> None:
        """Give the manifest its name, which makes it one."""
        self.files.mv(self._path(step, UNNAMED), self._path(step, MANIFEST))

    def update_latest(self, step: int) -> None:
        """Say in the file `latest` which one is."""
        self.files.pipe_file(f"{self.root}/latest", f"{name_of(step)}\n".encode())

    def read(self, step: int, file: str) -> bytes:
        """The content of a small file."""
        return self.files.cat_file(self._path(step, file))

    def fetch(self, step: int, file: str) -> Path:
        """The file, brought here once."""
        local = Path(self.fetched.name, name_of(step), file)
        if not local.exists():
            local.parent.mkdir(exist_ok=True)
            self.files.get_file(self._path(step, file), str(local.with_suffix(".part")))
            local.with_suffix(".part").rename(local)
        return local

    def remove(self, step: int) -> None:
        """Its manifest first: without one it is none."""
        if self.files.exists(self._path(step, MANIFEST)):
            self.files.rm_file(self._path(step, MANIFEST))
        if self.files.exists(self._path(step)):
            self.files.rm(self._path(step), recursive=True)

    def archive(self, step: int) -> None:
        """Without its manifest it is none; that is kept under another name."""
        self.files.mv(self._path(step, MANIFEST), self._path(step, ASIDE))

    def _path(self, step: int, file: str = "") -> str:
        return f"{self.root}/{name_of(step)}" + (f"/{file}" if file else "")


def _sync(folder: Path) -> None:
    """Have the names in a folder reach the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
