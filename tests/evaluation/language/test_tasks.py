"""Checkpoints on disk through the evaluations, to files; bad input refused before anything runs."""

import pytest
import torch
from language_fixtures import check_written, evaluate_models, write_models

from diffvision.data.datasets.mapping_text import training_documents as mappings
from diffvision.data.datasets.needle_documents import training_documents
from diffvision.evaluation.language import low_bit, pruning
from diffvision.evaluation.language.evaluate_language_command import run
from diffvision.evaluation.language.language_options import METHODS, SCHEMES, LanguageOptions
from diffvision.evaluation.language.language_suite import evaluate_language
from diffvision.evaluation.language.many_shot import Example, Task
from diffvision.evaluation.language.tasks import LANGUAGE_EVALUATIONS, Work
from diffvision.opening import open_model

SMALL = LanguageOptions(
    tokens=120,
    window=24,
    form="synthetic",
    lengths=(90,),
    depths=(0.0, 1.0),
    needles=("1x1", "2x2"),
    facts=(1, 2),
    samples=1,
    shots=(1, 4),
    permutations=2,
    mappings=1,
    pruning_methods=("snap",),
    pruning_ratios=(0.5,),
    continuation=8,
    schemes=("qk_int4_smooth", "cache_2"),
    batch_size=16,
)


TASKS = [task for task, evaluation in LANGUAGE_EVALUATIONS.items() if evaluation.reads not in ("rows", "questions")]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Two checkpoints with their tokenizer, and texts."""
    home = tmp_path_factory.mktemp("language")
    texts = [*training_documents(count=30, lengths=(40, 90)), *mappings(10)]
    return write_models(home, texts)


@pytest.fixture(scope="module")
def results(home):
    return evaluate_models(run, home, TASKS, SMALL)


def test_every_task_of_every_model_has_numbers(results):
    assert list(results) == ["plain", "diff-debug"]
    for metrics in results.values():
        assert {key.partition("/")[0] for key in metrics} == set(TASKS)
        assert metrics["recall_errors/2x1/malformed/90_high"] >= metrics["recall_errors/2x1/malformed/90"]
        assert metrics["many_shot/chance"] == 0.25


def test_every_task_writes_numbers_and_a_picture(results, home):
    check_written(results, home, TASKS)


def test_the_options_of_the_library_are_enough_in_python(home):
    model = open_model(str(home / "diff-debug"))
    task = Task([Example("a", "x"), Example("b", "y")], [Example("c", "y")])
    options = LanguageOptions(shots=(2,))
    own = evaluate_language(Work(model, options, label_tasks=[task]), ["many_shot"])
    assert own["many_shot/chance"] == 0.5
    documents = [torch.arange(64)]
    assert evaluate_language(Work(model, LanguageOptions(window=8), documents), ["outliers"])


def test_names_of_options_are_those_of_the_tables():
    assert list(METHODS) == [*pruning.METHODS]
    assert (*low_bit.SCHEMES,) == SCHEMES
