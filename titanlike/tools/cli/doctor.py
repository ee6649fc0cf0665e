"""`titanlike doctor`: what this machine lacks for training, and the remedies."""

import argparse
import json
from dataclasses import asdict
from typing import Any

from titanlike.config import UserError
from titanlike.distributed import environment

DESCRIPTION = """\
Checks Python, packages, torch, GPUs, driver, NCCL, float8, links, disk, shared memory, ports and limits of this machine; RDMA
devices (InfiniBand, RoCE, EFA) with locked and peer memory; the MTU of fast interfaces; and NCCL's variables. Each line is "ok",
"warning" with a remedy, or "missing" with the command to install it. Exits with code 1 if a required part is missing."""

WIDTH = 16  # of the longest subject


def add(commands: Any) -> None:
    """Adds `doctor` to the commands of `titanlike`."""
    parser = commands.add_parser(
        "doctor",
        help="what this machine lacks for training",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of lines")


def run(arguments: argparse.Namespace) -> int:
    """Runs the checks and prints them. Returns the exit code."""
    from titanlike.tools.doctor import examine

    findings = []
    try:
        for finding in examine():
            findings.append(finding)
            if not arguments.json:
                optional = " (optional)" if finding.optional else ""
                remedy = f": {finding.remedy}" if finding.remedy else ""
                line = f"{finding.status:<8} {finding.subject:<{WIDTH}} {finding.text}{remedy}{optional}"
                print(line, flush=True)  # importing torch takes seconds
    except UserError as error:  # such as MASTER_PORT=x
        environment.fail(error)
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    return int(any(finding.status == "missing" and not finding.optional for finding in findings))
