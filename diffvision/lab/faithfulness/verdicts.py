"""What a language model that judges is asked, and the verdict in its reply.

The parts are those of Lookback Lens's judge (arXiv 2407.07071), in our words: what is given and asked, the document,
the truth, the output, and the form of the reply.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

from diffvision.lab.faithfulness.rows import Row

_TASK = """\
Below are a document, {a_truth} and a proposed {kind}. Decide whether everything that the proposed {kind} says follows \
directly from the document. A statement that the document does not support makes it false, even if it is true \
elsewhere. A {kind} that differs from the {truth_name} is not false for that reason. Explain your decision first.
"""
_END = """\
End with the verdict, alone on a line: write **Conclusion: True** if the proposed {kind} follows from the document, or \
**Conclusion: False** if it does not. After False, add a line with the parts that do not follow, copied word by word: \
**Problematic Spans: ["...", ...]**"""
_NAMES = {
    "summary": {"kind": "summary", "title": "Summary", "a_truth": "a summary of reference", "truth_name": "reference"},
    "qa": {"kind": "answer", "title": "Answer", "a_truth": "a question, its valid answers", "truth_name": "valid ones"},
}
_TRUTH_TITLE = {"summary": "Ground Truth Summary", "qa": "Ground Truth Answers (a list of valid answers)"}
_MARK = re.compile(r"conclusion\W*[:：]\W*([^\n]*?)(?:\*\*|\n|$)", re.IGNORECASE)
_DENIED = re.compile(r"\b(?:not|neither|cannot|partly|partially|mostly)\b|n['’]t\b")
_SPANS = re.compile(r"problematic spans\W*?:\W*?(\[.*?\])\s*(?:\*\*|\n|$)", re.IGNORECASE | re.DOTALL)


def read_prompt(path: str | Path) -> str:
    """Read a judge's prompt: a text with {document} and {output}, and {question} and {truth} where they are wanted.

    Raises:
        FileNotFoundError; ValueError: one of the first two is missing; not UTF-8.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"judge.prompt is {path}, which is not UTF-8 ({error}): convert it") from error
    if missing := [name for name in ("{document}", "{output}") if name not in text]:
        raise ValueError(f"judge.prompt is {path}, which has no {missing[0]}: write where it stands in the prompt")
    return text


def prompt_of(row: Row, output: str, template: str | None = None) -> str:
    """Return what a judge is asked about an output, by default in our words."""
    filled = {"document": row.document, "question": row.question or "", "truth": row.truth, "output": output}
    if template is not None:
        return re.sub(r"\{(document|question|truth|output)\}", lambda name: filled[name[1]], template)
    names = _NAMES[row.kind]
    parts = [_TASK.format(**names), f"#Document#: {row.document}"]
    if row.question:
        parts.append(f"#Question#: {row.question}")
    parts.append(f"#{_TRUTH_TITLE[row.kind]}#: {row.truth or 'none is given'}")
    parts.append(f"#Proposed {names['title']}#: {output}")
    return "\n\n".join([*parts, _END.format(**names)])


def verdict_of(reply: str) -> bool | None:
    """Return the verdict of a judge's reply; None if it has none, or both.

    It is what follows a mark "Conclusion:" up to the line's end, in whatever quotes and asterisks. A reply that repeats
    both verdicts of the question, or denies one ("not true", "partly true"), is undecided.
    """
    verdicts: set[bool] = set()
    for match in _MARK.finditer(reply):
        text = match[1].lower()
        said = {word == "true" for word in re.findall(r"\b(?:true|false)\b", text)}
        if said and _DENIED.search(text):
            return None
        verdicts |= said
    return verdicts.pop() if len(verdicts) == 1 else None


def spans_of(reply: str) -> list[str]:
    """Return the problematic spans that a reply lists as JSON or as a literal; nothing that it does not list so."""
    match = _SPANS.search(reply)
    if match is None:
        return []
    for read in (json.loads, ast.literal_eval):
        try:
            spans: Any = read(match[1])
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(spans, list):
            return [span for span in spans if isinstance(span, str)]
    return []
