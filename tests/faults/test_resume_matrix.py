"""Runs that are interrupted and resumed against runs never stopped, in every bit that they leave.

A sample of the matrix in which every value occurs; the whole of it with `--faults-all`.
"""

import random
from dataclasses import astuple
from pathlib import Path

import pytest

import tiny_runs
from resume_matrix import CUTS, Case, cases, outcome_of, verdict
from tiny_runs import Outcome

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
def data(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("matrix") / "data"
    tiny_runs.write_data(root)
    return root


@pytest.fixture(scope="module")
def whole(data):
    """Return the outcome of a case's run that is not interrupted, trained once."""
    known: dict[Case, Outcome] = {}

    def outcome(case: Case) -> Outcome:
        if case.whole not in known:
            known[case.whole] = outcome_of(data, data.parent / f"whole{len(known)}", case.whole)
        return known[case.whole]

    return outcome


def test_an_interrupted_run_is_the_run_never_stopped(case, data, whole, tmp_path):
    outcome = outcome_of(data, tmp_path / "kept", case)
    assert len(outcome.began) == 1 + len(CUTS[case.cut])
    assert not verdict(case, outcome, whole(case))
