"""Models that are written and read again: one matrix of kinds of model, ways out and ways back.

Each gives the same numbers and has the same record of its architecture. What a way writes beside the weights, such as
transforms, tokenizers and cards, is tested with that way.
"""

import dataclasses
from functools import cache, cached_property

import open_clip
import pytest
import timm
import torch
from safetensors.torch import save_file

import diffvision
from diffvision.export.export_commands import export
from diffvision.models import language
from diffvision.models.architecture import architecture
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


@torch.no_grad()
def run(kind, model):
    draw = torch.Generator().manual_seed(1)
    if kind.startswith("language"):
        out = model(torch.randint(97, (2, 20), generator=draw))
        return getattr(out, "logits", out)
    images = torch.randn(2, 3, *[KINDS[kind][1].get("img_size", 32)] * 2, generator=draw)
    return model(images) if kind.startswith("timm") else torch.cat(model(images, torch.arange(48).reshape(2, 24))[:2])


class Shelf:
    """A model of a kind with weights that none begins with; its checkpoint of `fit` and its export, each made once."""

    def __init__(self, kind, folder):
        self.kind, self.folder = kind, folder
        self.name, self.settings = KINDS[kind]
        self.library = kind.partition(" ")[0]
        make = {"timm": timm.create_model, "open_clip": open_clip.create_model, "language": language.create}
        model = make[self.library](self.name, **self.settings)
        model = diffvision.adapt(model, "v2") if kind == "timm adapted" else model
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
        self.model = model.eval()
        self.numbers = run(kind, model)

    @cached_property
    def checkpoint(self):
        if self.library == "language":
            config = dataclasses.asdict(self.model.config)
            about = {"diffvision": {"model": self.name}, "hyper_parameters": {"config": config}}
        else:
            arguments = {key: value for key, value in self.settings.items() if key != "num_classes"}
            module = (
                ContrastiveModule(self.name)
                if self.library == "open_clip"
                else ClassificationModule(self.name, num_classes=5, model_args=arguments)
            )
            module.on_save_checkpoint(about := {})
        state = {f"model.{key}": value for key, value in self.model.state_dict().items()}
        path = self.folder / "last.ckpt"
        torch.save({"pytorch-lightning_version": "2.6.6", "state_dict": state, **about}, path)
        return path

    @cached_property
    def exported(self):
        export(str(self.checkpoint), str(self.folder / "exported"))
        return self.folder / "exported"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return cache(lambda kind: Shelf(kind, tmp_path_factory.mktemp("model")))


def by_checkpoint(shelf, folder):
    return open_model(shelf.checkpoint).module


def by_export(shelf, folder):
    return open_model(shelf.exported).module


def by_the_library(shelf, folder):
    """The library's own loader of what `export` wrote, without a name of ours."""
    if shelf.library == "timm":
        return timm.create_model(f"local-dir:{shelf.exported}", pretrained=True).eval()
    if shelf.library == "open_clip":
        return open_clip.create_model(f"local-dir:{shelf.exported}").eval()
    return pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(shelf.exported)


def by_the_library_s_saver(shelf, folder):
    timm.models.save_for_hf(shelf.model, folder / "out", safe_serialization=True)
    return open_model(folder / "out").module


def by_safetensors(shelf, folder):
    save_file(dict(shelf.model.state_dict()), folder / "x.safetensors")
    return open_model(shelf.name, folder / "x.safetensors").module


def by_saving(shelf, folder):
    language.save(shelf.model, folder / "out")
    return open_model(folder / "out").module


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
}
CELLS = [(way, kind) for kind in KINDS for way, (kinds, _) in WAYS.items() if kind in kinds]


@pytest.mark.parametrize(("way", "kind"), CELLS, ids=[f"{kind}-{way.__name__}" for way, kind in CELLS])
def test_a_model_comes_back(way, kind, shelf, tmp_path):
    known = shelf(kind)
    back = way(known, tmp_path)
    torch.testing.assert_close(run(kind, back), known.numbers, rtol=0, atol=WAYS[way][1])
    if not hasattr(back, "generation_config"):  # of transformers, which has no record
        assert architecture(back) == architecture(known.model)
        assert {p.dtype for p in back.parameters()} == {p.dtype for p in known.model.parameters()}
