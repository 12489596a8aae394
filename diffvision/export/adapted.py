"""`diffvision adapt`: make a pretrained model differential and write it as a folder that its host loads.

Here the model is opened, outputs are compared, and the folder is written; `diffvision.models.adapt` changes the layers.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diffvision.analysis.heads import highest_entropy
from diffvision.analysis.registers import MIN_IMAGES, find_register_neurons
from diffvision.data.images.decode import decode_image
from diffvision.data.images.samples import CaptionMember, ImageMember, ImageText
from diffvision.data.images.sources import IMAGE_SUFFIXES, walk
from diffvision.data.shards.loader import ShardLoader
from diffvision.data.shards.sample import BadSample
from diffvision.data.shards.storage import ShardSet
from diffvision.data.text.module import TextData
from diffvision.export.folders import save_folder
from diffvision.models import hub, language
from diffvision.models.adapt import ENTRYPOINT, Heads, register_trunk
from diffvision.models.adapt import adapt as adapt_model
from diffvision.models.convert.state import check_finite, few
from diffvision.models.files import FOLDER, check_free, read_json, tensors_only, written_whole
from diffvision.models.language.decoder import LanguageModel
from diffvision.models.names import Method
from diffvision.opening import Model, open_model, open_ours

EXACT: tuple[Method, ...] = ("v2", "dex")
TOLERANCE = 1e-6  # of the largest output
_EFFECT = {"v1": "another function, to be trained", **dict.fromkeys(EXACT, "the same function, until it is trained on")}
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.h5", "*.msgpack", "*.onnx", "*.ot", "*.index.json")
_HEADS = "heads is {!r}: give all, entropy:0.5, or numbers as 0,3,5"
IMAGES = 100  # of a folder, in which register neurons are looked for, as in the authors' notebook
MEASURED = 64  # samples for the choice of heads by entropy
# Weights of a BERT file that its class may leave out: heads of pretraining, a pooler, a buffer of older versions.
_LEFT_OUT = re.compile(r"^cls\.|^(bert\.)?(pooler\.dense\.|embeddings\.position_ids$)")


def write_adapted(
    model: str,
    destination: str,
    *,
    method: Method,
    checkpoint: str | None,
    heads: str,
    data: str | None,
    tokenizer: str | None,
) -> None:
    """Write a pretrained model made differential, as `diffvision.export.command.adapt_to_folder` describes."""
    target = Path(destination)
    check_free(target)
    if method != "dex" and (heads != "all" or (data and method != "registers")):
        raise ValueError(f"heads and data choose the heads of method 'dex'; {method!r} changes all")
    if method == "registers" and not data:
        raise ValueError(f"method {method!r} finds neurons in images: give --data FOLDER, of {MIN_IMAGES} or more")
    if data and method == "dex" and not heads.startswith("entropy"):
        raise ValueError(f"data is for choosing heads by entropy, but heads is {heads!r}: set heads to entropy:0.5")
    if method != "registers" and checkpoint is None and (folder := _bert_folder(model)):
        _write_bert(folder, target, method, heads)
        return
    opened = open_ours(model, checkpoint)
    if opened.weights is None:
        raise ValueError(f"{model} has new weights: give --checkpoint, a tag of pretrained ones or a file")
    module: Any = opened.module
    inputs = _random_inputs(opened)
    chosen = _heads(heads, opened, data, tokenizer, inputs)
    before = copy.deepcopy(module)
    adapt_model(module, _find_register(opened, Path(str(data))) if method == "registers" else method, heads=chosen)
    _compare(before, module, inputs, method)
    with written_whole(target) as made:
        _write(opened, method, made)
        again = open_model(f"{FOLDER}{made}").module
        if (off := largest_difference(module, again, inputs)) > TOLERANCE:
            raise ValueError(
                f"{type(module).__name__} cannot be saved, as its library builds another model ({off:.1e} off): "
                "save its state_dict"
            )
    print(f"wrote {target}: {_how_to_load(module, target)}")


def _find_register(opened: Model, folder: Path) -> str:
    """Return the method for the neurons that make outliers in a folder's images, and print the numbers."""
    register_trunk(opened.module)
    paths = sorted(walk(folder, IMAGE_SUFFIXES))
    paths = paths[:: max(1, len(paths) // IMAGES)][:IMAGES]
    try:
        images = [opened.transform(decode_image((path := one).read_bytes())) for one in paths]
    except BadSample as error:
        raise ValueError(f"{path}: {error}: repair the image, or remove it from the folder") from None
    found = find_register_neurons(opened.module, images)
    print(f"{found.method}: of {len(images)} images' patches {found.before:.2%} are outliers, then {found.after:.2%}")
    print(f"the register's norm is {found.norm:.1f} times the median")
    return found.method


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
        text = torch.randint(
            1, opened.config["text_cfg"].get("vocab_size", 49408), (2, model.context_length), generator=draws
        )
        batch["text"] = text
    return batch


def _heads(
    heads: str, opened: Model, data: str | None, tokenizer: str | None, inputs: Mapping[str, Tensor]
) -> Heads | None:
    """Return the heads that the argument `heads` describes."""
    kind, _, rest = heads.partition(":")
    if kind != "entropy":
        return _parse_heads(heads)
    try:
        share = float(rest or 0.5)
    except ValueError:
        raise ValueError(_HEADS.format(heads)) from None
    batches = [inputs] if data is None else list(_batches(opened, data, tokenizer))
    chosen = highest_entropy(opened.module, batches, share)
    measured = f"{MEASURED} samples of {data}" if data else "random inputs: give --data for those of real ones"
    print(f"heads of highest entropy on {measured}: {json.dumps(chosen)}")
    return chosen


def _parse_heads(heads: str) -> Heads | None:
    """Return the heads that "all" or "0,3,5" stands for, in every layer."""
    if heads == "all":
        return None
    try:
        numbers = [int(part) for part in heads.split(",")]
    except ValueError:
        raise ValueError(_HEADS.format(heads)) from None
    return lambda depth, attention: numbers


def _batches(opened: Model, data: str, tokenizer: str | None) -> Iterator[Any]:
    """Return `MEASURED` samples of the shards, preprocessed for the model."""
    model: Any = opened.module
    size = 8
    batches: Iterator[Any]
    if isinstance(model, LanguageModel):
        words = tokenizer or language.find_tokenizer(str(opened.weights))
        length = min(512, model.config.max_length)
        texts = TextData(data, size, length, tokenizer=None if words is None else str(words), num_workers=0)
        texts.prepare_data()
        batches = ({"tokens": batch["tokens"][:, :-1]} for batch in texts.train_dataloader())
    else:
        image = ImageMember(opened.transform)
        kind: Any = _Images(image) if opened.tokenizer is None else ImageText(image, CaptionMember(), opened.tokenizer)
        batches = iter(ShardLoader(ShardSet(data), kind, size, num_workers=0))
    return islice(batches, MEASURED // size)


class _Images:
    """A kind of sample with images only, from shards of any kind."""

    def __init__(self, image: ImageMember) -> None:
        self.image = image

    def decode(self, members: Any) -> Tensor:
        return self.image(members)

    def collate(self, items: list[Tensor]) -> dict[str, Tensor]:
        return {"image": torch.stack(items)}


# ---- BERT, which no evaluation of ours takes and `open_model` does not open ------------------------------------------


def _bert_folder(spec: str) -> Path | None:
    """Return the folder if it is of a BERT of transformers'; ValueError if that is differential already."""
    if spec.startswith(hub.HUB):
        return None
    folder = hub.local(spec)
    kind = read_json(folder / "config.json").get("model_type") if (folder / "config.json").is_file() else None
    if kind == "adapted_bert":
        raise ValueError(f"{folder} is a BERT that is differential already: give the one that it was made of")
    return folder if kind == "bert" else None


def _write_bert(folder: Path, target: Path, method: Method, heads: str) -> None:
    """Write the adapted encoder with all other files of the folder: tokenizer, sentence-transformers' settings."""
    try:
        from transformers.activations import ACT2FN

        from diffvision.models import bert
    except ModuleNotFoundError as error:
        raise ValueError(f"{folder} needs {error.name}: pip install 'diffvision[hf]'") from None
    if heads.startswith("entropy"):
        raise ValueError(f"heads is {heads!r}, which is not measured for BERT: give all, or numbers as 0,3,5")
    kinds = {kind.__name__: kind for kind in bert.CLASSES}
    config = read_json(folder / "config.json")
    if (activation := config.get("hidden_act", "gelu")) not in list(ACT2FN):
        raise ValueError(
            f"{folder} has hidden_act {activation!r}, which transformers does not know: correct its config.json, as "
            "to 'gelu', BERT's own"
        )
    (name, *_) = config.get("architectures") or [bert.BertModel.__name__]
    if name not in kinds:
        raise ValueError(
            f"{folder} is a {name}, whose head would be lost: give one of {', '.join(kinds)}, e.g. "
            f"transformers.BertModel.from_pretrained('{folder}')"
        )
    before = _open_bert(kinds[name], folder)
    draws = torch.Generator().manual_seed(0)
    shape = (2, min(64, before.config.max_position_embeddings))
    inputs = {"input_ids": torch.randint(before.config.vocab_size, shape, generator=draws)}
    after: Any = adapt_model(copy.deepcopy(before), method, heads=_parse_heads(heads))
    _compare(before, after, inputs, method)
    with written_whole(target) as made:
        # Of the encoder's weights alone: folders below hold other modules of sentence-transformers, as 2_Dense.
        of_encoder = shutil.ignore_patterns(*_WEIGHTS, "config.json", "onnx", "openvino*", ".*")
        shutil.copytree(folder, made, ignore=lambda at, names: of_encoder(at, names) if Path(at) == folder else set())
        if (card := made / "README.md").is_file():
            card.rename(made / "README.of_the_source.md")
        after.save_pretrained(made)
        again = _open_bert(type(after), made)
        if (off := largest_difference(after, again, inputs)) > TOLERANCE:
            raise ValueError(
                f"{name} cannot be saved, as transformers builds another model ({off:.1e} off): save its state_dict"
            )
    auto = "AutoModel" + name.removeprefix("Bert").removeprefix("Model")
    print(f"wrote {target}: import diffvision.models.bert, then transformers.{auto}.from_pretrained('{target}')")


def _open_bert(kind: Any, folder: Path) -> Any:
    """Open a BERT with all of its weights; a `BertModel` may have been saved without a pooler."""
    read = functools.partial(kind.from_pretrained, folder, output_loading_info=True, ignore_mismatched_sizes=True)
    with tensors_only(str(folder)):
        model, info = read()
        if info["missing_keys"] == {"pooler.dense.weight", "pooler.dense.bias"}:
            model, info = read(add_pooling_layer=False)
    if missing := info["missing_keys"]:
        raise ValueError(f"{folder} lacks {few(sorted(missing))}: save the whole model")
    faults = sorted(
        f"{name} is {list(held)} in its file and {list(expected)} by its config.json"
        for name, held, expected in info["mismatched_keys"]
    )
    faults += [f"{name} is not in the model" for name in sorted(info["unexpected_keys"]) if not _LEFT_OUT.search(name)]
    if faults:
        raise ValueError(
            f"{folder} has weights that its config.json does not describe: {few(faults)}; restore the config.json that "
            "was saved with them"
        )
    check_finite(model.state_dict(), str(folder))
    return model


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
    if "input_ids" in inputs:
        return [value for value in model(**inputs).values() if isinstance(value, Tensor)]
    towers = [(getattr(model, "encode_image", model), "image"), (getattr(model, "encode_text", None), "text")]
    return [tower(inputs[name]) for tower, name in towers if name in inputs]


def _compare(before: nn.Module, after: nn.Module, inputs: Mapping[str, Tensor], method: Method) -> None:
    """Print the difference between the outputs of both models, and raise a ValueError if they should be equal.

    If the difference in the model's dtype is above the tolerance, the models are compared in float64, where rounding
    is small.
    """
    off = largest_difference(before, after, inputs)
    report = f"{method}: outputs differ by {off:.1e} of the largest ({str(next(after.parameters()).dtype)[6:]})"
    if method in EXACT and off > TOLERANCE:
        wide = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
        off = largest_difference(copy.deepcopy(before).double(), copy.deepcopy(after).double(), wide)
        report += f", {off:.1e} (float64)"
    if method in EXACT and not off <= TOLERANCE:
        raise ValueError(
            f"{report}, above {TOLERANCE}: check that the weights are finite and that no layer was changed"
        )
    print(report if method in EXACT else f"{report}: it is another function")


# ---- writing -------------------------------------------------------------------------------------------------------


def _write(opened: Model, method: Method, folder: Path) -> None:
    """Write the adapted model as a folder in its host's format."""
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
    if method != "registers" and not text.get("hf_model_name"):
        text["block_type"] = _block_type(text.get("block_type"), method)
        if method == "v1":
            text["heads"] = text.get("heads", 8) // 2
    return changed


def _block_type(given: str | None, method: Method) -> str:
    """Return the block_type of an adapted tower; settings of our standard attention stay."""
    settings = (given or "").split(":", 2)[2:]
    return ":".join(["diffvision", method, *settings])


def _how_to_load(model: nn.Module, folder: Path) -> str:
    if isinstance(model, LanguageModel):
        return f"diffvision.models.language.load('{folder}'), diffvision fit --model.model local-dir:{folder}"
    call = "open_clip.create_model_and_transforms" if hasattr(model, "visual") else "timm.create_model"
    more = "" if hasattr(model, "visual") else ", pretrained=True"
    return f"{call}('{FOLDER}{folder}'{more}), diffvision fit --model.model {FOLDER}{folder}"
