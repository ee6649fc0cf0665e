"""Runs a command on null GPUs, and records what it does there.

    python -m titanlike.tools.null_gpu [--device h100] [--devices 8] [--record FILE] COMMAND...

PyTorch runs unmodified, and kernels compute nothing: see docs/performance.md.
"""

import argparse
import shutil
import sys
from pathlib import Path

from titanlike.tools.null_gpu import library, record


def main() -> None:
    """Runs the command. Exits with its code, or with 1 if the order of collectives differs between ranks."""
    parser = argparse.ArgumentParser(
        prog="python -m titanlike.tools.null_gpu", description="Runs a command on null GPUs."
    )
    parser.add_argument("--device", choices=sorted(library.devices()), default="h100")
    parser.add_argument("--devices", type=int, default=8, help="GPUs of the machine (default: 8)")
    parser.add_argument("--memory", type=float, metavar="GIB", help="memory of a GPU instead of the device's own")
    parser.add_argument(
        "--ranks", type=int, default=0, metavar="N", help="one process, as rank 0 of N whose others are absent"
    )
    parser.add_argument("--record", type=Path, metavar="FILE", help="JSON of what each process did")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("a command is missing, such as: python recipes/pretrain.py")
    if shutil.which(command[0]) is None:
        parser.error(f"{command[0]!r} is not a program in PATH")
    if options.devices < 1:
        parser.error(f"--devices {options.devices}: use 1 or more")
    if options.ranks < 0:
        parser.error(f"--ranks {options.ranks}: use 1 or more")
    if options.record and not options.record.parent.is_dir():
        parser.error(f"--record {options.record}: there is no directory {options.record.parent}")
    try:
        code, found = record.run(command, options.device, options.devices, options.memory, options.ranks)
    except (library.Unavailable, library.BuildFailed) as error:
        sys.exit(f"null GPU: {error}")
    except KeyboardInterrupt:  # the command has received it, too
        sys.exit(130)
    if options.record:
        options.record.write_text(record.as_json(found))
    print(record.summary(found), file=sys.stderr)
    mismatch = found["mismatch"]
    if mismatch:
        print(mismatch, file=sys.stderr)
    sys.exit(code or (1 if mismatch else 0))


if __name__ == "__main__":
    main()
