"""A job while it runs: what its hosts say, what becomes of it, and Ctrl-C, which asks."""

import re
import signal
import sys
import time
from types import FrameType

from logs import GROUP, Logs
from rich.console import Console
from rich.live import Live
from rich.text import Text
from sent import SentJob, clock, described, line, stop
from service import Clients, NoAnswer

from titanlike.config import UserError

INTERVAL = 10.0  # seconds between two looks: many watchers of many hosts stay below what AWS allows
LONGEST = 60.0  # between two looks, where AWS does not answer
QUIET = 300.0  # without a terminal a line at least so often: what says nothing may be taken for hung, and ended
LAST_WORDS = 60.0  # seconds after a job's end in which its last lines may still come in
DETACHED = 128 + signal.SIGINT
CODES = {"Completed": 0, "Stopped": 128 + signal.SIGTERM}
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")
QUESTION = "Ctrl-C: d detaches, and the job goes on; s stops the job, which saves first; anything else watches on: "


def wait(clients: Clients, job: str, *, tail: int | None = None, interval: float = INTERVAL) -> int:
    """Show what becomes of a job and what it says, until it ends. Returns 0 if it has completed, 143 if it was stopped, 1 if it
    has failed, and 130 if the user has left before."""
    watch = Watch(clients, job, tail, interval)
    back = line("wait", job, clients.region)
    with watch.ctrl_c:
        try:
            sent = watch.run()
        except KeyboardInterrupt:
            sent = None
            print(file=sys.stderr)  # below the question
        except UserError as error:
            if watch.sent is None:
                raise
            raise UserError(f"{error}; the job itself goes on, and back to it: {back}") from None
        finally:
            watch.screen.close()
    if sent is None:
        print(f"detached, and the job goes on; back to it: {back}")
        return DETACHED
    print(ending(sent, clients.region))
    return CODES.get(sent.status, 1)


def show_logs(
    clients: Clients, job: str, *, follow: bool = False, tail: int | None = None, interval: float = INTERVAL
) -> None:
    """Show what a job has said; with `follow` also what it says until it ends."""
    watch = Watch(clients, job, tail, interval, statuses=False)
    if follow:
        watch.run()
    elif not watch.say_lines():
        sent = described(clients, job)
        state = f"; it is {sent.secondary}" if sent else ""
        raise UserError(f"{job}: there is no line of it in CloudWatch, in {GROUP} of {clients.region}{state}")


def ending(sent: SentJob, region: str) -> str:
    """How it ended, and how to go on."""
    seconds, cost = sent.seconds(), sent.cost()
    facts = ", ".join(filter(None, [clock(seconds) if seconds is not None else "", cost]))
    reason = sent.answer.get("FailureReason", "")
    text = f"{sent.name}: {sent.secondary}{f' ({facts})' if facts else ''}{f': {reason}' if reason else ''}"
    if sent.status != "Completed" and sent.run:
        text += f"\nto go on from its newest checkpoint: {line('resume', sent.name, region)}"
    return text


class Screen:
    """Lines; on a terminal in colour, with a live one below them."""

    def __init__(self) -> None:
        self.spoken = time.monotonic()
        self._console = Console(highlight=False) if sys.stdout.isatty() else None
        self._live: Live | None = None

    def say(self, text: str, host: str = "") -> None:
        """A line, of a host if one is named."""
        self.spoken = time.monotonic()
        head = f"[{host}] " if host else ""
        if self._console is None:
            print(head + text, flush=True)
        else:
            number = int(re.sub(r"\D", "", host) or 1)
            styles = (COLOURS[(number - 1) % len(COLOURS)], "") if host else ("", "bold")
            self._console.print(Text.assemble((head, styles[0]), (text, styles[1])), soft_wrap=True)

    def show(self, text: str) -> None:
        """The live line, where there is a terminal."""
        if self._console is None:
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(Text(text, style="dim", no_wrap=True, overflow="ellipsis"), refresh=True)

    def close(self) -> None:
        """Take the live line away."""
        if self._live is not None:
            self._live.stop()
            self._live = None


class CtrlC:
    """Keeps a first Ctrl-C until there is time for it, so that no line is lost; a second one gets out at once."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> "CtrlC":
        self._before = signal.signal(signal.SIGINT, self._pressed)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt


class Watch:
    """Looks at a job again and again, and says what is new."""

    def __init__(self, clients: Clients, job: str, tail: int | None, interval: float, *, statuses: bool = True) -> None:
        self.clients, self.job, self.interval, self.statuses = clients, job, interval, statuses
        self.logs, self.screen, self.ctrl_c = Logs(clients, job, tail), Screen(), CtrlC()
        self.sent: SentJob | None = None
        self.pause = interval
        self.is_away = False
        self._told: list[tuple[str, str]] = []  # of its history

    def run(self) -> SentJob | None:
        """Watch until it has ended; None if the user leaves before."""
        looks_after = 0
        while True:
            has_news = self._look()
            if self.sent is not None and not self.sent.is_running and not self.is_away:
                looks_after += 1
                is_cold = self.sent.seconds_since_end() > LAST_WORDS
                if is_cold or (looks_after > 1 and not has_news):
                    return self.sent
            self._rest()
            if self.ctrl_c.count and not self._ask():
                return None

    def say_lines(self) -> bool:
        """Show the lines that are new. Returns whether there were any."""
        has_any = False
        for host, words in self.logs.read():
            self.screen.say(words, host)
            has_any = True
        return has_any

    def _look(self) -> bool:
        """Returns whether there were lines that are new."""
        try:
            if self.sent is None or self.sent.is_running:
                self.sent = described(self.clients, self.job)
                if self.sent is None:
                    raise UserError(f"{self.job}: there is no such job in {self.clients.region}")
                self._say_history(self.sent)
            has_news = self.say_lines()
        except NoAnswer as error:
            if not self.is_away:
                self.screen.say(f"{error}; it is asked again and again, and the job goes on")
            self.is_away, self.pause = True, min(max(LONGEST, self.interval), 2 * self.pause)
            return False
        if self.is_away:
            self.screen.say("AWS answers again")
        self.is_away, self.pause = False, self.interval
        return has_news

    def _say_history(self, sent: SentJob) -> None:
        """What became of it since: the service adds to the list, and changes the words of the newest."""
        for index, step in enumerate(sent.history if self.statuses else []):
            what = (step["Status"], step.get("StatusMessage", ""))
            if what not in self._told[index : index + 1]:
                self._told[index : index + 1] = [what]
                self.screen.say(f"{step['StartTime'].astimezone():%H:%M:%S}  {'  '.join(filter(None, what))}")

    def _rest(self) -> None:
        end = time.monotonic() + self.pause
        while (left := end - time.monotonic()) > 0 and not self.ctrl_c.count:
            if self.statuses:
                self.screen.show(f"{self._state()}  Ctrl-C detaches or stops")
            time.sleep(min(left, 0.2))
        if self.statuses and time.monotonic() - self.screen.spoken > QUIET:
            self.screen.say(self._state())

    def _state(self) -> str:
        if self.sent is None or self.is_away:
            return f"{self.job}: AWS does not answer"
        since = self.sent.history[-1]["StartTime"] if self.sent.history else self.sent.created
        words = [f"{self.sent.secondary} for {clock(time.time() - since.timestamp())}", self.sent.machines]
        return "  ".join(filter(None, [*words, self.sent.cost()]))

    def _ask(self) -> bool:
        """What Ctrl-C is to do. Returns whether to watch on."""
        if not sys.stdin.isatty():
            return False
        self.screen.close()
        print(QUESTION, end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline()
        word = answer.strip().lower()
        if word == "s":
            try:
                self.screen.say(stop(self.clients, self.job))
            except UserError as error:
                self.screen.say(f"error: {error}")
        self.ctrl_c.count = 0
        return answer != "" and word != "d"  # the end of input: nobody is there
