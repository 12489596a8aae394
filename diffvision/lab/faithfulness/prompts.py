"""What a model is asked about a row, and which part of a document is cut so that the model can read it.

Instruction, document and ending are those of Lookback Lens (Chuang et al. 2024, arXiv 2407.07071); LongBench's are read
from its file of prompts where one is given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffvision.lab.faithfulness.rows import Kind, Row
from diffvision.lab.language.chats import Ask
from diffvision.lab.language.generations import Prompt

STOPS = ("#Document#:", "#Question#:", "#Article#:", "Q:", "\\end{code}")
"""What ends an output, as in Lookback Lens: a base model continues with another example."""
TEMPLATES: dict[Kind, str] = {
    "summary": ("Generate a summary based on the information in the document.\n\n#Document#: {context}\n#Summary#:"),
    "qa": (
        "Answer the question based on the information in the document. Explain your reasoning in the document "
        "step-by-step before providing the final answer.\n\n#Document#: {context}\n#Question#: {input}\n#Answer#:"
    ),
}


def read_templates(path: str | Path, rows: Sequence[Row]) -> dict[str, str]:
    """Read prompts from a JSON file: {dataset of LongBench, or "summary" or "qa": text with {context} and {input}}.

    Args:
        path: the file.
        rows: for which they are meant.

    Raises:
        FileNotFoundError; ValueError: no such object, a text without {context}, or names that fit none of the rows.
    """
    try:
        templates = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"prompts is {path}, which is not JSON ({error}): correct it") from error
    if not isinstance(templates, dict) or not all(
        isinstance(text, str) and text.count("{context}") == 1 for text in templates.values()
    ):
        raise ValueError(f'prompts is {path}: write {{"NAME": "text with {{context}} once, and {{input}}", ...}}')
    names = {name for row in rows for name in (row.dataset, row.kind) if name}
    if names and not names & templates.keys():
        raise ValueError(
            f"prompts is {path} with {', '.join(templates) or 'no names'}, and the rows are of "
            f"{', '.join(sorted(names))}: name a prompt by one of these"
        )
    return templates


def fit_prompt(row: Row, tokenizer: Any, room: int | None, ask: Ask, templates: Mapping[str, str]) -> Prompt:
    """Return a row's prompt, its document cut where it has more tokens than there is room for.

    Args:
        row: what is asked.
        tokenizer: of the model.
        room: the most tokens of a prompt; None for any number.
        ask: makes the tokens of a prompt.
        templates: by dataset or kind; `TEMPLATES` has those that are missing.

    Raises:
        ValueError: there is no room for the prompt without its document; a template that leaves a question out.
    """
    template = templates.get(row.dataset or "") or templates.get(row.kind) or TEMPLATES[row.kind]
    if row.question and "{input}" not in template:
        raise ValueError(f"row {row.id!r} has a question, and its prompt has no {{input}}: write where it stands in it")

    def tokens_of(document: str) -> list[int]:
        filled = {"context": document, "input": row.question or ""}
        return ask(re.sub(r"\{(context|input)\}", lambda name: filled[name[1]], template))

    tokens = tokens_of(row.document)
    if room is None or len(tokens) <= room:
        return Prompt(row.id, tokens)
    bare = len(tokens_of(""))
    if bare >= room:
        raise ValueError(
            f"row {row.id!r} has a prompt of {bare} tokens without its document, over {room}: leave it out, or "
            "lower new_tokens"
        )
    document = tokenizer.encode(row.document)
    keep = len(document) - (len(tokens) - room)
    while len(tokens := tokens_of(_cut(document, max(keep, 0), row.cut, tokenizer))) > room:
        keep -= len(tokens) - room  # text that was cut may have other tokens
    return Prompt(row.id, tokens, len(document) - max(keep, 0))


def _cut(document: list[int], keep: int, where: str, tokenizer: Any) -> str:
    """Return the text of `keep` tokens: the first for "end", else as many from both ends; no partial character."""
    if where == "end":
        parts = [document[:keep]]
    else:
        parts = [document[: keep - keep // 2], document[len(document) - keep // 2 :]]
    return "".join(tokenizer.decode(part).strip("\N{REPLACEMENT CHARACTER}") for part in parts if part)
