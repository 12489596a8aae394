"""Small language models of every family."""

import functools

import pytest
from language_fixtures import small_model


@pytest.fixture
def make_model():
    return functools.partial(small_model, tied=False)


@pytest.fixture(params=["transformer-debug", "diff-debug", "diffv2-debug"])
def model(request):
    return small_model(request.param, tied=False)
