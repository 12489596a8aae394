"""Figures of the language evaluations, of one model or of several.

Each takes {model: metrics} as the evaluations return them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffvision.analysis.figures.language import HEIGHT, Results, draw_curves, draw_numbers, numbered
from diffvision.analysis.figures.style import COLOURS, INK, SOFT, colours_of, legend_below, new_figure, panels, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@styled
def recall_bars(results: Results) -> Figure:
    """Return the loss of recall hits, of the rest and of all."""
    figure, (ax,) = panels(1, width=5.4, height=HEIGHT)
    titles = {"nll/ar_hit": "recall hits", "nll/others": "others", "nll/all": "all"}
    draw_numbers(
        ax, {title: {name: metrics[key] for name, metrics in results.items()} for key, title in titles.items()}
    )
    ax.set(title="Loss of tokens that the context can recall, and of the rest", ylabel="nats a token")
    return legend_below(figure, ax)


@styled
def error_curves(results: Results) -> Figure:
    """Return the shares of right, distracted, fabricated and malformed answers over the number of facts."""
    kinds = ("correct", "distracted", "fabricated", "malformed")
    figure, axes = panels(len(kinds), width=3.0, height=HEIGHT, sharey=True)
    for ax, kind in zip(axes, kinds, strict=True):
        facts = {key: int(key.partition("x1/")[0]) for metrics in results.values() for key in metrics
                 if key.endswith(f"x1/{kind}")}  # fmt: skip
        draw_curves(
            ax, {name: {count: metrics[key] for key, count in facts.items()} for name, metrics in results.items()}
        )
        ax.set_xticks(sorted(set(facts.values())))
        ax.set(title=kind, xlabel="facts in the context")
    axes[0].set(ylabel="share of the answers", ylim=(-0.03, 1.03))
    return legend_below(figure, axes[0])


@styled
def math_bars(results: Results) -> Figure:
    """Return the accuracy, and the shares of texts without an answer and at the limit of tokens."""
    figure, (ax,) = panels(1, width=5.4, height=HEIGHT)
    titles = {"accuracy": "right", "without_answer": "no answer", "at_limit": "at the limit"}
    draw_numbers(
        ax, {title: {name: metrics[key] for name, metrics in results.items()} for key, title in titles.items()}
    )
    ax.set(title="Answers to mathematical questions", ylabel="share of the answers", ylim=(0, 1.1))
    return legend_below(figure, ax)


@styled
def attention_bars(results: Results) -> Figure:
    """Return the share of attention on the answer and on noise, by depth."""
    figure, axes = panels(2, width=4.0, height=HEIGHT, sharey=True)
    for ax, span, title in zip(axes, ("answer", "noise"), ("on the answer", "on the noise around it"), strict=True):
        shares = {name: numbered(metrics, span) for name, metrics in results.items()}
        depths = sorted({depth for by_depth in shares.values() for depth in by_depth})
        draw_numbers(ax, {f"{100 * depth:.0f}%": {name: shares[name][depth] for name in shares} for depth in depths})
        ax.set(title=f"Attention {title}", xlabel="depth of the answer")
        ax.axhline(0, color=SOFT, linewidth=0.8)
    axes[0].set_ylabel("share of attention")
    return legend_below(figure, axes[0])


@styled
def many_shot_panels(results: Results) -> Figure:
    """Return accuracy over shots, with the range from best to worst over orders of the same demonstrations."""
    figure, (shots, orders) = panels(2, width=4.0, height=HEIGHT)
    _draw_shots(shots, results)
    _draw_orders(orders, results)
    return legend_below(figure, shots)


def _draw_shots(ax: Any, results: Results) -> None:
    curves = {name: {x: 100 * y for x, y in numbered(metrics, "accuracy").items()} for name, metrics in results.items()}
    draw_curves(ax, curves)
    chance = 100 * next(iter(results.values()))["chance"]
    ax.axhline(chance, color=SOFT, linestyle=":", linewidth=1)
    ax.annotate("chance", (0.01, chance), xycoords=("axes fraction", "data"), va="top", fontsize=8, color=INK)
    shots = sorted({x for points in curves.values() for x in points})
    if len(shots) > 2:
        ax.set_xscale("log")
        ax.set_xticks(shots, [f"{x:g}" for x in shots])
        ax.minorticks_off()
    ax.set(title="Accuracy by demonstrations", xlabel="demonstrations", ylabel="%")
    ax.set_ylim(0, 110)


def _draw_orders(ax: Any, results: Results) -> None:
    for number, (name, colour) in enumerate(colours_of(results).items()):
        for group, arrangement in enumerate(("random", "alternating")):
            mean, best, worst = (
                100 * results[name][f"order/{arrangement}/{kind}"] for kind in ("mean", "best", "worst")
            )
            x = group + (number - (len(results) - 1) / 2) * 0.7 / len(results)
            errors = [[mean - worst], [best - mean]]
            bars: Any = {"fmt": "o", "color": colour, "capsize": 5, "linewidth": 1.8, "label": name}
            ax.errorbar([x], [mean], yerr=errors, **bars)
            text: Any = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center", "fontsize": 8}
            ax.annotate(f"{best - worst:.1f}", (x, best), **text)
    ax.set_xticks([0, 1], ["random", "alternating by class"])
    ax.set(title="Orders of the same demonstrations:\nmean, best, worst, and best − worst", xlim=(-0.6, 1.6))
    ax.set_ylim(0, 110)  # room for the numbers above the marks
    ax.grid(axis="x", visible=False)


@styled
def outlier_bars(results: Results) -> Figure:
    """Return the largest absolute activations and their median, on a logarithmic scale."""
    titles = {"attention_logits": "attention logits", "hidden_states": "hidden states"}
    by_kind = {kind: [key for key in next(iter(results.values())) if key.startswith(f"{kind}/")] for kind in titles}
    by_kind = {kind: keys for kind, keys in by_kind.items() if keys}
    figure, axes = panels(len(by_kind), width=4.6, height=HEIGHT)
    for ax, (kind, keys) in zip(axes, by_kind.items(), strict=True):
        labels = {key.partition("/")[2].replace("_", " "): key for key in keys}
        groups = {label: {name: metrics[key] for name, metrics in results.items()} for label, key in labels.items()}
        draw_numbers(ax, groups, log=True)
        ax.set(title=f"Largest {titles[kind]} and their median")
    return legend_below(figure, axes[0])


@styled
def quantization_curves(results: Results) -> Figure:
    """Return metrics over the number of bits of the attention logits, one panel per metric.

    A dotted line is the value without quantisation.
    """
    kinds = list(dict.fromkeys(key.rpartition("/")[0] for metrics in results.values() for key in metrics))
    kinds = [kind for kind in kinds if kind != "perplexity"]
    figure, axes = panels(len(kinds), width=4.4, height=HEIGHT)
    for ax, kind in zip(axes, kinds, strict=True):
        curves = {name: numbered(metrics, kind) for name, metrics in results.items()}
        draw_curves(ax, curves)
        for name, colour in colours_of(results).items():
            ax.axhline(results[name][f"{kind}/full"], color=colour, linestyle=":", linewidth=1)
        bits = sorted({x for points in curves.values() for x in points})
        ax.set_xscale("log", base=2)
        ax.set_xticks(bits, [f"{x:g}" for x in bits])
        ax.minorticks_off()
        ax.invert_xaxis()
        if "accuracy" in kind:
            ax.set_ylim(-0.03, 1.03)
        title = "loss, nats a token" if kind == "nll" else kind.replace("_", " ")
        ax.set(title=title, xlabel="bits of attention logits")
    return legend_below(figure, axes[0])


@styled
def pruning_curves(results: Results) -> Figure:
    """Return metrics over the share of the prompt that is dropped: a row for each metric, a column for each model."""
    titles = {"nll": "loss, nats a token", "needle_agnostic": "needles, asked later", "needle_aware": "needles, asked"}
    kinds = [kind for kind in titles if all(f"{kind}/full" in metrics for metrics in results.values())]
    figure = new_figure(3.4 * len(results), 2.6 * len(kinds) + 0.5)
    grid = figure.subplots(len(kinds), len(results), squeeze=False, sharex=True, sharey="row")
    keys = dict.fromkeys(key for metrics in results.values() for key in metrics)
    methods = [key.removeprefix("largest_ratio/") for key in keys if key.startswith("largest_ratio/")]
    for row, kind in zip(grid, kinds, strict=True):
        for ax, (name, metrics) in zip(row, results.items(), strict=True):
            for index, method in enumerate(methods):
                points = numbered(metrics, f"{kind}/{method}")
                line: Any = {"color": COLOURS[index % len(COLOURS)], "linewidth": 1.5, "marker": "o", "markersize": 3}
                style = "-" if index < len(COLOURS) else "--"
                ax.plot([0, *points], [metrics[f"{kind}/full"], *points.values()], style, label=method, **line)
            ax.set(title=name)
        row[0].set_ylabel(titles[kind])
    for ax in grid[-1]:
        ax.set_xlabel("share of the prompt dropped")
    return legend_below(figure, grid[0][-1], columns=5)


@styled
def low_bit_panels(results: Results) -> Figure:
    """Return the rise of the loss and the error of attention under each scheme, and the two factors by layer."""
    kinds = {"loss more than in full precision, nats": "nll", "relative L1 error of attention": "relative_l1"}
    if all("needle_accuracy/full" in metrics for metrics in results.values()):
        kinds["needle accuracy"] = "needle_accuracy"
    figure, axes = panels(len(kinds) + 2, width=4.2, height=4.2)
    for ax, (title, kind) in zip(axes, kinds.items(), strict=False):
        _schemes(ax, results, kind)
        ax.set(title=title)
    for ax, kind in zip(axes[len(kinds) :], ("cancellation", "largest_logit"), strict=True):
        draw_curves(ax, {name: numbered(metrics, kind) for name, metrics in results.items()})
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.set(xlabel="layer")
    axes[-2].set(title="how much the difference amplifies errors")
    largest = [metrics["largest_logit"] for metrics in results.values()]
    factors = ", ".join(f"{largest[0] / value:.2f}" for value in largest)
    axes[-1].set(title=f"largest attention logit\n(range factors, the first model's over each: {factors})")
    axes[-1].set_ylim(bottom=0)
    return legend_below(figure, axes[0])


def _schemes(ax: Any, results: Results, kind: str) -> None:
    """Draw a dot for each model and scheme; losses are less that in full precision, and errors are logarithmic."""
    colours = colours_of(results)
    for number, (name, metrics) in enumerate(results.items()):
        values = {key.partition("/")[2]: value for key, value in metrics.items() if key.startswith(f"{kind}/")}
        values = {scheme: value for scheme, value in values.items() if "/" not in scheme}
        full = values.pop("full", 0.0) if kind == "nll" else 0.0
        shift = (number - (len(results) - 1) / 2) * 0.6 / len(results)
        x = [index + shift for index in range(len(values))]
        y = [value - full for value in values.values()]
        ax.plot(x, y, "o", color=colours[name], markersize=4, label=name)
        ax.set_xticks(range(len(values)), [scheme.replace("_", " ") for scheme in values], rotation=90)
    if kind == "nll":
        ax.set_yscale("symlog", linthresh=1e-3)
        ax.axhline(0, color=SOFT, linewidth=0.8)
    elif kind == "relative_l1":
        ax.set_yscale("log")
    else:
        ax.set_ylim(-0.03, 1.03)
