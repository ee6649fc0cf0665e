"""Random damages of files and folders, and the answers that are allowed to them."""

import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titanlike.checkpoint.store import manifest_hash
from titanlike.config import UserError

SECONDS = 10  # for one case, on a busy machine
JUNK: list[Any] = [
    None, True, -1, 0, 3, 2**70, 1.5, 1e308, "", "9", "\0", "ü" * 300, [], {}, [[]], {"a": 1}, "../../etc/passwd", "nan", [None],
]  # fmt: skip


class Hang(BaseException):
    """Not an Exception, which the code may convert."""


@contextmanager
def within_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang(f"not done within {SECONDS} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def refused_or(function: Callable[[], Any], done: str = "") -> Any:
    """Returns the result of a function, or the message of its UserError, which must be one readable sentence.

    Other errors name what was done to its files.
    """
    with within_limit():
        try:
            return function()
        except UserError as error:
            message = str(error)
        except BaseException as error:
            raise AssertionError(done) from error
    assert message and "\n" not in message and len(message) < 2000, message
    assert not any(name in message for name in ("Traceback", "object at 0x", "errors.pydantic.dev"))
    return message


def replace_by_folder(path: Path, random: random.Random) -> None:
    remove(path)
    path.mkdir()


def replace_by_link(path: Path, random: random.Random) -> None:
    remove(path)
    path.symlink_to(random.choice(["/nowhere", "/dev/null", path.name, "/", str(path.parent)]))


def empty(path: Path, random: random.Random) -> None:
    remove(path)
    path.touch()


def remove(path: Path, _: Any = None) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def cut(path: Path, random: random.Random) -> None:
    if path.is_file() and path.stat().st_size:
        os.truncate(path, random.randrange(path.stat().st_size))


def extend(path: Path, random: random.Random) -> None:
    if path.is_file():
        with path.open("ab") as file:
            file.write(random.randbytes(random.choice([1, 8, 16, 1000])))


def flip(path: Path, random: random.Random) -> None:
    content = bytearray(path.read_bytes() if path.is_file() else b"")
    for _ in range(random.choice([1, 1, 5])):
        if content:
            content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    remove(path)
    path.write_bytes(content)


def noise(path: Path, random: random.Random) -> None:
    size = path.stat().st_size if path.is_file() else 100
    remove(path)
    path.write_bytes(random.choice([b"\xff", b"\0", b"[", b'{"a":', random.randbytes(1)]) * min(size, 200_000))


def change_json(path: Path, random: random.Random) -> None:
    """Replaces, removes or adds a value somewhere in a JSON file, or nests it deeply."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        noise(path, random)
        return
    if random.random() < 0.1:
        deep = "[" * 100_000
        path.write_text(random.choice([deep, f'{{"format": {deep}']))
        return
    parent, key = None, None
    value = values
    while isinstance(value, dict | list) and value and (parent is None or random.random() < 0.8):
        key = random.choice(list(value) if isinstance(value, dict) else range(len(value)))
        parent, value = value, value[key]
    if parent is None:
        values = random.choice(JUNK)
    elif random.random() < 0.2:
        del parent[key]
    elif random.random() < 0.1 and isinstance(parent, dict):
        parent["planted"] = 1
    else:
        parent[key] = random.choice(JUNK)
    if "sha256" in values if isinstance(values, dict) else False:  # a forged manifest of a checkpoint
        content = {name: each for name, each in values.items() if name != "sha256"}
        values["sha256"] = manifest_hash(content)
    path.write_text(json.dumps(values))


DAMAGES = [replace_by_folder, replace_by_link, empty, remove, cut, extend, flip, flip, noise]


def damage(folder: Path, random: random.Random) -> str:
    """Damages one or two entries below a folder. Returns what was done."""
    done = []
    for _ in range(random.choice([1, 1, 1, 2])):
        entries = sorted(path for path in folder.rglob("*") if path.exists())
        if not entries:
            break
        path = random.choice(entries)
        choices = DAMAGES + [change_json] * 10 * (path.suffix == ".json")
        change = random.choice([one for one in choices if path.is_file() or one in DAMAGES[:4]])
        change(path, random)
        done.append(f"{change.__name__} {path.relative_to(folder)}")
    return ", ".join(done)
