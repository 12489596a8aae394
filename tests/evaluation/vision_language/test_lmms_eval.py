"""Our models under lmms-eval's interface; `scripts/programs/run_lmms_eval.py` runs the program itself."""

import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from PIL import Image

from diffvision.evaluation.vision_language.answers import generate_answers

ROWS = [{"image": Image.new("L", (30, 30), 80 * number), "text": f"Is there a {number}?"} for number in range(3)]


@pytest.fixture
def adapter(vlm, monkeypatch):
    """The module, imported with lmms-eval's two names standing for it, and its model."""
    names = ["lmms_eval", "lmms_eval.api", "lmms_eval.api.model", "lmms_eval.models", "lmms_eval.models.registry_v2"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[names[2]].lmms = type("lmms", (), {"task_dict": {"pope": {"test": ROWS}}})
    sys.modules[names[4]].ModelManifest = lambda name, simple_class_path: {name: simple_class_path}
    monkeypatch.setattr("diffvision.opening.vlm.open_vlm", lambda spec: vlm)
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    entry = metadata.EntryPoint("diffvision", project["entry-points"]["lmms_eval.models"]["diffvision"], "")
    module = "diffvision.evaluation.vision_language.lmms_eval"
    monkeypatch.delitem(sys.modules, module, raising=False)
    assert entry.load()() == {"diffvision": f"{module}.DiffVision"}
    yield sys.modules[module].DiffVision("a folder", batch_size="2", device="cpu")
    sys.modules.pop(module)


def requests(visuals=lambda row: [row["image"]], **settings):
    rows = [(row["text"], {"max_new_tokens": 5, **settings}, visuals, i, "pope", "test") for i, row in enumerate(ROWS)]
    return [SimpleNamespace(args=args) for args in rows]


def test_answers_are_those_of_evaluate_vlm_up_to_what_ends_them(vlm, adapter):
    asked = [(row["text"], [row["image"].convert("RGB")]) for row in ROWS]
    answers = generate_answers(vlm.module, vlm.processor, asked, 5)
    assert adapter.generate_until(requests()) == answers
    end = answers[1][2:4]
    assert adapter.generate_until(requests(until=end, temperature=0, do_sample=True))[1] == answers[1].partition(end)[0]


def test_what_a_task_cannot_ask(adapter):
    with pytest.raises(ValueError, match="do_sample"):
        adapter.generate_until(requests(do_sample=True, temperature=0.7))
    with pytest.raises(NotImplementedError, match="generate_until"):
        adapter.loglikelihood([])
