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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that train in forked processes come first: what some others start (compiled graphs, threads of autograd)
    does not survive a fork, and autograd then refuses to work there."""
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
