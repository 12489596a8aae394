"""Models that are written and read again: one matrix of kinds of model, ways out and ways back.

Each gives the same numbers and has the same record of its architecture. What a way writes beside the weights, such as
transforms, tokenizers and cards, is tested with that way.
"""

import dataclasses

import open_clip
import pytest
import timm
import torch
from safetensors.torch import save_file

import diffvision
from diffvision.export.export_commands import export
from diffvision.models import language
from diffvision.models.architecture import architecture
from diffvision.models.convert import convert
from diffvision.models.language.hugging_face import as_native
from diffvision.opening import open_model
from diffvision.training.classification import ClassificationModule
from diffvision.training.clip import ContrastiveModule

pytestmark = pytest.mark.filterwarnings("ignore:no tokenizer next to:UserWarning")

TOKENS = {"vocab_size": 97, "max_length": 64}
KINDS = {
    "timm v1": ("diff_vit_debug", {"num_classes": 5, "lambda_init": 0.5, "img_size": 48}),
    "timm v2": ("diffv2_vit_debug", {"num_classes": 5, "drop_path_rate": 0.1, "head_norm": True}),
    "timm vca": ("vca_vit_debug", {"num_classes": 5}),
    "timm registers": ("gated_vit_debug", {"num_classes": 5, "reg_tokens": 4}),
    "timm adapted": ("plain_vit_debug", {"num_classes": 5}),
    "open_clip v1": ("DiffCLIP-debug", {}),
    "open_clip v2": ("DiffCLIP-V2-debug", {}),
    "open_clip sink": ("SinkCLIP-debug", {}),
    "language v1": ("diff-debug", {**TOKENS, "tied": False}),
    "language v2": ("diffv2-debug", TOKENS),
    "language plain": ("transformer-debug", {**TOKENS, "num_kv_heads": 2}),
    "language gated": ("gated-debug", TOKENS),
    "language by layer": ("diff-debug", {**TOKENS, "variant_by_layer": "1*standard"}),
}


def build(kind):
    """A model of a kind with weights that none begins with."""
    name, settings = KINDS[kind]
    make = {"timm": timm.create_model, "open_clip": open_clip.create_model, "language": language.create}
    model = make[kind.partition(" ")[0]](name, **settings)
    model = diffvision.adapt(model, "v2") if kind == "timm adapted" else model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model.eval()


@torch.no_grad()
def run(kind, model):
    draw = torch.Generator().manual_seed(1)
    if kind.startswith("language"):
        out = model(torch.randint(97, (2, 20), generator=draw))
        return getattr(out, "logits", out)
    images = torch.randn(2, 3, *[KINDS[kind][1].get("img_size", 32)] * 2, generator=draw)
    return model(images) if kind.startswith("timm") else torch.cat(model(images, torch.arange(48).reshape(2, 24))[:2])


def trained(kind, model, folder):
    """A checkpoint of `diffvision fit` with the model's weights."""
    name, settings = KINDS[kind]
    if kind.startswith("language"):
        about = {"diffvision": {"model": name}, "hyper_parameters": {"config": dataclasses.asdict(model.config)}}
    else:
        arguments = {key: value for key, value in settings.items() if key != "num_classes"}
        module = (
            ContrastiveModule(name)
            if kind.startswith("open_clip")
            else ClassificationModule(name, num_classes=5, model_args=arguments)
        )
        module.on_save_checkpoint(about := {})
    state = {f"model.{key}": value for key, value in model.state_dict().items()}
    torch.save({"pytorch-lightning_version": "2.6.6", "state_dict": state, **about}, folder / "last.ckpt")
    return folder / "last.ckpt"


def exported(kind, model, folder):
    export(str(trained(kind, model, folder)), str(folder / "out"))
    return folder / "out"


def by_checkpoint(kind, model, folder):
    return open_model(trained(kind, model, folder)).module


def by_export(kind, model, folder):
    return open_model(exported(kind, model, folder)).module


def by_the_library(kind, model, folder):
    """The library's own loader of what `export` wrote, without a name of ours."""
    out = exported(kind, model, folder)
    if kind.startswith("timm"):
        return timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    if kind.startswith("open_clip"):
        return open_clip.create_model(f"local-dir:{out}").eval()
    return pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(out)


def by_the_library_s_saver(kind, model, folder):
    timm.models.save_for_hf(model, folder / "out", safe_serialization=True)
    return open_model(folder / "out").module


def by_safetensors(kind, model, folder):
    save_file(dict(model.state_dict()), folder / "x.safetensors")
    return open_model(KINDS[kind][0], folder / "x.safetensors").module


def by_saving(kind, model, folder):
    language.save(model.bfloat16(), folder / "out")  # whose dtype stays
    return open_model(folder / "out").module


def by_hugging_face(kind, model, folder):
    return as_native(by_the_library(kind, model, folder))


def by_convert(kind, model, folder):
    convert(str(exported(kind, model, folder)), str(folder / "again"), to="language")
    return language.load(folder / "again")


LANGUAGE = [kind for kind in KINDS if kind.startswith("language")]
STOCK = LANGUAGE[:3]  # transformers has a class for them
CLIP, VIT = ([kind for kind in KINDS if kind.startswith(library)] for library in ("open_clip", "timm"))
NAMED = [kind for kind in VIT if kind != "timm adapted"]
WAYS = {
    # a way: the kinds that take it, and how far numbers may be from those before
    by_checkpoint: ([*NAMED, *CLIP, *LANGUAGE], 0),
    by_export: ([*NAMED, *CLIP, *STOCK], 1e-5),
    by_the_library: ([*NAMED, *CLIP, *STOCK], 1e-5),
    by_the_library_s_saver: (VIT, 0),
    by_safetensors: (["timm vca", *CLIP], 0),
    by_saving: (LANGUAGE, 0),
    by_hugging_face: (STOCK, 1e-5),
    by_convert: (STOCK, 1e-5),
}


@pytest.mark.parametrize(
    ("way", "kind"),
    [pytest.param(way, kind, id=f"{kind}-{way.__name__}") for way, (kinds, _) in WAYS.items() for kind in kinds],
)
def test_a_model_comes_back(way, kind, tmp_path):
    model = build(kind)
    back = way(kind, model, tmp_path)
    torch.testing.assert_close(run(kind, back), run(kind, model), rtol=0, atol=WAYS[way][1])
    if not hasattr(back, "generation_config"):  # of transformers, which has no record
        assert architecture(back) == architecture(model)
        assert {p.dtype for p in back.parameters()} == {p.dtype for p in model.parameters()}
