"""Settings of every test: one thread a worker (two workers share two cores) and a fixed seed."""

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports triton: its kernels then run in the interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

ASSETS = Path(__file__).parent / "assets"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-all", action="store_true", help="with -m faults: every cell of the resume matrix")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow the cases that `quick` leaves out, and sort tests that train in forked processes to the front.

    What some others start (compiled graphs, threads of autograd) does not survive a fork, and autograd then refuses to
    work there.
    """
    for item in items:
        quick = item.get_closest_marker("quick")
        if quick is not None and item.callspec.id not in quick.args:  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.get_closest_marker("forks") is None)


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def assets() -> Path:
    return ASSETS
