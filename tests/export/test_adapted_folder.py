"""`diffvision adapt`: folders that the libraries load by themselves, compared before they are written."""

import open_clip
import pytest
import timm
import torch

from diffvision import adapt
from diffvision.cli import main
from diffvision.export import adapted_folder as adapted
from diffvision.export import save_folder
from diffvision.export.export_commands import adapt_to_folder
from diffvision.models import language
from diffvision.nn import ATTENTION
from diffvision.opening import open_model
from diffvision.training.classification import ClassificationModule
from diffvision.training.clip import ContrastiveModule
from diffvision.training.language import LanguageModule

SIZE = {"image_size": 32, "patch_size": 8}
TEXT = {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
VISION = {
    "own": {**SIZE, "width": 32, "layers": 2, "head_width": 8},
    "timm": {"timm_model_name": "plain_vit_debug_clip", "image_size": 32, "timm_pool": "", "timm_proj": "linear"},
}
KINDS = ("own", "timm", "classifier", "language")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A pretrained model of each kind, as its library saves it."""
    root = tmp_path_factory.mktemp("pretrained")
    for kind in ("own", "timm"):
        config = {"embed_dim": 8, "vision_cfg": VISION[kind], "text_cfg": TEXT, "custom_text": kind == "timm"}
        made = open_clip.CustomTextCLIP if config.pop("custom_text") else open_clip.CLIP
        model = made(**config)
        if kind == "timm":
            config["custom_text"] = True
        model.visual.preprocess_cfg = {"size": [32, 32], "mean": [0.5] * 3, "std": [0.5] * 3}
        save_folder(model, root / kind, config=config)
    classifier = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, embed_dim=32, depth=2, num_heads=2, num_classes=5
    )
    timm.models.save_for_hf(classifier, root / "classifier", safe_serialization=True)
    language.save(language.create("transformer-debug", vocab_size=64), root / "language")
    return root


def read(folder):
    return language.load(folder) if folder.name.startswith("language") else open_model(folder).module


def inputs(kind):
    torch.manual_seed(1)
    if kind == "language":
        return {"tokens": torch.randint(64, (2, 20))}
    batch = {"image": torch.randn(2, 3, 32, 32)}
    return batch if kind == "classifier" else {**batch, "text": torch.randint(1, 1000, (2, 77))}


@pytest.mark.quick("v1-timm", "v2-own", "dex-language", "v1-classifier")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["v2", "dex", "v1"])
def test_the_host_loads_what_was_written(kind, method, folders, tmp_path, capsys):
    target = tmp_path / f"{kind}_{method}"
    assert main(["adapt", str(folders / kind), str(target), f"--method={method}"]) == 0
    told = capsys.readouterr().out
    assert f"{method}: outputs differ by" in told
    assert str(target) in told
    before, after = read(folders / kind), read(target)
    changed = [module for module in after.modules() if type(module) is ATTENTION[method]]
    assert len(changed) == {"own": 3, "timm": 5, "classifier": 2, "language": 2}[kind]  # of both towers
    off = adapted.largest_difference(before, after, inputs(kind))
    assert off > 1e-2 if method == "v1" else off <= 1e-6
    assert list(tmp_path.iterdir()) == [target]


def test_fit_starts_from_a_folder(folders, tmp_path):
    target = {kind: tmp_path / kind for kind in ("own", "classifier", "language")}
    for kind, folder in target.items():
        adapt_to_folder(str(folders / kind), str(folder))
    clip = ContrastiveModule(f"local-dir:{target['own']}")
    classifier = ClassificationModule(f"local-dir:{target['classifier']}", num_classes=5)
    text = LanguageModule(f"local-dir:{target['language']}", model_args={"max_length": 8192})
    assert text.model.config.variant == "v2"
    assert text.model.config.max_length == 8192
    for kind, module in {"own": clip, "classifier": classifier, "language": text}.items():
        expected = read(target[kind])
        assert adapted.largest_difference(expected, module.model.eval(), inputs(kind)) == 0
    with pytest.raises(ValueError, match="of another model"):
        LanguageModule(f"local-dir:{target['language']}", model_args={"norm_eps": 1e-3})


def test_heads_are_in_the_weights(folders, tmp_path):
    adapt_to_folder(str(folders / "classifier"), str(tmp_path / "second"), method="dex", heads="1")
    heads = [block.attn.dex_heads for block in read(tmp_path / "second").blocks]
    assert [chosen.tolist() for chosen in heads] == [[False, True]] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vit_tiny_patch16_224", "out"], "vit_tiny_patch16_224 has new weights"),
        (["nothing", "out", "--checkpoint=x"], "neither OpenCLIP, timm nor diffvision has a model 'nothing'"),
        (["{language}", "out", "--checkpoint=x"], "has weights of its own"),
        (["{classifier}", "out", "--method=v2", "--heads=0"], "heads is for method 'dex'"),
        (["{classifier}", "out", "--method=dex", "--heads=most"], "heads must be all, or numbers"),
        (["{classifier}", "there"], "there is there already"),
    ],
)
def test_one_error_and_nothing_behind(arguments, message, folders, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    places = {kind: str(folders / kind) for kind in KINDS}
    assert main(["adapt", *(argument.format(**places) for argument in arguments)]) == 1
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_weights_that_are_not_finite_are_refused(folders, tmp_path, capsys):
    model = language.load(folders / "language")
    with torch.no_grad():
        model.blocks[0].attn.q_proj.weight[0, 0] = float("inf")
    language.save(model, tmp_path / "broken")
    for command in ("adapt", "export"):
        assert main([command, str(tmp_path / "broken"), str(tmp_path / "out")]) == 1
        assert "not finite" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_images_of_one_channel(tmp_path, capsys):
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=32, depth=2, num_heads=2, in_chans=1)
    timm.models.save_for_hf(model, tmp_path / "grey", safe_serialization=True, model_args={"in_chans": 1})
    adapt_to_folder(str(tmp_path / "grey"), str(tmp_path / "v2"), method="v2")
    assert "v2: outputs differ by" in capsys.readouterr().out


def test_outputs_that_differ_by_more_than_rounding_are_refused(folders, tmp_path, monkeypatch, capsys):
    language.save(language.load(folders / "language").bfloat16(), tmp_path / "half")
    adapt_to_folder(str(tmp_path / "half"), str(tmp_path / "v2"))
    assert "(float64)" in capsys.readouterr().out

    def spoil(model, method, heads):
        adapt(model, method)
        model.blocks[0].attn.proj.weight.data += 0.1

    monkeypatch.setattr(adapted, "adapt_model", spoil)
    with pytest.raises(ValueError, match="above"):
        adapt_to_folder(str(folders / "language"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
