"""The table behind `diffvision models`, compared with the models."""

import sys
from pathlib import Path

import pytest

from diffvision.models import names as model_names
from diffvision.models import parameters

ALL = [(library, name) for library, names in parameters.recorded().items() for name in names]
SMALL = [(library, name) for library, name in ALL if "debug" in name]
REMEDY = "write the table anew: python -m diffvision.models.parameters"


def test_the_table_has_every_model():
    assert {library: list(names) for library, names in parameters.recorded().items()} == parameters.names(), REMEDY


@pytest.mark.parametrize(("library", "name"), SMALL)
def test_the_table_has_the_parameters_of_small_models(library, name):
    assert parameters.recorded()[library][name] == parameters.count_parameters(library, name), REMEDY


@pytest.mark.nightly
def test_the_table_has_the_parameters_of_all_models():
    wrong = [
        name
        for library, name in ALL
        if parameters.recorded()[library][name] != parameters.count_parameters(library, name)
    ]
    assert not wrong, REMEDY


def test_names_of_models_are_those_of_the_hosts(monkeypatch):
    import open_clip
    import timm

    from diffvision.models.clip_configs import CONFIGS

    # Other tests register models of their own.
    registered = timm.models._registry._model_entrypoints
    known = {name for name in timm.list_models() if registered[name].__module__.startswith(("timm.", "diffvision."))}
    shipped = {path.stem for path in Path(open_clip.__file__).with_name("model_configs").glob("*.json")} | set(CONFIGS)
    listed = {"timm": known, "open_clip": shipped & set(open_clip.list_models())}
    for library in listed:
        monkeypatch.delitem(sys.modules, library)
    model_names._files.cache_clear()
    assert {
        library: set(names) for library, names in model_names.names_by_library().items() if library != "language"
    } == listed
