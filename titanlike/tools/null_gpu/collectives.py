"""Reads the logs of collectives that ranks on null GPUs leave, and compares their order.

NCCL matches the calls of ranks on a communicator by their order alone. A call hangs if another rank calls another operation, or the
same with another size.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

OPERATIONS = (
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "gather", "scatter", "split", "send",
    "receive",
)  # fmt: skip
_HEADER = struct.Struct("<32s64siiiiQ")  # log_header of device/nccl.c
_ENTRY = struct.Struct("<IIIIQQ")  # entry


@dataclass(frozen=True)
class Call:
    """What one rank called on a communicator."""

    operation: str
    type: int
    peer: int
    count: int

    def __str__(self) -> str:
        peer = (
            f" {'to' if self.operation == 'send' else 'from'} {self.peer}"
            if self.operation in ("send", "receive")
            else ""
        )
        return f"{self.operation}{peer} of {self.count} elements, type {self.type}"


@dataclass(frozen=True)
class Log:
    """The calls of one rank on one communicator."""

    communicator: str
    name: str
    size: int
    rank: int
    global_rank: int
    calls: list[Call]


def read_log(path: Path) -> Log:
    """Reads one log."""
    with path.open("rb") as file:
        data = file.read(_HEADER.size)
        identity, name, size, rank, global_rank, _, end = _HEADER.unpack(data)
        calls = []
        position = _HEADER.size
        while position < end:
            file.seek(position)
            operation, kind, _, peer, count, stored = _ENTRY.unpack(file.read(_ENTRY.size))
            calls.append(Call(OPERATIONS[operation], kind, peer, count))
            position += _ENTRY.size + (stored + 63) // 64 * 64
    return Log(identity.rstrip(b"\0").decode(), name.rstrip(b"\0").decode(), size, rank, global_rank, calls)


def read_logs(folder: Path) -> list[Log]:
    """Reads all logs of a folder, in order of communicator and rank."""
    logs = [read_log(path) for path in folder.iterdir() if path.suffix[1:].isdecimal()]
    return sorted(logs, key=lambda log: (log.communicator, log.rank))


def mismatch(logs: list[Log]) -> str | None:
    """Returns where the ranks of a communicator differ, with both sequences, or None."""
    ranks: dict[str, list[Log]] = {}
    for log in logs:
        ranks.setdefault(log.communicator, []).append(log)
    for group in ranks.values():
        if len(group) < group[0].size:
            missing = sorted(set(range(group[0].size)) - {log.rank for log in group})
            return f"Communicator {group[0].name}: ranks {missing} never joined, where the others wait for them."
        found = _collectives_differ(group) or _messages_differ(group)
        if found:
            return found
    return None


def _collectives_differ(group: list[Log]) -> str | None:
    first = group[0]
    expected = [call for call in first.calls if call.operation not in ("send", "receive")]
    for log in group[1:]:
        calls = [call for call in log.calls if call.operation not in ("send", "receive")]
        if calls != expected:
            return _difference(first, expected, log, calls, "the order of collectives differs: NCCL would hang")
    return None


def _messages_differ(group: list[Log]) -> str | None:
    by_rank = {log.rank: log for log in group}
    for sender in group:
        for receiver in group:
            sent = [call for call in sender.calls if call.operation == "send" and call.peer == receiver.rank]
            received = [
                call
                for call in by_rank[receiver.rank].calls
                if call.operation == "receive" and call.peer == sender.rank
            ]
            if [(c.type, c.count) for c in sent] != [(c.type, c.count) for c in received]:
                return _difference(
                    sender, sent, receiver, received, "messages sent are not those received: NCCL would hang"
                )
    return None


def _difference(first: Log, expected: list[Call], other: Log, calls: list[Call], what: str) -> str:
    position = next(
        (
            i
            for i, (a, b) in enumerate(zip(expected, calls, strict=False))
            if (a.type, a.count, a.operation) != (b.type, b.count, b.operation)
        ),
        min(len(expected), len(calls)),
    )
    lines = [f"Communicator {first.name} ({first.size} ranks), call {position}: {what}."]
    for log, sequence in ((first, expected), (other, calls)):
        lines.append(f"  rank {log.global_rank} ({log.rank} of the communicator), {len(sequence)} calls:")
        for i in range(max(0, position - 3), min(len(sequence), position + 4)):
            lines.append(f"  {'->' if i == position else '  '} {i}: {sequence[i]}")
        if position >= len(sequence):
            lines.append(f"  -> {position}: nothing")
    return "\n".join(lines)
