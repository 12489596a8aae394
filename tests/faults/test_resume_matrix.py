"""Runs that are interrupted and resumed against runs never stopped, in every bit that they leave.

A sample of the matrix in which every value occurs; the whole of it with `--faults-all`.
"""

import random
from dataclasses import astuple

import pytest

from resume_matrix import Case, Matrix, cases

pytestmark = [
    pytest.mark.faults,
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:resumed from:UserWarning"),
]


def values(chosen: list[Case]) -> set[tuple]:
    """Return the name and value of every parameter of these cells."""
    rows = [(*astuple(case.setting), case.cut, case.workers, case.ranks) for case in chosen]
    return {(column, value) for row in rows for column, value in enumerate(row)}


def sample() -> list[Case]:
    """Return few cells in which every value occurs, mixed by a fixed seed."""
    everything = cases()
    random.Random(0).shuffle(everything)
    chosen: list[Case] = []
    while missing := values(everything) - values(chosen):
        chosen.append(max(everything, key=lambda case: len(values([case]) & missing)))
    return chosen


def pytest_generate_tests(metafunc):
    if "case" not in metafunc.fixturenames:
        return
    chosen = cases() if metafunc.config.getoption("faults_all") else sample()
    marks = [[pytest.mark.forks] if case.ranks != (1,) else [] for case in chosen]
    cells = [pytest.param(case, marks=mark, id=str(case)) for case, mark in zip(chosen, marks, strict=True)]
    metafunc.parametrize("case", cells)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("matrix"))


def test_an_interrupted_run_is_the_run_never_stopped(case, matrix, tmp_path):
    matrix.check(case, tmp_path / "kept")
