"""Starts Python programs by forking a process that has already imported torch, torchao and the library.

These imports take four to five CPU seconds per process, most of the time of a small distributed test. `Forked` is a
`subprocess.Popen` whose program starts within milliseconds. The program is a real process with its own session, environment,
working directory and signal handlers. Python programs that it starts in turn are forked as well, so that the processes of a
launcher remain its children.

The server forks twice and the intermediate process exits, so that the program becomes a child of the nearest subreaper, which is
this process. `poll`, `wait` and `communicate` work as for any other child.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import functools
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
    "recipes.pretrain", "titanlike.run.launch", "titanlike.tools.cli.main", "titanlike.distributed.torchrun",
    "titanlike.float8.all_gather", "titanlike.float8.linear", "titanlike.float8.tensor_parallel", "titanlike.models.llama.model",
    "titanlike.parallelisms.pipeline", "titanlike.tools.planning.hooks", "torch._dynamo", "torch.distributed.pipelining",
    "torch.utils.tensorboard", "tests.training",
)  # fmt: skip

NUM_SYNTHETIC_TOKENS = 200_000  # drawn and hashed by each rank

_start_process = subprocess.Popen._execute_child  # type: ignore[attr-defined]


class ForkServer:
    """The forking process. It is started at the first request and exits with this process."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.lock = threading.Lock()

    def fork(self, request: dict[str, Any], streams: Sequence[int]) -> int:
        """Forks a process with these three standard streams. Returns its process id."""
        with self.lock:
            if self.process is None:
                self._start()
            socket.send_fds(self.control, [json.dumps(request).encode() + b"\n"], list(streams))
            reply = self.replies.readline()
        assert reply, "the fork server exited"
        return int(reply)

    def _start(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.control, remote = socket.socketpair()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.forkserver", str(remote.fileno())], cwd=ROOT, env=environment,
            stdin=subprocess.DEVNULL, pass_fds=[remote.fileno()], start_new_session=True,
        )  # fmt: skip
        remote.close()
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
        self.pid = SERVER.fork(call.request(pass_fds=[]), call.child_streams())
        self._child_created = True
        self._close_pipe_fds(*call.pipes)  # type: ignore[attr-defined]


class _Call:
    """The arguments of `Popen._execute_child` that `Forked` supports. Their order is the same from Python 3.10 to 3.13."""

    def __init__(self, args: Any, *others: Any) -> None:
        command = [os.fsdecode(word) for word in args] if isinstance(args, list | tuple) else []
        self.program = _python_program(command)
        self.preexec, self.pass_fds, self.cwd, self.env = others[1], others[3], others[4], others[5]
        self.pipes = others[9:15]
        self.streams = (self.pipes[0], self.pipes[3], self.pipes[5])  # of the child; -1: inherited
        self.new_session = bool(others[20])

    def child_streams(self) -> list[int]:
        """Returns the descriptors of the child's standard streams."""
        return [stream if stream != -1 else inherited for inherited, stream in enumerate(self.streams)]

    def request(self, pass_fds: Sequence[int]) -> dict[str, Any]:
        """Returns what `become` needs, as JSON values."""
        return {
            "program": self.program,
            "cwd": str(Path(self.cwd or ".").absolute()),
            "environment": dict(os.environ if self.env is None else self.env),
            "new_session": self.new_session,
            "pass_fds": list(pass_fds),
        }


def _python_program(command: Sequence[str]) -> list[str] | None:
    """Returns the arguments of `python` if the command runs a script or a module."""
    rest = list(command[1:])
    while rest[:1] == ["-u"]:
        rest.pop(0)
    is_python = bool(command) and Path(command[0]).name.startswith("python")
    return rest if is_python and rest and (rest[0].endswith(".py") or rest[0] == "-m") else None


def serve(control: socket.socket) -> NoReturn:
    """Forks at each request until the client closes the connection."""
    for name in PRELOADED:
        importlib.import_module(name)
    _prepare_runs()
    gc.collect()
    gc.freeze()  # a garbage collection in a forked process does not touch, and so copy, these objects
    while True:
        content, streams, _, _ = socket.recv_fds(control, 2**20, 3)
        if not content:
            os._exit(0)
        while not content.endswith(b"\n"):
            content += control.recv(2**20)
        read_end, write_end = os.pipe()
        intermediate = os.fork()
        if intermediate == 0:
            child = os.fork()
            if child:
                os.write(write_end, f"{child}\n".encode())
                os._exit(0)
            os.close(write_end)
            become(json.loads(content), streams)
        os.waitpid(intermediate, 0)  # the program is now a child of the subreaper
        control.sendall(os.read(read_end, 32))
        for descriptor in (read_end, write_end, *streams):
            os.close(descriptor)


def _prepare_runs() -> None:
    """Computes once what each run would compute again, and leaves out what no test of a forked run looks at."""
    from titanlike.config.schema import describe
    from titanlike.data.tokens import datasets
    from titanlike.distributed import environment
    from titanlike.recipe import PretrainRecipe
    from titanlike.run import hooks, run_dir

    describe(PretrainRecipe)  # cached
    hooks.entry_points = functools.cache(hooks.entry_points)
    for point in ("checked", "completed", "out_of_memory"):
        hooks.entry_points(group=f"titanlike.{point}")
    versions, commit = run_dir.versions(), run_dir._git("rev-parse", "HEAD")
    run_dir.versions = lambda: versions
    run_dir._git = lambda *_: commit
    os.fsync = lambda _: None
    environment.ERROR_DELAY = 1.0  # tests notice an exit sooner than a launcher on a busy machine
    datasets.SYNTHETIC_TOKENS = NUM_SYNTHETIC_TOKENS


def become(request: dict[str, Any], streams: Sequence[int]) -> NoReturn:
    """Runs the requested program in this process, and exits."""
    if request["new_session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    streams = [os.dup(stream) for stream in streams]  # dup2 could overwrite one that is still needed
    for descriptor, stream in enumerate(streams):
        os.dup2(stream, descriptor)
    kept = sorted({0, 1, 2, *request["pass_fds"]})
    for low, high in zip(kept, [*kept[1:], 2**16], strict=True):
        os.closerange(low + 1, high)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM, signal.SIGCHLD, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) != signal.SIG_IGN:  # a new program ignores what its parent ignores
            signal.signal(number, signal.SIG_DFL)
    subprocess.Popen._execute_child = _fork_or_start  # type: ignore[attr-defined]
    code = _run(request["program"])
    for finish in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):  # type: ignore[attr-defined]
        with contextlib.suppress(OSError, ValueError):
            finish()
    os._exit(code)


def _run(program: list[str]) -> int:
    """Runs a script or module as `__main__`. Returns the exit code of the interpreter."""
    try:
        if program[0] == "-m":
            sys.argv = program[1:]
            sys.path[0] = str(Path.cwd())
            sys.modules.pop(program[1], None)  # it may be preloaded
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = program
            sys.path[0] = str(Path(program[0]).resolve().parent)
            runpy.run_path(str(Path(program[0]).absolute()), run_name="__main__")
    except SystemExit as exit:
        if exit.code is None or isinstance(exit.code, int):
            return (exit.code or 0) & 0xFF
        print(exit.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001  like the interpreter
        traceback.print_exc()
        return 1
    return 0


def _fork_or_start(self: Any, args: Any, *others: Any) -> None:
    """Replaces `Popen._execute_child` in a forked process: forks again for Python programs."""
    call = _Call(args, *others)
    if call.program is None or not args[0].startswith(sys.prefix):
        _start_process(self, args, *others)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    self.pid = os.fork()
    if self.pid == 0:
        gc.freeze()  # finalizers of the parent's objects would close files of this process
        atexit._clear()  # exit handlers belong to the parent
        if call.preexec:
            call.preexec()
        become(call.request(call.pass_fds), call.child_streams())
    self._child_created = True
    self._close_pipe_fds(*call.pipes)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
