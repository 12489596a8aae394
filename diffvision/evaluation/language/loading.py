"""What is evaluated and on what: models, tokenizers and documents from where they are kept."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diffvision.data.tokenizers import load_tokenizer
from diffvision.evaluation.language.hugging_face import load_hugging_face
from diffvision.evaluation.language.needle import start_tokens
from diffvision.models import language

HUGGING_FACE = "hf:"
_LENGTHS = ("max_length", "max_position_embeddings", "n_positions", "max_seq_len")


@dataclass(frozen=True)
class Subject:
    """A model in evaluation mode and what belongs to it."""

    name: str
    model: nn.Module
    tokenizer: Any | None  # encode, decode, vocab_size, eos_id; None where none came with the model
    max_length: int | None  # tokens that it can read; None where it does not say


def load_subject(checkpoint: str, *, tokenizer: str | None = None, device: torch.device | str = "cpu") -> Subject:
    """The model of a checkpoint.

    Args:
        checkpoint: a folder or .ckpt file of ours, or `hf:PATH` for a Hugging Face causal language model; `NAME=`
            before it names the model in tables and pictures (by default the path's last part).
        tokenizer: a file or name as `diffvision.data.tokenizers.load_tokenizer` takes, where none came with the model
            or another is wanted.
        device: where to.

    Raises:
        FileNotFoundError, ValueError: as the loaders; a tokenizer with more tokens than the model.
    """
    name, path = _named(checkpoint)
    own: Any = None
    model: nn.Module
    if path.startswith(HUGGING_FACE):
        model, own = load_hugging_face(path.removeprefix(HUGGING_FACE))
    else:
        model = language.load(path)
        own = load_tokenizer(path) if (Path(path) / "tokenizer.json").is_file() else None
    own = load_tokenizer(tokenizer) if tokenizer is not None else own
    config: Any = model.config
    if own is not None and own.vocab_size > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {own.vocab_size} tokens and the model of {path} {config.vocab_size}: give the "
            "tokenizer that it was trained with"
        )
    # transformers keeps generation's max_length in configurations of old: only ours means the context by it
    names = _LENGTHS if isinstance(model, language.LanguageModel) else _LENGTHS[1:]
    length = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    return Subject(name, model.to(device).eval(), own, length)


def read_texts(sources: Sequence[str | Path]) -> Iterator[str]:
    """Documents: each .txt file is one, each line of a .jsonl file has one in its field "text"; of a folder all such
    files below it in the order of their names; of shards (a .tar, a folder of them, a pattern) each member .txt.

    Raises:
        FileNotFoundError: no such file. ValueError: nothing to read there, or text that is not UTF-8.
    """
    for source in sources:
        path = Path(source)
        if path.is_dir() and not any(path.glob("*.tar")):
            files = sorted(file for suffix in ("*.txt", "*.jsonl") for file in path.rglob(suffix))
            if not files:
                raise ValueError(f"no .txt, .jsonl or .tar in {path}: give files of text, or shards of them")
            yield from read_texts(files)
        elif path.suffix in (".txt", ".jsonl"):
            try:
                yield from _documents(path)
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} is not UTF-8 ({error}): convert it") from error
        else:
            yield from _members(str(source))


def tokenised(texts: Iterable[str], tokenizer: Any, at_most: int) -> tuple[list[Tensor], int]:
    """Documents as tokens, each behind a start token, `at_most` in all (the last one is cut), and the bytes of UTF-8 in
    their text.

    Raises:
        ValueError: no text has a token.
    """
    documents: list[Tensor] = []
    num_bytes, left, start = 0, at_most, start_tokens(tokenizer)
    for text in texts:
        tokens = tokenizer.encode(text)
        if len(tokens) > left:
            tokens = tokens[:left]
            text = tokenizer.decode(tokens)
        if tokens:
            documents.append(torch.tensor([*start, *tokens]))
            num_bytes += len(text.encode())
            left -= len(tokens)
        if not left:
            break
    if not documents:
        raise ValueError("the texts have not a single token: give files with text in them")
    return documents, num_bytes


def rows_of(documents: Sequence[Tensor], length: int) -> Tensor:
    """The documents end to end, cut in rows of one length, int64 [S, length]; what is left over is left out.

    Raises:
        ValueError: they are not even one row long.
    """
    stream = torch.cat(list(documents))
    count = len(stream) // length
    if not count:
        raise ValueError(
            f"the documents have {len(stream)} tokens, not one row of {length}: give more text or a smaller window"
        )
    return stream[: count * length].view(count, length)


def _named(checkpoint: str) -> tuple[str, str]:
    """(name, path) of NAME=PATH or PATH; Lightning's own paths have = in them ("epoch=3-step=100.ckpt")."""
    name, given, path = checkpoint.partition("=")
    if given and "/" not in name and not Path(checkpoint).exists():
        return name, path
    last = Path(checkpoint.removeprefix(HUGGING_FACE))
    return (last.stem if last.suffix == ".ckpt" else last.name) or "model", checkpoint


def _documents(path: Path) -> Iterator[str]:
    if path.suffix == ".txt":
        yield path.read_text(encoding="utf-8-sig")
        return
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1):
        if line.strip():
            try:
                yield str(json.loads(line)["text"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f'line {number} of {path} has no document: write {{"text": ...}} on each line'
                ) from error


def _members(source: str) -> Iterator[str]:
    from diffvision.data.storage import ShardSet
    from diffvision.data.tokenize import documents_of

    return documents_of(ShardSet(source))
