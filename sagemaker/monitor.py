"""Monitors a running job: status changes, log lines and Ctrl-C."""

import re
import signal
import sys
import time

from job_status import JobStatus, clock, command, describe, now, stop
from logs import GROUP, Logs
from service import Clients, TransientError

from titanlike.config import UserError
from titanlike.utils.live_line import LiveLine

INTERVAL = 10.0  # seconds between polls, which keeps many monitors of many hosts below AWS's request limits
MAX_DELAY = 60.0  # seconds between polls while AWS does not respond
QUIET_INTERVAL = 300.0  # without a terminal, the status is printed at least this often: CI systems end silent commands
LATE_LINES = 60.0  # seconds after a job's end during which log lines may still arrive
DETACHED = 128 + signal.SIGINT
EXIT_CODES = {"Completed": 0, "Stopped": 128 + signal.SIGTERM}
COLORS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")
QUESTION = (
    "Ctrl-C: d detaches and leaves the job running; s stops the job, which saves first; any other key continues: "
)


def wait(clients: Clients, job: str, *, tail: int | None = None, interval: float = INTERVAL) -> int:
    """Prints a job's status changes and log lines until it ends. Returns 0 if it completed, 143 if it was stopped, 1 if it
    failed, 130 if the user detached."""
    monitor = JobMonitor(clients, job, tail, interval)
    reattach = f"to reattach: {command('wait', job, clients.region)}"
    with monitor.interrupt:
        try:
            status = monitor.run()
        except KeyboardInterrupt:
            status = None
            print(file=sys.stderr)  # ends the line of the question
        except UserError as error:
            if monitor.status is None:
                raise
            raise UserError(f"{error}; the job keeps running; {reattach}") from None
        finally:
            monitor.line.close()
    if status is None:
        print(f"detached, the job keeps running; {reattach}")
        return DETACHED
    print(summary(status, clients.region))
    return EXIT_CODES.get(status.status, 1)


def show_logs(
    clients: Clients, job: str, *, follow: bool = False, tail: int | None = None, interval: float = INTERVAL
) -> None:
    """Prints a job's log lines; with `follow`, until it ends."""
    monitor = JobMonitor(clients, job, tail, interval, show_status=False)
    if follow:
        monitor.run()
    elif not monitor.print_new_lines():
        status = describe(clients, job)
        state = f"; its status is {status.secondary}" if status else ""
        raise UserError(f"{job}: no log lines in CloudWatch group {GROUP} of {clients.region}{state}")


def summary(status: JobStatus, region: str) -> str:
    """Returns the result of a job, and how to resume it."""
    facts = ", ".join(filter(None, [status.duration(), status.cost()]))
    text = f"{status.name}: {status.secondary}{f' ({facts})' if facts else ''}"
    text += f": {status.reason}" if status.reason else ""
    if status.status != "Completed" and status.run:
        text += f"\nto resume from the newest checkpoint: {command('resume', status.name, region)}"
    return text


class DeferredInterrupt:
    """Defers the first Ctrl-C until `pending` is checked, so that no line is lost. The second one interrupts at once."""

    pending = False

    def __enter__(self) -> None:
        self._previous = signal.signal(signal.SIGINT, self._handle)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _handle(self, *_: object) -> None:
        if self.pending:
            raise KeyboardInterrupt
        self.pending = True


class JobMonitor:
    """Polls a job and prints what is new."""

    def __init__(
        self, clients: Clients, job: str, tail: int | None, interval: float, *, show_status: bool = True
    ) -> None:
        self.clients, self.job, self.interval, self.show_status = clients, job, interval, show_status
        self.logs, self.interrupt = Logs(clients, job, tail), DeferredInterrupt()
        self.line = LiveLine(plain_interval=QUIET_INTERVAL, transient=True, style="dim")
        self.status: JobStatus | None = None
        self.delay = interval
        self.is_disconnected = False
        self._history: list[tuple[str, str]] = []  # printed so far

    def run(self) -> JobStatus | None:
        """Monitors the job until it ends. Returns None if the user detaches."""
        polls_after_end = 0
        while True:
            has_new_lines = self._poll()
            if self.status is not None and not self.status.is_active and not self.is_disconnected:
                polls_after_end += 1
                is_old = (now() - self.status.ended).total_seconds() > LATE_LINES
                if is_old or (polls_after_end > 1 and not has_new_lines):
                    return self.status
            self._sleep()
            if self.interrupt.pending and not self._ask():
                return None

    def print_new_lines(self) -> bool:
        """Prints new log lines. Returns whether there were any."""
        has_any = False
        for host, text in self.logs.read():
            number = int(re.sub(r"\D", "", host) or 1)
            self.line.print((f"[{host}] ", COLORS[(number - 1) % len(COLORS)]), text)
            has_any = True
        return has_any

    def _poll(self) -> bool:
        """Returns whether there were new log lines."""
        try:
            if self.status is None or self.status.is_active:
                self.status = describe(self.clients, self.job)
                if self.status is None:
                    raise UserError(f"{self.job}: no such job in {self.clients.region}")
                self._print_history(self.status)
            has_new_lines = self.print_new_lines()
        except TransientError as error:
            if not self.is_disconnected:
                self._print(f"{error}; retrying, the job keeps running")
            self.is_disconnected, self.delay = True, min(max(MAX_DELAY, self.interval), 2 * self.delay)
            return False
        if self.is_disconnected:
            self._print("AWS responds again")
        self.is_disconnected, self.delay = False, self.interval
        return has_new_lines

    def _print(self, text: str) -> None:
        self.line.print((text, "bold"))

    def _print_history(self, status: JobStatus) -> None:
        """Prints new status transitions. SageMaker appends to the list, and updates the message of the last entry."""
        for index, step in enumerate(status.history if self.show_status else []):
            entry = (step["Status"], step.get("StatusMessage", ""))
            if entry not in self._history[index : index + 1]:
                self._history[index : index + 1] = [entry]
                self._print(f"{step['StartTime'].astimezone():%H:%M:%S}  {'  '.join(filter(None, entry))}")

    def _sleep(self) -> None:
        end = time.monotonic() + self.delay
        while (remaining := end - time.monotonic()) > 0 and not self.interrupt.pending:
            if self.show_status:
                self.line.update(self._state() + ("  Ctrl-C detaches or stops" if self.line.is_terminal else ""))
            time.sleep(min(remaining, 0.2))

    def _state(self) -> str:
        if self.status is None or self.is_disconnected:
            return f"{self.job}: no response from AWS"
        since = self.status.history[-1]["StartTime"] if self.status.history else self.status.created
        duration = clock(time.time() - since.timestamp())
        return "  ".join(
            filter(None, [f"{self.status.secondary} for {duration}", self.status.instances, self.status.cost()])
        )

    def _ask(self) -> bool:
        """Asks what Ctrl-C should do. Returns whether to continue monitoring."""
        if not sys.stdin.isatty():
            return False
        self.line.close()
        print(QUESTION, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        answer = line.strip().lower()
        if answer == "s":
            try:
                self._print(stop(self.clients, self.job))
            except UserError as error:
                self._print(f"error: {error}")
        self.interrupt.pending = False
        return line != "" and answer != "d"  # an empty line without "\n" is the end of the input
