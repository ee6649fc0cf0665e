"""`python sagemaker/launch.py list | describe | logs | wait | stop | resume`: jobs that were already sent."""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from logs import GROUP
from machines import PRICES
from request import STAMP, base_name
from sent import PREFIX, PROGRAM, SentJob, clock, described, find, line, names, resume_request, stop
from service import Clients, clients, plainly

from titanlike.utils import system

ABOUT = {
    "list": "jobs whose names begin with --prefix, newest first",
    "describe": "what became of a job, where its things are, what it cost",
    "logs": "what its hosts have said",
    "wait": "what becomes of it and what its hosts say, until it ends; exit code 0: completed, 1: failed, 143: stopped",
    "stop": "tell it to stop: it saves first",
    "resume": "send the same request again: the run goes on from its newest checkpoint",
}


def build_parser() -> argparse.ArgumentParser:
    """The commands about jobs, and what each takes."""
    parser = argparse.ArgumentParser(prog=PROGRAM)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, about in ABOUT.items():
        one = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        if name != "list":
            one.add_argument(
                "job", metavar="JOB", help="its name, or that of its run, which stands for the run's newest job"
            )
        if name == "list":
            one.add_argument("--limit", type=_count, default=20, metavar="N", help="so many at most (20)")
        if name == "describe":
            one.add_argument("--json", action="store_true", help="all that SageMaker says of it")
        if name == "logs":
            one.add_argument("--follow", action="store_true", help="and what they say from now on, until it ends")
        if name in ("logs", "wait"):
            one.add_argument("--tail", type=_count, metavar="N", help="of what is there, the last so many lines (all)")
        if name == "resume":
            one.add_argument("--dry-run", action="store_true", help="print the request, and send nothing")
            one.add_argument("--wait", action="store_true", help="then show logs until it ends")
        one.add_argument("--region", default="", help="(AWS_REGION, or as your configuration says)")
        one.add_argument("--prefix", default=PREFIX, help=f"of names of jobs ({PREFIX})")
    return parser


def command(words: Sequence[str]) -> int:
    """Do what these words say. Returns the exit code."""
    options = build_parser().parse_args(words)
    system.exit_on_interrupt()
    try:
        code = _do(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` has seen enough, and Python would say so once more at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _do(options: argparse.Namespace) -> int:
    asked = clients(options.region)
    if options.command == "list":
        print(table(list_jobs(asked, options.prefix, options.limit), options.prefix, asked.region))
        return 0
    if options.command == "resume":
        return _resume(asked, options)
    job = find(asked, options.job, options.prefix)
    if options.command == "describe":
        answer = {name: value for name, value in job.answer.items() if name != "ResponseMetadata"}
        print(json.dumps(answer, indent=2, default=str) if options.json else description(job, asked.region))
    elif options.command == "stop":
        print(stop(asked, job.name))
    else:
        from watching import show_logs, wait

        if options.command == "wait":
            return wait(asked, job.name, tail=options.tail)
        show_logs(asked, job.name, follow=options.follow, tail=options.tail)
    return 0


def _resume(asked: Clients, options: argparse.Namespace) -> int:
    request = resume_request(asked, options.job, time.strftime(STAMP), options.prefix)
    if options.dry_run:
        print(json.dumps(request, indent=2))
        return 0
    name = request["TrainingJobName"]
    with plainly(asked.region):
        asked.sagemaker.create_training_job(**request)
    print(f"sent {name}")
    if options.wait:
        from watching import wait

        return wait(asked, name)
    print(f"to watch it: {line('wait', name, asked.region)}")
    return 0


def list_jobs(asked: Clients, prefix: str = PREFIX, limit: int = 20) -> list[SentJob]:
    """The newest jobs whose names begin with the prefix, newest first."""
    with ThreadPoolExecutor(4) as pool:  # one question a job; more at a time, and AWS asks for a pause
        jobs = pool.map(lambda name: described(asked, name), names(asked, base_name(prefix, ""), limit))
        return [job for job in jobs if job]


def table(jobs: Sequence[SentJob], prefix: str, region: str) -> str:
    """Jobs, one a line."""
    if not jobs:
        return f"no job in {region} has a name that begins with {base_name(prefix, '')}-"
    rows = [("job", "status", "machines", "started", "lasted", "cost")]
    for job in jobs:
        status = job.status if job.secondary == job.status else f"{job.status}: {job.secondary}"
        seconds, started = job.seconds(), job.started
        when = f"{started.astimezone():%Y-%m-%d %H:%M}" if started else "not yet" if job.is_running else "never"
        rows.append((job.name, status, job.machines, when, clock(seconds) if seconds is not None else "", job.cost()))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{word:<{width}}" for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if any("$" in job.cost() for job in jobs):
        lines.append(f"\nprices: {PRICES}")
    return "\n".join(lines)


def description(job: SentJob, region: str) -> str:
    """What a person wants to know of a job."""
    seconds, cost = job.seconds(), job.cost()
    facts = {
        "status": job.status if job.secondary == job.status else f"{job.status}: {job.secondary}",
        "reason": job.answer.get("FailureReason", ""),
        "run": job.run,
        "machines": f"{job.machines}{', spot' if job.is_spot else ''}, {region}",
        "created": f"{job.created.astimezone():%Y-%m-%d %H:%M:%S}",
        "lasted": clock(seconds) if seconds is not None else "",
        "billed": _billed(job),
        "cost": f"{cost} ({PRICES})" if "$" in cost else cost,
        **job.places(),
        "logs": f"{GROUP}, {job.name}/",
    }
    lines = [job.name, *(f"  {name:<13}{fact}" for name, fact in facts.items() if fact)]
    lines += ["", *_history(job)] if job.history else []
    if metrics := job.answer.get("FinalMetricDataList"):
        lines += ["", "last metrics", *(f"  {one['MetricName']:<20}{one['Value']:.6g}" for one in metrics)]
    return "\n".join(lines)


def _billed(job: SentJob) -> str:
    billed, trained = job.answer.get("BillableTimeInSeconds"), job.answer.get("TrainingTimeInSeconds")
    if billed is None or job.is_running:
        return ""
    saved = f", {1 - billed / trained:.0%} saved by spot" if job.is_spot and trained else ""
    return f"{billed:,} seconds of each machine{saved}"


def _history(job: SentJob) -> list[str]:
    lines = ["history"]
    for step in job.history:
        lasted = clock((step["EndTime"] - step["StartTime"]).total_seconds()) if step.get("EndTime") else ""
        when, message = f"{step['StartTime'].astimezone():%m-%d %H:%M:%S}", step.get("StatusMessage", "")
        words = f"  {when}  {step['Status']:<24}{lasted:>8}  {message}"
        lines.append(words.rstrip())
    return lines


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 on")
    return int(text)
