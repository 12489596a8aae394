"""Print the tables of DiffCLIP's paper, each differential CLIP next to its baseline, from the runs' evaluations.

    python scripts/clip_table.py runs/* --output table.md table.csv table.tex

Nothing is measured here: `diffvision evaluate RUN --output RUN/evaluations` writes what is read. Runs that differ in
their seeds alone are one model, and three seeds or more of both give a difference its 95% interval. A run that lacks a
part of the paper's evaluations is refused, unless --parts leaves it out.
"""

import argparse
import csv
import dataclasses
import filecmp
import io
import json
import os
import re
import shlex
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.markup import escape
from rich.table import Table

from diffvision.comparison.entries import Entry, Group, group_seeds, model_settings, read_entries
from diffvision.comparison.result import Row, describe_difference, format_difference, format_mean, plain_table
from diffvision.evaluation.output_files import check_file, write_bytes
from diffvision.tables import show

DIFFERENCE = "difference [95% CI]"
FOLDER = "evaluations"  # of a run, with CLIP_benchmark's records
_NINE = "caltech101 dtd pets flowers sun397 aircraft cifar10 cifar100 food101"
_VARIED = ("model.init_args.model", "trainer.logger")  # settings in which twins differ


class Part(NamedTuple):
    """One of the paper's evaluations."""

    task: str  # of `diffvision evaluate`, which measures it
    record: str  # the task's name in records
    metrics: dict[str, str]  # metric -> its name in the table
    sets: str  # of the paper
    only: bool = False  # other datasets do not count


_RECALLS = {f"{of}_retrieval_recall@5": f"{of} R@5" for of in ("image", "text")}
_KINDS = {"mean_of_7_kinds_image_score": "7 kinds", "mean_per_kind_image_score": "all kinds"}
_SHIFTED = "imagenetv2 imageneta imagenetr imagenetsketch"
_OTHER_NAMES = {
    "imagenet1k": "imagenet",
    "mscoco": "coco",
    "oxfordpets": "pets",
    "oxfordiiitpet": "pets",
    "flowers102": "flowers",
    "oxfordflowers": "flowers",
    "oxfordflowers102": "flowers",
    "fgvcaircraft": "aircraft",
    "mmvpvlm": "mmvp",
}
PARTS = {
    "zero_shot": Part("zero_shot", "zeroshot_classification", {"acc1": ""}, "imagenet"),
    "out_of_distribution": Part("zero_shot", "zeroshot_classification", {"acc1": ""}, _SHIFTED, only=True),
    "retrieval": Part("retrieval", "zeroshot_retrieval", _RECALLS, "flickr30k flickr8k coco"),
    "linear_probe": Part("linear_probe", "logistic_regression", {"acc1": ""}, _NINE),
    "few_shot": Part("few_shot", "fewshot_episodes", {"acc": ""}, _NINE),
    "mmvp": Part("pairs", "image_caption_pairs", _KINDS, "mmvp", only=True),
}
"""The paper's evaluations, in the order of the table; those of several sets have a mean."""


@dataclass
class PairTable:
    """A differential model next to its baseline, or one of them alone."""

    labels: list[str]  # the baseline's, and the differential model's
    seeds: list[int]  # runs of each
    rows: list[Row]  # of metrics, each named "PART/DATASET/METRIC"
    notes: list[str]

    def cells(self) -> list[list[str]]:
        """Return the table as text, the head first; a row of one cell is the title of a part."""
        is_pair = len(self.labels) > 1
        cells = [["%", *self.labels, *([DIFFERENCE] if is_pair else [])]]
        cells.append(["seeds", *map(str, self.seeds), *([""] if is_pair else [])])
        above = ""
        for row in self.rows:
            part, dataset, metric = row.metric.split("/", 2)
            if part != above:
                cells.append([part.replace("_", " ")])
            above, name = part, f"{dataset} {PARTS[part].metrics[metric]}".strip()
            means = [format_mean(row.values[label], row.factor) for label in self.labels]
            cells.append([name, *means, *([format_difference(row, self.labels[1])] if is_pair else [])])
        return cells


def make_tables(folders: Sequence[str], parts: Sequence[str]) -> list[PairTable]:
    """Return a table for each pair of a differential model and its baseline; `parts` are keys of `PARTS`."""
    entries, left_out = _entries(folders)
    metrics: dict[str, dict[str, float]] = {}
    for number, entry in enumerate(entries):
        metrics[entry.spec], name = _metrics(entry, parts)
        if name not in ("", Path(entry.model).name):
            entries[number] = dataclasses.replace(entry, which=f"{name}, which is not its best")
    _refuse_missing(metrics, parts)
    notes = [f"Left out, no trained CLIPs: {', '.join(left_out)}."] if left_out else []
    tables = [_table(pair, metrics, parts) for pair in _pair(group_seeds(entries))]
    tables[-1].notes += notes
    return tables


# ---- runs ----------------------------------------------------------------------------------------------------------


def _entries(folders: Sequence[str]) -> tuple[list[Entry], list[str]]:
    """Return the runs of CLIPs in the folders, and the names of what is not one."""
    from diffvision.opening.run_folders import CHECKPOINTS, run_config, runs_below, setting

    found: list[str] = []
    left_out: list[str] = []
    for folder in folders:
        runs = [*runs_below(Path(folder))] if Path(folder).is_dir() else []
        left_out += [] if runs else [folder]
        for run in runs:
            kind = str(setting(run_config(run), "model.class_path")).rpartition(".")[2]
            is_trained = kind == "ContrastiveModule" and any((run / CHECKPOINTS).glob("*.ckpt"))
            (found if is_trained else left_out).append(str(run))
    if not found:
        raise ValueError(
            f"no run of a CLIP in {', '.join(folders)}: give directories that `diffvision fit` has written"
        )
    return read_entries(found, fewest=1), left_out


def _metrics(entry: Entry, parts: Sequence[str]) -> tuple[dict[str, float], str]:
    """Return the metrics of a run that the table wants, by "PART/DATASET/METRIC", and the checkpoint's name."""
    metrics: dict[str, float] = {}
    read: dict[str, Path] = {}
    twice: list[str] = []
    for file in sorted((Path(entry.spec) / FOLDER).glob("*.json")):
        for record in _records(file):
            weights = Path(record["pretrained"])
            read[weights.name] = min(read.get(weights.name, file), file, key=os.path.getmtime)  # the oldest
            own = Path(entry.model).with_name(weights.name)
            is_other = weights.exists() and not (own.exists() and filecmp.cmp(own, weights))
            if record["model"] != entry.label or weights.parent.parent.name != Path(entry.spec).name or is_other:
                raise ValueError(f"{file} is of {record['model']}, {weights}, not of this run: evaluate {entry.spec}")
            for part in parts:
                if record["task"] == PARTS[part].record and _is_of(part, record["dataset"]):
                    values = {metric: record["metrics"].get(metric) for metric in PARTS[part].metrics}
                    found = {f"{part}/{record['dataset']}/{m}": v for m, v in values.items() if v is not None}
                    twice += [f"{file}: {name}" for name, value in found.items() if metrics.get(name, value) != value]
                    metrics |= found
    if len(read) > 1:
        raise ValueError(f"{entry.spec} has evaluations of {' and '.join(read)}: leave those of one checkpoint")
    if twice:
        raise ValueError(f"{twice[0]} is not what another file of the folder has: leave one of them")
    for name, file in read.items():
        checkpoint = Path(entry.model).with_name(name)
        if checkpoint.is_file() and checkpoint.stat().st_mtime > file.stat().st_mtime:
            raise ValueError(f"{name} is newer than {file}: evaluate {entry.spec} again, into an empty folder")
    return metrics, next(iter(read), "")


def _records(file: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        records = content if isinstance(content, list) else [content]
        return [{key: one[key] for key in ("dataset", "model", "pretrained", "task", "metrics")} for one in records]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ValueError(f"{file} is not what `diffvision evaluate` writes: remove it, or evaluate again") from None


def _is_of(part: str, dataset: str) -> bool:
    if PARTS[part].only:
        return _set_name(dataset) in PARTS[part].sets.split()
    return part != "zero_shot" or not _is_of("out_of_distribution", dataset)


def _set_name(dataset: str) -> str:
    """Return a dataset's name as `Part.sets` has it: "coco" for CLIP_benchmark's "wds_mscoco_captions"."""
    plain = re.sub("[^a-z0-9]", "", dataset.lower())
    name = plain.removeprefix("wds").removeprefix("vtab").removesuffix("captions")
    return _OTHER_NAMES.get(name, name)


def _refuse_missing(metrics: dict[str, dict[str, float]], parts: Sequence[str]) -> None:
    """Raise a ValueError with the command for the first evaluation that a run lacks and others, or the paper, have."""
    every = dict.fromkeys(name for of_run in metrics.values() for name in of_run)
    for part, run in product(parts, metrics):
        sets = dict.fromkeys(name.split("/")[1] for name in every if name.startswith(f"{part}/"))
        has = {name.split("/")[1] for name in metrics[run] if name.startswith(f"{part}/")}
        lost = next((f" on {dataset}" for dataset in sets if dataset not in has), None if sets else "")
        if lost is not None:
            command = ["diffvision", "evaluate", run, "--data", "DATA", "--tasks", PARTS[part].task]
            command += ["--output", str(Path(run) / FOLDER)]
            raise ValueError(f"{run} lacks {part}{lost}: {shlex.join(command)}, or choose --parts")


# ---- tables --------------------------------------------------------------------------------------------------------


def _pair(groups: Sequence[Group]) -> Iterator[list[Group]]:
    """Yield [baseline, model] of each differential model, and models without the other one alone.

    The baseline of DiffCLIP-[VARIANT-]SHAPE[-...] is CLIP-SHAPE; of several, the one with the fewest other settings.
    """
    baselines: list[Group] = [group for group in groups if group.entries[0].label.startswith("CLIP-")]
    paired: list[Group] = []
    for group in groups:
        if group in baselines:
            continue
        shapes = [one.entries[0].label.removeprefix("CLIP-") for one in baselines]
        name = group.entries[0].label
        own = [b for b, shape in zip(baselines, shapes, strict=True) if re.search(rf"-{re.escape(shape)}(-|$)", name)]
        nearest = sorted(own, key=lambda one: len(_differing(one, group)))[:1]
        paired += nearest
        yield [*nearest, group]
    yield from ([group] for group in baselines if group not in paired)


def _differing(first: Group, second: Group) -> list[str]:
    a, b = model_settings(first.entries[0].config), model_settings(second.entries[0].config)
    return [name for name in {**a, **b} if a.get(name) != b.get(name) and not name.startswith(_VARIED)]


def _table(pair: Sequence[Group], metrics: dict[str, dict[str, float]], parts: Sequence[str]) -> PairTable:
    of_group = {group.label: [metrics[entry.spec] for entry in group.entries] for group in pair}
    names = list(next(iter(of_group.values()))[0])
    rows = []
    for part in parts:
        own = [name for name in names if name.startswith(f"{part}/")]
        rows += [_row(name, {label: [one[name] for one in runs] for label, runs in of_group.items()}) for name in own]
        for metric in PARTS[part].metrics if " " in PARTS[part].sets else ():
            same = [name for name in own if name.endswith(f"/{metric}")]
            if len(same) > 1:
                means = {
                    label: [statistics.mean(one[n] for n in same) for one in runs] for label, runs in of_group.items()
                }
                rows.append(_row(f"{part}/mean of {len(same)}/{metric}", means))
    return PairTable([*of_group], [*map(len, of_group.values())], rows, [*_notes(pair, rows)])


def _row(name: str, values: dict[str, list[float]]) -> Row:
    from diffvision.evaluation.intervals import difference

    first, *others = values
    found = {label: difference(values[first], values[label], largest=1.0) for label in others}
    if max(map(len, values.values())) == 1:
        found = {label: dataclasses.replace(one, method="one seed") for label, one in found.items()}
    return Row(name, None, values, found)


def _notes(pair: Sequence[Group], rows: Sequence[Row]) -> Iterator[str]:
    """Yield which checkpoints were evaluated, and where the two models, or the table and the paper's, differ."""
    for group in pair:
        yield f"{group.label}: {'; '.join(f'{entry.spec} ({entry.which})' for entry in group.entries)}."
    if len(pair) == 1:
        yield f"{pair[0].label} has no run of its baseline, or of a differential model with its shape, next to it."
    elif differing := _differing(*pair):
        yield f"They differ in more than the model: {', '.join(differing[:5])}{', ...' * (len(differing) > 5)}."
    steps = {entry.spec: _last_step(entry) for group in pair for entry in group.entries}
    if len({*steps.values()}) > 1:
        yield f"Trained to different steps: {', '.join(f'{run} to {step:,}' for run, step in steps.items())}."
    for part in dict.fromkeys(row.metric.split("/")[0] for row in rows):
        sets = dict.fromkeys(row.metric.split("/")[1] for row in rows if row.metric.startswith(f"{part}/"))
        absent = [one for one in PARTS[part].sets.split() if one not in map(_set_name, sets)]
        if absent:
            yield f"The paper's {part.replace('_', ' ')} has sets that are not here: {', '.join(absent)}."
    if len(pair) > 1 and any(one.low is not None for row in rows for one in row.differences.values()):
        from diffvision.evaluation.intervals import RULE

        yield f"Mean ± standard deviation over seeds, and Welch's 95% CI of the difference of two means. {RULE}"


def _last_step(entry: Entry) -> int:
    """Return the last step of the checkpoints next to a run's."""
    return max(map(_step, Path(entry.model).parent.glob("*.ckpt")), default=0)


def _step(checkpoint: Path) -> int:
    """Return the step of a checkpoint; 0 for a file that is none."""
    try:
        return int(torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)["global_step"])
    except Exception:  # a file that is no checkpoint can fail torch's reader in any way
        return 0


# ---- writers -------------------------------------------------------------------------------------------------------


def rich_table(table: PairTable) -> Table:
    head, *rows = [[escape(cell) for cell in row] for row in table.cells()]
    printed = plain_table()
    for number, cell in enumerate(head):
        is_value = 0 < number <= len(table.labels)
        printed.add_column(cell, justify="right" if is_value else "left", overflow="fold", no_wrap=not is_value)
    for row in rows:
        printed.add_row(*row, style="bold" if len(row) == 1 else None)
    return printed


def _markdown(tables: Sequence[PairTable]) -> str:
    parts = []
    for table in tables:
        head, *rows = table.cells()
        rule = ["---" if cell in (head[0], DIFFERENCE) else "---:" for cell in head]
        titled = [row if len(row) > 1 else [f"**{row[0]}**", *[""] * (len(head) - 1)] for row in rows]
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *titled]))
        parts += table.notes
    return "\n\n".join(parts) + "\n"


def _latex(tables: Sequence[PairTable]) -> str:
    parts = []
    for table in tables:
        head, *rows = [[_escape(cell) for cell in row] for row in table.cells()]
        columns = "l" + "r" * len(table.labels) + "l" * (len(table.labels) > 1)
        lines = [rf"\begin{{tabular}}{{{columns}}}  % needs booktabs", r"\toprule", " & ".join(head) + r" \\"]
        for row in rows:
            lines += [r"\midrule", rf"\textit{{{row[0]}}} \\"] if len(row) == 1 else [" & ".join(row) + r" \\"]
        notes = [f"% {note}" for note in table.notes]
        parts.append("\n".join([*notes, *lines, r"\bottomrule", r"\end{tabular}"]))
    return "\n\n".join(parts) + "\n"


def _escape(text: str) -> str:
    return re.sub(r"([%_&#${}])", r"\\\1", text).replace("±", r"$\pm$")


def _csv(tables: Sequence[PairTable]) -> str:
    """Return a row for each metric and model; values are shares, not percent."""
    rows: list[dict[str, Any]] = []
    for table in tables:
        for row in table.rows:
            names = dict(zip(("part", "dataset", "metric"), row.metric.split("/", 2), strict=True))
            rows += [
                {**names, "baseline": table.labels[0], "model": label, **_moments(values)}
                | (describe_difference(row.differences[label]) if label in row.differences else {})
                for label, values in row.values.items()
            ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[-1]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _moments(values: Sequence[float]) -> dict[str, Any]:
    """Return the number of seeds, and the mean and standard deviation over them."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"seeds": len(values), "mean": statistics.mean(values), "standard_deviation": deviation}


WRITERS = {".md": _markdown, ".csv": _csv, ".tex": _latex}


def main() -> None:
    """Print the tables of the runs that the command line names, and write them to files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="directories of training runs, or folders that hold some")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--output", nargs="+", type=Path, default=[], help=f"files that end in {', '.join(WRITERS)}")
    given = parser.parse_args()
    try:
        for file in given.output:
            if file.suffix not in WRITERS:
                raise ValueError(f"output must end in {', '.join(WRITERS)}, got {file}")
            check_file(file)
        tables = make_tables(given.runs, given.parts)
    except ValueError as error:
        parser.error(str(error))
    show(*(part for table in tables for part in (rich_table(table), *table.notes, "")), data=tables)
    for file in given.output:
        write_bytes(file, WRITERS[file.suffix](tables).encode())
        print(f"written: {file}")


if __name__ == "__main__":
    main()
