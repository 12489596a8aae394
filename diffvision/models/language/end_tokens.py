"""The token that ends a document, as a file of the tokenizers library or what lies beside it tells."""

import json
from collections.abc import Container
from pathlib import Path
from typing import Any

ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")  # the usual names, as data.tokenizers has them


def told_end(file: Path, vocabulary: Container[str]) -> str | None:
    """The token that tokenizer_config.json beside a tokenizer.json names, or the first usual name that it has.

    Raises:
        ValueError: tokenizer_config.json is not JSON.
    """
    beside = file.with_name("tokenizer_config.json")
    told: Any = {}
    if beside.is_file():
        try:
            told = json.loads(beside.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{beside} is not JSON, or nested too deeply: {error}") from None
    token = told.get("eos_token") if isinstance(told, dict) else None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else next((name for name in ENDS if name in vocabulary), None)
