"""A headless Chromium that tests drive through the DevTools protocol: with real key presses, window sizes and color schemes."""

import itertools
import json
import os
import select
import subprocess
from pathlib import Path
from typing import Any

from tests.debian import require

# The last option: the browser crashes where /dev/shm is small.
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
CODES = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
LIMIT = 120  # seconds for each answer


class Browser:
    """One window. `messages` has what pages have written to the console, and their errors."""

    def __init__(self, folder: Path) -> None:
        self.messages: list[str] = []
        self._numbers, self._rest = itertools.count(), b""
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        words = [
            require("chromium", "chromium"), *OPTIONS, f"--user-data-dir={folder / 'profile'}", "--remote-debugging-pipe",
            "about:blank",
        ]  # fmt: skip
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{answers}', "bash", *words],
                pass_fds=(commands, answers), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        os.close(commands)
        os.close(answers)
        self._session = ""
        pages = [each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        self._session = self.call("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """Ends the browser."""
        os.close(self._commands)
        os.close(self._answers)
        self._process.terminate()
        self._process.wait(LIMIT)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Returns the result of a method of the DevTools protocol."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != number:
            pass
        assert "error" not in answer, answer
        return dict(answer["result"])

    def open(self, address: str, width: int = 1200, scheme: str = "light") -> None:
        """Opens a page and waits until it is loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        for each in ("about:blank", address):  # an address that differs after the # alone would not be loaded again
            self.call("Page.navigate", url=each)
            while self._read().get("method") != "Page.loadEventFired":
                pass

    def evaluate(self, expression: str) -> Any:
        """Returns the value of an expression in JavaScript, which may be a promise."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str, times: int = 1) -> None:
        """Presses a key."""
        for _ in range(times):
            for kind in ("rawKeyDown", "keyUp"):
                self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=CODES[key])

    def _read(self) -> dict[str, Any]:
        """Returns the next answer or event."""
        while b"\0" not in self._rest:
            assert select.select([self._answers], [], [], LIMIT)[0], "the browser does not answer"
            part = os.read(self._answers, 2**20)
            assert part, "the browser has ended"
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if message.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.messages.append(str(message["params"]))
        return message
