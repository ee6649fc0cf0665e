"""Start Python programs by forking a process that has already imported torch, torchao and the library.

Importing them takes four to five CPU seconds a process, which is most of what a small distributed test costs. `Forked` is a
`subprocess.Popen` whose program starts within milliseconds. The program is a real process with its own session, environment,
working directory and signal handlers. Python programs that it starts in turn are forked as well, so that the processes of a
launcher remain its children.

The server forks twice and the process in between ends, so the program becomes a child of the nearest subreaper, which is this
process. `poll`, `wait` and `communicate` then work as for any other child.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
PR_SET_CHILD_SUBREAPER = 36
# Everything that a training process of any test imports.
PRELOADED = (
    "recipes.pretrain", "titanlike.cli.launch", "titanlike.cli.main", "titanlike.cli.torchrun", "titanlike.float8.all_gather",
    "titanlike.float8.linear", "titanlike.float8.tensor_parallel", "titanlike.parallelisms.pipeline", "torch._dynamo",
    "torch.distributed.pipelining", "torch.utils.tensorboard", "tests.training",
)  # fmt: skip

_start_process = subprocess.Popen._execute_child  # type: ignore[attr-defined]


class ForkServer:
    """The process that forks. It starts at the first request and ends when this process ends."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.lock = threading.Lock()

    def fork(self, request: dict[str, Any], streams: Sequence[int]) -> int:
        """Fork a process with these three standard streams. Returns its process id."""
        with self.lock:
            if self.process is None:
                self._start()
            socket.send_fds(self.control, [json.dumps(request).encode() + b"\n"], list(streams))
            answer = self.replies.readline()
        assert answer, "the fork server ended"
        return int(answer)

    def _start(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.control, theirs = socket.socketpair()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.forkserver", str(theirs.fileno())], cwd=ROOT, env=environment,
            stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True,
        )  # fmt: skip
        theirs.close()
        self.replies = self.control.makefile("rb")
        atexit.register(self._stop)

    def _stop(self) -> None:
        assert self.process is not None
        self.replies.close()
        self.control.close()
        self.process.wait(timeout=60)


SERVER = ForkServer()


class Forked(subprocess.Popen[Any]):
    """`subprocess.Popen` for `[python, script.py, ...]` and `[python, "-m", module, ...]`, started by the fork server."""

    def _execute_child(self, args: Any, *others: Any) -> None:
        call = _Call(args, *others)
        assert call.program is not None, f"{args} is not a Python program"
        streams = [mine if mine != -1 else own for own, mine in enumerate(call.streams)]
        request = {
            "program": call.program,
            "cwd": str(Path(call.cwd or ".").absolute()),
            "environment": dict(os.environ if call.env is None else call.env),
            "new_session": call.new_session,
            "pass_fds": [],
        }
        self.pid = SERVER.fork(request, streams)
        self._child_created = True
        self._close_pipe_fds(*call.pipes)  # type: ignore[attr-defined]


class _Call:
    """The arguments of `Popen._execute_child` that are used here. Their order is the same from Python 3.10 to 3.13."""

    def __init__(self, args: Any, *others: Any) -> None:
        words = [os.fsdecode(word) for word in args] if isinstance(args, list | tuple) else []
        self.program = _python_program(words)
        self.pass_fds, self.cwd, self.env = others[3], others[4], others[5]
        self.pipes = others[9:15]
        self.streams = (self.pipes[0], self.pipes[3], self.pipes[5])  # what the child reads, and what it writes
        self.new_session = bool(others[20])


def _python_program(words: Sequence[str]) -> list[str] | None:
    """The words after `python`, if they name a script or a module."""
    rest = list(words[1:])
    while rest[:1] == ["-u"]:
        rest.pop(0)
    is_python = bool(words) and Path(words[0]).name.startswith("python")
    return rest if is_python and rest and (rest[0].endswith(".py") or rest[0] == "-m") else None


def serve(control: socket.socket) -> NoReturn:
    """Fork at each request until the other side closes the connection."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a forked process does not touch, and so copy, these objects
    while True:
        content, streams, _, _ = socket.recv_fds(control, 2**20, 3)
        if not content:
            os._exit(0)
        while not content.endswith(b"\n"):
            content += control.recv(2**20)
        ours, theirs = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child:
                os.write(theirs, f"{child}\n".encode())
                os._exit(0)
            os.close(theirs)
            become(json.loads(content), streams)
        os.waitpid(between, 0)  # from here on the process is a child of the subreaper
        control.sendall(os.read(ours, 32))
        for descriptor in (ours, theirs, *streams):
            os.close(descriptor)


def become(request: dict[str, Any], streams: Sequence[int]) -> NoReturn:
    """Be the requested program, from here to the end of this process."""
    if request["new_session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    streams = [os.dup(stream) for stream in streams]  # first, for one of them may be in the place of another
    for own, stream in enumerate(streams):
        os.dup2(stream, own)
    kept = sorted({0, 1, 2, *request["pass_fds"]})
    for low, high in zip(kept, [*kept[1:], 2**16], strict=True):
        os.closerange(low + 1, high)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("SIGTERM", "SIGUSR1", "SIGALRM", "SIGCHLD", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    subprocess.Popen._execute_child = _fork_or_start  # type: ignore[attr-defined]
    code = _run(request["program"])
    for finish in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):  # type: ignore[attr-defined]
        with contextlib.suppress(OSError, ValueError):
            finish()
    os._exit(code)


def _run(program: list[str]) -> int:
    """Run a script or module as `__main__`. Returns the exit code that Python would give."""
    try:
        if program[0] == "-m":
            sys.argv = program[1:]
            sys.path[0] = str(Path.cwd())
            sys.modules.pop(program[1], None)  # it may be among the preloaded ones
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = program
            sys.path[0] = str(Path(program[0]).resolve().parent)
            runpy.run_path(str(Path(program[0]).absolute()), run_name="__main__")
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return (left.code or 0) & 0xFF
        print(left.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001  as the interpreter does
        traceback.print_exc()
        return 1
    return 0


def _fork_or_start(self: Any, args: Any, *others: Any) -> None:
    """In a forked process, for what it starts: fork once more where that is a Python program."""
    call = _Call(args, *others)
    if call.program is None or not args[0].startswith(sys.prefix):
        _start_process(self, args, *others)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    self.pid = os.fork()
    if self.pid == 0:
        gc.freeze()  # objects of the parent stay: what they hold would close files of this process
        atexit._clear()  # and what the parent cleans up at its end is not for this process to clean up
        request = {
            "program": call.program,
            "cwd": str(Path(call.cwd or ".").absolute()),
            "environment": dict(os.environ if call.env is None else call.env),
            "new_session": call.new_session,
            "pass_fds": list(call.pass_fds),
        }
        become(request, [mine if mine != -1 else own for own, mine in enumerate(call.streams)])
    self._child_created = True
    self._close_pipe_fds(*call.pipes)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
