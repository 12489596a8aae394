"""A variant is one file: no module above `nn` names its class, and a variant of a test goes through all of them."""

import json
import re
from pathlib import Path

import open_clip
import pytest
import timm
import torch
from torch import nn

import diffvision
from diffvision.analysis import layer_lambdas, layer_maps
from diffvision.analysis.capture import captured
from diffvision.cli import main
from diffvision.comparison import compare
from diffvision.data.text.tokenizers import train_tokenizer
from diffvision.models import language
from diffvision.models.architecture import architecture
from diffvision.nn import ATTENTION, GRID_ATTENTION, AttentionLayer, DiffAttention
from diffvision.ops import diff_attention

PACKAGE = Path(diffvision.__file__).parent
TEXT = "the cat sat on the mat and the dog saw it. "


class MixedAttention(AttentionLayer):
    """A weighted mean of two maps over one key: its rows sum to 1, and its weight is learned for each head."""

    variant, query_maps, key_maps, value_maps = "mixed", 2, 1, 1
    recorded, new_parameters = ("start",), ("gate", "q_proj")

    def __init__(self, dim, num_heads, num_kv_heads=None, *, start: float = 1.0, **settings):
        self.start = start
        super().__init__(dim, num_heads, num_kv_heads, **settings)

    def add_parameters(self, dim, factory_kwargs):
        self.gate = nn.Parameter(torch.empty(self.num_heads, **factory_kwargs))

    def reset_parameters(self):
        nn.init.constant_(self.gate, self.start)

    def _first(self):
        return self.gate.float().sigmoid()[None, :, None, None]

    def compute_lambda(self, x=None):
        return 1 - 1 / self._first()

    def attend(self, inputs):
        settings = {"causal": inputs.is_causal, "mask": inputs.mask, "dropout": inputs.dropout}
        lam = self.compute_lambda(inputs.x)
        return (self._first() * diff_attention(inputs.q, inputs.k, inputs.v, lam, **settings)).to(inputs.v.dtype)

    def combine(self, maps, lam, inputs):
        one, two = maps.unbind(2)
        return self._first() * one + (1 - self._first()) * two

    @classmethod
    def from_standard(cls, layer, *, depth):
        new = cls._with_parts_of(layer, layer.num_heads, layer.num_kv_heads)
        with torch.no_grad():
            for name, value in layer.q_proj.named_parameters():
                shape = (-1, 2, -1, *value.shape[1:])
                twice = value.unflatten(0, (layer.num_heads, 1, layer.head_dim)).expand(shape)
                getattr(new.q_proj, name).copy_(twice.flatten(0, 2))
        return new


@pytest.fixture(autouse=True)
def mixed(monkeypatch):
    monkeypatch.setitem(ATTENTION, "mixed", MixedAttention)


def train_step(model, loss):
    loss.backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if ".attn." in name)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_a_new_variant_in_timm():
    torch.manual_seed(0)
    model = timm.create_model("plain_vit_debug", variant_by_layer="4*mixed", num_classes=3, start=0.5)
    assert {layer.variant for layer in model.modules() if isinstance(layer, AttentionLayer)} == {"mixed"}
    images = torch.randn(2, 3, 32, 32)
    assert architecture(model)["layers"]["blocks.0.attn"]["start"] == model.blocks[0].attn.gate[0].item() == 0.5
    train_step(model, model(images).square().mean())
    model.eval()
    lambdas = layer_lambdas(model)
    assert len(lambdas) == 4
    for layer in layer_maps(model, images[0]):
        torch.testing.assert_close(layer.weights.sum(-1), torch.ones_like(layer.weights[..., 0]))
        assert layer.lam.mean().item() == pytest.approx(lambdas[layer.name])
    adapted = diffvision.adapt(timm.create_model("plain_vit_debug"), "mixed", only_new=True)
    assert type(adapted.blocks[0].attn) is MixedAttention
    assert adapted.blocks[0].attn.gate.requires_grad
    assert not adapted.blocks[0].attn.v_proj.weight.requires_grad


def test_a_new_variant_in_clip():
    config = open_clip.get_model_config("DiffCLIP-debug")
    config["text_cfg"] |= {"block_type": "diffvision:mixed:start=0.5", "heads": 4}
    config["vision_cfg"]["timm_model_name"] = "plain_vit_debug_clip"
    model = open_clip.CLIP(**config)
    assert {type(block.attn) for block in model.transformer.resblocks} == {MixedAttention}
    text = torch.randint(1, config["text_cfg"]["vocab_size"], (2, model.context_length))
    image = torch.randn(2, 3, 32, 32)
    train_step(model, (model.encode_image(image) @ model.encode_text(text).T).square().mean())
    with pytest.raises(ValueError, match="'depth=1'"):
        open_clip.CLIP(**config | {"text_cfg": config["text_cfg"] | {"block_type": "diffvision:mixed:depth=1"}})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("variant")
    tokenizer = train_tokenizer([TEXT * 30], 300)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ATTENTION, "mixed", MixedAttention)
        model = language.create("transformer-debug", variant="mixed", vocab_size=300, max_length=64)
        tokens = torch.randint(300, (2, 24))
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        train_step(model, loss)
        language.save(model, folder / "mixed", tokenizer)
    language.save(language.create("diff-debug", vocab_size=300, max_length=64), folder / "diff", tokenizer)
    (folder / "text.txt").write_text(TEXT * 40)
    return folder


@torch.no_grad()
def test_a_new_variant_decodes_with_a_cache(folders):
    model = language.load(folders / "mixed")
    tokens = torch.randint(300, (2, 12))
    whole = model.hidden(tokens)
    cache = model.new_cache(2, 12)
    parts = [model.hidden(tokens[:, index : index + 1], cache=cache) for index in range(12)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)


def test_a_new_variant_is_inspected_and_compared(folders, tmp_path):
    given = ["--text", "the cat sat on the mat", "--output", str(tmp_path / "page")]
    assert main(["inspect", str(folders / "mixed"), *given]) == 0
    layers = json.loads((tmp_path / "page" / "statistics.json").read_text())
    assert "lambda" in json.dumps(layers)
    models = [str(folders / "mixed"), str(folders / "diff")]
    comparison = compare(models, data=str(folders / "text.txt"), rounds=0, num_workers=0, device="cpu")
    assert len(comparison.models) == 2


SHAPES = [(), (1,), ("N", 1), ("H", 1, 1), (1, "N", 1), ("H", "N", 1), ("B", 1, 1, 1), ("B", "H", "N", 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_lambda_of_any_shape_is_captured(shape, monkeypatch):
    def compute_lambda(layer, x=None):
        sizes = {"H": layer.num_heads, "B": 1 if x is None else x.shape[0], "N": 1 if x is None else x.shape[1]}
        return torch.full([sizes.get(axis, axis) for axis in shape], 0.25)

    monkeypatch.setattr(DiffAttention, "compute_lambda", compute_lambda)
    monkeypatch.setattr(DiffAttention, "lambda_by_token", "N" in shape or "B" in shape)
    torch.manual_seed(0)
    model = timm.create_model("diff_vit_debug", num_classes=3).eval()
    images = torch.randn(2, 3, 32, 32)
    assert set(layer_lambdas(model, {"image": images}).values()) == {0.25}
    for layer in layer_maps(model, images[0]):
        assert layer.lam.shape == (layer.maps.shape[0], layer.maps.shape[2], 1)
        torch.testing.assert_close(layer.weights, layer.maps[:, 0] - 0.25 * layer.maps[:, 1])
    with torch.no_grad(), captured(model, lambda call: call.scores()):
        from_scores = model(images)
    torch.testing.assert_close(from_scores, model(images))


def test_no_module_above_names_a_variants_class():
    classes = {layer.__name__ for layer in (*ATTENTION.values(), *GRID_ATTENTION.values())}
    names = "|".join(classes - {"Attention"})  # a word of many sentences
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if "nn" not in path.relative_to(PACKAGE).parts]
    lines = [line for path in files for line in path.read_text().splitlines() if re.search(rf"\b({names})\b", line)]
    assert not [line for line in lines if "timm" not in line]  # which has a class of this name
