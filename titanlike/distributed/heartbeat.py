"""What ranks tell each other while they train, and what is known from it of a rank that is missing."""

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from titanlike.distributed import process_group

AT_MOST = 8  # lines about ranks, or groups of ranks
RECONNECT = 60.0  # seconds


@dataclass(frozen=True)
class Heartbeat:
    """What a rank says of itself."""

    step: int
    host: str
    pid: int
    time: float = 0.0  # by the clock of its host
    patient: bool = False
    place: str = ""
    dumped: bool = False  # its stacks are on the disk: it may be ended
    left: bool = False  # the loop is behind it


class HeartbeatThread:
    """Tells the others about this rank, and hears from them, through a connection of its own to the job's store.

    Its thread may block for ever, so nobody waits for it without a limit. Keys are of this run: a process may see several.
    """

    def __init__(
        self, rank: int, world_size: int, sign: Callable[[], Heartbeat], interval: float, hearing: float
    ) -> None:
        self.rank, self.world_size, self.interval, self.hearing = rank, world_size, interval, hearing
        self.alarm = self.is_reporter = self.told = False
        # Set while this rank is stuck and others have said that they take longer.
        self.listening_since: float | None = None
        self._num_patient = 0
        self._sign = sign
        self._wanted = self._telling = self._was_patient = False
        self._count = self._run = 0
        self._heard: dict[int, tuple[bytes, float]] = {}  # what was said last, and when it was first heard
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._talk, name="roll call", daemon=True)

    def start(self) -> None:
        """Begin to talk."""
        self._thread.start()

    def stop(self) -> None:
        """Say that this rank has left, and be silent."""
        self._stop.set()
        self._wake.set()
        if self._thread.ident:
            self._thread.join(self.hearing)

    def raise_alarm(self) -> None:
        """Ask all ranks to dump their stacks. The first to ask is the one that reports."""
        self._wanted = True
        self._wake.set()

    def tell(self) -> None:
        """Say that the report is out, and give the others a moment to leave."""
        self._telling = True
        self._wake.set()
        self.wait_for(lambda: self.told, self.hearing)
        time.sleep(0.5)

    def answers(self) -> tuple[dict[int, Heartbeat | None], list[int]]:
        """What each rank said last, and who is silent: after all others have dumped their stacks."""
        began = time.monotonic()

        def silent(rank: int) -> bool:
            return time.monotonic() - self._heard.get(rank, (b"", began))[1] > self.hearing

        def waited_for(rank: int) -> bool:
            sign = self._last(rank)
            return not (sign and (sign.dumped or sign.left)) and not silent(rank)

        ranks = range(self.world_size)
        self.wait_for(lambda: not any(map(waited_for, ranks)), 4 * self.hearing)
        signs = {rank: self._last(rank) for rank in ranks}
        missing = [rank for rank, sign in signs.items() if silent(rank) and not (sign and (sign.dumped or sign.left))]
        return signs, missing

    def listen(self, on: bool) -> None:
        """Follow what each rank says, or no longer."""
        self.listening_since = (self.listening_since or time.monotonic()) if on else None

    @property
    def num_patient(self) -> int:
        """How many ranks do what may take longer than a step. A rank that was stopped in the midst of it cannot take that back:
        it counts until it has been silent for as long as this rank has listened."""
        now = time.monotonic()
        if self.listening_since is None or now - self.listening_since <= self.hearing:
            return self._num_patient
        heard = [self._last(rank) for rank, (_, since) in list(self._heard.items()) if now - since <= self.hearing]
        return sum(1 for sign in heard if sign and sign.patient and not sign.left)

    @staticmethod
    def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
        """Whether it came true within so many seconds."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    def _last(self, rank: int) -> Heartbeat | None:
        said = self._heard.get(rank, (b"", 0.0))[0]
        return Heartbeat(**json.loads(said)[1]) if said else None

    def _talk(self) -> None:
        store: process_group.Store | None = None
        while True:
            left = self._stop.is_set()
            try:
                store = store or process_group.connect_to_store()
                self._exchange(store, left)
            except RuntimeError:  # the connection is lost, perhaps with the machine that keeps the store
                store = None
                self.told |= self.alarm and not self.is_reporter
                self._stop.wait(RECONNECT)
            if left:
                return
            self._wake.wait(0.1 if self.alarm else self.interval)
            self._wake.clear()

    def _exchange(self, store: "process_group.Store", left: bool) -> None:
        # As many runs as this process has seen, all others have seen.
        self._run = self._run or store.add(f"watch/runs/{self.rank}", 1)
        here = f"watch/{self._run}"
        sign = self._sign()
        self._count += 1
        store.set(f"{here}/{self.rank}", json.dumps([self._count, dataclasses.asdict(sign)]))
        patient = sign.patient and not left
        self._num_patient = store.add(f"{here}/patient", int(patient) - int(self._was_patient))
        self._was_patient = patient
        if self._wanted and not self.alarm:
            self.is_reporter = store.add(f"{here}/alarm", 1) == 1
            self.alarm = True
        elif not self.alarm:
            self.alarm = store.check([f"{here}/alarm"])
        if self._telling:
            store.set(f"{here}/told", "")
            self.told = True
        elif self.is_reporter or (self.listening_since is not None and not self.alarm):
            self._listen(store, here)
        elif self.alarm:
            self.told = store.check([f"{here}/told"])

    def _listen(self, store: "process_group.Store", here: str) -> None:
        for rank in range(self.world_size):
            key = f"{here}/{rank}"
            said = store.get(key) if store.check([key]) else b""
            if rank not in self._heard or self._heard[rank][0] != said:
                self._heard[rank] = said, time.monotonic()


def diagnose_missing_ranks(signs: Mapping[int, Heartbeat | None], silent: Collection[int], now: float) -> list[str]:
    """What is to be said of a run that hangs, from each rank's last sign and from who gives none any more."""
    lines = [_of_silent(rank, signs[rank], now) for rank in sorted(silent)[:AT_MOST]]
    if len(silent) > AT_MOST:
        lines.append(f"nor have ranks {ranges(sorted(silent)[AT_MOST:])}")
    known = {rank: sign for rank, sign in signs.items() if sign and rank not in silent}
    gone = [rank for rank, sign in known.items() if sign.left]
    if gone:
        lines.append(f"{_ranks(gone)} left the loop in step {min(known[rank].step for rank in gone)}")
    alive = {rank: sign for rank, sign in known.items() if not sign.left}
    last = max((sign.step for sign in alive.values()), default=0)
    behind = [rank for rank, sign in alive.items() if sign.step < last]
    for rank in [] if silent else behind[:AT_MOST]:
        lines.append(
            f"rank {rank} (pid {alive[rank].pid} on {alive[rank].host}) lives, and is at step {alive[rank].step}; the others "
            f"wait in step {last}"
        )
    if not lines:
        lines.append(f"all {len(alive)} ranks live, and are in step {last}")
    places: dict[str, list[int]] = {}
    for rank, sign in alive.items():
        places.setdefault(sign.place, []).append(rank)
    fewest_first = sorted(places.items(), key=lambda item: len(item[1]))
    waiting = [f"{_ranks(r)} {'wait' if len(r) > 1 else 'waits'} in {place}" for place, r in fewest_first if place]
    return lines + waiting[:AT_MOST]


def _of_silent(rank: int, sign: Heartbeat | None, now: float) -> str:
    if sign is None:
        return f"rank {rank} has not been heard of: it has not come to the loop, or its machine is gone"
    return (
        f"rank {rank} (pid {sign.pid} on {sign.host}) has not been heard of for {now - sign.time:.0f} s, and then was at step "
        f"{sign.step}: its process is stopped, or its machine is gone"
    )


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"


def ranges(ranks: Iterable[int]) -> str:
    """Numbers in few words: 0-3, 5."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
