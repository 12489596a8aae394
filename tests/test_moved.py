"""Old names of modules, classes and functions still work, and warn once."""

import pickle
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest
import yaml

from diffvision import moved
from diffvision.cli import main
from diffvision.mistakes import Mistake
from diffvision.training.settings import check

# Without the lab, which nothing else needs, the names that moved there are gone.
MODULES, NAMES = (
    {old: new for old, new in rows.items() if find_spec("diffvision.lab") or ".lab." not in new}
    for rows in (moved.MODULES, moved.NAMES)
)


@pytest.fixture
def forget_old_names():
    """Forget which old names this process has imported, so that they warn again."""
    for name in list(sys.modules):
        if moved._find_row(name) is not None:
            del sys.modules[name]


@pytest.mark.usefixtures("forget_old_names")
@pytest.mark.parametrize("old", MODULES)
def test_an_old_module_is_the_new_one_and_warns_once(old):
    new = MODULES[old]
    with pytest.warns(FutureWarning, match=f"{old} is now {new}:") as warned:
        module = import_module(old)
    assert len(warned) == 1
    assert warned[0].filename == __file__ or "importlib" in warned[0].filename
    assert module is import_module(new)
    assert module.__name__ == module.__spec__.name == new
    import_module(old)  # without a warning, which would be an error


@pytest.mark.parametrize("old", NAMES)
def test_an_old_name_is_the_new_one_and_warns_once(old):
    module, _, name = old.partition(":")
    new_module, _, new_name = NAMES[old].partition(":")
    vars(import_module(module)).pop(name, None)
    with pytest.warns(FutureWarning, match=f"{module}.{name} is now {new_module}.{new_name}:") as warned:
        value = getattr(import_module(module), name)
    assert (len(warned), warned[0].filename) == (1, __file__)
    assert value is getattr(import_module(new_module), new_name)
    getattr(import_module(module), name)


def test_no_row_hides_a_module_that_exists():
    finders = [finder for finder in sys.meta_path if not isinstance(finder, moved._Finder)]
    for old in MODULES:
        parent, _, name = old.rpartition(".")
        path = import_module(moved.find_current(parent)).__path__
        assert not any(finder.find_spec(f"{parent}.{name}", path) for finder in finders), old


def test_the_warning_names_the_line_that_imports():
    code = "import diffvision\n\nimport diffvision.models.vision as vision\nprint(vision.__name__)\n"
    done = subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "diffvision.models.vit"
    assert "<stdin>:3: FutureWarning: diffvision.models.vision is now diffvision.models.vit:" in done.stderr


@pytest.mark.usefixtures("forget_old_names")
def test_a_module_in_a_moved_package_is_the_new_one():
    with pytest.warns(FutureWarning, match="diffvision.training.durable is now") as warned:
        from diffvision.training.durable.finite import StepGuard
    assert len(warned) == 1
    from diffvision.training.fault_tolerance import StepGuard as New

    assert StepGuard is New


@pytest.mark.usefixtures("forget_old_names")
def test_a_pickle_may_name_an_old_module():
    pickled = b"cdiffvision.models.vision\nGridTransformer\n."
    with pytest.warns(FutureWarning, match="diffvision.models.vision is now"):
        cls = pickle.loads(pickled)
    assert cls.__module__ == "diffvision.models.vit"


def test_the_present_name_of_a_class_path(monkeypatch):
    monkeypatch.setitem(
        moved.NAMES, "diffvision.training.fault_tolerance.finite:Guard", "diffvision.training:StepGuard"
    )
    assert moved.find_current("diffvision.training.durable.finite.Guard") == "diffvision.training.StepGuard"
    assert moved.find_current("diffvision.models.vit.X") == "diffvision.models.vit.X"
    assert moved.find_current("diffvision") == "diffvision"


def test_a_lazy_package_knows_its_old_names(monkeypatch):
    import diffvision.training

    monkeypatch.setitem(moved.NAMES, "diffvision.training:Guard", "diffvision.training:StepGuard")
    with pytest.warns(FutureWarning, match="diffvision.training.Guard is now") as warned:
        guard = diffvision.training.Guard
    assert warned[0].filename == __file__
    assert guard is diffvision.training.StepGuard
    monkeypatch.delattr(diffvision.training, "Guard")
    with pytest.raises(AttributeError, match="no attribute 'Missing'"):
        diffvision.training.Missing  # noqa: B018


def test_a_recipe_with_an_old_class_path_is_checked_as_the_new_one(monkeypatch):
    monkeypatch.setitem(moved.MODULES, "diffvision.training.contrastive", "diffvision.training.clip")
    with pytest.raises(Mistake, match="ContrastiveModule takes no mdel"):
        check(["fit", "--model", "diffvision.training.contrastive.ContrastiveModule", "--model.mdel", "CLIP-debug"])


@pytest.mark.usefixtures("forget_old_names")
@pytest.mark.parametrize("allow", [[], ["--allow", "diffvision.training.durable"]])
def test_a_recipe_with_an_old_class_path_is_read(tmp_path, capsys, allow):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {class_path: ContrastiveModule, init_args: {model: DiffCLIP-debug}}\n"
        "trainer: {callbacks: [{class_path: diffvision.training.durable.finite.StepGuard}]}\n"
    )
    with pytest.warns(FutureWarning, match="diffvision.training.durable is now"), pytest.raises(SystemExit) as end:
        main(["fit", *allow, "--config", str(recipe), "--print_config"])
    assert end.value.code == 0
    callbacks = yaml.safe_load(capsys.readouterr().out)["trainer"]["callbacks"]
    assert callbacks[0]["class_path"].endswith(".StepGuard")
