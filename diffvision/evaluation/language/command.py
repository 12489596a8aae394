"""`diffvision evaluate-language`: language models on tasks and texts. What is measured is in `suite`."""

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
        models: .ckpt files or folders of language models, or hf:PATH for transformers' (one after the other, or
            separated by commas), each with LABEL= before it if wanted; several are shown in one picture.
        tasks: perplexity, position_nll, associative_recall, needle, attention_mass, many_shot, outliers, quantization
            (a list, or separated by commas).
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
    from diffvision.evaluation.language import suite

    return suite.run(
        models,
        tasks=tasks,
        data=data,
        checkpoint=checkpoint,
        output=output,
        cache=cache,
        tokenizer=tokenizer,
        demonstrations=demonstrations,
        queries=queries,
        device=device,
        options=options,
    )
