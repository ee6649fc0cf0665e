"""Start of a command in several processes, and the options that commands on a model share. Imports torch late."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from titanlike.config import UserError
from titanlike.distributed import environment, launch_config
from titanlike.tools.arguments import positive_int
from titanlike.utils import system

if TYPE_CHECKING:
    import torch

SHUTDOWN_TIMEOUT = 10  # seconds


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name a model, and where and how it computes."""
    parser.add_argument(
        "path", type=Path, metavar="RUN|CHECKPOINT|FOLDER", help="run, checkpoint or Hugging Face folder"
    )
    parser.add_argument(
        "--step", type=positive_int, default=0, metavar="N", help="step of the run (default: the newest)"
    )
    text = "precision to compute in (default: bfloat16 on a GPU, float32 on a CPU)"
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help=text)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto", help="device to compute on")


def start_processes(default: int | None = None) -> None:
    """Runs this command in several processes if NPROC asks for it, and exits with their exit code.

    Returns in each of them, and in the only process. `default` is their number without NPROC: by default one per GPU.
    """
    if environment.rank_info().started_by_launcher:
        environment.terminate_with_launcher()
        return
    config = launch_config.launch_config(default_processes=default)
    if config.num_nodes > 1:
        environment.check_address(config.master_address)
        print(f"launch  {config.label()}", file=sys.stderr, flush=True)
    if config.world_size == 1:
        return
    system.set_variables(system.share_cores(config.processes_per_node))
    launch_config.set_launch_id()
    from titanlike.distributed.torchrun import torchrun

    sys.exit(torchrun(config, ["-m", "titanlike.tools.cli.main", *sys.argv[1:]], SHUTDOWN_TIMEOUT))


@contextmanager
def session(device: str) -> Iterator["torch.device"]:
    """Joins the process group. A user's mistake ends the process with its message."""
    from titanlike.distributed import process_group

    with process_group.session(device, option="--device") as chosen:  # type: ignore[arg-type]
        yield chosen


def read_lines(file: str) -> Sequence[str]:
    """Returns the lines of a file that are not empty, or of standard input for "-"."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return [line for line in text.split("\n") if line]
