"""`diffvision adapt`: make a pretrained model differential and write it as a folder that its library loads.

Here the model is opened, outputs are compared, and the folder is written; `diffvision.models.adapt` changes the layers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diffvision.export.finite_weights import open_for_export
from diffvision.export.model_folders import save_folder
from diffvision.models import language
from diffvision.models.adapt import ENTRYPOINT
from diffvision.models.adapt import adapt as adapt_model
from diffvision.models.language.decoder import LanguageModel
from diffvision.models.names import Method
from diffvision.models.weight_files import FOLDER, check_free, written_whole
from diffvision.opening import Model, open_model

EXACT: tuple[Method, ...] = ("v2", "dex")
TOLERANCE = 1e-6  # of the largest output
_EFFECT = {"v1": "another function, to be trained", **dict.fromkeys(EXACT, "the same function, until it is trained on")}


def write_adapted(model: str, destination: str, *, method: Method, checkpoint: str | None, heads: str) -> None:
    """Write a pretrained model made differential, as `diffvision.export.export_commands.adapt_to_folder` describes."""
    target = Path(destination)
    check_free(target)
    chosen = _parse_heads(heads)
    opened = open_for_export(model, checkpoint)
    module: Any = opened.module
    inputs = _random_inputs(opened)
    before = copy.deepcopy(module)
    adapt_model(module, method, heads=chosen)
    _compare(before, module, inputs, method)
    with written_whole(target) as made:
        _write(opened, method, made)
        again = open_model(made).module
        if (off := largest_difference(module, again, inputs)) > TOLERANCE:
            raise ValueError(
                f"{type(module).__name__} cannot be saved, as its library builds another model ({off:.1e} off): "
                "save its state_dict"
            )
    print(f"wrote {target}: train it with diffvision fit --model.model {FOLDER}{target}")


# ---- model and heads -----------------------------------------------------------------------------------------------


def _random_inputs(opened: Model) -> dict[str, Tensor]:
    """Return a random batch that the model takes, drawn with a fixed seed."""
    model: Any = opened.module
    draws = torch.Generator().manual_seed(0)
    dtype = next(model.parameters()).dtype
    if isinstance(model, LanguageModel):
        shape = (2, min(64, model.config.max_length))
        return {"tokens": torch.randint(model.config.vocab_size, shape, generator=draws)}
    size = getattr(getattr(model, "visual", None), "image_size", None) or opened.preprocess["input_size"][1:]
    channels = getattr(getattr(getattr(model, "patch_embed", None), "proj", None), "in_channels", 3)
    sides = (size, size) if isinstance(size, int) else size
    batch = {"image": torch.randn(2, channels, *sides, generator=draws).to(dtype)}
    if hasattr(model, "encode_text"):
        vocabulary = opened.config["text_cfg"].get("vocab_size", 49408)
        batch["text"] = torch.randint(1, vocabulary, (2, model.context_length), generator=draws)
    return batch


def _parse_heads(heads: str) -> list[int] | None:
    """Return the heads that "all" or "0,3,5" stands for, in every layer."""
    try:
        return None if heads == "all" else [int(part) for part in heads.split(",")]
    except ValueError:
        raise ValueError(f"heads must be all, or numbers as 0,3,5, got {heads!r}") from None


# ---- comparison ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def largest_difference(before: nn.Module, after: nn.Module, inputs: Mapping[str, Tensor]) -> float:
    """Return the largest difference of two models' outputs relative to the largest output, over all towers.

    Args:
        before, after: timm, OpenCLIP or language models, in evaluation mode.
        inputs: `image` and/or `text`, or `tokens`.
    """
    off = 0.0
    for expected, output in zip(_outputs(before, inputs), _outputs(after, inputs), strict=True):
        difference = (output.double() - expected.double()).abs().max() / expected.double().abs().max()
        off = max(off, difference.nan_to_num(torch.inf).item())
    return off


def _outputs(model: Any, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the outputs of all of a model's towers."""
    if "tokens" in inputs:
        return [model(inputs["tokens"])]
    towers = [(getattr(model, "encode_image", model), "image"), (getattr(model, "encode_text", None), "text")]
    return [tower(inputs[name]) for tower, name in towers if name in inputs]


def _compare(before: nn.Module, after: nn.Module, inputs: Mapping[str, Tensor], method: Method) -> None:
    """Print the difference between the outputs of both models, and raise a ValueError if they should be equal.

    If the difference in the model's dtype is above the tolerance, the models are compared in float64, where rounding
    is small.
    """
    off = largest_difference(before, after, inputs)
    report = f"{method}: outputs differ by {off:.1e} of the largest ({str(next(after.parameters()).dtype)[6:]})"
    if method not in EXACT:
        print(f"{report}: it is another function")
        return
    if off > TOLERANCE:
        wide = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
        off = largest_difference(copy.deepcopy(before).double(), copy.deepcopy(after).double(), wide)
        report += f", {off:.1e} (float64)"
    if off > TOLERANCE:
        raise ValueError(f"{report}, above {TOLERANCE}: adapt a model whose layers were not changed")
    print(report)


# ---- writing -------------------------------------------------------------------------------------------------------


def _write(opened: Model, method: Method, folder: Path) -> None:
    """Write the adapted model as a folder in its library's format."""
    model: Any = opened.module
    if isinstance(model, LanguageModel):
        before = language.origin_of(str(opened.weights))
        made = f"Made differential by diffvision adapt, method {method}: {_EFFECT[method]}."
        origin = made if before is None else f"{before}\n{made}"
        language.save(model, folder, language.find_tokenizer(str(opened.weights)), origin=origin)
        return
    if hasattr(model, "visual"):
        config = open_clip_config(opened.config, model, method)
    else:
        config = {**opened.config, **{key: model._model_args[key] for key in ("base", "method")}}
    save_folder(model, folder, config=config, preprocess=opened.preprocess, tokenizer=opened.tokenizer)


def open_clip_config(config: Mapping[str, Any], model: nn.Module, method: Method) -> dict[str, Any]:
    """Return OpenCLIP's model_cfg of an adapted model, from that of the pretrained one.

    Raises:
        ValueError: the configuration cannot describe the attention of a tower: CoCa's decoder.
    """
    if "multimodal_cfg" in config:
        raise ValueError("a CoCa's decoder cannot be named in OpenCLIP's configuration: adapt it in Python instead")
    changed: dict[str, Any] = copy.deepcopy(dict(config))
    adapted: Any = model
    vision, text = changed["vision_cfg"], changed["text_cfg"]
    args = getattr(getattr(adapted.visual, "trunk", None), "_model_args", {})
    if "base" in args:
        vision |= {"timm_model_name": f"{ENTRYPOINT}.{args['method']}.{args['base']}", "timm_model_pretrained": False}
    elif hasattr(adapted.visual, "transformer"):
        vision["block_type"] = _block_type(vision.get("block_type"), method)
        if method == "v1":
            vision["head_width"] = 2 * vision.get("head_width", 64)
    if not text.get("hf_model_name"):
        text["block_type"] = _block_type(text.get("block_type"), method)
        if method == "v1":
            text["heads"] = text.get("heads", 8) // 2
    return changed


def _block_type(given: str | None, method: Method) -> str:
    """Return the block_type of an adapted tower; settings of our standard attention stay."""
    settings = (given or "").split(":", 2)[2:]
    return ":".join(["diffvision", method, *settings])
