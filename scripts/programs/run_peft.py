"""LoRA by PEFT on our models: timm's, OpenCLIP's both towers, the language model's and its class of transformers.

    pip install peft
    python scripts/programs/run_peft.py                     # a minute on two CPU cores

Wraps the attention's projections (then every linear map), trains a few steps, saves, loads and merges. Prints a table;
exit status 1 if anything in it failed.
"""

import copy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import open_clip
import timm
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

import diffvision  # noqa: F401  (registers the models)
from diffvision.models import language
from diffvision.models.language.hugging_face import as_transformers
from shown import Shown, versions

PROJECTIONS = r".*attn\.(q_proj|k_proj|v_proj|o_proj|proj)"
IMAGES, STEPS = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0)), 5
TOKENS = torch.randint(50, (8, 24), generator=torch.Generator().manual_seed(0))


def models() -> dict[str, tuple[nn.Module, Callable[[nn.Module], Tensor]]]:
    """Return each model with a way to call it that goes through all of it."""
    text = language.create("diff-debug", vocab_size=50, tied=False)
    hosted = as_transformers(language.create("diffv2-debug", vocab_size=50))
    return {
        "diff_vit_debug": (timm.create_model("diff_vit_debug", num_classes=4), lambda m: m(IMAGES)),
        "DiffCLIP-debug": (
            open_clip.create_model("DiffCLIP-debug"),
            lambda m: torch.cat([m.encode_image(IMAGES), m.encode_text(TOKENS)]),
        ),
        "diff-debug": (text, lambda m: m(TOKENS)),
        "diffv2-debug, Hugging Face": (hosted, lambda m: m(input_ids=TOKENS).logits),
    }


def trained(model: nn.Module, call: Callable[[nn.Module], Tensor]) -> list[float]:
    """Return the losses of a few steps towards random targets; only what requires gradients is trained."""
    target = torch.randn(call(model).shape, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (call(model) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def bypassed(model: nn.Module, call: Callable[[nn.Module], Tensor]) -> list[str]:
    """Return the wrapped layers whose LoRA does not change the model's output."""
    before, silent = call(model), []
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            layer.lora_B["default"].weight.fill_(0.5)
            silent += [name] if torch.equal(call(model), before) else []
            layer.lora_B["default"].weight.zero_()
    return silent


def check(shown: Shown, name: str, plain: nn.Module, call: Callable[[nn.Module], Tensor], targets: str) -> None:
    """Check one model with one LoRA: a row of the table."""
    model = get_peft_model(copy.deepcopy(plain), LoraConfig(r=4, target_modules=targets)).eval()
    wrapped = sum(isinstance(layer, LoraLayer) for layer in model.modules())
    silent, losses = bypassed(model, call), trained(model, call)
    idle = [name for name, p in model.named_parameters() if p.requires_grad and not p.grad.any()]
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = PeftModel.from_pretrained(copy.deepcopy(plain), folder).eval()
        loaded = (call(again) - call(model)).abs().max().item()
        merged = (call(again.merge_and_unload()) - call(model)).abs().max().item()
    held = not silent and not idle and loaded == 0 and merged < 1e-5 and losses[-1] < losses[0]
    counted = f"{wrapped} wrapped, {len(silent)} bypassed, {len(idle)} without gradient, "
    counted += f"loss {losses[0]:.3f} to {losses[-1]:.3f}, loaded {loaded:.0e}, merged {merged:.0e}"
    shown.check(f"{name}, {'attention' if targets == PROJECTIONS else targets}", held, counted)


def main() -> int:
    torch.manual_seed(0)
    print(versions("torch", "peft", "timm", "open_clip_torch", "transformers", "diffvision"))
    shown = Shown(Path("runs/programs/peft"))
    for name, (model, call) in models().items():
        for targets in (PROJECTIONS, "all-linear"):
            check(shown, name, model.eval(), call, targets)
    return shown.end()


if __name__ == "__main__":
    sys.exit(main())
