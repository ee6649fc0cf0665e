"""The owner of a checkpoint location: the one run that may write there.

Two runs of the same name may share a location, such as s3://bucket/runs/NAME, although their directories differ. The file
`owner.json` at the location names the owner. Each start of a run replaces the record by one with a new token, and stores a copy in
the run directory. A start continues the owner's run if its directory has the recorded path or holds the recorded token: a run
resumes after its directory was moved, and also if the directory is lost but its path is the same, as on a new machine. All other
runs are refused. Before each write to the location, the token is compared: a run that has been superseded stops.
"""

import json
import os
import platform
import time
import uuid
from dataclasses import asdict
from pathlib import Path

from titanlike.checkpoint.store import LocationLost, Store
from titanlike.config import UserError
from titanlike.config.base import record, validate
from titanlike.utils.atomic_write import atomic_write_text

FILE = "owner.json"


@record
class Owner:
    """The content of `owner.json`."""

    run: str  # absolute path of the run directory
    host: str
    process: int
    started: str
    token: str  # of this start

    def __str__(self) -> str:
        return f"the run {self.run} (process {self.process} on host {self.host}, started {self.started})"


class Claim:
    """This start's claim to a location. Used by rank 0 only."""

    def __init__(self, store: Store, run: Path, *, allow_other: bool = False) -> None:
        """`run` is the directory of the run. `allow_other`: the location may belong to a run in another directory, which this one
        then replaces."""
        self.store = store
        self.run = run
        self.allow_other = allow_other
        self.owner = Owner(
            run=str(run.resolve()),
            host=platform.node(),
            process=os.getpid(),
            started=time.strftime("%Y-%m-%d %H:%M:%S%z"),
            token=uuid.uuid4().hex,
        )
        self._acquired = False

    def check(self) -> None:
        """Raises `UserError` if the location belongs to another run."""
        recorded = self._recorded()
        if recorded and not self.allow_other and self.owner.run != recorded.run and not self._has_token(recorded):
            raise UserError(
                f"{self.store} holds the checkpoints of {recorded}; give --run.name or --checkpoint.dir to start another run, or "
                "--checkpoint.allow_changed='[\"run.dir\"]' to continue that run here and stop it there"
            )

    def acquire(self) -> None:
        """Records this start as the owner."""
        self.check()
        text = json.dumps(asdict(self.owner), indent=1) + "\n"
        self.run.mkdir(parents=True, exist_ok=True)
        atomic_write_text(self.run / FILE, text)  # before the other: the owner's token is always here
        self.store.write_file(FILE, text)
        self._acquired = True

    def verify(self) -> None:
        """Raises `UserError` if another start owns the location by now."""
        if not self._acquired:
            self.acquire()
        recorded = self._recorded()
        if recorded is None:
            raise UserError(f"{self.store}/{FILE} does not exist: the directory was moved or deleted during training")
        if recorded.token != self.owner.token:
            raise LocationLost(
                f"{self.store} was taken over by {recorded}; end one of the two, and give --run.name to train both"
            )

    def _recorded(self) -> Owner | None:
        content = self.store.read_file(FILE)
        if content is None:
            return None
        try:
            return validate(Owner, json.loads(content))
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{self.store}/{FILE} is not valid ({error}); delete it if no other run writes to {self.store}"
            ) from None

    def _has_token(self, recorded: Owner) -> bool:
        try:
            return bool(json.loads((self.run / FILE).read_bytes())["token"] == recorded.token)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return False
