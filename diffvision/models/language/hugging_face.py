"""Language models as transformers' own (`pip install diffvision[hf]`), in memory and as folders.

V1 is a `DiffLlamaForCausalLM`, the plain model a `LlamaForCausalLM`, and V2 a Llama with a difference at the end of
attention (`modeling_diffllama_v2.py`). The weights are renamed in `diffvision.models.convert.transformers`.
"""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
import torch
from transformers import DiffLlamaForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from diffvision.models.convert.transformers import EXPORTED, from_hugging_face, to_hugging_face
from diffvision.models.language.decoder import LanguageModel
from diffvision.models.language.modeling_diffllama_v2 import DiffLlamaV2ForCausalLM, DiffLlamaV2Model
from diffvision.models.merge import merge_dex
from diffvision.tokenizer_settings import USUAL_ENDS, find_end, read_config, text_settings

CLASSES: dict[str, Any] = {
    "diffllama": DiffLlamaForCausalLM,
    "llama": LlamaForCausalLM,
    "diffllama_v2": DiffLlamaV2ForCausalLM,
}
"""model_type -> the class of transformers, or of `modeling_diffllama_v2`."""
_ANSWER = "A star."


def as_transformers(model: LanguageModel, **settings: Any) -> Any:
    """Return a language model as a DiffLlama, a Llama or a DIFF V2 in a Llama, in the dtype and mode of the model.

    Weights that are only renamed share their memory with the model's.

    Args:
        model: a model of variant v1, v2 or standard, or of DEX, whose projections are merged.
        **settings: further settings of transformers' configuration: eos_token_id, pad_token_id, ...

    Raises:
        ValueError: transformers has no class for it.
    """
    if any(layer.mergeable for layer in model.attention_layers()):
        merge_dex(model := copy.deepcopy(model))
    values, state = to_hugging_face(model.config, model.state_dict())
    kind = CLASSES[values.pop("model_type")]
    config = kind.config_class(
        **{**values, "bos_token_id": None, "eos_token_id": None, **settings}, dtype=model.embed.weight.dtype
    )
    setattr(config, EXPORTED, True)
    if kind is DiffLlamaV2ForCausalLM:  # engines make the decoder alone; save_pretrained adds the two other classes
        config.auto_map = {"AutoModel": f"{DiffLlamaV2Model.__module__.rpartition('.')[2]}.{DiffLlamaV2Model.__name__}"}
    with torch.device("meta"):
        made = kind(config)
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    made.load_state_dict(state, assign=True)
    made.tie_weights()
    made.model.rotary_emb = type(made.model.rotary_emb)(config).to(model.embed.weight.device)
    return made.train(model.training)


def as_native(model: Any) -> LanguageModel:
    """Return a DiffLlama, a Llama or a DIFF V2 in a Llama as our language model; the inverse of `as_transformers`.

    Raises:
        ValueError: our model does not have one of its settings.
    """
    config, state = from_hugging_face(model.config.to_dict(), model.state_dict())
    with torch.device("meta"):
        ours = LanguageModel(config)
    ours.load_state_dict(state, assign=True)
    return ours.train(model.training)


def write(model: Any, directory: str | Path, tokenizer: Path | None, *, eos: str | None = None) -> None:
    """Write a model of `as_transformers` as a folder, with the tokenizer of a tokenizer.json.

    The folder needs no diffvision. V2's holds a copy of `modeling_diffllama_v2.py`, which a program that does not
    import this package loads with `trust_remote_code=True`. The generation configuration ends a text with the
    tokenizer's end token, and with the special token that its chat template writes after an answer.

    Args:
        model: the model.
        directory: made if it does not exist.
        tokenizer: a tokenizer.json; None for a folder without one.
        eos: token that ends a document, as in `fast_tokenizer`.

    Raises:
        ValueError: the tokenizer is damaged, or has no such token or more tokens than the model.
    """
    if tokenizer is not None:
        fast = fast_tokenizer(tokenizer, model.config.vocab_size, model.config.max_position_embeddings, eos)
        for config in (model.config, model.generation_config):
            config.bos_token_id = fast.bos_token_id
            config.eos_token_id = join_ends([fast.eos_token_id, turn_end(fast)])
        # not of the model's configuration, by which the embedding of the end token would get no gradient
        model.generation_config.pad_token_id = fast.pad_token_id
        fast.save_pretrained(directory)
    model.save_pretrained(directory)


def join_ends(tokens: Iterable[int | None]) -> int | list[int] | None:
    """Return the tokens that end a text as transformers' configurations have them: a number, several, or None."""
    unique = [token for token in dict.fromkeys(tokens) if token is not None]
    return unique[0] if len(unique) == 1 else unique or None


def turn_end(tokenizer: Any, template: str | None = None) -> int | None:
    """Return the special token that a chat template writes after an answer; None if there is none.

    Args:
        tokenizer: with the special tokens, and a template of texts.
        template: another one, of messages in parts.
    """
    texts = {"user": "What is it?", "assistant": _ANSWER}
    messages = [
        {"role": role, "content": text if template is None else [{"type": "text", "text": text}]}
        for role, text in texts.items()
    ]
    try:
        written: Any = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except (ValueError, TypeError, jinja2.TemplateError):  # no template, or one that takes no such conversation
        return None
    special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    rest = written.rpartition(_ANSWER)[2].lstrip()
    return next((special[name] for name in sorted(special, key=len, reverse=True) if rest.startswith(name)), None)


def tokenizer_file(path: Path) -> Path:
    """Return the tokenizer.json of a path, which is that file or its folder; FileNotFoundError if there is none."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"no tokenizer at {path}: give a tokenizer.json, or a directory that holds one")
    return file


def fast_tokenizer(file: Path, vocab_size: int, max_length: int, eos: str | None = None) -> PreTrainedTokenizerFast:
    """Return transformers' tokenizer of a tokenizer.json, for a model with these sizes; it pads at the left.

    Its chat template, first and last token are those of the files next to it. Without a template text is only text, as
    in our tokenizers. With one, transformers writes the names of special tokens into the text, and must read them.

    Raises:
        ValueError: the file is not a tokenizer, has no token `eos`, or has more tokens than the model.
    """
    try:
        vocabulary = tokenizers.Tokenizer.from_file(str(file)).get_vocab()
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"{file} is not a file of the tokenizers library: {error}") from None
    eos = eos or find_end(vocabulary, read_config(file.parent)) or USUAL_ENDS[0]
    if eos not in vocabulary:
        raise ValueError(f"{file} has no token {eos!r} that ends a document: name the one that does with eos")
    if (size := max(vocabulary.values()) + 1) > vocab_size:
        raise ValueError(f"{file} has {size} tokens and the model {vocab_size}: give the model's own tokenizer")
    return PreTrainedTokenizerFast(
        tokenizer_file=str(file),
        eos_token=eos,
        pad_token=eos,
        padding_side="left",
        model_max_length=max_length,
        **text_settings(file.parent),
    )
