"""`python sagemaker/launch.py list | describe | logs | wait | stop | resume`: operations on submitted jobs."""

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from job_status import JobStatus, clock, command, describe, find_job, job_names, resume_request, stop
from logs import GROUP
from request import PREFIX, TIMESTAMP, base_name
from service import Clients, make_clients

from titanlike.tools.arguments import positive_int
from titanlike.utils import system

COMMANDS = {
    "list": "list the jobs whose names begin with --prefix, newest first",
    "describe": "show a job's status, files and cost",
    "logs": "print the log lines of all hosts",
    "wait": "print status changes and log lines until the job ends; exit code 0: completed, 1: failed, 143: stopped",
    "stop": "stop a job, which saves a checkpoint first",
    "resume": "submit the same request again: the run resumes from its newest checkpoint",
}


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the commands."""
    parser = argparse.ArgumentParser(prog="python sagemaker/launch.py")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        one = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name == "list":
            one.add_argument("--limit", type=positive_int, default=20, metavar="N", help="maximum number of jobs (20)")
        else:
            one.add_argument(
                "job", metavar="JOB", help="name of a job, or of a run, which selects the run's newest job"
            )
        if name == "describe":
            one.add_argument("--json", action="store_true", help="print SageMaker's full description")
        if name == "logs":
            one.add_argument("--follow", action="store_true", help="continue with new lines until the job ends")
        if name in ("logs", "wait"):
            one.add_argument("--tail", type=positive_int, metavar="N", help="begin with the last N lines (all)")
        if name == "resume":
            one.add_argument("--dry-run", action="store_true", help="print the request and exit")
            one.add_argument("--wait", action="store_true", help="then print logs until the job ends")
        one.add_argument("--region", default="", help="(AWS_REGION, or the configured region)")
        one.add_argument("--prefix", default=PREFIX, help=f"prefix of job names ({PREFIX})")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Executes a command line. Returns the exit code."""
    options = build_parser().parse_args(arguments)
    system.exit_on_interrupt()
    clients = make_clients(options.region)
    if options.command == "list":
        print(table(list_jobs(clients, options.prefix, options.limit), options.prefix, clients.region))
        return 0
    if options.command == "resume":
        return _resume(clients, options)
    job = find_job(clients, options.job, options.prefix)
    if options.command == "describe":
        description = {key: value for key, value in job.description.items() if key != "ResponseMetadata"}
        print(json.dumps(description, indent=2, default=str) if options.json else details(job, clients.region))
    elif options.command == "stop":
        print(stop(clients, job.name))
    else:
        from monitor import show_logs, wait

        if options.command == "wait":
            return wait(clients, job.name, tail=options.tail)
        show_logs(clients, job.name, follow=options.follow, tail=options.tail)
    return 0


def _resume(clients: Clients, options: argparse.Namespace) -> int:
    request = resume_request(clients, options.job, time.strftime(TIMESTAMP), options.prefix)
    if options.dry_run:
        print(json.dumps(request, indent=2))
        return 0
    clients.sagemaker.create_training_job(**request)
    print(f"submitted {request['TrainingJobName']}")
    return after_submit(clients, request["TrainingJobName"], wait=options.wait)


def after_submit(clients: Clients, name: str, *, wait: bool) -> int:
    """Monitors a submitted job, or prints the command that does. Returns the exit code."""
    if wait:
        import monitor

        return monitor.wait(clients, name)
    print(f"to monitor it: {command('wait', name, clients.region)}")
    return 0


def list_jobs(clients: Clients, prefix: str = PREFIX, limit: int = 20) -> list[JobStatus]:
    """Returns the newest jobs whose names begin with the prefix, newest first."""
    with ThreadPoolExecutor(4) as pool:  # one request per job; more threads are throttled
        jobs = pool.map(lambda name: describe(clients, name), job_names(clients, base_name(prefix, ""), limit))
        return [job for job in jobs if job]


def table(jobs: Sequence[JobStatus], prefix: str, region: str) -> str:
    """Formats jobs as a table."""
    if not jobs:
        return f"no job in {region} has a name that begins with {base_name(prefix, '')}-"
    rows = [("job", "status", "instances", "started", "duration", "cost")]
    for job in jobs:
        start = f"{job.started.astimezone():%Y-%m-%d %H:%M}" if job.started else "not yet" if job.is_active else "never"
        rows.append((job.name, _state(job), job.instances, start, job.duration(), job.cost()))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if sources := {job.price_source for job in jobs if "$" in job.cost()}:
        lines.append(f"\nprices: {'; '.join(sorted(sources))}")
    return "\n".join(lines)


def details(job: JobStatus, region: str) -> str:
    """Formats all facts about a job."""
    cost = job.cost()
    billed, trained = (job.description.get(f"{name}TimeInSeconds") for name in ("Billable", "Training"))
    saved = f", {1 - billed / trained:.0%} saved by spot" if job.is_spot and billed is not None and trained else ""
    facts = {
        "status": _state(job),
        "reason": job.reason,
        "run": job.run,
        "instances": f"{job.instances}{', spot' if job.is_spot else ''}, {region}",
        "created": f"{job.created.astimezone():%Y-%m-%d %H:%M:%S}",
        "duration": job.duration(),
        "billed": "" if billed is None or job.is_active else f"{billed:,} seconds per instance{saved}",
        "cost": f"{cost} ({job.price_source})" if "$" in cost else cost,
        **job.locations(),
        "logs": f"{GROUP}, {job.name}/",
    }
    lines = [job.name, *(f"  {name:<13}{fact}" for name, fact in facts.items() if fact)]
    lines += ["", "history"] if job.history else []
    for step in job.history:
        duration = clock((step["EndTime"] - step["StartTime"]).total_seconds()) if step.get("EndTime") else ""
        start, message = f"{step['StartTime'].astimezone():%m-%d %H:%M:%S}", step.get("StatusMessage", "")
        lines.append(f"  {start}  {step['Status']:<24}{duration:>8}  {message}".rstrip())
    if metrics := job.description.get("FinalMetricDataList"):
        lines += ["", "last metrics", *(f"  {one['MetricName']:<20}{one['Value']:.6g}" for one in metrics)]
    return "\n".join(lines)


def _state(job: JobStatus) -> str:
    return job.status if job.secondary == job.status else f"{job.status}: {job.secondary}"
