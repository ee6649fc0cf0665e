"""What the hosts of a job say, as CloudWatch keeps it."""

import re
from collections import deque
from collections.abc import Iterator
from typing import Any

from service import Clients, is_missing, plainly

GROUP = "/aws/sagemaker/TrainingJobs"
# Colours, movements of the cursor, and all else that is no text: a log is not to write elsewhere on a screen.
CONTROL = re.compile(r"\x1b\[[0-9;?]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
PAGE = 10_000  # lines at most


class Stream:
    """What one host says, page by page."""

    def __init__(self, logs: Any, name: str) -> None:
        self.name = name
        self.host = re.sub(r"-\d+$", "", name.rpartition("/")[2])  # algo-1 of JOB/algo-1-1234567890
        self.lines: deque[tuple[int, str]] = deque()  # fetched and not yet shown: their time, and what they say
        self.is_read = False  # up to now
        self._logs, self._token = logs, ""

    def fetch(self) -> None:
        """The next page. It was the last when AWS gives the same token again; an empty one may be followed by others."""
        answer = self._page(self._token, startFromHead=True)
        self.lines.extend(_lines(answer))
        self.is_read = answer["nextForwardToken"] == self._token
        self._token = answer["nextForwardToken"]

    def fetch_last(self, count: int) -> None:
        """So many lines, from the end."""
        token, lines, forward = "", deque[tuple[int, str]](), ""
        while len(lines) < count:
            answer = self._page(token, startFromHead=False, limit=min(count - len(lines), PAGE))
            lines.extendleft(reversed(_lines(answer)))
            forward = forward or answer["nextForwardToken"]
            if answer["nextBackwardToken"] == token:
                break
            token = answer["nextBackwardToken"]
        self.lines, self._token = lines, forward

    def _page(self, token: str, **words: Any) -> dict[str, Any]:
        if token:
            words["nextToken"] = token
        return self._logs.get_log_events(logGroupName=GROUP, logStreamName=self.name, **words)


class Logs:
    """What all hosts of a job say, by time. Whatever fails on the way, nothing is lost or shown twice."""

    def __init__(self, clients: Clients, job: str, tail: int | None = None) -> None:
        self.clients, self.job, self.tail = clients, job, tail
        self.streams: dict[str, Stream] = {}

    def read(self) -> Iterator[tuple[str, str]]:
        """The hosts and lines that there are now and that were not read before."""
        with plainly(self.clients.region):
            for name in self._names():
                self.streams.setdefault(name, Stream(self.clients.logs, name))
        streams = list(self.streams.values())
        if self.tail is not None and streams:
            self._skip_to_tail(streams, self.tail)
            self.tail = None
        for stream in streams:
            stream.is_read = False
        while True:
            with plainly(self.clients.region):
                for stream in streams:
                    while not (stream.lines or stream.is_read):
                        stream.fetch()
            first = _first(streams)
            if first is None:
                return
            _, message = first.lines.popleft()
            for line in re.split(r"[\r\n]+", message.rstrip().lstrip("\r\n")):  # a bar of progress writes over itself
                yield first.host, CONTROL.sub("", line)

    def _names(self) -> list[str]:
        from botocore.exceptions import ClientError

        found: list[str] = []
        words = {"logGroupName": GROUP, "logStreamNamePrefix": f"{self.job}/"}
        while True:
            try:
                answer = self.clients.logs.describe_log_streams(**words)
            except ClientError as error:
                if is_missing(error):
                    return []  # no job of this account has said anything yet
                raise
            found += [stream["logStreamName"] for stream in answer["logStreams"]]
            if not answer.get("nextToken"):
                return found
            words["nextToken"] = answer["nextToken"]

    def _skip_to_tail(self, streams: list[Stream], tail: int) -> None:
        with plainly(self.clients.region):
            for stream in streams:
                stream.fetch_last(tail)
        for _ in range(sum(len(stream.lines) for stream in streams) - tail):
            if first := _first(streams):
                first.lines.popleft()


def _lines(answer: dict[str, Any]) -> list[tuple[int, str]]:
    return [(event["timestamp"], event["message"]) for event in answer["events"]]


def _first(streams: list[Stream]) -> Stream | None:
    """The stream whose next line is the oldest."""
    return min((stream for stream in streams if stream.lines), key=lambda stream: stream.lines[0][0], default=None)
