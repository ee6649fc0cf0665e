"""CPU seconds of the tests, by file: those of all processes that a test starts. `pytest --costs FILE` writes them.

`pytest --cpu-budget SECONDS` fails above a budget, which holds for a machine on which `calibration` takes `REFERENCE` seconds, and
grows with the seconds that it takes here.
"""

import json
import os
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
STARTS = "starts and collection"
MODULES = "asyncio, ctypes, decimal, difflib, email, http.client, json, pydoc, sqlite3, tarfile, unittest, xml.dom"
REFERENCE = 0.1
INTERVAL = 20.0  # CPU seconds between calibrations: a machine that others use is slower for a while


def seconds(process: str = "self") -> float:
    """Returns the CPU seconds of a process, of the processes that it waited for, and of those that still run."""
    folder = Path("/proc", process)
    if not folder.exists():  # the process has ended, or the system has no /proc
        return sum(os.times()[:4]) if process == "self" else 0.0
    try:
        own = sum(map(int, (folder / "stat").read_text().rpartition(")")[2].split()[11:15])) / TICKS
        children = [
            child for thread in (folder / "task").iterdir() for child in (thread / "children").read_text().split()
        ]
    except OSError:  # it ended in between
        return 0.0
    return own + sum(map(seconds, children))


def calibration() -> float:
    """Returns the CPU seconds of an interpreter that imports modules. Tests, too, start processes, import and touch new memory."""
    command = [sys.executable, "-I", "-S", "-c", f"import {MODULES}"]
    used = os.wait4(os.posix_spawn(sys.executable, command, os.environ), 0)[2]
    return used.ru_utime + used.ru_stime


class Costs:
    """Measures each test in this process, and adds what the workers measured."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.files: dict[str, float] = defaultdict(float)
        self.calibrations: list[float] = []

    def pytest_sessionstart(self) -> None:
        self.calibrations.append(calibration())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        start = seconds()
        result = yield
        # Less, if a process has ended for which nobody has waited.
        self.files[item.nodeid.partition("::")[0]] += max(0.0, seconds() - start)
        if sum(self.files.values()) > INTERVAL * len(self.calibrations):
            self.calibrations.append(calibration())
        return result

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output = getattr(node, "workeroutput", {})
        for file, spent in output.get("costs", {}).items():
            self.files[file] += spent
        self.calibrations += output.get("calibrations", [])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        is_worker = hasattr(self.config, "workeroutput")
        if is_worker or not self.config.getoption("numprocesses", None):
            self.files[STARTS] += seconds() - sum(self.files.values())
        self.calibrations.append(calibration())
        if is_worker:
            self.config.workeroutput["costs"] = dict(self.files)  # type: ignore[attr-defined]
            self.config.workeroutput["calibrations"] = self.calibrations  # type: ignore[attr-defined]
        elif (budget := self.config.getoption("cpu_budget")) and self.relative() > budget and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def relative(self) -> float:
        """Returns the CPU seconds that the tests take on the machine of the budget."""
        return sum(self.files.values()) * REFERENCE / statistics.mean(self.calibrations)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        folders: dict[str, float] = defaultdict(float)
        for file, spent in self.files.items():
            folders[str(Path(file).parent) if "/" in file else file] += spent
        terminalreporter.section("CPU seconds")
        for folder, spent in sorted(folders.items(), key=lambda each: -each[1]):
            terminalreporter.write_line(f"{spent:7.1f}  {folder}")
        terminalreporter.write_line(
            f"{sum(self.files.values()):7.1f}  all; {self.relative():.0f} on the machine of the budget, "
            f"which is {self.config.getoption('cpu_budget') or 'not given'} (the calibration takes "
            f"{statistics.mean(self.calibrations):.3f} s, and {REFERENCE} s there)"
        )
        if path := self.config.getoption("costs"):
            Path(path).write_text(json.dumps(dict(sorted(self.files.items(), key=lambda each: -each[1])), indent=1))
