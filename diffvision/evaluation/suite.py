"""All evaluations by name: `evaluate` runs those of one folder. For any folders see `evaluate_command`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from diffvision.data.images.folders import EvaluationFolder, find_folders
from diffvision.evaluation.classification import classification
from diffvision.evaluation.composition import composition
from diffvision.evaluation.features import Features
from diffvision.evaluation.few_shot import fewshot_episodes, fewshot_k
from diffvision.evaluation.linear_probe import linear_probe
from diffvision.evaluation.objects import objects
from diffvision.evaluation.options import InferenceSettings, Options
from diffvision.evaluation.output_files import check_file, check_folder, write_json
from diffvision.evaluation.pairs import pairs
from diffvision.evaluation.per_sample import Metrics, means
from diffvision.evaluation.retrieval import retrieval
from diffvision.evaluation.zero_shot import zero_shot
from diffvision.plugins import PluginTable
from diffvision.tables import show

if TYPE_CHECKING:
    from rich.table import Table


class Evaluation(NamedTuple):
    """One evaluation in the table `EVALUATIONS`."""

    function: Callable[[Features, Any, Options], Metrics]
    folder: str  # the kind of evaluation folder it is made for
    record: str  # the task's name in records: CLIP_benchmark's, unless its task of that name has another algorithm
    metrics: tuple[str, ...] = ()  # of those that run by default, first the one that checkpoints are chosen by
    probe: bool = False  # fitted on a training split; reads no text
    opt_in: bool = False  # runs only if it is named in `tasks`, as the probes do

    @property
    def by_default(self) -> bool:
        return not (self.probe or self.opt_in)


_EVALUATIONS = {
    "zero_shot": Evaluation(
        zero_shot,
        "zero_shot",
        "zeroshot_classification",
        ("acc1", "acc5", "mean_per_class_recall"),
    ),
    "retrieval": Evaluation(
        retrieval,
        "retrieval",
        "zeroshot_retrieval",
        tuple(f"{of}_retrieval_recall@{k}" for of in ("image", "text") for k in Options().recall_k),
    ),
    "composition": Evaluation(
        composition,
        "composition",
        "image_caption_selection",
        ("acc", "mean_per_kind_acc", "ties"),
    ),
    "pairs": Evaluation(
        pairs,
        "pairs",
        "image_caption_pairs",
        (
            "group_score",
            "text_score",
            "image_score",
            "ties",
            *(f"mean_per_kind_{score}_score" for score in ("group", "text", "image")),
            "mean_of_7_kinds_image_score",
        ),
    ),
    "objects": Evaluation(
        objects,
        "objects",
        "object_presence",
        ("auc", "ap", "paired_acc", "paired_ties", "accuracy", "precision", "recall", "f1", "yes_ratio"),
    ),
    "classification": Evaluation(classification, "zero_shot", "classification", opt_in=True),
    "linear_probe": Evaluation(linear_probe, "zero_shot", "logistic_regression", probe=True),
    "fewshot_k": Evaluation(fewshot_k, "zero_shot", "linear_probe", probe=True),
    "fewshot_episodes": Evaluation(fewshot_episodes, "zero_shot", "fewshot_episodes", probe=True),
}
EVALUATIONS = PluginTable("tasks", _EVALUATIONS, Evaluation)
"""Task -> its evaluation, of this package and of plugins (`diffvision.plugins`)."""
GROUPS = {"few_shot": ("fewshot_k", "fewshot_episodes")}
"""Names for several evaluations at once."""


def evaluate(
    model: nn.Module,
    folder: EvaluationFolder,
    tasks: Sequence[str] | None = None,
    *,
    transform: Callable[..., Tensor],
    tokenizer: Callable[[list[str]], Tensor] | None = None,
    options: Options = Options(),  # noqa: B008  frozen
    **settings: Any,
) -> dict[str, float]:
    """Return metrics of a model on one evaluation folder, such as {"zero_shot/digits/acc1": 0.87, ...}.

    Where torch.distributed is in use all ranks must call this together: each reads a share of the images, and all
    return the same metrics.

    Args:
        model: on its device already; its train/eval modes are left as they were.
        folder: what to evaluate on.
        tasks: names of `EVALUATIONS` or `GROUPS`; by default the one that the folder was made for, without probes
            and classification.
        transform: PIL image -> tensor [3, h, w].
        tokenizer: list of strings -> int64 [B, L]; the probes need none.
        options: the evaluations' settings.
        settings: fields of `InferenceSettings`: batch_size, num_workers, device, precision, progress and cache.

    Raises:
        ValueError: unknown task, or one that does not fit the folder or the model; empty split; labels or class names
            that do not fit.
    """
    planned = plan([folder], None if tasks is None else expand(tasks), options)
    names = planned[0][1] if planned else []
    features = Features(model, transform, tokenizer, InferenceSettings(**settings))
    return means(measure(features, folder, names, options))


def measure(features: Features, folder: EvaluationFolder, names: Sequence[str], options: Options) -> Metrics:
    """Return the metrics of the named evaluations on one folder, sample by sample, as "task/dataset/metric"."""
    return {
        f"{name}/{folder.name}/{metric}": value
        for name in names
        for metric, value in EVALUATIONS[name].function(features, folder, options).items()
    }


def expand(tasks: Iterable[str]) -> list[str]:
    """Return the evaluations that the names stand for, each once; raise a ValueError for an unknown name."""
    names: list[str] = []
    for task in tasks:
        if task not in EVALUATIONS and task not in GROUPS:
            raise ValueError(f"unknown task {task!r}: choose among {', '.join([*EVALUATIONS, *GROUPS])}")
        names += [name for name in GROUPS.get(task, (task,)) if name not in names]
    return names


def plan_data(
    data: Iterable[str], tasks: Sequence[str] | None, options: Options
) -> list[tuple[EvaluationFolder, list[str]]]:
    """Return which evaluations run on which folders, as `plan` does, for data as commands take it.

    Args:
        data: evaluation folders, folders that hold some, shards, or images.
        tasks: names of `EVALUATIONS` or `GROUPS`, or None.
        options: the evaluations' settings.
    """
    names = None if tasks is None else expand(tasks)
    kinds = {EVALUATIONS[name].folder for name in names or ()}
    kind = kinds.pop() if len(kinds) == 1 else None
    folders = {folder.path.resolve(): folder for path in data for folder in find_folders(path, kind)}
    return plan([*folders.values()], names, options)


def report(
    results: Mapping[str, dict[str, float]], models: Mapping[str, tuple[str, str, str]], output: str | None
) -> None:
    """Print the table, with a column for each of several models, and write the records.

    Args:
        results: metrics by the model's label.
        models: by label, the model and the weights as records name them, and both in words.
        output: as `write_records`; None writes nothing.
    """
    several = len(results) > 1
    rows: list[dict[str, Any]] = []
    titles = []
    for label, metrics in results.items():
        model, weights, title = models[label]
        titles.append(f"{label}: {title}" if several else title)
        described = records(metrics, model=model, pretrained=weights)
        rows += [{"label": label, **row} for row in described] if several else described
    columns = results if several else {"value": next(iter(results.values()))}
    show(table(columns, "\n".join(titles)), data=rows)
    if output is not None:
        write_records(rows, output)


def plan(
    folders: Sequence[EvaluationFolder], tasks: Sequence[str] | None, options: Options
) -> list[tuple[EvaluationFolder, list[str]]]:
    """Return which evaluations each folder gets, in the order of `EVALUATIONS`, checked before any of them starts.

    Raises:
        ValueError: no folder; a task that fits none; a missing split; two folders of one kind and one name.
    """
    if not folders:
        raise ValueError(
            "no evaluation folder found: give one in CLIP_benchmark's layout, such as `diffvision data make digits "
            "DIR` writes"
        )
    wanted = tasks if tasks is not None else [name for name, row in _EVALUATIONS.items() if row.by_default]
    planned: list[tuple[EvaluationFolder, list[str]]] = []
    seen: set[tuple[str, str]] = set()
    for folder in folders:
        names = [name for name in wanted if EVALUATIONS[name].folder == folder.task]
        if names and (folder.task, folder.name) in seen:
            raise ValueError(f"two {folder.task} folders are named {folder.name!r}: evaluate them one at a time")
        seen.add((folder.task, folder.name))
        needed = {options.split} | ({options.train_split} if any(EVALUATIONS[n].probe for n in names) else set())
        if names and (missing := needed - set(folder.splits)):
            raise ValueError(
                f"evaluation folder {folder.name!r} has no split {', '.join(sorted(missing))}, which "
                f"{', '.join(names)} needs: it has {', '.join(folder.splits) or 'none'}"
            )
        if names:
            planned.append((folder, names))
    if idle := [task for task in tasks or [] if not any(task in names for _, names in planned)]:
        kinds = ", ".join(f"{folder.name} ({folder.task})" for folder in folders)
        raise ValueError(f"no folder fits {', '.join(idle)}: give others than {kinds}")
    return sorted(planned, key=lambda entry: list(EVALUATIONS).index(entry[1][0]))


def records(metrics: dict[str, float], *, model: str, pretrained: str) -> list[dict[str, Any]]:
    """Return one record per task and dataset in CLIP_benchmark's shape; a NaN (acc5 of four classes) is None."""
    tasks: dict[tuple[str, str], dict[str, float | None]] = {}
    for key, value in metrics.items():
        task, dataset, metric = key.split("/", 2)
        tasks.setdefault((task, dataset), {})[metric] = None if math.isnan(value) else value
    return [
        {
            "dataset": dataset,
            "model": model,
            "pretrained": pretrained,
            "task": EVALUATIONS[task].record,
            "metrics": values,
            "language": "en",
        }
        for (task, dataset), values in tasks.items()
    ]


def check_output(output: str | Path) -> None:
    """Raise a ValueError, before any work, where `write_records` could not write."""
    if Path(output).suffix == ".json":
        check_file(output)
    else:
        check_folder(output)


def write_records(rows: list[dict[str, Any]], output: str | Path) -> None:
    """Write records into one JSON file (`output` ends in .json), or each into a file of a folder, as a whole."""
    output = Path(output)
    if output.suffix == ".json":
        write_json(output, rows)
        return
    names: list[str] = []
    for row in rows:
        shots = f"_fewshot_k{row['metrics']['fewshot_k']:g}" if "fewshot_k" in row["metrics"] else ""
        weights = Path(row["pretrained"]).name
        model = row["model"].replace("/", "-")
        name = f"{row['dataset']}_{weights}_{model}_{row['language']}_{row['task']}{shots}.json"
        if name in names:  # two runs' last.ckpt
            name = name.replace(f"_{weights}_", f"_{row['pretrained'].strip('./').replace('/', '-')}_", 1)
        names.append(name)
        write_json(output / name, row)


def table(results: Mapping[str, Mapping[str, float]], title: str = "") -> Table:
    """Return the metrics as a table for the terminal, one column for each model."""
    from rich.table import Table

    printed = Table(title=title or None, title_justify="left")
    for column in ("task", "dataset", "metric"):
        printed.add_column(column)
    for label in results:
        printed.add_column(label, justify="right", overflow="fold")
    previous: list[str] = []
    for key in dict.fromkeys(key for metrics in results.values() for key in metrics):
        names = key.split("/", 2)
        # Task and dataset are printed in the first row of their section only.
        if previous and previous[:2] != names[:2]:
            printed.add_section()
        cells = names if previous[:2] != names[:2] else ["", "", names[2]]
        values = [metrics.get(key, "") for metrics in results.values()]
        printed.add_row(
            *cells, *(f"{v:.4f}" if isinstance(v, float) and v < 1000 else f"{v:g}" if v != "" else "" for v in values)
        )
        previous = names
    return printed
