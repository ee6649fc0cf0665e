"""The programs that a shell script starts, found by running it with bash, in which every program is a recorder.

A script runs in a copy of its folder. Landlock, where the kernel has it, keeps it from writing elsewhere, and from the network.
"""

import ctypes
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from titanlike.config import UserError
from titanlike.config.base import shown

MAX_SECONDS = 10
MAX_FILE_BYTES, MAX_MEMORY = 2**24, 2**31
MAX_FILES, MAX_COPIED = 1000, 2**20  # of its folder, and bytes of one
MAX_VARIABLES = 100
# Real programs; what else a script starts is recorded, and ends well.
TOOLS = (
    *(
        "basename",
        "bash",
        "cat",
        "cut",
        "date",
        "dirname",
        "expr",
        "grep",
        "head",
        "mkdir",
        "readlink",
        "realpath",
        "sed",
    ),
    *("seq", "sort", "tail", "tee", "tr", "uname", "wc"),
)
# What bash reads before each script. A script may set PATH, `exec` and `bash -c` start programs too, and folders may be missing.
RECORDER = r"""
set -u
command_not_found_handle() {
    printf '%s\0' "$@" > "$TITANLIKE_RECORDS/$BASHPID"
    while (( $# )); do
        case ${1##*/} in bash | sh) shift; bash "$@"; return ;; esac
        shift
    done
}
for name in python python3 torchrun srun sbatch mpirun mpiexec deepspeed accelerate; do
    eval "$name() ( command_not_found_handle $name \"\$@\" )"
done
exec() { (( $# == 0 )) || { "$@"; exit; }; }
cd() { builtin cd "$@" 2> /dev/null || true; }
mkdir() { command mkdir "$@" 2> /dev/null || true; }
"""
PROGRAM = r"pretrain_\w+\.py"
LAUNCHERS = r"python[\d.]*|torchrun|srun|mpirun|deepspeed|accelerate"
# Paths of programs, which may be missing here, and must not start.
PATHS = re.compile(rf"""[^\s"'`=;|&()]*/(?=(?:{LAUNCHERS}|{PROGRAM})(?:["'\s]|$))""")
UNSET = re.compile(r": \$?([A-Za-z_]\w*|\d{1,2})(?:\[.*?\])?: unbound variable")

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT, NO_NEW_PRIVILEGES = 444, 445, 446, 38
WRITE_FILE, REFER, TRUNCATE = 1 << 1, 1 << 13, 1 << 14
WRITES = WRITE_FILE | sum(1 << bit for bit in range(4, 13))  # and removing and making entries of folders


class Script(NamedTuple):
    """What a script did."""

    commands: list[list[str]]
    unset: list[str]
    """Variables without a value, which it read as empty."""
    problem: str
    """The last line of its output, and its exit status."""


def run_script(name: str, text: str, folder: Path | None, env: Mapping[str, str], *, trust: bool) -> Script:
    """Runs a script, and returns the programs that it starts.

    Args:
        folder: whose files the script may read by relative paths.
        env: its environment.
        trust: run it where the kernel cannot confine it.
    """
    version, bash = landlock_version(), shutil.which("bash")
    if bash is None:
        raise UserError(f"{name}: a script is run to be read, which requires bash")
    if not version and not trust:
        raise UserError(
            f"{name}: a script is run to be read, with a recorder in place of programs, and this kernel cannot confine it: read "
            "it, then give --trust"
        )
    with TemporaryDirectory() as directory:
        root = Path(directory).resolve()
        for part in ("tools", "work", "records"):
            (root / part).mkdir()
        for tool in TOOLS:
            if found := shutil.which(tool):
                (root / "tools" / tool).symlink_to(found)
        for file in islice(folder.iterdir(), MAX_FILES) if folder else ():
            if file.is_file() and file.stat().st_size <= MAX_COPIED and os.access(file, os.R_OK):
                shutil.copyfile(file, root / "work" / file.name)
        script = root / "work" / (Path(name).name or "script")
        script.write_text(PATHS.sub("", text.replace("\r\n", "\n")), encoding="utf-8")
        for program in re.findall(PROGRAM, text):
            (root / "work" / program).touch()  # scripts ask whether it exists
        (root / "recorder").write_text(RECORDER)
        variables = {
            "HOME": str(root), "USER": "user", **env, "PATH": str(root / "tools"), "BASH_ENV": str(root / "recorder"),
            "TITANLIKE_RECORDS": str(root / "records"),
        }  # fmt: skip
        unset: list[str] = []
        while True:
            for record in (root / "records").iterdir():
                record.unlink()
            arguments = [""] * max([int(one) for one in unset if one.isdigit()], default=0)
            status = _run([bash, f"./{script.name}", *arguments], root, variables, version)
            output = (root / "output").read_text(errors="replace").replace(f"{root}/work/", "")
            new = [one for one in dict.fromkeys(UNSET.findall(output)) if one not in unset]
            if not new or len(unset) > MAX_VARIABLES:
                break
            unset += new
            variables |= {one: "" for one in new if not one.isdigit()}
        lines = [line for line in output.splitlines() if line.strip() and not line.startswith("+")]  # of set -x
        ended = f"exit status {status}" if status is not None else f"not done after {MAX_SECONDS} s"
        texts = [record.read_text(errors="replace") for record in (root / "records").iterdir()]
        commands = [one.replace(f"{root}/work", str(folder or ".")).split("\0")[:-1] for one in texts]
        return Script(commands, unset, "; ".join([*(shown(line.removeprefix("./")) for line in lines[-1:]), ended]))


def _run(command: list[str], root: Path, variables: Mapping[str, str], version: int) -> int | None:
    """Returns the exit status of a script, or None if it takes too long."""
    with (root / "output").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=root / "work", env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True, preexec_fn=partial(_confine, str(root), version),
        )  # fmt: skip
        try:
            return process.wait(MAX_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it left in the background
            process.wait()


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def landlock_version() -> int:
    """Returns the version of the kernel's Landlock interface, 0 without one."""
    return max(0, ctypes.CDLL(None).syscall(LANDLOCK_CREATE, None, 0, 1)) if sys.platform == "linux" else 0


def _confine(folder: str, version: int) -> None:
    """Limits what this process uses and, with Landlock, where it writes."""
    for limit, value in (
        (resource.RLIMIT_CPU, MAX_SECONDS),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_AS, MAX_MEMORY),
    ):
        resource.setrlimit(limit, (value, value))
    if not version:
        return
    libc = ctypes.CDLL(None)
    file = WRITE_FILE | (TRUNCATE if version >= 3 else 0)
    writes = WRITES | file | (REFER if version >= 2 else 0)
    # From version 4 on, TCP; from version 6 on, signals and abstract sockets.
    rules = _Ruleset(writes, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    ruleset = libc.syscall(LANDLOCK_CREATE, ctypes.byref(rules), ctypes.sizeof(rules), 0)
    for path, allowed in ((folder, writes), (os.devnull, file)):
        beneath = _PathBeneath(allowed, os.open(path, os.O_PATH))
        libc.syscall(LANDLOCK_ADD, ruleset, 1, ctypes.byref(beneath), 0)
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if libc.syscall(LANDLOCK_RESTRICT, ruleset, 0):
        raise OSError("landlock_restrict_self")
