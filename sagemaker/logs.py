"""The log lines of a job's hosts, from CloudWatch."""

import re
from collections import deque
from collections.abc import Iterator
from typing import Any

from service import Clients, NotFound

GROUP = "/aws/sagemaker/TrainingJobs"
# ANSI escape sequences and control characters, which could overwrite other lines of the terminal.
CONTROL = re.compile(r"\x1b\[[0-9;?]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
MAX_PAGE = 10_000  # events


class Stream:
    """The log stream of one host, read page by page. boto3 has no paginator for `GetLogEvents`."""

    def __init__(self, logs: Any, name: str) -> None:
        self.name = name
        self.host = re.sub(r"-\d+$", "", name.rpartition("/")[2])  # algo-1 of JOB/algo-1-1234567890
        self.events: deque[tuple[int, str]] = deque()  # fetched and not yet returned: timestamp, message
        self.at_end = False
        self._logs, self._token = logs, ""

    def fetch(self) -> None:
        """Fetches the next page. The token repeats at the end of the stream; pages before the end may be empty."""
        page = self._page(self._token, startFromHead=True)
        self.events.extend(_events(page))
        self.at_end = page["nextForwardToken"] == self._token
        self._token = page["nextForwardToken"]

    def fetch_last(self, count: int) -> None:
        """Fetches the last `count` events."""
        events: deque[tuple[int, str]] = deque()
        token = forward_token = ""
        while len(events) < count:
            page = self._page(token, startFromHead=False, limit=min(count - len(events), MAX_PAGE))
            events.extendleft(reversed(_events(page)))
            forward_token = forward_token or page["nextForwardToken"]
            if page["nextBackwardToken"] == token:
                break
            token = page["nextBackwardToken"]
        self.events, self._token = events, forward_token

    def _page(self, token: str, **parameters: Any) -> dict[str, Any]:
        if token:
            parameters["nextToken"] = token
        return self._logs.get_log_events(logGroupName=GROUP, logStreamName=self.name, **parameters)


class Logs:
    """Merges the streams of all hosts by time. After an error, `read` continues without losing or repeating lines."""

    def __init__(self, clients: Clients, job: str, tail: int | None = None) -> None:
        self.clients, self.job, self.tail = clients, job, tail
        self.streams: dict[str, Stream] = {}

    def read(self) -> Iterator[tuple[str, str]]:
        """Yields the host and text of each new line."""
        for name in self._stream_names():
            self.streams.setdefault(name, Stream(self.clients.logs, name))
        streams = list(self.streams.values())
        if self.tail is not None and streams:
            for stream in streams:
                stream.fetch_last(self.tail)
            for _ in range(sum(len(stream.events) for stream in streams) - self.tail):
                _pop_oldest(streams)
            self.tail = None
        for stream in streams:
            stream.at_end = False
        while True:
            for stream in streams:
                while not (stream.events or stream.at_end):
                    stream.fetch()
            if not any(stream.events for stream in streams):
                return
            host, message = _pop_oldest(streams)
            # A progress bar separates its states by carriage returns.
            for line in re.split(r"[\r\n]+", message.rstrip().lstrip("\r\n")):
                yield host, CONTROL.sub("", line)

    def _stream_names(self) -> list[str]:
        paginator = self.clients.logs.get_paginator("describe_log_streams")
        try:
            pages = list(paginator.paginate(logGroupName=GROUP, logStreamNamePrefix=f"{self.job}/"))
        except NotFound:  # no job of this account has written a log yet
            return []
        return [stream["logStreamName"] for page in pages for stream in page["logStreams"]]


def _events(page: dict[str, Any]) -> list[tuple[int, str]]:
    return [(event["timestamp"], event["message"]) for event in page["events"]]


def _pop_oldest(streams: list[Stream]) -> tuple[str, str]:
    """Removes the oldest fetched event. Returns its host and message."""
    oldest = min((stream for stream in streams if stream.events), key=lambda stream: stream.events[0][0])
    return oldest.host, oldest.events.popleft()[1]
