"""A rank of a pool. Runs the functions that tests send."""

import gc
import os
import pickle
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist


def serve(rank: int, world_size: int, port: int) -> None:
    """Runs the functions received on standard input, a socket, until the test closes it."""
    pipe = Connection(os.dup(0))
    # Native stacks, ahead of faulthandler's: a thread of torch or gloo that crashes has no Python stack.
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    signal.signal(signal.SIGINT, signal.getsignal(signal.SIGINT))  # not fatal
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
    )
    # A run would unfreeze all objects at its end, also those that the fork server has frozen. Collections of later runs, which
    # traverse them, would take as long as the rest of a small run.
    gc.freeze = gc.unfreeze = lambda: None
    while True:
        try:
            received = pipe.recv_bytes()
        except EOFError:
            return
        try:
            function, arguments, named = pickle.loads(received)
            failed, result = False, function(*arguments, **named)
        except BaseException as error:  # noqa: BLE001  reported to the test
            failed, result = True, traceback.format_exc()
            if isinstance(error, AssertionError) and not error.args:  # with the values that it compares
                innermost = traceback.TracebackException.from_exception(error, limit=-1, capture_locals=True)
                result += "".join(innermost.stack.format())
        threads = len(list(Path("/proc/self/task").iterdir())) if sys.platform == "linux" else 0
        pipe.send_bytes(pickle.dumps((failed, result, threads)))  # `send` would share the memory of tensors


if __name__ == "__main__":
    sys.path[:] = sys.argv[4:]
    serve(*map(int, sys.argv[1:4]))
