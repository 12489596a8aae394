"""`diffvision evaluate-language` with the lab's tasks: the library's command with the settings of these tasks."""

from __future__ import annotations

from typing import Any

from diffvision.evaluation.language import command
from diffvision.lab.faithfulness.options import JudgeOptions
from diffvision.lab.language.options import LabOptions


def run(
    models: str | list[str],
    *,
    tasks: str | list[str],
    data: str | list[str] | None = None,
    checkpoint: str | None = None,
    output: str | None = None,
    cache: str | None = None,
    tokenizer: str | None = None,
    demonstrations: str | None = None,
    queries: str | None = None,
    device: str = "auto",
    settings: dict[str, Any] | None = None,
    judge: JudgeOptions = JudgeOptions(),  # noqa: B008  frozen
    options: LabOptions = LabOptions(),  # noqa: B008  frozen
) -> dict[str, dict[str, float]]:
    """Evaluate language models, print a table, and write a JSON and a picture for each task.

    Args:
        models: directories of training runs, .ckpt files or folders of language models, or hf:PATH for transformers'
            (one after the other, or separated by commas), each with LABEL= before it if wanted; several are shown in
            one picture.
        tasks: perplexity, position_nll, associative_recall, needle, recall_errors, lookback, faithfulness, math,
            attention_mass, many_shot, outliers, quantization, low_bit, cache_pruning, and tasks of plugins (a list, or
            separated by commas).
        data: text: files or folders of .txt or .jsonl ({"text": ...} a line), shards of text (options.text_key), or
            token shards of the model's tokenizer. For faithfulness, files (.jsonl, .json, both also as .gz, .parquet)
            of rows {"id", "task" (summary or qa), "document", "question", "answers", "reference"}, or in the layouts of
            Lookback Lens and LongBench. For math, such files, or folders of them, of {"question", "answer"}, {"prompt",
            "response"}, or as GSM8K, MATH, SVAMP, ASDiv, MAWPS, CARP, TABMWP, CollegeMath and `data make arithmetic`
            have them.
        checkpoint: .ckpt file or folder with the weights of a single model that is given by its name.
        output: folder for TASK.json and TASK.png, and for what faithfulness and math generate and judges say, from
            which a run that was ended resumes.
        cache: folder that each finished task's metrics are kept in: an evaluation that was ended resumes with the next.
        tokenizer: a tokenizer.json or its folder, where none lies next to the weights.
        demonstrations: JSON lines {"text": ..., "label": ...} for many_shot; without it, the synthetic task.
        queries: what many_shot asks, in the same form.
        device: auto, cpu, cuda, cuda:1, ...
        settings: of plugins' tasks, as {name: value}.
        judge: of faithfulness.
        options: the evaluations' settings.

    Raises:
        ValueError: as the library's command.
    """
    if (demonstrations is None) != (queries is None):
        raise ValueError("many_shot of files needs both demonstrations and queries: give the two or neither")
    own = {"demonstrations": demonstrations, "queries": queries, "judge": judge}
    return command.run(
        models,
        tasks=tasks,
        data=data,
        checkpoint=checkpoint,
        output=output,
        cache=cache,
        tokenizer=tokenizer,
        device=device,
        settings={**(settings or {}), **own},
        options=options,
    )
