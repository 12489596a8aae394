"""The opening of language models: ours, and transformers' causal ones, with their tokenizers.

transformers is imported only when one of its models is opened.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, cast

from diffvision.data.text.tokenizers import load_tokenizer
from diffvision.models import language
from diffvision.models.bundled import bundled
from diffvision.models.checkpoint import few, read_origin
from diffvision.models.convert.transformers import EXPORTED, MODEL_TYPES
from diffvision.models.weight_files import tensors_only
from diffvision.opening.image_models import check_name
from diffvision.opening.model import Model
from diffvision.opening.run_folders import folder_config, run_of
from diffvision.opening.specs import register_diffllama_v2

_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len")  # not max_length, which generation uses


def open_language_name(name: str, checkpoint: str | Path | None) -> Model:
    """Open one of our language models by name, with the weights of a tag, or of a path, or new ones."""
    if checkpoint is None:
        return _language_model(language.create(name), name)
    if not isinstance(checkpoint, Path):
        return open_language(bundled(name)[checkpoint], name)
    model = open_language(checkpoint, read_origin(checkpoint).model if checkpoint.is_file() else None)
    check_name(model.name if model.name in language.model_names() else None, name, checkpoint)
    return model


def open_language(path: Path, trained: str | None = None) -> Model:
    """Open a checkpoint of our language models; `trained` is the name that its run recorded."""
    return _language_model(language.load(path), trained, path)


def _language_model(module: language.LanguageModel, name: str | None, path: Path | None = None) -> Model:
    """Return the loaded model, named after the known model of its configuration or its folder."""
    config = dataclasses.asdict(module.config)
    if name not in language.model_names():
        sizes = {key: config[key] for key in ("vocab_size", "max_length")}
        same = (known for known in language.model_names() if language.config(known, **sizes) == module.config)
        name = next(same, "model" if path is None else path.name)
    return Model(
        name=name,
        library="language",
        module=module,
        config=config,
        max_length=module.config.max_length,
        weights=None if path is None else str(path),
        run=run_of(path),
        path=path,
    )


def open_transformers_folder(folder: Path) -> Model:
    """Open a folder in transformers' layout; an exported model of this package becomes a `LanguageModel` again."""
    values = folder_config(folder)
    if values.get(EXPORTED) or values.get("model_type") == MODEL_TYPES["v2"]:
        return _convert(folder)
    return open_transformers(str(folder))


def open_as_language(folder: Path) -> Model:
    """Open a folder in transformers' layout as a language model of ours, whatever its class there is.

    Raises:
        ValueError: ours cannot be that model.
    """
    from diffvision.models.convert.layouts import recognise  # imports timm and OpenCLIP

    recognise(folder)
    return _convert(folder)


def open_transformers(path: str) -> Model:
    """Open a causal language model of transformers' with its tokenizer, from a folder or the Hub.

    Raises:
        ValueError: it is an encoder, which transformers would open as well, lacks weights, which would be new, or has
            more layers than its configuration.
    """
    register_diffllama_v2(path)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module, loading = from_pretrained(AutoModelForCausalLM, path, "causal language model", output_loading_info=True)
    causal = [part.is_causal for part in module.modules() if hasattr(part, "is_causal")]
    if causal and not any(causal):
        raise ValueError(
            f"{path} is an encoder ({module.config.model_type}): its tokens see those after them, so it does not "
            "generate; give a causal language model"
        )
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(f"{path} lacks {few(missing)} of a causal language model: save the whole model")
    kinds = {_without_numbers(name) for name in module.state_dict()}
    if surplus := sorted(name for name in loading["unexpected_keys"] if _without_numbers(name) in kinds):
        raise ValueError(
            f"{path} has weights of more layers than its config.json says, such as {few(surplus)}: restore the "
            "config.json that was saved with them"
        )
    folder, tokenizer = Path(path), None
    files = ("tokenizer.json", "tokenizer_config.json")
    if not folder.is_dir() or any((folder / name).exists() for name in files):
        tokenizer = HuggingFaceTokenizer(from_pretrained(AutoTokenizer, path, "tokenizer"))
    config: Any = module.config
    return Model(
        name=folder.name,
        library="transformers",
        module=module,
        config=config.to_dict(),
        tokenizer=tokenizer,
        max_length=next((getattr(config, name) for name in _LENGTHS if getattr(config, name, None)), None),
        weights=path,
        path=folder if folder.is_dir() else None,
    )


def _convert(folder: Path) -> Model:
    from diffvision.models.convert.files import read_language  # imports timm and OpenCLIP

    return _language_model(read_language(folder), None, folder)


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "", name)


def from_pretrained(kind: Any, path: str, what: str, **settings: Any) -> Any:
    """Load a model or tokenizer with one of transformers' Auto classes, without running code that comes with it."""
    try:
        with tensors_only(f"hf:{path}"):
            # Without trust_remote_code=False transformers would ask the user whether to run the code.
            return kind.from_pretrained(path, trust_remote_code=False, **settings)
    # Weights of other sizes and deeply nested JSON are a RuntimeError.
    except (OSError, ValueError, RuntimeError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"hf:{path} has code for its {what} (trust_remote_code), which is not run: give a model that "
                "transformers knows"
            ) from error
        first = str(error).strip().splitlines()[0]
        raise ValueError(f"transformers finds no {what} at {path!r}: {first}") from error


class HuggingFaceTokenizer:
    """A transformers tokenizer with the interface of our tokenizers.

    Attributes:
        start_id: the token that a text begins with, or None.
        eos_id: the token that ends a document.
        turn_end: the token that ends a turn by the chat template, or None.
    """

    def __init__(self, tokenizer: Any) -> None:
        from diffvision.models.language.hugging_face import turn_end

        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.eos_id: int | None = tokenizer.eos_token_id
        self.turn_end = turn_end(tokenizer)
        self.start_id: int | None = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text. The name of a special token in it is plain text, as in our tokenizers."""
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens."""
        return self.tokenizer.decode(ids)


def with_tokenizer(model: Model, tokenizer: str | None) -> Model:
    """Return the language model with the tokenizer of that path or name, or by default the one next to its weights."""
    words = model.tokenizer
    if tokenizer is not None:
        words = load_tokenizer(tokenizer)
    elif model.library == "language" and model.weights is not None:
        file = language.find_tokenizer(model.weights)
        words = None if file is None else load_tokenizer(file)
    vocabulary = cast(Any, model.module).config.vocab_size
    if words is not None and words.vocab_size > vocabulary:
        raise ValueError(
            f"the tokenizer has {words.vocab_size} tokens, {model.weights or model.name} has {vocabulary}: give the "
            "model's own tokenizer"
        )
    return dataclasses.replace(model, tokenizer=words)
