"""Pictures of language evaluations as PNG bytes, of one model or of several.

Each takes {model: metrics} as the evaluations return them. They lie here, and not with the other figures, since
evaluation and analysis are neighbours on one floor, and a command writes its picture beside its numbers.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Results = Mapping[str, Mapping[str, float]]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito's
_STYLE: Any = {
    "figure.dpi": 140,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.edgecolor": "#888888",
    "grid.color": "#e3e3e3",
    "legend.frameon": False,
}


def _png(draw: Callable[[Results], Figure]) -> Callable[[Results], bytes]:
    """Makes a function that draws a figure into one that returns it as PNG, on a canvas of its own."""

    @functools.wraps(draw)
    def png(results: Results) -> bytes:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        with mpl.rc_context(_STYLE):
            figure = draw(results)
            buffer = io.BytesIO()
            FigureCanvasAgg(figure).print_png(buffer)
        return buffer.getvalue()

    return png


@_png
def perplexity_bars(results: Results) -> Figure:
    """Loss, and bits a byte where it is known."""
    panels = {"nll": "nats a token", "bits_per_byte": "bits a byte"}
    kept = [key for key in panels if all(key in own for own in results.values())]
    figure, axes = _panels(len(kept), width=3.2)
    for ax, key in zip(axes, kept, strict=True):
        _bars(ax, {"": {name: own[key] for name, own in results.items()}})
        ax.set(title=panels[key])
    return _legend(figure, axes[0], results)


@_png
def recall_bars(results: Results) -> Figure:
    """Loss of recall hits, of the rest and of all."""
    figure, axes = _panels(1, width=5.0)
    titles = {"nll/ar_hit": "recall hits", "nll/others": "others", "nll/all": "all"}
    _bars(axes[0], {title: {name: own[key] for name, own in results.items()} for key, title in titles.items()})
    axes[0].set(title="Loss of tokens that the context can recall, and of the rest", ylabel="nats a token")
    return _legend(figure, axes[0], results)


@_png
def position_curves(results: Results) -> Figure:
    """The running mean of the loss over positions, a curve a model."""
    figure, axes = _panels(1, width=5.0)
    _curves(axes[0], {name: numbered(own, "nll") for name, own in results.items()})
    axes[0].set(title="Cumulative average loss by position", xlabel="position", ylabel="nats a token")
    return _legend(figure, axes[0], results)


@_png
def needle_maps(results: Results) -> Figure:
    """Accuracy by depth and length: a row of maps a model, a column a number of needles."""
    pairs = list(dict.fromkeys(key.partition("/")[0] for own in results.values() for key in own))
    figure, grid = _grid(len(results), len(pairs), width=2.6, height=2.1)
    shown: Any = None
    for row, (name, own) in zip(grid, results.items(), strict=True):
        for ax, pair in zip(row, pairs, strict=True):
            cells = {k.removeprefix(f"{pair}/"): v for k, v in own.items() if k.startswith(f"{pair}/")}
            shown = _heat_map(ax, cells)
            needles, _, queries = pair.partition("x")
            asked = f"{needles} needle{'s' * (needles != '1')}, {queries} asked for"
            ax.set_title(f"{asked}\n{name}: {100 * cells['accuracy']:.0f}%", fontsize=9)
        row[0].set_ylabel("depth of the answer")
    for ax in grid[-1]:
        ax.set_xlabel("length in tokens")
    bar = figure.colorbar(shown, ax=[ax for row in grid for ax in row], fraction=0.02, pad=0.02)
    bar.outline.set_visible(False)
    bar.set_label("accuracy")
    return figure


@_png
def attention_bars(results: Results) -> Figure:
    """The share of attention on the answer and on noise, by depth."""
    figure, axes = _panels(2, width=3.8, sharey=True)
    for ax, span, title in zip(axes, ("answer", "noise"), ("on the answer", "on the noise around it"), strict=True):
        depths = {name: numbered(own, span) for name, own in results.items()}
        places = sorted({depth for own in depths.values() for depth in own})
        _bars(ax, {f"{100 * depth:.0f}%": {name: own[depth] for name, own in depths.items()} for depth in places})
        ax.set(title=f"Attention {title}", xlabel="depth of the answer")
        ax.axhline(0, color="#888888", linewidth=0.8)
    axes[0].set_ylabel("share of attention")
    return _legend(figure, axes[0], results)


@_png
def many_shot_panels(results: Results) -> Figure:
    """Accuracy over shots; best to worst over orders of the same demonstrations."""
    figure, axes = _panels(2, width=3.8)
    curves = {name: {x: 100 * y for x, y in numbered(own, "accuracy").items()} for name, own in results.items()}
    _curves(axes[0], curves)
    chance = 100 * next(iter(results.values()))["chance"]
    axes[0].axhline(chance, color="#888888", linestyle=":", linewidth=1)
    axes[0].annotate(
        "chance", (0.01, chance), xycoords=("axes fraction", "data"), va="top", fontsize=8, color="#666666"
    )
    shots = sorted({x for own in curves.values() for x in own})
    if len(shots) > 2:
        axes[0].set_xscale("log")
        axes[0].set_xticks(shots, [f"{x:g}" for x in shots])
        axes[0].minorticks_off()
    axes[0].set(title="Accuracy by demonstrations", xlabel="demonstrations", ylabel="%")
    axes[0].set_ylim(0, 110)
    for number, (name, own) in enumerate(results.items()):
        for group, arrangement in enumerate(("random", "alternating")):
            mean, best, worst = (100 * own[f"order/{arrangement}/{kind}"] for kind in ("mean", "best", "worst"))
            place = group + (number - (len(results) - 1) / 2) * 0.7 / len(results)
            errors = [[mean - worst], [best - mean]]
            colour = COLOURS[number % len(COLOURS)]
            axes[1].errorbar([place], [mean], yerr=errors, fmt="o", color=colour, capsize=5, linewidth=1.8, label=name)
            axes[1].annotate(
                f"{best - worst:.1f}", (place, best), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=8
            )
    axes[1].set_xticks([0, 1], ["random", "alternating by class"])
    axes[1].set(title="Orders of the same demonstrations:\nmean, best, worst, and best − worst", xlim=(-0.6, 1.6))
    axes[1].set_ylim(0, 110)  # room for the numbers above the marks
    axes[1].grid(axis="y")
    return _legend(figure, axes[0], results)


@_png
def outlier_bars(results: Results) -> Figure:
    """The largest absolute activations and their median, on a logarithmic scale."""
    kinds = {"attention_logits": "attention logits", "hidden_states": "hidden states"}
    figure, axes = _panels(2, width=4.4)
    for ax, (kind, title) in zip(axes, kinds.items(), strict=True):
        keys = [key for key in next(iter(results.values())) if key.startswith(f"{kind}/")]
        shown = {key.partition("/")[2].replace("_", " "): key for key in keys}
        _bars(ax, {label: {name: own[key] for name, own in results.items()} for label, key in shown.items()}, log=True)
        ax.set(title=f"Largest {title} and their median")
    return _legend(figure, axes[0], results)


@_png
def quantization_curves(results: Results) -> Figure:
    """Loss by bits of the attention logits, and what else was taken; a dotted line where nothing is quantised."""
    kinds = list(dict.fromkeys(key.rpartition("/")[0] for own in results.values() for key in own))
    kinds = [kind for kind in kinds if kind != "perplexity"]
    figure, axes = _panels(len(kinds), width=4.2)
    for ax, kind in zip(axes, kinds, strict=True):
        _curves(ax, {name: numbered(own, kind) for name, own in results.items()})
        for number, own in enumerate(results.values()):
            ax.axhline(own[f"{kind}/full"], color=COLOURS[number % len(COLOURS)], linestyle=":", linewidth=1)
        bits = sorted({x for own in results.values() for x in numbered(own, kind)})
        ax.set_xscale("log", base=2)
        ax.set_xticks(bits, [f"{x:g}" for x in bits])
        ax.minorticks_off()
        ax.invert_xaxis()
        if "accuracy" in kind:
            ax.set_ylim(-0.03, 1.03)
        ax.set(
            title="loss, nats a token" if kind == "nll" else kind.replace("_", " "), xlabel="bits of attention logits"
        )
    return _legend(figure, axes[0], results)


def numbered(metrics: Mapping[str, float], kind: str) -> dict[float, float]:
    """{x: value} of the keys "<kind>/<x>" with a number for x, in its order."""
    found = {key.removeprefix(f"{kind}/"): value for key, value in metrics.items() if key.startswith(f"{kind}/")}
    points = {float(x): value for x, value in found.items() if x.replace(".", "", 1).isdecimal()}
    return dict(sorted(points.items()))


def _curves(ax: Any, curves: Mapping[str, Mapping[float, float]]) -> None:
    for number, (name, points) in enumerate(curves.items()):
        marker = "o" if len(points) < 10 else None
        colour = COLOURS[number % len(COLOURS)]
        ax.plot(
            list(points), list(points.values()), color=colour, linewidth=1.8, marker=marker, markersize=4, label=name
        )
    ax.grid(True)


def _bars(ax: Any, groups: Mapping[str, Mapping[str, float]], *, log: bool = False) -> None:
    """Bars side by side in groups, each with its number on it."""
    names = list(next(iter(groups.values())))
    wide = 0.8 / len(names)
    if log:
        ax.set_yscale("log")
        ax.yaxis.set_minor_formatter("")
    for number, name in enumerate(names):
        for place, own in enumerate(groups.values()):
            if not math.isfinite(value := own[name]):
                continue
            x = place + (number - (len(names) - 1) / 2) * wide
            ax.bar(x, value, width=0.92 * wide, color=COLOURS[number % len(COLOURS)], label=None if place else name)
            ax.annotate(
                f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}",
                (x, value),
                xytext=(0, 3 if value >= 0 else -3),
                textcoords="offset points",
                ha="center",
                va="bottom" if value >= 0 else "top",
                fontsize=7,
                rotation=90 if len(names) * len(groups) > 9 else 0,
            )
    ax.set_xticks(range(len(groups)), list(groups))
    ax.grid(axis="y")
    ax.margins(y=0.3 if log else 0.2)  # room for the numbers


def _heat_map(ax: Any, cells: Mapping[str, float]) -> Any:
    """Accuracy of "accuracy/<length>/<depth>": lengths across, depths downwards, numbers in percent."""
    found = {tuple(map(float, key.split("/")[1:])): value for key, value in cells.items() if key.count("/") == 2}
    lengths, depths = (sorted({key[axis] for key in found}) for axis in (0, 1))
    values = [[found[length, depth] for length in lengths] for depth in depths]
    shown = ax.imshow(values, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    for row, own in enumerate(values):
        for column, value in enumerate(own):
            colour = "black" if value > 0.6 else "white"
            ax.text(column, row, f"{100 * value:.0f}", ha="center", va="center", color=colour, fontsize=8)
    ax.set_xticks(range(len(lengths)), [f"{length:g}" for length in lengths])
    ax.set_yticks(range(len(depths)), [f"{100 * depth:.0f}%" for depth in depths])
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    return shown


def _panels(count: int, *, width: float, sharey: bool = False) -> tuple[Figure, Any]:
    figure, grid = _grid(1, count, width=width, height=2.9, sharey=sharey)
    return figure, grid[0]


def _grid(rows: int, columns: int, *, width: float, height: float, sharey: bool = False) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns + 0.4, height * rows + 0.4), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, sharey=sharey)


def _legend(figure: Figure, ax: Any, names: Sequence[str] | Results) -> Figure:
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(names), 4))
    return figure
