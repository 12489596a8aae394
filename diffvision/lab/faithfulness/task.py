"""The evaluation itself: outputs about the rows, the judgements of each judge, and their rates.

Source: arXiv 2410.05258 section 3.6 judges 100 outputs of each data set by GPT-4o, after Lookback Lens (arXiv
2407.07071). An output that a judge cannot decide counts as not accurate, as there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from diffvision.evaluation.language.scoring import Progress, unseen
from diffvision.evaluation.records import Records, fingerprint
from diffvision.evaluation.samples import PerSample
from diffvision.lab.faithfulness.judges import Judge
from diffvision.lab.faithfulness.prompts import STOPS, fit_prompt
from diffvision.lab.faithfulness.rows import Row
from diffvision.lab.faithfulness.rules import Judgement
from diffvision.lab.language.chats import asking, ends_of
from diffvision.lab.language.generations import Generation, generate_rows, room_for
from diffvision.lab.language.recall_errors import unit
from diffvision.opening import Model

EMPTY = Judgement(False, "the output is empty")


def faithfulness(
    model: Model,
    rows: Sequence[Row],
    judges: Sequence[Judge],
    *,
    new_tokens: int = 256,
    templates: Mapping[str, str] | None = None,
    chat: str | None = None,
    folder: Path | None = None,
    settings: Any = None,
    batch_size: int = 8,
    progress: Progress = unseen,
) -> dict[str, PerSample | float]:
    """Return the share of outputs that each judge finds accurate, and what became of all rows.

    Args:
        model: with its tokenizer.
        rows: the documents and questions.
        judges: of `judges.open_judges`.
        new_tokens: the most tokens of an output.
        templates: as `prompts.fit_prompt`.
        chat: as `chats.asking`.
        folder: for generations.jsonl and judgements-JUDGE.jsonl, from which a run that was ended resumes; None for no
            files.
        settings: what outputs depend on besides the rows, such as a digest of the model.
        batch_size: outputs at a time.

    Returns:
        "<judge>/accuracy" and "<judge>/undecided"; "kappa/<judge>+<judge>", Cohen's kappa of two judges' verdicts,
        "undecided" being one; "rows"; "cut", the share of rows whose document was cut, and "cut_tokens", the mean over
        all rows of the tokens that were left out; "output_tokens", the mean; the shares "at_limit" (ended by
        new_tokens) and "empty".

    Raises:
        ValueError: a row for which there is no room; files of other rows or settings; a judge does not answer.
    """
    room = room_for(model, new_tokens)
    ask = asking(model, chat)
    prompts = [fit_prompt(row, model.tokenizer, room, ask, templates or {}) for row in rows]
    outputs = generate_rows(
        model,
        prompts,
        max_new_tokens=new_tokens,
        stops=(*STOPS, *ends_of(model, chat)),
        file=None if folder is None else folder / "generations.jsonl",
        settings=settings,
        batch_size=batch_size,
        progress=progress,
    )
    units = [unit([row.id, row.document, row.question, row.truth]) for row in rows]
    verdicts: dict[str, list[bool | None]] = {}
    results: dict[str, PerSample | float] = {}
    for judge in judges:
        file = None if folder is None else folder / f"judgements-{judge.name}.jsonl"
        judged = judgements(judge, rows, outputs, file, progress)
        verdicts[judge.name] = [one.accurate for one in judged]
        results[f"{judge.name}/accuracy"] = _share([one.accurate is True for one in judged], units)
        results[f"{judge.name}/undecided"] = _share([one.accurate is None for one in judged], units)
    for first, other in itertools.combinations(verdicts, 2):
        results[f"kappa/{first}+{other}"] = cohen_kappa(verdicts[first], verdicts[other])
    return results | {
        "rows": float(len(rows)),
        "cut": _share([one.cut > 0 for one in outputs], units),
        "cut_tokens": _mean([one.cut for one in outputs]),
        "output_tokens": _mean([one.tokens for one in outputs]),
        "at_limit": _share([one.stopped_by == "length" for one in outputs], units),
        "empty": _share([not one.output.strip() for one in outputs], units),
    }


def judgements(
    judge: Judge, rows: Sequence[Row], outputs: Sequence[Generation], file: Path | None, progress: Progress = unseen
) -> list[Judgement]:
    """Return a judge's verdicts in the order of the rows; those that the file has are not asked for again."""
    records = Records(file, {"judge": judge.identity})
    inputs = [fingerprint([row.id, row.document, row.question, row.truth, output.output])
              for row, output in zip(rows, outputs, strict=True)]  # fmt: skip
    missing = [
        index
        for index, (row, output) in enumerate(zip(rows, outputs, strict=True))
        if output.output.strip() and records.get(row.id, inputs[index]) is None
    ]
    batches = [missing[start : start + judge.batch] for start in range(0, len(missing), judge.batch)]
    for batch in progress(batches, f"judgements of {judge.name}"):
        for index, judgement in judge.judge([(rows[number], outputs[number].output) for number in batch]):
            records.add([(rows[batch[index]].id, inputs[batch[index]], judgement._asdict())])
    judged = []
    for row, output, of in zip(rows, outputs, inputs, strict=True):
        record = records.get(row.id, of) if output.output.strip() else None
        judged.append(EMPTY if record is None else
                      Judgement(record["accurate"], record["reason"], tuple(record["spans"])))  # fmt: skip
    return judged


def _share(right: list[bool], units: list[int]) -> PerSample:
    return PerSample(torch.tensor(right), torch.tensor(units))


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)


def cohen_kappa(first: Sequence[Hashable], other: Sequence[Hashable]) -> float:
    """Return Cohen's kappa of two judges' verdicts of the same samples, 1 for full agreement and 0 for chance's.

    It is NaN where both judges give one and the same verdict throughout, for then chance agrees fully too.

    Source: Cohen 1960.
    """
    if len({*first, *other}) < 2:
        return math.nan
    from sklearn.metrics import cohen_kappa_score

    return float(cohen_kappa_score([str(verdict) for verdict in first], [str(verdict) for verdict in other]))
