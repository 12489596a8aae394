"""The token that ends a document, by tokenizer_config.json or by its usual names.

`diffvision.data.text.tokenizers` has the same rule for training; `data` and `models` do not import each other.
"""

import json
from collections.abc import Container
from pathlib import Path
from typing import Any

USUAL_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")  # as in data.text.tokenizers


def end_token(tokenizer: Path, vocabulary: Container[str]) -> str | None:
    """Return the token that ends a document, or None if the vocabulary has none of the usual names.

    Args:
        tokenizer: tokenizer.json; the `eos_token` of a tokenizer_config.json next to it comes first.
        vocabulary: the tokens of the tokenizer.

    Raises:
        ValueError: tokenizer_config.json is not JSON.
    """
    file = tokenizer.with_name("tokenizer_config.json")
    values: Any = {}
    if file.is_file():
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} is not JSON, or nested too deeply: {error}") from None
    token = values.get("eos_token") if isinstance(values, dict) else None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else next((name for name in USUAL_NAMES if name in vocabulary), None)
