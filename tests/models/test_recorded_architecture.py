"""What a model was built of is recorded with its weights, and a mismatch is refused wherever weights are loaded."""

import json
from dataclasses import replace

import open_clip
import pytest
import timm
import torch

from diffvision import adapt
from diffvision.export.finite_weights import open_for_export
from diffvision.export.model_folders import save_folder
from diffvision.models import language, vit
from diffvision.models.adapt import set_dex_schedule
from diffvision.models.architecture import KEY, architecture, difference
from diffvision.opening import open_model
from diffvision.training.classification import ClassificationModule
from diffvision.training.clip import ContrastiveModule
from diffvision.training.fault_tolerance.resume import check_resumable
from diffvision.training.language import LanguageModule
from tiny_runs import plain_checkpoint

CLIP, VIT, TEXT = "DiffCLIP-debug", "diff_vit_debug", "diff-debug"
PLAIN, SIZES = "vit_tiny_patch16_224", {"depth": 1, "num_heads": 6, "embed_dim": 48}


def checkpoint(module, path):
    """A file as Lightning writes it of a module."""
    content = plain_checkpoint(module.state_dict(), 1)
    module.on_save_checkpoint(content)
    torch.save(content, path)
    return path


def test_a_clip_of_the_same_name_and_another_lambda_is_refused(tmp_path, monkeypatch):
    """The name may stand for another lambda_init in another version."""
    path = checkpoint(ContrastiveModule(CLIP), tmp_path / "x.ckpt")
    open_model(CLIP, path)
    open_for_export(path)
    config = open_clip.get_model_config(CLIP)
    config["text_cfg"]["block_type"] = "diffvision:v1:lambda_init=0.2"
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, CLIP, config)
    told = r"transformer\.resblocks\.0\.attn\.lambda_init 0\.8 there and 0\.2 here"
    for call in (
        lambda: open_model(CLIP, path),
        lambda: open_for_export(path),
        lambda: check_resumable(str(path), ContrastiveModule(CLIP), world_size=1, ranks="same"),
        lambda: ContrastiveModule(CLIP).on_load_checkpoint(torch.load(path, weights_only=True)),
    ):
        with pytest.raises(ValueError, match=f"another architecture .*{told}"):
            call()


def test_a_vit_of_the_same_name_and_another_lambda_is_refused(tmp_path, monkeypatch):
    path = checkpoint(ClassificationModule(VIT, num_classes=3), tmp_path / "x.ckpt")
    save_folder(timm.create_model(VIT, num_classes=3), tmp_path / "vit", config={})
    open_model(VIT, path)
    variant, shape = vit.MODELS[VIT]
    monkeypatch.setitem(vit.MODELS, VIT, vit.Model(variant, shape._replace(settings={"lambda_init": 0.2})))
    for call in (
        lambda: open_model(VIT, path),
        lambda: open_for_export(path),
        lambda: check_resumable(str(path), ClassificationModule(VIT, num_classes=3), world_size=1, ranks="same"),
        lambda: open_model(tmp_path / "vit"),
        lambda: open_model(VIT, tmp_path / "vit" / "model.safetensors"),
    ):
        with pytest.raises(ValueError, match=r"blocks\.1\.attn\.lambda_init"):
            call()


def test_arguments_of_the_run_build_its_model_again(tmp_path):
    """evaluate builds timm's models as they were trained; fit is given its arguments, and compares them."""
    module = ClassificationModule(VIT, num_classes=3, model_args={"lambda_init": 0.5, "drop_path_rate": 0.1})
    path = checkpoint(module, tmp_path / "x.ckpt")
    assert open_model(VIT, path).module.blocks[1].attn.lambda_init == 0.5
    same = ClassificationModule(VIT, num_classes=3, model_args={"lambda_init": 0.5})  # dropout is no architecture
    check_resumable(str(path), same, world_size=1, ranks="same")
    told = r"cannot resume from .*x\.ckpt: .*blocks\.0\.attn\.lambda_init 0\.5 there and 0\.2"
    with pytest.raises(ValueError, match=told):
        check_resumable(str(path), ClassificationModule(VIT, num_classes=3), world_size=1, ranks="same")


def test_files_without_a_record_load_with_a_note(tmp_path):
    for module in (ContrastiveModule(CLIP), ClassificationModule(VIT, num_classes=3)):
        path = checkpoint(module, tmp_path / "x.ckpt")
        content = torch.load(path, weights_only=True)
        del content["diffvision"][KEY]  # as an older version wrote it
        torch.save(content, path)
        with pytest.warns(UserWarning, match="architecture") as noted:
            open_model(path)
        assert len(noted) == 1
        with pytest.warns(UserWarning, match="architecture"):
            check_resumable(str(path), module, world_size=1, ranks="same")


def edit(file, change):
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def test_an_openclip_folder_whose_configuration_was_changed(tmp_path):
    folder = tmp_path / "clip"
    config = open_clip.get_model_config(CLIP)
    save_folder(open_clip.create_model(CLIP), folder, config=config)
    open_model(folder)
    edit(folder / "open_clip_config.json", lambda c: c["model_cfg"]["text_cfg"].update(pool_type="first"))
    for call in (open_model, lambda folder: ContrastiveModule(f"local-dir:{folder}")):
        with pytest.raises(ValueError, match="text_pool_type 'argmax' there"):
            call(folder)
    edit(
        folder / "open_clip_config.json",
        lambda c: c["model_cfg"]["text_cfg"].update(pool_type="argmax", block_type="diffvision:v1:lambda_init=0.2"),
    )
    told = r"lambda_init 0\.8 there and 0\.2 here"
    for call in (open_model, open_for_export, lambda folder: ContrastiveModule(f"local-dir:{folder}")):
        with pytest.raises(ValueError, match=told):
            call(folder)


def test_language_files_whose_configuration_was_changed(tmp_path):
    model = language.create(TEXT)
    language.save(model, tmp_path / "text")
    language.load(tmp_path / "text")
    edit(tmp_path / "text" / "config.json", lambda c: c.update(lambda_init=0.3, rotary_theta=500.0, max_length=64))
    told = r"lambda_init 0\.2\d* there and 0\.3 here, .*rotary 10000\.0 there and 500\.0 here"
    for call in (
        language.load,
        open_for_export,
        lambda folder: open_model(str(folder)),
        lambda f: LanguageModule(f"local-dir:{f}"),
    ):
        with pytest.raises(ValueError, match=told):
            call(tmp_path / "text")
    path = checkpoint(LanguageModule(TEXT), tmp_path / "x.ckpt")
    content = torch.load(path, weights_only=True)
    content["hyper_parameters"]["config"]["lambda_init"] = 0.3
    torch.save(content, path)
    with pytest.raises(ValueError, match=r"lambda_init 0\.2\d* there and 0\.3"):
        language.load(path)


@pytest.mark.parametrize("block_type", [None, "diffvision:v1"])
@pytest.mark.parametrize("made", [open_clip.CLIP, open_clip.CustomTextCLIP])
def test_a_text_tower_records_whether_it_is_causal(made, block_type):
    config = open_clip.get_model_config(CLIP)
    config["text_cfg"]["block_type"] = block_type
    causal = made(**config)
    config["text_cfg"]["no_causal_mask"] = True
    every = architecture(made(**config))
    assert "causal True there and False here" in difference(architecture(causal), every)
    older = {"layers": {name: {k: v for k, v in one.items() if k != "causal"} for name, one in every["layers"].items()}}
    assert difference(older, architecture(made(**open_clip.get_model_config(CLIP)))).count("causal") == 0


def test_the_schedule_of_lambda_is_state():
    """LambdaAnnealing sets it for each step: a buffer, in the weights."""
    model = adapt(timm.create_model("plain_vit_debug"), "dex")
    before = architecture(model)
    set_dex_schedule(model, 0.3, 0.7)
    assert difference(before, architecture(model)) == ""


def test_what_files_and_machines_make_of_values_is_no_difference(tmp_path):
    built = architecture(timm.create_model(VIT))
    again = json.loads(json.dumps(built))
    again["layers"]["blocks.1.attn"]["lambda_init"] *= 1 + 1e-12
    assert difference(again, built) == difference(built, again) == ""
    assert difference({"layers": {}, "config": {"a_field": 1}}, built) == ""  # of an earlier version
    assert "lambda_init" in difference(again, architecture(timm.create_model(VIT, lambda_init=0.3)))
    text = language.create(TEXT)
    longer = replace(text.config, max_length=8192)  # it costs nothing, and changes nothing
    assert difference(architecture(text), architecture(language.LanguageModel(longer))) == ""


def test_a_record_that_is_none(tmp_path):
    """A damaged or hostile record is one sentence."""
    path = checkpoint(ContrastiveModule(CLIP), tmp_path / "x.ckpt")
    content = torch.load(path, weights_only=True)
    for fine in ({"layers": {"visual": None}}, {}):
        content["diffvision"][KEY] = fine
        torch.save(content, path)
        open_model(CLIP, path)
    for wrong in ({KEY: {"layers": 3, "config": []}}, {KEY: {"layers": [1]}}, {"preprocess": None}, {"model_args": 1}):
        torch.save(content | {"diffvision": wrong}, path)
        with pytest.raises(ValueError, match=r"x\.ckpt"):
            open_model(CLIP, path)
    torch.save(content | {"diffvision": [1]}, path)
    with pytest.raises(ValueError, match=r"x\.ckpt"):
        open_model(CLIP, path)
    path = checkpoint(ClassificationModule(VIT, num_classes=3), tmp_path / "y.ckpt")
    content = torch.load(path, weights_only=True)
    content["diffvision"]["model_args"] = {"depth": "x"}
    torch.save(content, path)
    with pytest.raises(ValueError, match=r"y\.ckpt.*model_args"):
        open_for_export(path)


@pytest.mark.parametrize(
    ("name", "common", "setting", "told"),
    [
        (PLAIN, SIZES, {"num_heads": 3}, "num_heads"),
        (PLAIN, SIZES, {"act_layer": "relu"}, "class"),
        ("convnext_atto", {}, {"output_stride": 16}, "dilation"),
        ("plain_vit_debug", {"global_pool": "avg"}, {"pool_include_prefix": True}, "pool_include_prefix"),
    ],
)
def test_arguments_of_timm_that_no_weight_shows_are_recorded(name, common, setting, told):
    with torch.device("meta"):
        models = [timm.create_model(name, **common | given) for given in ({}, setting)]
    assert told in difference(*map(architecture, models))
