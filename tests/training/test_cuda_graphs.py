"""A training step as a GPU would run it is one graph: traced on tensors without data, and not run.

The package is told that there is a GPU, torch is not. Tensors are fake ones on `cuda`; autocast casts as on a GPU.
"""

import sys

import open_clip
import pytest
import timm
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from diffvision.models import clip_configs
from diffvision.nn import ATTENTION
from diffvision.ops.attention import kernels
from diffvision.training.classification import ClassificationModule
from diffvision.training.clip import ContrastiveModule, create_loss
from diffvision.training.language import LanguageModule

# torch.autocast("cuda", enabled=False) says that there is no GPU.
pytestmark = pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
LANGUAGE = {"vocab_size": 50, "depth": 1, "dim": 32, "num_heads": 4, "head_dim": 8, "mlp_dim": 48, "max_length": 64}


@pytest.fixture
def gpu(monkeypatch):
    """A GPU for the package's questions; bf16 autocast is on."""
    is_available = torch.cuda.is_available

    def answer():
        return sys._getframe(1).f_globals["__name__"].startswith("diffvision") or is_available()

    monkeypatch.setattr(torch.cuda, "is_available", answer)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    kernels._compute_capability.cache_clear()
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    yield
    torch.set_autocast_enabled("cuda", False)
    kernels._compute_capability.cache_clear()
    torch.compiler.reset()


class Kept(Exception):
    """A graph was made, and is not run."""


def trace(step):
    """Return the graphs of the first call of a compiled step; a break is an error."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)

        def refuse(*_):
            raise Kept

        return refuse

    torch.compiler.reset()
    compiled = torch.compile(step, backend=keep, fullgraph=True, dynamic=False)
    with pytest.raises(Kept):
        compiled()
    return graphs


def move(module, fakes):
    """Replace the parameters and buffers of a module by fake ones on a GPU."""
    with fakes:
        for part in module.modules():
            for name, value in part._parameters.items():
                if value is not None:
                    fake = torch.empty(value.shape, dtype=value.dtype, device="cuda")
                    part._parameters[name] = nn.Parameter(fake, requires_grad=value.requires_grad)
            for name, value in part._buffers.items():
                if value is not None:
                    part._buffers[name] = torch.empty(value.shape, dtype=value.dtype, device="cuda")


def make_step(kind, variant, fakes):
    """Return a training step of a model of one block, with its loss."""
    if kind == "vit":
        module = ClassificationModule("diff_vit_debug", num_classes=10, model_args={"variant": variant, "depth": 1})
    elif kind == "clip":
        module = ContrastiveModule("traced")
        module.model.visual.trunk = timm.create_model("plain_vit_debug_clip", variant=variant, num_classes=0, depth=1)
        module.loss = create_loss("clip", rank=0, world_size=1)
        module._device = torch.device("cuda")
    else:
        module = LanguageModule("transformer-debug", model_args=LANGUAGE | {"variant": variant})
    move(module.train(), fakes)
    with fakes, torch.device("cuda"):
        image, label, text = torch.empty(8, 3, 32, 32), torch.ones(8).long(), torch.ones(8, 24).long()
        tokens = {"tokens": torch.ones(4, 33).long(), "documents": torch.ones(4, 33).long()}
    if kind == "vit":
        return lambda: F.cross_entropy(module.model(image).float(), label)
    if kind == "clip":
        return lambda: module.compute_loss(module.model(image, text))
    return lambda: module.sum_losses(tokens)[0]


def clip_of_one_block(variant):
    configuration = clip_configs._config("debug", "plain_vit_debug_clip", variant)
    return configuration | {"text_cfg": configuration["text_cfg"] | {"layers": 1}}


@pytest.mark.quick("v1-clip", "v2-packed")
@pytest.mark.parametrize(
    ("variant", "kind"), [("v1", "clip"), *((variant, kind) for variant in ATTENTION for kind in ("vit", "packed"))]
)
def test_a_training_step_is_one_graph(gpu, variant, kind, monkeypatch):
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "traced", clip_of_one_block(variant))
    (graph,) = trace(make_step(kind, variant, FakeTensorMode()))
    outputs = [node.meta["example_value"] for node in graph.graph.nodes if "linear" in str(node.target)]
    assert outputs
    assert {(value.device.type, value.dtype) for value in outputs} == {("cuda", torch.bfloat16)}
