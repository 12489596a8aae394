"""`diffvision export` from every kind of source, and what it refuses."""

import pickle
import shutil
from pathlib import Path
from typing import get_args

import open_clip
import pytest
import torch

from diffvision import cli
from diffvision.export.export_commands import To, export
from diffvision.export.finite_weights import open_for_export
from diffvision.export.formats import DEFAULTS, FORMATS


def test_the_command_line(runs, tmp_path, capsys):
    target = tmp_path / "deeper" / "vision"
    assert cli.main(["export", str(runs.paths["vision"]), str(target), "--to", "timm", "--license", "mit"]) == 0
    assert "best.ckpt is diff_vit_debug, averaged weights (EMA): wrote" in capsys.readouterr().out
    assert (target / "README.md").read_text().split("---")[1].splitlines().count("license: mit") == 1
    assert cli.main(["export", str(runs.paths["vision"]), str(target)]) == 1
    assert "is there already: remove it, or name another" in capsys.readouterr().err
    assert [path.name for path in target.parent.iterdir()] == ["vision"]


def test_a_language_model_becomes_hugging_faces(runs, tmp_path):
    transformers = pytest.importorskip("transformers")
    with pytest.warns(UserWarning, match=r"no tokenizer next to .*best.ckpt"):
        export(str(runs.paths["text"]), str(tmp_path / "folder"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    tokens = torch.randint(20, (1, 8))
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, runs.text(tokens), rtol=0, atol=2e-6)
    assert "library_name: transformers" in (tmp_path / "folder" / "README.md").read_text()
    assert open_for_export(tmp_path / "folder").name == "diff-debug"


def test_bad_input_is_one_error_and_leaves_nothing(runs, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(FileNotFoundError, match=r"no file or folder ./nowhere"):
        export("./nowhere", str(out))
    with pytest.raises(ValueError, match="is a model of timm, and openclip"):
        export(str(runs.paths["vision"]), str(out), "openclip")
    with pytest.raises(ValueError, match=r"to .*'gguf'"):
        export(str(runs.paths["vision"]), str(out), "gguf")
    torch.save(runs.vision.model.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ValueError, match="does not say of which model"):
        export(str(tmp_path / "weights.pt"), str(out))
    with pytest.raises(ValueError, match=r"does not fit the model"):
        export("CLIP-debug", str(out), checkpoint=str(tmp_path / "weights.pt"))
    with pytest.raises(ValueError, match=r"checkpoint is 'x', but .*best.ckpt"):
        export(str(runs.paths["clip"]), str(out), checkpoint="x")
    with pytest.raises(ValueError, match="diff_vit_debug has new weights"):
        export("diff_vit_debug", str(out))
    with pytest.raises(ValueError, match=r"not loaded from URLs"):
        export("https://example.org/model.ckpt", str(out))
    assert not out.exists()


class Foreign:
    def __reduce__(self):
        return (open, ("ran", "w"))


def test_weights_that_could_do_harm_are_refused(runs, exported, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = torch.load(runs.paths["clip"], weights_only=True)
    torch.save({**content, "more": Foreign()}, "foreign.ckpt")
    with pytest.raises(ValueError, match="holds more than tensors and plain"):
        export("foreign.ckpt", "out")
    content["state_dict"]["model.text_projection"] = torch.full((64, 64), torch.inf, dtype=torch.float16)
    torch.save(content, "infinite.ckpt")
    with pytest.raises(ValueError, match=r"1 tensors of infinite.ckpt are not"):
        export("infinite.ckpt", "out")
    for kind, weights in (("clip", "open_clip_pytorch_model.bin"), ("vision", "pytorch_model.bin")):
        shutil.copytree(exported / kind, kind)
        next((tmp_path / kind).glob("*.safetensors")).unlink()
        (tmp_path / kind / weights).write_bytes(pickle.dumps(Foreign(), protocol=2))
        with pytest.raises(ValueError, match=r"damaged, or hold Python objects"):
            export(kind, "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "ran").exists()


def test_formats_are_those_of_the_command():
    assert set(get_args(To)) == set(FORMATS)
    assert all(library in FORMATS[name].libraries for library, name in DEFAULTS.items())


@pytest.mark.nightly
def test_a_run_from_its_data_to_its_folder(tmp_path, monkeypatch):
    """As a new user: make data, train with averages, export, load, evaluate."""
    from diffvision import evaluate
    from diffvision.data.make import make
    from diffvision.training.fit import fit

    root = Path(__file__).parents[2]
    monkeypatch.chdir(tmp_path)
    make("digits", "data/digits")
    recipe = str(root / "configs" / "clip" / "debug.yaml")
    trained = fit(["fit", "--config", recipe, "--trainer.max_epochs=1", "--trainer.enable_progress_bar=false"])
    path = trained.trainer.checkpoint_callback.best_model_path
    export(path, "folder")
    measured = evaluate(model="folder", data="data/digits/zero_shot", num_workers=0)
    logged = trained.trainer.callback_metrics["zero_shot/digits/acc1"].item()
    assert measured["zero_shot/digits/acc1"] == pytest.approx(logged, abs=1e-6)
    assert open_clip.create_model("local-dir:folder").visual.preprocess_cfg["mean"] == [0.33, 0.33, 0.33]
    assert f"| zero_shot/digits/acc1 | {logged:.4f} |" in (tmp_path / "folder" / "README.md").read_text()
