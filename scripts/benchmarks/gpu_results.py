"""A pytest plugin that writes down each result when it is known: `pytest -p gpu_results --results FILE`.

FILE has a JSON per line: first the machine, then a line when a test starts and one with its outcome. A test that starts
and has no outcome was running when its process ended. A later call on the same FILE leaves out the tests in it. Once a
CUDA error has made the device unusable the session stops, for every later test would fail too. Under pytest-xdist the
controller writes.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from machine import environment

LOST = ("CUDA error", "CUDA driver error", "AcceleratorError")
LENGTH = 1500  # characters of a failure


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, metavar="FILE")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Results(config.getoption("--results"), hasattr(config, "workerinput")))


class Results:
    def __init__(self, file: Path, is_worker: bool) -> None:
        self.file, self.is_worker = file, is_worker
        self.outcomes: dict[str, dict[str, object]] = {}  # of tests that run
        self.session: pytest.Session | None = None
        if not file.exists():
            self.write(environment("cuda" if torch.cuda.is_available() else "cpu"))

    def write(self, row: dict[str, object]) -> None:
        if self.is_worker:
            return
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session = session

    def read(self) -> dict[str, dict[str, object]]:
        """Return the last row of each test."""
        rows = map(json.loads, self.file.read_text().splitlines())
        return {row["test"]: row for row in rows if "test" in row}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        done = self.read()
        items[:] = [item for item in items if item.nodeid not in done]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.outcomes[nodeid] = {"test": nodeid, "outcome": "passed", "seconds": 0.0}
        self.write({"test": nodeid, "outcome": "started"})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = self.outcomes[report.nodeid]
        outcome["seconds"] = round(outcome["seconds"] + report.duration, 2)  # type: ignore[operator]
        if not report.passed:
            outcome |= {"outcome": report.outcome, "why": report.longreprtext[-LENGTH:]}
        if report.when == "teardown":
            self.write(outcome | dict(report.user_properties))
        if report.failed and any(lost in report.longreprtext for lost in LOST) and self.session is not None:
            self.session.shouldstop = "the device is lost"

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Answer for all calls on this file, where there were tests left or none."""
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            passed = all(row["outcome"] in ("passed", "skipped") for row in self.read().values())
            session.exitstatus = pytest.ExitCode.OK if passed else pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what all calls on this file have shown."""
        rows = self.read().values()
        for row in rows:
            if row["outcome"] in ("started", "failed"):
                terminalreporter.write_line(f"{row['outcome']}: {row['test']}")
        terminalreporter.write_line(f"{self.file.name}: {dict(Counter(row['outcome'] for row in rows))}")
