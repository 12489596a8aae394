"""Hugging Face's models among ours: loading, and their tokenizers. transformers is imported only when one is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from diffvision.models.bounds import bounded
from diffvision.models.files import tensors_only


class HuggingFaceTokenizer:
    """A tokenizer of transformers with the names that ours has.

    Attributes:
        start_id: token that a text begins with, where the model wants one.
        eos_id: token that ends a text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.eos_id: int | None = tokenizer.eos_token_id
        self.start_id: int | None = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without special ones: one whose name is written in the text is text, as in ours."""
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def decode(self, ids: list[int]) -> str:
        """The text of tokens."""
        return self.tokenizer.decode(ids)


def load_hugging_face(path: str) -> tuple[nn.Module, HuggingFaceTokenizer | None]:
    """A causal language model and its tokenizer (None if the folder has none), from a folder or the Hub's name.

    Folders that `models.language.transformers.export` wrote open too: our classes are known without their code.

    Raises:
        ValueError: transformers is missing, or finds no causal language model there; the folder has code or pickles,
            which are not run.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        import diffvision.models.language.transformers  # noqa: F401  (registers our classes)
    except ImportError as error:
        raise ValueError(f"hf:{path} needs transformers 5 or later: pip install diffvision[hf] ({error})") from error
    model = _opened(AutoModelForCausalLM, path, "causal language model")
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return model, None
    return model, HuggingFaceTokenizer(_opened(AutoTokenizer, path, "tokenizer"))


def _opened(kind: Any, path: str, what: str) -> Any:
    """What one of transformers' Auto classes finds, if that needs nothing to be run; else a ValueError."""
    folder = Path(path)
    with bounded(folder if folder.is_dir() else path):
        try:
            with tensors_only(f"hf:{path}"):
                return kind.from_pretrained(path, trust_remote_code=False)  # left out, it would ask
        except (OSError, ValueError, RuntimeError) as error:  # the last of weights of other sizes, and of deep JSON
            if "trust_remote_code" in str(error):
                raise ValueError(
                    f"hf:{path} has code of its own for its {what} (trust_remote_code), which is not run: give a model "
                    "that transformers knows, or convert it with code that you have read"
                ) from error
            first = str(error).strip().splitlines()[0]
            raise ValueError(f"transformers finds no {what} at {path!r}: {first}") from error
