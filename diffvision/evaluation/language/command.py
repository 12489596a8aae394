"""`diffvision evaluate-language`: language models on tasks and texts. What is measured is in `tasks`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffvision.evaluation.language.options import LanguageOptions
from diffvision.lab.faithfulness.options import JudgeOptions

if TYPE_CHECKING:
    from diffvision.lab.faithfulness.rows import Row
    from diffvision.lab.mathematics.sets import Question


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
    judge: JudgeOptions = JudgeOptions(),  # noqa: B008  frozen
    options: LanguageOptions = LanguageOptions(),  # noqa: B008  frozen
) -> dict[str, dict[str, float]]:
    """Evaluate language models, print a table, and write a JSON and a picture for each task.

    Args:
        models: directories of training runs, .ckpt files or folders of language models, or hf:PATH for transformers'
            (one after the other, or separated by commas), each with LABEL= before it if wanted; several are shown in
            one picture.
        tasks: perplexity, position_nll, associative_recall, needle, recall_errors, lookback, faithfulness, math,
            attention_mass, many_shot, outliers, quantization, low_bit, cache_pruning (a list, or separated by commas).
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
        tokenizer: a tokenizer.json, its folder, or a name of tiktoken's, where none lies next to the weights.
        demonstrations: JSON lines {"text": ..., "label": ...} for many_shot; without it, the synthetic task.
        queries: what many_shot asks, in the same form.
        device: auto, cpu, cuda, cuda:1, ...
        judge: of faithfulness.
        options: the evaluations' settings.
    """
    from diffvision.evaluation.cache import Cache
    from diffvision.evaluation.distributed import process_group
    from diffvision.evaluation.intervals import differences, with_intervals
    from diffvision.evaluation.language import suite
    from diffvision.evaluation.language.table import show
    from diffvision.evaluation.language.tasks import low_bit_settings, synthetic_mappings
    from diffvision.evaluation.output import check_folder, listed
    from diffvision.lab.faithfulness.judges import open_judges
    from diffvision.lab.language.many_shot import read_task
    from diffvision.opening import check_spec, labelled, open_model

    names = list(dict.fromkeys(listed(tasks)))
    suite.check(names, has_data=data is not None)
    if "low_bit" in names:
        low_bit_settings(options)
    if output is not None:
        check_folder(output)
    if cache is not None:
        check_folder(cache, "cache")
    specs = listed(models)
    if checkpoint is not None and len(specs) > 1:
        raise ValueError(f"checkpoint is {checkpoint!r}, and {len(specs)} models are given: name each by its file")
    texts, rows, questions = _read(data, set(map(suite.reads, names)), options)
    labels: set[str] = set()
    for label, spec in map(labelled, specs):  # all of them, before the first is evaluated
        if label in labels:
            raise ValueError(f"two models are named {label!r}: write LABEL=MODEL to distinguish them")
        labels.add(label)
        check_spec(spec)
    if (demonstrations is None) != (queries is None):
        raise ValueError("many_shot of files needs both demonstrations and queries: give the two or neither")
    many_shot_tasks = []
    if demonstrations is not None and queries is not None:
        many_shot_tasks = [read_task(demonstrations, queries)]
    elif "many_shot" in names:
        # Raises before a model is loaded if there are too few words for the options.
        many_shot_tasks = synthetic_mappings(options)
    results: dict[str, dict[str, float]] = {}
    notes: dict[str, str] = {}
    first: dict[str, Any] = {}  # the metrics of the first model, with their samples
    result_cache = None if cache is None else Cache(cache)
    with process_group(device) as used_device:
        replies = None if cache is None else Path(cache) / "replies"
        judges = open_judges(judge, rows, used_device, replies) if rows else []
        for label, spec in map(labelled, specs):
            opened = open_model(spec, checkpoint, tokenizer=tokenizer, device=used_device).for_text()
            model = dataclasses.replace(opened, name=label)
            results[label], notes[label] = {}, opened.average_note
            work = suite.prepared(model, options, texts, many_shot_tasks)
            folder = None if output is None else Path(output)
            work = dataclasses.replace(work, rows=rows, judges=judges, questions=questions, folder=folder)
            identity = {} if result_cache is None else suite.cache_inputs(work, used_device)
            for name in names:
                measured = suite.cached(work, name, result_cache, identity)
                results[label] |= with_intervals(measured)
                if len(results) == 1:
                    first |= measured
                else:
                    results[label] |= differences(first, measured)
                if output is not None:
                    suite.write_numbers(name, results, options, output, judge if suite.reads(name) == "rows" else None)
    show(results, notes)
    if output is not None:
        for name in names:
            suite.write_picture(name, results, output)
    return results


def _read(
    data: str | list[str] | None, kinds: set[str], options: LanguageOptions
) -> tuple[list[str] | None, list[Row], list[Question]]:
    """Return the sources of text, or the rows or questions that they hold.

    What cannot be read raises before a model is loaded.
    """
    from diffvision.evaluation.language.documents import check_sources
    from diffvision.evaluation.language.tasks import prompting
    from diffvision.evaluation.output import listed
    from diffvision.lab.faithfulness.prompts import read_templates
    from diffvision.lab.faithfulness.rows import read_rows
    from diffvision.lab.mathematics.sets import read_questions

    if data is None:
        return None, [], []
    if "questions" in kinds:
        prompting(options)
        return None, [], read_questions(listed(data), count=options.rows, seed=options.seed)
    if "rows" in kinds:
        rows = read_rows(listed(data), count=options.rows, seed=options.seed)
        if options.prompts is not None:
            read_templates(options.prompts, rows)
        return None, rows, []
    check_sources(listed(data))
    return listed(data), [], []
