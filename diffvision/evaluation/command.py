"""`diffvision evaluate`: a model on any number of folders. What is measured is in `suite`."""

from typing import Any

from diffvision.evaluation.options import Options, Precision


def run(
    model: str,
    *,
    data: str | list[str],
    checkpoint: str | None = None,
    tasks: str | list[str] | None = None,
    output: str | None = None,
    cache: str | None = None,
    batch_size: int = 64,
    num_workers: int = 2,
    device: str = "auto",
    precision: Precision = "fp32",
    preprocess: dict[str, Any] | None = None,
    options: Options = Options(),  # noqa: B008  frozen
) -> dict[str, float]:
    """Evaluate a model on folders, print a table and write records as CLIP_benchmark does.

    Under torchrun the images are shared among the processes.

    Args:
        model: a .ckpt of a training run, the folder of a model, or a name of OpenCLIP's or timm's, ours or any other
            (`diffvision.open_model` has the whole grammar). timm's models are for classification and the probes.
        data: evaluation folders, or folders that hold some (a list, or separated by commas).
        checkpoint: of a name: a file of weights (OpenCLIP's, timm's or a training run's), or a tag of pretrained ones.
        tasks: zero_shot, retrieval, composition, classification (by its classifier), linear_probe, few_shot
            (fewshot_k and fewshot_episodes), as a list or separated by commas; each runs on the folders that it fits.
            By default the first three.
        output: a file ending in .json for all records in a list; otherwise a folder, with one file a record named as
            CLIP_benchmark names them.
        cache: folder that features are kept in as they are computed (at most 20 GB): an evaluation that was ended
            resumes from there, and one of the same model and images reuses them.
        batch_size: images a batch.
        num_workers: processes that read and decode images.
        device: auto, cpu, cuda, cuda:1, ...
        precision: fp32, bf16 or fp16.
        preprocess: mean, std, interpolation, resize_mode where they differ from the model's.
        options: the evaluations' settings.
    """
    from diffvision.data.images.folders import find_folders
    from diffvision.evaluation.cache import Cache
    from diffvision.evaluation.distributed import process_group, rank_and_world
    from diffvision.evaluation.output import bar, check_folder, listed
    from diffvision.evaluation.suite import check_output, evaluate, expand, plan, report
    from diffvision.opening import open_model

    if output is not None:
        check_output(output)
    if cache is not None:
        check_folder(cache, "cache")
    feature_cache = None if cache is None else Cache(cache)
    folders = [folder for path in listed(data) for folder in find_folders(path)]
    planned = plan(folders, None if tasks is None else expand(listed(tasks)), options)
    metrics: dict[str, float] = {}
    with process_group(device) as device:
        opened = open_model(model, checkpoint, preprocess=preprocess, device=device).for_images()
        for folder, names in planned:
            metrics |= evaluate(
                opened.module,
                folder,
                names,
                transform=opened.transform,
                tokenizer=opened.tokenizer,
                batch_size=batch_size,
                num_workers=num_workers,
                device=device,
                precision=precision,
                options=options,
                progress=bar,
                cache=feature_cache,
            )
        if rank_and_world()[0] == 0:
            report(metrics, opened, model, checkpoint, output)
            if feature_cache is not None:
                print(feature_cache)
    return metrics
