"""What may be asked of a format beyond the model; which formats there are is in `formats.py`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Settings of the formats; each reads those that concern it.

    Attributes:
        tokenizer: of a language model: tokenizer.json, or a directory that holds one.
        eos: of a language model: the token that ends a document.
        license: of the weights, for the model card, as the Hub names it.
    """

    tokenizer: str | None = None
    eos: str | None = None
    license: str | None = None
