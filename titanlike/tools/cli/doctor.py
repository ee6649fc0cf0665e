"""`titanlike doctor`: what this machine lacks for training, and the remedies."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from titanlike.config import UserError
from titanlike.distributed import environment
from titanlike.tools.cli import processes
from titanlike.tools.cli.command import add_command
from titanlike.tools.doctor.finding import Finding
from titanlike.utils import system

DESCRIPTION = """\
Checks what training needs of this machine. Looks at Python, packages, torch, GPUs, driver, NCCL, float8, links, disk, shared
memory, ports and limits; RDMA devices (InfiniBand, RoCE, EFA) with locked and peer memory; the MTU of fast interfaces; and NCCL's
variables. Each line is "ok", "warning" with a remedy, or "missing" with the command to install it. Exits with code 1 if a required
part is missing.

With --network, compares the clocks of all nodes, and measures for up to a minute how fast GPUs communicate within nodes, between
nodes and all together. Start it on each node with the variables of ./run_train.sh, or with srun."""

WIDTH = 16  # of the longest subject


def add(commands: Any) -> None:
    """Adds `doctor` to the commands of `titanlike`."""
    parser = add_command(commands, "doctor", DESCRIPTION, run)
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of lines")
    text = "only compare the clocks of the nodes and measure the links between all GPUs, in one process per GPU"
    parser.add_argument("--network", action="store_true", help=text)
    text = "with --network: hardware whose bandwidth is expected (default: the data sheet of the GPUs)"
    parser.add_argument("--hardware", metavar="NAME|FILE", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Runs the checks and prints them. Returns the exit code."""
    findings = []
    for finding in _network(arguments) if arguments.network else _machine(arguments):
        findings.append(finding)
        if not arguments.json:
            optional = " (optional)" if finding.optional else ""
            remedy = f": {finding.remedy}" if finding.remedy else ""
            line = f"{finding.status:<8} {finding.subject:<{WIDTH}} {finding.text}{remedy}{optional}"
            print(line, flush=True)  # importing torch takes seconds
    if arguments.json and (findings or not arguments.network):
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    return int(any(finding.status == "missing" and not finding.optional for finding in findings))


def _machine(arguments: argparse.Namespace) -> Iterator[Finding]:
    if arguments.hardware:
        raise UserError("--hardware is for --network: titanlike doctor --network --hardware NAME")
    from titanlike.tools.doctor.checks import examine

    return examine()


def _network(arguments: argparse.Namespace) -> list[Finding]:
    """Returns the findings on rank 0, and none on others."""
    from titanlike.tools.planning.hardware import load_hardware

    hardware = load_hardware(arguments.hardware) if arguments.hardware else None
    processes.start_processes(None if system.num_gpus() else 2)
    from titanlike.distributed import process_group
    from titanlike.tools.doctor import network
    from titanlike.tools.planning.hardware import hardware_of

    with processes.session("auto") as device:
        found = network.findings(device, hardware or hardware_of(device), environment.rank_info().local_world_size)
        return found if process_group.is_main() else []
