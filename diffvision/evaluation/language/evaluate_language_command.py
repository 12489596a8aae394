"""`diffvision evaluate-language`: evaluate language models on the tasks of `tasks`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from diffvision.evaluation.language.language_options import LanguageOptions


def run(
    models: str | list[str],
    *,
    tasks: str | list[str],
    data: str | list[str] | None = None,
    checkpoint: str | None = None,
    output: str | None = None,
    tokenizer: str | None = None,
    device: str = "auto",
    options: LanguageOptions = LanguageOptions(),  # noqa: B008  frozen
) -> dict[str, dict[str, float]]:
    """Evaluate language models, print a table, and write a JSON for each task.

    Args:
        models: directories of training runs, .ckpt files or folders of language models, or hf:PATH for transformers'
            (one after the other, or separated by commas), each with LABEL= before it if wanted.
        tasks: perplexity, position_nll, needle, recall_errors, math, attention_mass, many_shot,
            outliers, low_bit, cache_pruning, and tasks of plugins (a list, or separated by commas).
        data: text: files or folders of .txt or .jsonl ({"text": ...} a line), shards of text (options.text_key), or
            token files of the model's tokenizer. For math, JSON lines {"question", "answer"}, such as GSM8K's or those
            of `data make arithmetic`. For a plugin's task, what it reads.
        checkpoint: .ckpt file or folder with the weights of a single model that is given by its name.
        output: folder for TASK.json, and for what tasks write.
        tokenizer: a tokenizer.json or its folder, where none lies next to the weights.
        device: auto, cpu, cuda, cuda:1, ...
        options: settings of the tasks.

    Raises:
        ValueError: an unknown task, or one without the data that it needs; a checkpoint with several models, or two
            models with one label; what the evaluations raise.
    """
    from diffvision.evaluation.distributed import process_group
    from diffvision.evaluation.intervals import differences, with_intervals
    from diffvision.evaluation.language import language_suite as suite
    from diffvision.evaluation.language.mathematics import read_questions
    from diffvision.evaluation.language.read_documents import check_sources
    from diffvision.evaluation.language.table import show
    from diffvision.evaluation.language.tasks import LANGUAGE_EVALUATIONS
    from diffvision.evaluation.output_files import check_folder, split_names
    from diffvision.models.threads import limit_threads
    from diffvision.opening import check_spec, open_model, split_label

    names = list(dict.fromkeys(split_names(tasks)))
    suite.check(names, has_data=data is not None)
    if output is not None:
        check_folder(output)
    specs = split_names(models)
    if checkpoint is not None and len(specs) > 1:
        raise ValueError(f"checkpoint is {checkpoint!r}, and {len(specs)} models are given: name each by its file")
    sources = None if data is None else split_names(data)
    has_own_data = {LANGUAGE_EVALUATIONS[name].reads for name in names} - {"documents", "tokenizer"}
    texts = None if has_own_data else sources
    check_sources(texts or [])
    inputs: dict[str, Any] = {"files": sources or []}
    if "math" in names:
        inputs["questions"] = read_questions(sources or [], count=options.rows, seed=options.seed)
    labels: set[str] = set()
    for label, spec in map(split_label, specs):  # all of them, before the first is evaluated
        if label in labels:
            raise ValueError(f"two models are named {label!r}: write LABEL=MODEL to distinguish them")
        labels.add(label)
        check_spec(spec)
    results: dict[str, dict[str, float]] = {}
    notes: dict[str, str] = {}
    first: dict[str, Any] = {}  # the metrics of the first model, with their samples
    with process_group(device) as used_device:
        for label, spec in map(split_label, specs):
            opened = open_model(spec, checkpoint, tokenizer=tokenizer, device=used_device).for_text()
            model = dataclasses.replace(opened, name=label)
            results[label], notes[label] = {}, opened.average_note
            folder = None if output is None else Path(output)
            work = dataclasses.replace(suite.prepare(model, options, texts), **inputs, folder=folder)
            for name in names:
                with limit_threads(used_device, opened.module):
                    measured = suite.measure(work, name)
                results[label] |= with_intervals(measured)
                if len(results) == 1:
                    first |= measured
                else:
                    results[label] |= differences(first, measured)
                if output is not None:
                    suite.write_numbers(name, results, options, output)
    show(results, notes)
    return results
