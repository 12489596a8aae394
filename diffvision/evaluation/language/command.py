"""`diffvision evaluate-language`: language models on tasks and texts. What is measured is in `suite`."""

import dataclasses

from diffvision.evaluation.language.options import LanguageOptions


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
    options: LanguageOptions = LanguageOptions(),  # noqa: B008  frozen
) -> dict[str, dict[str, float]]:
    """Evaluate language models, print a table, and write a JSON and a picture for each task.

    Args:
        models: directories of training runs, .ckpt files or folders of language models, or hf:PATH for transformers'
            (one after the other, or separated by commas), each with LABEL= before it if wanted; several are shown in
            one picture.
        tasks: perplexity, position_nll, associative_recall, needle, attention_mass, many_shot, outliers, quantization,
            cache_pruning (a list, or separated by commas).
        data: text: files or folders of .txt or .jsonl ({"text": ...} a line), shards of text (options.text_key), or
            token shards of the model's tokenizer.
        checkpoint: .ckpt file or folder with the weights of a single model that is given by its name.
        output: folder for TASK.json and TASK.png.
        cache: folder that each finished task's metrics are kept in: an evaluation that was ended resumes with the next.
        tokenizer: a tokenizer.json, its folder, or a name of tiktoken's, where none lies next to the weights.
        demonstrations: JSON lines {"text": ..., "label": ...} for many_shot; without it, the synthetic task.
        queries: what many_shot asks, in the same form.
        device: auto, cpu, cuda, cuda:1, ...
        options: the evaluations' settings.
    """
    from diffvision.evaluation.cache import Cache
    from diffvision.evaluation.distributed import process_group
    from diffvision.evaluation.language import suite
    from diffvision.evaluation.language.documents import check_sources
    from diffvision.evaluation.language.many_shot import read_task
    from diffvision.evaluation.output import check_folder, listed
    from diffvision.opening import check_spec, labelled, open_model

    names = list(dict.fromkeys(listed(tasks)))
    suite.check(names, has_documents=data is not None)
    if output is not None:
        check_folder(output)
    if cache is not None:
        check_folder(cache, "cache")
    specs = listed(models)
    if checkpoint is not None and len(specs) > 1:
        raise ValueError(f"checkpoint is {checkpoint!r}, and {len(specs)} models are given: name each by its file")
    if data is not None:
        check_sources(listed(data))
    for _, spec in map(labelled, specs):
        check_spec(spec)  # all of them, before the first is evaluated
    if (demonstrations is None) != (queries is None):
        raise ValueError("many_shot of files needs both demonstrations and queries: give the two or neither")
    many_shot_tasks = []
    if demonstrations is not None and queries is not None:
        many_shot_tasks = [read_task(demonstrations, queries)]
    elif "many_shot" in names:
        # Raises before a model is loaded if there are too few words for the options.
        many_shot_tasks = suite.synthetic_mappings(options)
    results: dict[str, dict[str, float]] = {}
    result_cache = None if cache is None else Cache(cache)
    with process_group(device) as used_device:
        for label, spec in map(labelled, specs):
            if label in results:
                raise ValueError(f"two models are named {label!r}: write LABEL=MODEL to distinguish them")
            opened = open_model(spec, checkpoint, tokenizer=tokenizer, device=used_device).for_text()
            model = dataclasses.replace(opened, name=label)
            results[label] = {}
            work = suite.prepared(model, options, None if data is None else listed(data), many_shot_tasks)
            identity = {} if result_cache is None else suite.cache_inputs(work, used_device)
            for name in names:
                results[label] |= suite.cached(work, name, result_cache, identity)
                if output is not None:
                    suite.write_numbers(name, results, options, output)
    suite.show(results)
    if output is not None:
        for name in names:
            suite.write_picture(name, results, output)
    return results
