"""Numbers that pages print are those of the committed files which they name."""

import csv
import functools
import itertools
import json
import re
import statistics
from pathlib import Path

import pytest

import clip
import clip_control
import vision
from grid import differences, spread

DOCS = Path(__file__).parents[2] / "docs"
README = "../README.md"


@functools.cache
def read(name: str):
    """Return the content of a file below `docs`."""
    return json.loads((DOCS / name).read_text(encoding="utf-8"))


@functools.cache
def printed(page: str) -> str:
    """Return a page; of README, whose excerpts are narrower than the output, with single spaces."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.sub(" +", " ", text) if page == README else text


def signed(text: str) -> str:
    """Return numbers as pages print them: without a plus in intervals, with a true minus sign."""
    return text.replace("[+", "[").replace(", +", ", ").replace("-", "−")


def difference(values: dict, family: str, digits: int = 1) -> str:
    """Return a family's difference from the first family, of {family: {seed: value}}, with its word but without p."""
    return signed(differences(values)[family].text(digits).partition(" (p")[0])


def interval(values: dict, family: str, digits: int = 1) -> str:
    return difference(values, family, digits).partition("]")[0] + "]"


def by_seed(runs, first: str, value, family: str = "family") -> dict:
    """Return {family: {seed: value of the run}}, from the family that others are compared with."""
    found: dict = {first: {}}
    for run in runs:
        found.setdefault(run[family], {})[run["seed"]] = value(run)
    return found


def fresh_runs(folder: str) -> list:
    """Return the runs in a folder except those that chose learning rates."""
    return [read(str(file.relative_to(DOCS))) for file in sorted((DOCS / "results" / folder).rglob("*-?.json"))]


def compare_excerpts():
    """Yield the lines of the whole output that the guide shows, and README's two rows."""
    whole = next(lines for command, lines in read("benchmarks/compare.json").items() if "version_0" in command)
    yield from (("guides/compare.md", line) for line in whole[:2])
    for name in ("acc1", "image R@1", "text R@1"):
        first = next(number for number, line in enumerate(whole) if line.startswith(name))
        rows = whole[first : first + 2]
        yield from (("guides/compare.md", row) for row in rows)
        if name != "text R@1":
            yield from ((README, " ".join(row.split())) for row in rows)


def demo():
    """Yield the rows of both tables, whose means are those of the seeds."""
    for row in read("benchmarks/demo.json")["seeds"]["rows"][:3]:
        cells = (row[name] for name in ("CLIP-debug", "DiffCLIP-debug-0.2", "difference, 95% interval"))
        yield "benchmarks/demo.md", f"| {row['what']} ↑ | {' | '.join(cells)} |"
        for name in ("CLIP-debug", "DiffCLIP-debug-0.2"):
            yield "benchmarks/demo.md", f"{statistics.mean(row[f'{name}, by seed']):.1f} ±"
    for row in read("benchmarks/demo.json")["lesson"]["rows"]:
        cells = (row[name] for name in ("seeds 0, 1, 2", "image R@1", "ink right", "paper right"))
        yield "benchmarks/demo.md", f"| {' | '.join(cells)} |"


def sinks():
    names = {"smollm2": "SmolLM2-135M, rounded to four bits", "minilm": "MiniLM-L6", "dinov2": "DINOv2-S"}
    for key, name in names.items():
        one = read("benchmarks/sinks.json")["models"][key]
        ratio = one["largest_over_median_norm"]
        cells = [f"{one[kind]:.1%}" for kind in ("sink", "nop", "broadcast")]
        yield "guides/inspect.md", f"| {name} | {' | '.join(cells)} | {ratio:.{1 if ratio < 10 else 0}f} |"


def clip_benchmark():
    names = {
        "acc1": "zero-shot acc1",
        "acc5": "zero-shot acc5",
        "image_retrieval_recall@1": "image R@1",
        "text_retrieval_recall@1": "text R@1",
        "image_retrieval_recall@10": "image R@10",
        "text_retrieval_recall@10": "text R@10",
        "acc": "caption selection",
    }
    for row in read("benchmarks/clip_benchmark.json")["DiffCLIP-debug, trained, digits"]:
        if row["metric"] in names:
            counts = [f"{row[key]:.0f}" for key in ("right, CLIP_benchmark", "right, diffvision", "of")]
            yield "benchmarks/clip_benchmark.md", f"| {names[row['metric']]} | {' | '.join(counts)} |"


def gpu():
    """Yield the eager steps on an H200 by the backend that "auto" takes."""
    for row in read("benchmarks/gpu-h200.json")["steps"]:
        if row["mode"] == "eager" and row["backend"] == "auto" and row["role"] != "peer":
            yield "benchmarks/gpu.md", f"| {row['ms']:.1f} | {row['rate']:,.0f} | {row['peak_gib']:.1f} |"
            if row["setting"] == "ViT-B/16, batch 256":
                yield README, f" {row['ms']:.1f} |"


def emoji():
    runs = clip.GRID
    differences = runs.differences("image R@1")
    rows = {"V1 0.8": "V1 0.8 in both towers, DiffCLIP's", "V2": "V2 in both towers"}
    yield "results/clip.md", f"| plain | {spread([*runs.by_seed('plain', 'image R@1').values()])} | |"
    for family, name in rows.items():
        mean = spread([*runs.by_seed(family, "image R@1").values()])
        difference = signed(str(differences[family]).partition("]")[0] + "]")
        yield "results/clip.md", f"| {name} | {mean} | {difference}"
        yield README, difference
    right = clip_control.by_picture(clip_control.GRID.done())
    yield from (("results/clip.md", signed(row)) for row in clip_control.table(right) if "±" in row)


def fashion():
    runs = vision.GRID
    accuracy, noise = (runs.differences(metric) for metric in ("accuracy", "noise"))
    plain = [spread([*runs.by_seed("plain", metric).values()]) for metric in ("accuracy", "noise")]
    yield "results/vision.md", f"| plain | {' | '.join(plain)} |"
    cells = [signed(str(accuracy[family]).partition(" n.s.")[0]) for family in ("V1 depth", "V2")]
    yield README, f"accuracy, % ↑ | {plain[0]} | {' | '.join(cells)} |"
    for family, name in {"V1 depth": "V1, by depth", "V2": "V2"}.items():
        yield "results/vision.md", f"| {name} | {signed(str(accuracy[family]))} | {signed(str(noise[family]))} |"


def pruned():
    for name, model in {"plain": "plain", "V1": "V1", "V2": "V2"}.items():
        seeds = [of for key, of in read("results/cache_pruning.json")["models"].items() if key.startswith(model)]
        k95 = statistics.mean(of["k95"] for of in seeds)
        yield "results/cache_pruning.md", f"| {name} | {k95:.0f} |"


def scaling():
    for size, tokens in {"0.03M": "150", "0.1M": "15", "0.3M": "2", "0.8M": "0.4"}.items():
        runs = [run for run in fresh_runs("scaling") if run["size"] == size]
        losses = by_seed(runs, "plain", lambda run: run["points"][-1]["loss"])  # of 2e12 FLOPs
        for family, label in (("V1", f"{size}, {tokens}"), ("V2", "")):
            yield (
                "results/scaling.md",
                f"| {label} | {family} | {difference(losses, family, 3)} |".replace("|  |", "| |"),
            )


def language():
    runs = [run for run in read("results/language.json")["runs"] if run["size"] == "1m" and run["tokens"] == 2_000_000]
    for name, metric, digits, factor in (
        ("validation loss ↓", "nll", 3, 1),
        ("1 needle, 256 tokens, % ↑", "needle/1x1/256", 0, 100),
        ("2 of 4 needles, 256 tokens, % ↑", "needle/4x2/256", 0, 100),
        ("largest logit ↓", "outliers/attention_logits/top_1", 1, 1),
    ):
        values = by_seed(runs, "transformer", lambda run, key=metric, factor=factor: factor * run["metrics"][key])
        cells = [spread([*values[family].values()], digits) for family in ("transformer", "diff", "diffv2")]
        yield "results/language.md", f"| {name} | {' | '.join(cells)} |"


def low_bit():
    models = read("results/low_bit.json")["models"].items()
    runs = [metrics | dict(zip(("family", "seed"), key.rsplit("-", 1), strict=True)) for key, metrics in models]
    for scheme in ("qk_int8", "qk_int4", "qk_int4_smooth", "cache_2"):
        rises = by_seed(runs, "transformer-debug", lambda run, key=f"nll_rise/{scheme}": 1000 * run[key])
        cells = [f"{statistics.mean(rises['transformer-debug'].values()):.1f}"]
        cells += [interval(rises, family).replace("−0.0 [", "0.0 [") for family in ("diff-debug", "diffv2-debug")]
        yield "results/low_bit.md", f"| `{scheme}` | {' | '.join(cells)} |"
    logits = by_seed(runs, "transformer-debug", lambda run: run["largest_logit"])
    yield "results/low_bit.md", f"V1 {interval(logits, 'diff-debug')}, V2 {interval(logits, 'diffv2-debug')}"


def adapt():
    names = {"v2": "v2", "dex": "dex, annealed (paper)", "dex_kept": "dex, lambda kept (ours)"}
    for way, name in (names | {"dex_new": "dex, lambda kept, only new", "v1": "v1"}).items():
        cells = []
        for task in ("language", "vision"):
            runs = [run for run in read("results/adapt.json")["runs"] if run["task"] == task]
            losses = by_seed(runs, "plain", lambda run: run["curves"]["val/loss"][1][-1], "way")
            cells.append(interval({"plain": losses["plain"], way: losses[way]}, way, 4 if way in names else 3))
        yield "results/adapt.md", f"| {name} | {' | '.join(cells)} |"


def vlm():
    metrics = ("POPE adversarial F1", "POPE adversarial accuracy", "yes, adversarial", "CHAIR_i", "recall", "colour")
    for tower, language_model in itertools.product(("plain", "V2"), repeat=2):
        runs = [run for run in fresh_runs("vlm") if run["family"] == f"{tower} tower, {language_model} language"]
        cells = [spread([100 * run["test"][name] for run in runs]) for name in (*metrics, "place")]
        cells[2] = cells[2].partition(" ±")[0]
        yield "results/vlm.md", f"| {tower}, {language_model} | {' | '.join(cells)} |"


def bundled():
    rows = [*csv.DictReader((DOCS / "results/bundled.csv").read_text().splitlines())]
    for metric, words, digits in (
        ("classification/digits/acc1", "accuracy of the ViT", 3),
        ("zero_shot/digits/acc1", "zero-shot accuracy of the CLIP", 3),
        ("perplexity/perplexity", "language model (V2)", 1),
    ):
        plain, other = (f"{float(row['mean']):.{digits}f}" for row in rows if row["metric"] == metric)
        yield "guides/weights.md", f"{words} {plain} and {other}"


SOURCES = (
    *(compare_excerpts, demo, sinks, clip_benchmark, gpu, emoji, fashion, pruned),
    *(scaling, language, low_bit, adapt, vlm, bundled),
)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_pages_print_the_numbers_of_their_files(source):
    expected = [*source()]
    assert len(expected) > 2
    for page, text in expected:
        assert text in printed(page), f"{page} does not print {text!r}"
