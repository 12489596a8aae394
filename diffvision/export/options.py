"""Settings of the export formats; the table of formats is in `formats.py`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Settings of an export; each format reads those that it needs.

    Attributes:
        tokenizer: for a language model: tokenizer.json, or a directory that holds one.
        eos: for a language model: the token that ends a document.
        license: of the weights, for the model card, as the Hub names it.
    """

    tokenizer: str | None = None
    eos: str | None = None
    license: str | None = None
