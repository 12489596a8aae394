"""Vision-language models by name, their processors and checkpoints (`pip install "diffvision[hf]"`).

The tower is any ViT of timm, ours among them, the language model any causal one of transformers. Ours become a Llama, a
DiffLlama or a `DiffLlamaV2ForCausalLM`. The model's class is in `timm_llava`.
"""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import timm
import torch
from timm.data import resolve_model_data_config
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlavaImageProcessor,
    LlavaProcessor,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    TimmWrapperConfig,
)
from transformers.image_utils import PILImageResampling
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from diffvision.models import language
from diffvision.models.architecture import KEY, check, difference
from diffvision.models.checkpoint import check_fits, few, read_checkpoint
from diffvision.models.hub import HUGGING_FACE, local
from diffvision.models.language.hugging_face import as_transformers, fast_tokenizer, join_ends, tokenizer_file, turn_end
from diffvision.models.names import is_tag, unknown_model
from diffvision.models.timm_llava import IMAGE, TimmLlava, TimmLlavaConfig, create_projector
from diffvision.models.weight_files import FOLDER, read_json, tensors_only

__all__ = ["NAMES", "TimmLlava", "TimmLlavaConfig", "create", "make_processor"]


class Halves(NamedTuple):
    """The tower and the language model of a name, with their arguments."""

    tower: str
    language: str
    tower_args: dict[str, Any] | None = None
    language_args: dict[str, Any] | None = None


_VICUNA = {"vocab_size": 32_000, "max_length": 4096, "tied": False}
NAMES = {
    "vlm-debug": Halves("plain_vit_debug", "transformer-debug"),
    "diff-vlm-debug": Halves("diff_vit_debug", "diffv2-debug"),
    "llava-1.5-7b": Halves(
        "vit_large_patch14_clip_quickgelu_336", "transformer-6.8b", language_args={**_VICUNA, "mlp_dim": 11_008}
    ),
    # The MLP is narrower by the parameters of V2's second queries, as in `language.SIZES`.
    "diff-llava-1.5-7b": Halves(
        "diff_vit_large_patch14_clip_224", "diffv2-6.8b", {"img_size": 336}, {**_VICUNA, "mlp_dim": 9632}
    ),
}
"""Name of a vision-language model -> its halves; LLaVA-1.5-7B's have the sizes of CLIP-L/14-336 and Vicuna-7B."""


def create(
    name: str = "vlm-debug",
    *,
    tower: str | None = None,
    tower_args: dict[str, Any] | None = None,
    tower_pretrained: str | None = None,
    language: str | None = None,
    language_args: dict[str, Any] | None = None,
    tokenizer: Any = None,
    **settings: Any,
) -> TimmLlava:
    """Return a vision-language model, with new weights where none are named.

    Args:
        name: key of `NAMES`, which gives the tower and the language model.
        tower: another tower, by timm's name.
        tower_args: arguments of the tower, as `timm.create_model` takes them.
        tower_pretrained: weights of the tower: a tag of timm's, a file, or a folder of timm's or OpenCLIP's; of a CLIP
            model the image tower.
        language: another language model: a name of ours; or one with weights: `local-dir:` and a folder or training's
            .ckpt of ours, or `hf:PATH`, of transformers.
        language_args: fields of `LanguageConfig`, for a name.
        tokenizer: as `make_processor` takes it, to set image_token_id; by default that is beyond the vocabulary.
        **settings: further fields of `TimmLlavaConfig`.

    Raises:
        FileNotFoundError: there are no such weights.
        ValueError: a name is unknown, or weights or a setting do not fit.
    """
    if name not in NAMES:
        raise unknown_model(name, "diffvision.models.vision_language has no", NAMES)
    named = NAMES[name]
    if language is None:
        language, language_args = named.language, {**(named.language_args or {}), **(language_args or {})}
    if tower is None:
        tower, tower_args = named.tower, {**(named.tower_args or {}), **(tower_args or {})}
    words = open_language(language, language_args)
    if tokenizer is not None:
        settings["image_token_id"] = with_image_token(tokenizer, words.config).convert_tokens_to_ids(IMAGE)
    images, about = open_tower(tower, tower_args, tower_pretrained)
    config = TimmLlavaConfig(
        vision_config=TimmWrapperConfig(architecture=tower, model_args=tower_args or {}),
        text_config=copy.deepcopy(words.config),  # whose choice of attention kernel is reset there
        **{"image_token_id": words.config.vocab_size, **settings},
    )
    config.preprocess = {**about, **(config.preprocess or {})} or None
    with torch.device("meta"):  # transformers would draw the halves' weights again
        model = TimmLlava(config)
    model.vision_tower.timm_model, model.language_model, config.text_config = images, words, words.config
    model.multi_modal_projector = create_projector(config)
    return model


# ---- the halves ----------------------------------------------------------------------------------------------------


def open_tower(name: str, args: dict[str, Any] | None, source: str | None) -> tuple[Any, dict[str, Any]]:
    """Return a tower of timm, and mean, std and interpolation of its images where its weights record them.

    Args:
        name: of the tower.
        args: its arguments.
        source: None for new weights; a file of weights, a folder of timm's or OpenCLIP's, or a tag of `name`, which
            wins over a path; of the weights of a CLIP model the image tower's are taken.

    Raises:
        ValueError: timm has no such tower; there are no such weights, they are damaged, or not of this tower.
    """
    if not timm.is_model(name):
        raise unknown_model(name, "timm has no", timm.list_models())
    arguments = {"num_classes": 0, **(args or {})}
    if source is None:
        return timm.create_model(name, **arguments), {}
    tags = [tag.removeprefix(f"{name}.") for tag in timm.list_pretrained(f"{name}.*")]
    if is_tag(source, tags):
        return timm.create_model(f"{name}.{source}", pretrained=True, **arguments), {}
    if not (path := local(source)).exists():
        known = ", ".join(tags) or "it has none"
        raise ValueError(f"tower_pretrained must be a path or a tag of {name!r} ({known}), got {source!r}")
    weights, about = _read_weights(path)
    made: Any = timm.create_model(name, **arguments)
    prefix = next((one for one in ("visual.trunk.", "visual.") if any(key.startswith(one) for key in weights)), "")
    unused = (f"{made.pretrained_cfg.get('classifier')}.", "visual.head.")
    state = {
        key.removeprefix(prefix): value
        for key, value in weights.items()
        if key.startswith(prefix) and not key.startswith(unused)
    }
    check_fits(state, made.state_dict(), f"{source} is not of tower {name!r}: it")
    made.load_state_dict(state)
    return made, {key: about[key] for key in ("mean", "std", "interpolation") if key in about}


def _read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights in a file, or in a folder of timm's or OpenCLIP's, and how they want images preprocessed."""
    about: dict[str, Any] = {}
    if path.is_dir():
        files = {"open_clip_config.json": "open_clip_model.safetensors", "config.json": "model.safetensors"}
        found = next((file for file in files if (path / file).is_file()), "config.json")
        values = read_json(path / found)
        about, path = values.get("preprocess_cfg") or values.get("pretrained_cfg") or {}, path / files[found]
    read = read_checkpoint(path)
    return read.state, about or read.about.get("preprocess") or {}


def open_language(name: str, args: dict[str, Any] | None = None) -> Any:
    """Return a causal language model as a model of transformers, in torch's default dtype.

    Args:
        name: a name of ours, for new weights; `local-dir:` and a folder or .ckpt of ours; or `hf:PATH`.
        args: fields of `LanguageConfig`, for a name.

    Raises:
        FileNotFoundError, ValueError: the name is unknown; transformers has no such model; the weights do not exist,
            are damaged, or do not fit.
    """
    if not name.startswith((HUGGING_FACE, FOLDER)):
        return as_transformers(language.create(name, **(args or {})))
    if args:
        raise ValueError(f"language_args must be left out, as {name} has its own sizes, got {args}")
    path, dtype = local(name), torch.get_default_dtype()
    if name.startswith(FOLDER):
        return as_transformers(language.load(path).to(dtype)).train()
    with tensors_only(name):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, trust_remote_code=False, dtype=dtype, output_loading_info=True
        )
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{name} lacks {few(missing)} of a causal language model: save the whole model")
    return model.train()


# ---- the processor -------------------------------------------------------------------------------------------------

_FLATTEN = """\
{%- set flat = namespace(messages=[]) %}
{%- for message in messages %}
{%- set content = namespace(text=message.content if message.content is string else '') %}
{%- for part in message.content if message.content is not string %}
{%- set content.text = content.text + ('<image>\\n' if part.type == 'image' else part.text) %}{% endfor %}
{%- set flat.messages = flat.messages + [{'role': message.role, 'content': content.text}] %}{% endfor %}
{%- set messages = flat.messages %}"""
"""Before a chat template for text: an image part is its placeholder and a line break."""
_QUESTION = """\
{%- for message in messages %}
{%- if message.role == 'user' %}{{ 'USER: ' + message.content + ' ASSISTANT:' }}
{%- elif message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}
{%- else %}{{ message.content + ' ' }}{% endif %}{% endfor %}"""
"""LLaVA-1.5's template, for tokenizers without one."""


def with_image_token(tokenizer: Any, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """Return a copy of a language model's tokenizer with the special token `IMAGE`, which pads at the left.

    Args:
        tokenizer: of transformers; or the path of a tokenizer.json, or of its folder.
        config: the language model's configuration.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the tokenizer has more tokens than the language model.
    """
    if isinstance(tokenizer, str | Path):
        longest = getattr(config, "max_position_embeddings", VERY_LARGE_INTEGER)
        tokenizer = fast_tokenizer(tokenizer_file(Path(tokenizer)), config.vocab_size, longest)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side, tokenizer.split_special_tokens = "left", False
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if (size := len(tokenizer)) > config.vocab_size and IMAGE not in tokenizer.get_vocab():
        raise ValueError(
            f"the tokenizer has {size} tokens and the language model {config.vocab_size}: give the model's own"
        )
    tokenizer.add_tokens([IMAGE], special_tokens=True)
    return tokenizer


def make_processor(model: TimmLlava, tokenizer: Any) -> LlavaProcessor:
    """Return the processor of a model: transform, tokenizer with placeholders, chat template.

    An image is padded to a square with the mean colour, as LLaVA-1.5 has it, and resized to the tower's size. The
    tokenizer's own chat template is used if it has one, with an image's placeholder and a line break before its text
    where it does not write them itself. What ends an answer by the template ends the model's generation too.

    Args:
        model: the model.
        tokenizer: as in `with_image_token`.

    Raises:
        ValueError: the tokenizer has more tokens than the language model, or its token `IMAGE` is not the placeholder.
    """
    config = model.config
    tokenizer = with_image_token(tokenizer, config.text_config)
    if (found := tokenizer.convert_tokens_to_ids(IMAGE)) != config.image_token_id:
        raise ValueError(
            f"{IMAGE} is token {found} of the tokenizer and image_token_id is {config.image_token_id}: create the "
            "model with this tokenizer"
        )
    height, width = model.image_size
    images = {**resolve_model_data_config(model.vision_tower.timm_model), **(config.preprocess or {})}
    own: Any = tokenizer.chat_template
    template = own if own and _writes_images(tokenizer, own) else _FLATTEN + (own or _QUESTION)
    processor = LlavaProcessor(
        image_processor=LlavaImageProcessor(
            do_pad=True,
            size={"height": height, "width": width},
            crop_size={"height": height, "width": width},
            resample=getattr(PILImageResampling, images["interpolation"].upper()),
            image_mean=list(images["mean"]),
            image_std=list(images["std"]),
        ),
        tokenizer=tokenizer,
        patch_size=model.patch_size * config.shuffle,
        vision_feature_select_strategy="full",
        chat_template=template,
        image_token=IMAGE,
    )
    known = model.generation_config.eos_token_id
    ends = known if isinstance(known, list) else [tokenizer.eos_token_id if known is None else known]
    model.generation_config.eos_token_id = join_ends([*ends, turn_end(tokenizer, template)])
    return processor


def _writes_images(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Return whether a chat template writes the placeholder of an image part."""
    question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}
    messages: list[Any] = [question, {"role": "assistant", "content": [{"type": "text", "text": "A star."}]}]
    try:
        written: Any = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except (jinja2.TemplateError, TypeError):  # a template for texts meets a list of parts
        return False
    return written.count(IMAGE) == 1


# ---- checkpoints of training ---------------------------------------------------------------------------------------

_UNRECORDED = ("transformers_version", "_name_or_path", "architectures", "dtype")  # versions, and what weights show


def record(model: TimmLlava) -> dict[str, Any]:
    """Return a model's configuration as plain values."""
    values = model.config.to_dict()
    parts = {name: part for name, part in values.items() if isinstance(part, dict)}
    values |= {name: {k: v for k, v in part.items() if k not in _UNRECORDED} for name, part in parts.items()}
    return {key: value for key, value in values.items() if key not in _UNRECORDED}


def check_record(about: dict[str, Any], model: TimmLlava, what: str) -> None:
    """Compare a model with the record of a checkpoint.

    Raises:
        ValueError: the record is not of a vision-language model, or of one with other settings, which are named.
    """
    if differences := difference({"config": _recorded_config(about, what)}, {"config": record(model)}):
        raise ValueError(f"{what} is of another model, with {differences}: set model.* as in its config.yaml")
    check({KEY: about.get(KEY)}, model, what)


def _recorded_config(about: dict[str, Any], what: str) -> dict[str, Any]:
    config = about.get("config")
    if not isinstance(config, dict) or config.get("model_type") != TimmLlavaConfig.model_type:
        raise ValueError(f"{what} is not of our vision-language training: give a checkpoint of VisionLanguageModule")
    return config


def load(path: str | Path) -> tuple[TimmLlava, dict[str, Any]]:
    """Return the model of a checkpoint of training in evaluation mode, LoRA's adapters merged, and its record.

    The record is {"model": name, "tokenizer": path, "fingerprint": of the tokenizer, "config": {...}, "lora": {"r": 8,
    "alpha": 16, ...} or None, "architecture": {...}}. Where averaged weights (EMA) are in the file, they are taken.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is damaged, or not a checkpoint of our vision-language training.
    """
    read = read_checkpoint(path)
    config, lora = _recorded_config(read.about, str(path)), read.about.get("lora")
    try:
        model = TimmLlava(TimmLlavaConfig.from_dict(config))
        model.load_state_dict(merge_adapters(read.state, lora["alpha"] / lora["r"] if lora else 0.0))
    except (TypeError, KeyError, RuntimeError) as error:
        first = " ".join(line.strip() for line in str(error).splitlines()[:3])
        raise ValueError(f"checkpoint {path} does not fit its configuration: {first[:500]}") from error
    check(read.about, model, str(path))
    return model.eval(), read.about


def merge_adapters(state: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return weights without LoRA's adapters A and B, which are added to the weight of their layer: W + scale B A."""
    merged = {}
    for name, value in state.items():
        layer, is_wrapped, rest = name.rpartition(".base_layer.")
        if is_wrapped and rest == "weight":
            down, up = (state[f"{layer}.lora_{side}.default.weight"].float() for side in "AB")
            value = (value.float() + scale * (up @ down)).to(value.dtype)
        if ".lora_" not in name:
            merged[f"{layer}.{rest}" if is_wrapped else name] = value
    return merged
