"""The tokenizer of a GGUF file, for the `tokenizers` library: byte-level pairs (GPT-2's) or SentencePiece's (Llama's).

A file names how text is split before pairs are merged, and has no pattern for it. The patterns here are those of the
tokenizers that these names stand for; a file with another name is refused, since a wrong split gives other tokens
without an error. As in SentencePiece, every text begins with a space where the file says so, or says nothing; some
tokenizers of transformers leave it out before a text that begins with one.

Source: ggml-org/llama.cpp src/llama-vocab.cpp (names and patterns, which of them keep whole words and begin with bos);
google/sentencepiece (merges in order of scores).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

_SPACE = "▁"
_CONTROL, _USER_DEFINED = 3, 4  # token types
_LONGEST_TOKEN = 1000  # characters: a token is cut at each of them to find its merges
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}"
    r"\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, list[pre_tokenizers.PreTokenizer]] = {
    "gpt-2": [],
    "smollm": [pre_tokenizers.Digits(individual_digits=True)],
    "llama-bpe": [pre_tokenizers.Split(Regex(_LLAMA_3), "isolated")],
    "tekken": [pre_tokenizers.Split(Regex(_TEKKEN), "isolated")],
}
_GPT2_PATTERN = ("gpt-2", "smollm")  # those that GPT-2's pattern splits further
_WHOLE_WORDS = ("llama-bpe", "tekken")  # a word that is a token stays whole, whatever the merges; text begins with bos
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # in tokenizer_config.json, in GGUF


def tokenizer_from_gguf(metadata: Mapping[str, Any], what: str) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Return the tokenizer that a GGUF file describes, and the values of its tokenizer_config.json.

    Args:
        metadata: of the file.
        what: name of the file in errors.

    Raises:
        ValueError: there is none, it is of another kind, or its text is split in a way that is not known.
    """
    known = {name.removeprefix("tokenizer.ggml."): value for name, value in metadata.items()}
    kind, tokens = known.get("model"), known.get("tokens")
    if kind not in ("gpt2", "llama") or not isinstance(tokens, list):
        raise ValueError(f"{what} has a tokenizer of kind {kind!r}: only 'gpt2' and 'llama' are read")
    if kind == "gpt2" and known.get("pre") not in _SPLITS:
        raise ValueError(
            f"{what} splits text as {known.get('pre')!r}, which is not known ({', '.join(_SPLITS)} are): give "
            "the original model's with --tokenizer tokenizer.json"
        )
    try:
        tokenizer = (_byte_level if kind == "gpt2" else _sentence_piece)(known, tokens)
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"{what} has a tokenizer whose tokens and merges do not fit each other: {error}") from error
    try:
        settings = _with_special_tokens(tokenizer, known, tokens)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{what} has special tokens of other types than GGUF's ({error}): convert it again") from error
    if template := metadata.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    return tokenizer, settings


def _with_special_tokens(
    tokenizer: tokenizers.Tokenizer, known: Mapping[str, Any], tokens: Sequence[str]
) -> dict[str, Any]:
    """Add the special tokens to a tokenizer, and return the settings that name them."""
    types = known.get("token_type") or ()
    added = [
        AddedToken(token, normalized=False, special=type_ == _CONTROL)
        for token, type_ in zip(tokens, types, strict=False)
        if type_ in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for theirs, gguf in _SPECIAL.items():
        number = known.get(f"{gguf}_token_id")
        if number is not None and 0 <= number < len(tokens):
            settings[f"{theirs}_token"] = tokens[number]
    bos = settings.get("bos_token")
    if bos and known.get("add_bos_token", known["model"] == "llama" or known.get("pre") in _WHOLE_WORDS):
        settings["add_bos_token"] = True
        number = known["bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, number)]
        )
    return settings


def _byte_level(known: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """Build a byte-level BPE tokenizer, as Llama 3 has."""
    split: str = known["pre"]
    merges = [tuple(pair.split(" ", 1)) for pair in known["merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split in _WHOLE_WORDS))
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in _GPT2_PATTERN)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*_SPLITS[split], words])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(known: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """Build a SentencePiece-like BPE tokenizer, as Llama 2 has."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = _merges(vocabulary, known["scores"])
    unknown = tokens[known.get("unknown_token_id", 0)]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefixed = known.get("add_space_prefix", True)
    replaced = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([*([normalizers.Prepend(_SPACE)] if prefixed else []), replaced])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefixed else [])])
    return tokenizer


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the pairs that make each token, those of the best score first: SentencePiece merges in that order."""
    pairs = []
    if longest := next((token for token in vocabulary if len(token) > _LONGEST_TOKEN), None):
        raise ValueError(f"a token has {len(longest):,} characters, and may have {_LONGEST_TOKEN:,}")
    for token, number in vocabulary.items():
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        made = [pair for pair in halves if pair[0] in vocabulary and pair[1] in vocabulary]
        made.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        pairs += [(-scores[number], pair) for pair in made]
    return [pair for _, pair in sorted(pairs, key=lambda ranked: ranked[0])]
