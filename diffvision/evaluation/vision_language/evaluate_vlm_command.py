"""`diffvision evaluate-vlm`: vision-language models on POPE, CHAIR and short answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def run(
    models: str | list[str] | None = None,
    *,
    data: str | list[str],
    tasks: str | list[str] | None = None,
    images: str | None = None,
    answers: str | list[str] | None = None,
    synonyms: str | None = None,
    output: str | None = None,
    prompt: str = "{question}",
    max_new_tokens: int = 128,
    batch_size: int = 8,
    device: str = "auto",
) -> dict[str, dict[str, float]]:
    """Ask vision-language models questions about images, and score the answers.

    Args:
        models: directories of training runs, .ckpt files or folders of vision-language models, or hf:PATH for
            transformers' (one after the other, or separated by commas), each with LABEL= before it if wanted.
        data: question files, or folders of them: POPE's, or JSON lines {"question_id", "image", "text"} with a "label"
            or "objects".
        tasks: pope, chair, vqa (a list, or separated by commas); by default those that the files are of.
        images: folder of the images; by default `images` next to the questions, or their own folder.
        answers: JSON lines {"question_id", "text" or "answer"} that are scored as a model's; or a folder with a file
            SET.jsonl for each question file.
        synonyms: CHAIR's synonyms.txt, an object and its synonyms a line; by default the objects.txt of the questions.
        output: folder for results.json and the answers, which --answers reads.
        prompt: what is asked, with {question} in it. LLaVA-1.5's results on POPE and VQA are with
            "{question}\\nAnswer the question using a single word or phrase.", the \\n a line feed.
        max_new_tokens: most tokens of an answer.
        batch_size: questions at a time.
        device: auto, cpu, cuda, cuda:1, ...

    Raises:
        ValueError: neither models nor answers, two with one label, and what reading, generating and scoring raise.
    """
    from diffvision.evaluation.distributed import resolve_device
    from diffvision.evaluation.intervals import differences, with_intervals
    from diffvision.evaluation.language.table import show
    from diffvision.evaluation.output_files import bar, check_folder, split_names, write_json
    from diffvision.evaluation.per_sample import Metrics
    from diffvision.evaluation.vision_language.answers import answer_questions, read_answers
    from diffvision.evaluation.vision_language.questions import read_sets
    from diffvision.evaluation.vision_language.scores import average_sets, describe_set, find_redundant_metrics, score
    from diffvision.models.threads import limit_threads
    from diffvision.opening import check_spec, split_label
    from diffvision.opening.vlm import open_vlm
    from diffvision.tables import plain

    specs = [split_label(spec) for spec in split_names(models or [])]
    files = [split_label(spec) for spec in split_names(answers or [])]
    labels = [label for label, _ in specs + files]
    if not labels:
        raise ValueError("no model to ask: name a model, or the --answers of one")
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise ValueError(f"two models are named {twice!r}: write LABEL=MODEL to distinguish them")
    if output is not None:
        check_folder(output)
    sets = read_sets(split_names(data), images, tasks and split_names(tasks), has_images=bool(specs))
    for _, spec in specs:
        check_spec(spec)
    answers_by_label = {label: [read_answers(Path(path), one) for one in sets] for label, path in files}
    settings: dict[str, Any] = {"prompt": prompt, "max_new_tokens": max_new_tokens, "batch_size": batch_size}
    descriptions = [describe_set(one) for one in sets]
    for one in descriptions:
        print(f"{one['set']}: {one['task']}, {one['questions']}", file=sys.stderr)
    results: dict[str, dict[str, float]] = {}
    first: Metrics = {}
    for label, spec in [*specs, *files]:
        texts = answers_by_label.get(label)
        if texts is None:
            vlm = open_vlm(spec)
            vlm.module.to(resolve_device(device))
            folder = None if output is None else Path(output) / "answers" / label
            with limit_threads(vlm.device, vlm.module):
                texts = [
                    answer_questions(vlm, one, **settings, file=folder and folder / f"{one.name}.jsonl", progress=bar)
                    for one in sets
                ]
        measured = {
            key: value for pair in zip(sets, texts, strict=True) for key, value in score(*pair, synonyms).items()
        }
        measured |= average_sets(sets, measured)
        results[label] = with_intervals(measured) | differences(first, measured)
        first = first or measured
        if output is not None:
            content = {"models": results, "sets": descriptions, "settings": settings}
            write_json(Path(output) / "results.json", plain(content))
    show(results, hidden=find_redundant_metrics(results))
    return results
