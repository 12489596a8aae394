"""What models of every library bear alike: one table of builds and conditions.

What one library alone asks of its models is in test_timm_conformance.py, test_clip.py and language/.
"""

import copy
import math
import pickle

import open_clip
import pytest
import timm
import torch

from diffvision.models import language

CURES = ("gated", "sink", "integral")
TIMM = {
    **{f"{family}_vit_debug": {"depth": 3} for family in ("diff", "diffv2", "vca", "plain", "gda", "dint", *CURES)},
    "diff_vit_tiny_patch16_reg4_gap_256": {"depth": 3, "img_size": 64},
    "gated_vit_debug with registers": {"depth": 1, "reg_tokens": 4},
}
OPEN_CLIP = [f"DiffCLIP-{kind}debug" for kind in ("", "V2-", "GDA-", "DINT-")]
OPEN_CLIP += ["CLIP-debug", "GatedCLIP-debug", "SinkCLIP-debug", "IntegralCLIP-debug"]
LANGUAGE = [f"{family}-debug" for family in ("diff", "diffv2", "transformer", *CURES)]
BUILDS = (*TIMM, *OPEN_CLIP, *LANGUAGE)

FIRST = ("diff_vit_debug", "DiffCLIP-debug", "diff-debug")  # of each library
BY_DAY = (*FIRST, "diffv2_vit_debug", "vca_vit_debug", "DiffCLIP-V2-debug", "diffv2-debug", "transformer-debug")


def build(name, **settings):
    torch.manual_seed(0)
    if name in TIMM:
        return timm.create_model(name.partition(" ")[0], num_classes=7, **TIMM[name], **settings)
    if name in OPEN_CLIP:
        return open_clip.create_model(name, **settings)
    return language.create(name, vocab_size=64, **settings)


def inputs(name, batch=2):
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(batch, 3, *[TIMM.get(name, {}).get("img_size", 32)] * 2, generator=draw)
    if name in TIMM:
        return (images,)
    if name in OPEN_CLIP:
        words = torch.randint(1, 400, (batch, 24), generator=draw)
        words[:, 9], words[:, 10:] = 511, 0  # the end of a text, which has the largest number
        return images, words
    return (torch.randint(64, (batch, 12), generator=draw),)


def run(model, given):
    """The outputs, one after another, as one row of numbers."""
    outputs = model(*given)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.cat([output.float().flatten() for output in outputs])


def train(model, given):
    """The outputs, and the gradient of each parameter, of a loss in which every number counts."""
    model.train().zero_grad()
    row = run(model, given)
    (row * torch.linspace(-1, 1, len(row)).sin()).sum().backward()
    return row.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def close(got, expected, rtol=1e-4, atol=1e-5):
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


def checkpoints_activations(name):
    model, given = build(name), inputs(name)
    expected, gradients = train(model, given)
    assert not [key for key, value in gradients.items() if value is None or not value.isfinite().all()]
    assert name in TIMM or all(value.any() for value in gradients.values())
    model.set_grad_checkpointing()
    row, again = train(model, given)
    close(row, expected)
    close(again, gradients)


def computes_in_half_precision(name):
    exact = build(name)
    expected = run(exact.eval(), inputs(name))
    model = copy.deepcopy(exact).bfloat16()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}  # FSDP2 shards one dtype only
    row, gradients = train(model, [t.bfloat16() if t.is_floating_point() else t for t in inputs(name)])
    assert (row - expected).norm() < 0.03 * expected.norm()
    assert all(value.isfinite().all() for value in gradients.values())


def computes_under_autocast(name):
    model, given = build(name), inputs(name)
    expected, _ = train(model, given)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            row, gradients = train(model, given)
        assert (row - expected).norm() < 0.03 * expected.norm()
        assert {value.dtype for value in gradients.values()} == {torch.float32}
        assert all(value.isfinite().all() for value in gradients.values())


def copies_and_pickles(name):
    model, given = build(name).eval(), inputs(name)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(other, given), run(model, given))


def builds_on_the_meta_device(name):
    model, given = build(name), inputs(name)
    with torch.device("meta"):
        made = build(name, **({"device": "meta"} if name not in LANGUAGE else {}))
    assert run(made, [t.to("meta") for t in given]).shape == run(model, given).shape
    shapes = [{key: value.shape for key, value in one.state_dict().items()} for one in (made, model)]
    assert shapes[0] == shapes[1]
    assert all(parameter.is_meta for parameter in made.parameters())
    assert all(parameter.ndim > 0 or key == "logit_scale" for key, parameter in made.named_parameters())  # for FSDP2


def initialises_after_the_meta_device(name):
    direct, made = build(name), build(name, device="meta").to_empty(device="cpu")
    for parameter in made.parameters():
        torch.nn.init.constant_(parameter, math.nan)
    for each in (direct, made):
        torch.manual_seed(0)
        each.init_weights()
    assert all(torch.equal(value, direct.state_dict()[key]) for key, value in made.state_dict().items())


def compiles_whole(name, backend="aot_eager"):
    torch.compiler.reset()
    model, given = build(name), inputs(name)
    expected, gradients = train(model, given)
    row, again = train(torch.compile(model, fullgraph=True, backend=backend), given)
    close(row, expected)
    close({key.removeprefix("_orig_mod."): value for key, value in again.items()}, gradients, rtol=1e-3, atol=1e-4)


def compiles_with_inductor(name):
    compiles_whole(name, "inductor")


def exports_with_any_batch(name):
    model, batch = build(name).eval(), torch.export.Dim("batch", min=2, max=64)
    dynamic = tuple({0: batch} for _ in inputs(name))
    if name in LANGUAGE:
        program = torch.export.export(model, inputs(name), dynamic_shapes=dynamic, strict=False).module()
    else:
        program = torch.export.export(model, inputs(name), dynamic_shapes=dynamic).module()
    for size in (2, 5):
        close(run(program, inputs(name, size)), run(model, inputs(name, size)))


CONDITIONS = {
    # a condition: the builds of a plain run, and of a slow one; the others are of the nightly run
    checkpoints_activations: (BY_DAY, BUILDS),
    computes_in_half_precision: (BY_DAY, BUILDS),
    computes_under_autocast: (FIRST, BY_DAY),
    copies_and_pickles: (BY_DAY, BUILDS),
    builds_on_the_meta_device: (BY_DAY, BUILDS),
    initialises_after_the_meta_device: (BY_DAY[:1] + BY_DAY[3:5], TIMM),
    compiles_whole: ((), (*FIRST, "vca_vit_debug")),
    compiles_with_inductor: ((), FIRST[:1]),
    exports_with_any_batch: ((), BY_DAY),
}
CELLS = [
    pytest.param(
        condition,
        name,
        id=f"{name}-{condition.__name__}",
        marks=() if name in by_day else pytest.mark.slow if name in slow else pytest.mark.nightly,
    )
    for condition, (by_day, slow) in CONDITIONS.items()
    for name in (TIMM if condition is initialises_after_the_meta_device else BUILDS)
]


@pytest.mark.parametrize(("condition", "name"), CELLS)
def test_a_model(condition, name):
    condition(name)
