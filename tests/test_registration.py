"""Models are registered with a host imported before diffvision or after it, in threads and in other processes."""

import importlib
import importlib.util
import subprocess
import sys

import pytest

import diffvision
from diffvision import registration


def run(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


HEAVY = {"lightning", "pytorch_lightning", "webdataset", "sklearn", "matplotlib", "jsonargparse"}
QUICK = """
import sys
import diffvision, diffvision.models, diffvision.data, diffvision.evaluation, diffvision.export, diffvision.training
assert not {"torch", "timm", "open_clip", "numpy"} & set(sys.modules), "import diffvision is to be quick"
"""
DIFFVISION_FIRST = f"""
import sys, threading, importlib.util
import diffvision
assert importlib.util.find_spec("timm") and "timm" not in sys.modules  # to look for a host is not to import it
known = []
def work():
    import timm.models
    known.append(timm.is_model("diff_vit_base"))
threads = [threading.Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
assert known == [True] * 8, known
assert "open_clip" not in sys.modules
import timm, open_clip
from timm import create_model, list_models
assert timm.is_model("diff_vit_base") and timm.is_model("adapted_vit") and "diff_vit_base" in list_models("diff_vit*")
assert type(create_model("diff_vit_debug").blocks[0]).__module__ == "diffvision.models.vit"
assert "DiffCLIP-ViT-B-16" in open_clip.list_models()
assert open_clip.create_model("DiffCLIP-debug").visual is not None
assert callable(diffvision.adapt) and diffvision.models.clip.model_names()
assert not {HEAVY!r} & set(sys.modules), {HEAVY!r} & set(sys.modules)
"""


def test_diffvision_and_its_packages_import_nothing_heavy():
    run(QUICK)


@pytest.mark.slow
def test_diffvision_before_its_hosts():
    run(DIFFVISION_FIRST)


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host of a few lines, and a module that registers with it."""
    (tmp_path / "a_host").mkdir()
    (tmp_path / "a_host/__init__.py").write_text("known = []\nloader = __loader__\n")
    (tmp_path / "a_host/part.py").write_text("from a_host import known\nseen = list(known)\n")
    (tmp_path / "our_side.py").write_text("import a_host\na_host.known.append('ours')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setitem(registration.MODULES, "a_host", ("our_side",))
    yield tmp_path
    for name in ("a_host", "a_host.part", "our_side"):
        sys.modules.pop(name, None)


def import_(name):
    importlib.invalidate_caches()
    return importlib.import_module(name)


def test_a_host_is_registered_with_once_and_sees_its_usual_loader(host):
    before = [*sys.meta_path]
    registration.register("a_host")
    registration.register("a_host")
    assert len(sys.meta_path) == len(before) + 1
    assert importlib.util.find_spec("a_host") is not None
    assert "a_host" not in sys.modules
    assert import_("a_host.part").seen == ["ours"]
    a_host = sys.modules["a_host"]
    assert a_host.known == ["ours"]
    assert type(a_host.loader).__name__ == "SourceFileLoader"
    assert a_host.__spec__.loader is a_host.loader is a_host.__loader__
    assert sys.meta_path == before
    registration.register("a_host")
    assert a_host.known == ["ours"]
    assert importlib.reload(a_host).known == []  # as of any registry


def test_a_host_that_is_imported_already_is_registered_with_at_once(host):
    a_host = import_("a_host")
    registration.register("a_host")
    assert a_host.known == ["ours"]


def test_a_host_that_is_too_old_is_imported_with_a_warning(host):
    (host / "our_side.py").write_text("from a_host import what_it_lacks\n")
    registration.register("a_host")
    with pytest.warns(UserWarning, match="registered"):
        assert import_("a_host").known == []


def test_names_are_offered_before_they_are_imported():
    assert {"adapt", "models", "__version__"} <= set(dir(diffvision))
    with pytest.raises(AttributeError, match="module 'diffvision' has no"):
        diffvision.adpat  # noqa: B018
    assert "lazy_names" not in dir(diffvision)
