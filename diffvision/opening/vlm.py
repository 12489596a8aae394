"""The opening of vision-language models: ours, and any of transformers that takes images and text, with processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffvision.data.text.tokenizers import load_tokenizer
from diffvision.models.checkpoint import few, read_origin
from diffvision.models.hub import HUGGING_FACE, local
from diffvision.models.language import find_tokenizer
from diffvision.opening.model import Model
from diffvision.opening.run_folders import best_checkpoint
from diffvision.opening.specs import find_model, register_diffllama_v2
from diffvision.opening.texts import from_pretrained


def open_vlm(spec: str | Path) -> Model:
    """Open a vision-language model with its weights and processor.

    Args:
        spec: the run of our training, whose best checkpoint is taken, or a .ckpt of it; a folder of transformers', with
            or without `hf:`; or an id on the Hub after `hf:`.

    Raises:
        FileNotFoundError: the folder does not exist, or the tokenizer of a training does not any more.
        ValueError: it is not an image-text-to-text model, its weights do not fit, or its processor is another model's.
    """
    register_diffllama_v2(str(spec))
    if (file := find_trained(spec)) is not None:
        return _open_trained(file)
    found = find_model(spec)
    if found.kind not in ("folder", "hf"):
        raise ValueError(f"{spec} is no vision-language model: give a run or folder of one, or {HUGGING_FACE}ID")
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from diffvision.models.vision_language import TimmLlava  # registers it

    path = local(spec)
    what = "image-text-to-text model"
    model, info = from_pretrained(AutoModelForImageTextToText, str(path), what, output_loading_info=True)
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{path} lacks {few(missing)} of an {what}: save the whole model")
    if isinstance(model, TimmLlava) and (others := sorted(info["unexpected_keys"])):
        raise ValueError(f"{path} has weights that its config.json does not name, {few(others)}: restore its own")
    processor = from_pretrained(AutoProcessor, str(path), "processor")
    _complete(processor, model.config)
    check_processor(model, processor, str(path))
    return _opened(path.name, model.eval(), processor, path)


def _complete(processor: Any, config: Any) -> None:
    """Take from the configuration and the tokenizer what the processor of an older transformers' folder leaves out."""
    if getattr(processor, "chat_template", None) is None:
        processor.chat_template = getattr(getattr(processor, "tokenizer", None), "chat_template", None)
    if getattr(processor, "patch_size", 0) is None:  # of a LlavaProcessor
        processor.patch_size = config.vision_config.patch_size
        processor.vision_feature_select_strategy = config.vision_feature_select_strategy
        processor.num_additional_image_tokens = int(config.vision_config.model_type == "clip_vision_model")  # its class


def find_trained(spec: str | Path) -> Path | None:
    """Return the checkpoint of our vision-language training that a run or file stands for; None where it is another."""
    found = find_model(spec)
    if found.kind not in ("run", "file"):
        return None
    path = best_checkpoint(found.path)[0] if found.kind == "run" else found.path
    return path if path.suffix == ".ckpt" and read_origin(path).vision_language else None


def _open_trained(file: Path) -> Model:
    from diffvision.models.vision_language import load, make_processor

    model, about = load(file)
    if (tokenizer := find_tokenizer(file)) is None:
        raise FileNotFoundError(
            f"{file} was trained with tokenizer {about.get('tokenizer')}, which is not here: put it next to the file"
        )
    if about.get("fingerprint") not in (None, load_tokenizer(tokenizer).fingerprint):
        raise ValueError(f"{tokenizer} is not the tokenizer that {file} was trained with: put its own next to it")
    return _opened(about["model"], model, make_processor(model, tokenizer), file)


def _opened(name: str, module: Any, processor: Any, path: Path) -> Model:
    config = module.config.to_dict()
    return Model(name, "transformers", module, config, processor=processor, weights=str(path), path=path)


def check_processor(model: Any, processor: Any, what: str) -> None:
    """Raise a ValueError if a processor writes other placeholders than its model reads, or other images."""
    if not hasattr(processor, "image_processor") or not hasattr(processor, "tokenizer"):
        raise ValueError(f"{what} has no processor of images and text: save it with processor.save_pretrained")
    known = {"placeholder": (getattr(processor, "image_token_id", None), getattr(model.config, "image_token_id", None))}
    if hasattr(model, "image_tokens"):  # ours
        size = getattr(processor.image_processor, "crop_size", None) or {"height": None, "width": None}
        known["size of images"] = ((size["height"], size["width"]), model.image_size)
        side = model.patch_size * model.config.shuffle
        known["patch_size"] = (getattr(processor, "patch_size", None), side)
    for name, (theirs, its) in known.items():
        if None not in (theirs, its) and theirs != its:
            raise ValueError(
                f"{what} has a processor of another model: its {name} is {theirs}, not {its}; save its own"
            )
