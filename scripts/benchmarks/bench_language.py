"""Times training and decoding of our language models against Hugging Face's Llama and DiffLlama, on one device.

    python scripts/benchmarks/bench_language.py [--quick] [--size 30m] [--device cpu] [--threads 2] [--output DIR]

writes language-<device>-<dtype>.json (every time of every round) and .png, and prints tables.
Without transformers our models are timed alone, and the columns of Hugging Face's say "not installed".

All models of a run have one size's width, depth, heads and vocabulary (`diffvision.models.language.SIZES`), tied
embeddings and random weights; Hugging Face's run with sdpa. A training step is forward, cross entropy, backward and
AdamW: ours as `diffvision fit` does it, with `linear_cross_entropy`; Hugging Face's with `F.cross_entropy` on the
logits and without a cache. Decoding is greedy, batch 1, with no end token, by `models.language.generate` and by
`generate` of transformers with its default cache. On CUDA training is bfloat16 autocast on float32 weights, and
decoding has bfloat16 weights. `benchmark.py` says how times and memory are taken.
"""

import copy
import gc
import importlib.util
import math
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark import (
    Way,
    add_ratios,
    arguments,
    in_turns,
    measure_all,
    parse,
    peak_memory,
    ratios_to,
    remarks,
    table,
    training_step,
)
from benchmark_picture import Panel, draw
from diffvision.models import language
from diffvision.models.language.generation import generate
from diffvision.training.cross_entropy import linear_cross_entropy
from machine import describe_machine, device_in_words, environment

LLAMA, DIFFLLAMA = "HF Llama", "HF DiffLlama"
# Name -> prefix of its classes in transformers.
PEERS = {LLAMA: "Llama", DIFFLLAMA: "DiffLlama"}
ABSENT = "not installed"
# Sequences and tokens of a training step; tokens of prompts.
TRAINING = [(4, 512), (1, 2048)]
PROMPTS = [1000, 64]
QUICK_SECONDS = 20.0  # with --quick, for the rounds of one table
METHOD = """Speeds "x Llama" and "x DiffLlama" are tokens/s over that model's in the same run (higher is better): all
models take turns within each round, and a cell is the median over rounds of the ratio in one round. Decoding's time is
that of a call less that of a call for one token in the same round, so the prompt's pass is not in it; another table
has the whole call. Peak memory is what a training step holds beyond weights, optimiser state and batch. Quartiles and
single times are in the JSON."""


class Setting(NamedTuple):
    """One measurement: "training" of [batch, tokens], or "decoding" after a prompt."""

    task: str
    batch: int
    tokens: int

    @property
    def title(self) -> str:
        if self.task == "training":
            return f"training, {self.batch} x {self.tokens}"
        return f"decoding, prompt of {self.tokens}"


def hugging_face(name: str, size: language.Size) -> nn.Module:
    """Return Llama or DiffLlama in the shape of a size; no weights are fetched."""
    import transformers

    config = getattr(transformers, f"{PEERS[name]}Config")(
        vocab_size=size.vocab_size,
        hidden_size=size.dim,
        intermediate_size=size.mlp_dim,
        num_hidden_layers=size.depth,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=max(size.max_length, 2048),
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return getattr(transformers, f"{PEERS[name]}ForCausalLM")(config)


class Built:
    """The models of a size by name, each built when it is first used; peers only if installed."""

    def __init__(self, size: str, device: str) -> None:
        self.size, self.device = size, device
        self.installed = importlib.util.find_spec("transformers") is not None
        self.ours = [f"{family}-{size}" for family in language.FAMILIES]
        self.names = [*PEERS, *self.ours] if self.installed else self.ours
        self.models: dict[str, nn.Module] = {}

    @property
    def plain(self) -> str:
        """Return the baseline of the picture: Llama, or our Transformer where it is not installed."""
        return LLAMA if self.installed else self.ours[0]

    def role(self, name: str) -> str:
        return "plain" if name == self.plain else "peer" if name in PEERS else "ours"

    def __getitem__(self, name: str) -> nn.Module:
        if name not in self.models:
            peer = name in PEERS
            model = hugging_face(name, language.SIZES[self.size]) if peer else language.create(name)
            self.models[name] = model.to(self.device)
        return self.models[name]

    def parameters(self, name: str) -> int:
        return sum(p.numel() for p in self[name].parameters())


def loss_of(name: str, model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean next-token cross entropy of tokens [B, N + 1], N predictions a row."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
    if name in PEERS:
        return F.cross_entropy(model(input_ids=inputs, use_cache=False).logits.flatten(0, 1).float(), targets)
    loss, _ = linear_cross_entropy(model.hidden(inputs).flatten(0, 1), model.head_weight, targets)
    return loss / len(targets)


def decoding(name: str, model: nn.Module, prompt: Tensor, new: int) -> list[int]:
    """Return the `new` tokens with which a model greedily continues a prompt [1, N]."""
    if name not in PEERS:
        return generate(model, prompt, max_new_tokens=new)[0]
    mask = torch.ones_like(prompt)
    tokens = model.generate(prompt, attention_mask=mask, max_new_tokens=new, do_sample=False)
    return tokens[0, prompt.shape[1] :].tolist()


def ways(setting: Setting, built: Built, args: Any) -> list[Way]:
    """Return the ways of a setting: each model, when decoding for one token ("first") and for all ("whole")."""
    made = []
    trains = setting.task == "training"
    vocabulary = language.SIZES[built.size].vocab_size
    tokens = torch.randint(3, vocabulary, (setting.batch, setting.tokens + trains), device=args.device)
    for name in built.names:
        role = built.role(name)
        try:
            if trains:
                model = built[name].train()
                made.append(Way(name, role, training_step(model, partial(loss_of, name, model, tokens), args)))
                continue
            # A copy for bfloat16, since the weights that are trained stay float32.
            model = built[name] if args.dtype == torch.float32 else copy.deepcopy(built[name]).to(args.dtype)
            for kernel, new in (("first", 1), ("whole", args.new)):
                call = partial(decoding, name, model.eval(), tokens, new)
                made.append(Way(name, role, call, kernel=kernel))
        except Exception as error:
            made.append(Way(name, role, None, cannot=f"{type(error).__name__}: {error}"[:300]))
    return made


def without_first(first: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """Return the times of decoding alone: in each round the whole call less the call for one token."""
    result = {"group": whole["group"], "kernel": "", "role": whole["role"]}
    for part in (first, whole):
        if reason := {key: part[key] for key in ("cannot", "failed") if key in part}:
            return result | reason
    times = [b - a for a, b in zip(first["times_ms"], whole["times_ms"], strict=True)]
    if min(times) <= 0:
        return result | {"failed": "a call for one token took as long as the whole: take more with --new"}
    return result | {"times_ms": times}


def add_speeds(results: dict[str, dict[str, Any]]) -> None:
    """Add "speed": tokens/s over each peer's that was timed, the median over rounds."""
    peers = {name: results[name] for name in PEERS if results.get(name, {}).get("times_ms")}
    for result in results.values():
        if result.get("times_ms"):
            result["speed"] = {name: statistics.median(ratios_to(peer, result)) for name, peer in peers.items()}


def measure(setting: Setting, built: Built, args: Any) -> list[dict[str, Any]]:
    """Return the tables of a setting: one, and for decoding also that of the whole call."""
    made = ways(setting, built, args)
    peak = (lambda way: peak_memory(way.call, args.device)) if setting.task == "training" else None
    seconds = QUICK_SECONDS if args.quick else math.inf
    results = in_turns(made, args.device, args.rounds, seconds=seconds, peak=peak)
    del made
    gc.collect()
    if args.device.startswith("cuda"):
        torch.cuda.empty_cache()
    entry: dict[str, Any] = {"task": setting.task, "title": setting.title, "tokens": setting.batch * setting.tokens}
    tables = [entry | {"models": results}]
    if setting.task == "decoding":
        whole = {name: results.get(f"{name}: whole", results.get(name)) for name in built.names}
        first = {name: results.get(f"{name}: first", results.get(name)) for name in built.names}
        alone = {name: without_first(first[name], whole[name]) for name in built.names}
        title = f"{setting.title}: whole call"
        tables = [
            entry | {"tokens": args.new - 1, "models": alone},
            entry | {"task": "whole call", "title": title, "tokens": args.new, "models": whole},
        ]
    for entry in tables:
        entry["baseline"] = add_ratios(entry["models"])
        add_speeds(entry["models"])
    return tables


def model_rows(entry: dict[str, Any], report: dict[str, Any]) -> list[list[str]]:
    """Return a row for each model."""
    rows = []
    for name, result in entry["models"].items():
        row = [name, f"{report['parameters'][name] / 1e6:.2f} M"]
        row.append(f"{1e3 * entry['tokens'] / result['median_ms']:,.0f}" if "median_ms" in result else "–")
        for peer in PEERS:
            speed = result.get("speed", {}).get(peer)
            absent = "–" if report["versions"]["transformers"] else ABSENT
            row.append(f"{speed:.2f}" if speed else absent)
        row.append("{:.1f}–{:.1f}".format(*result["quartiles_ms"]) if "median_ms" in result else "–")
        if entry["task"] == "training":
            row.append(f"{result['peak_bytes'] / 2**20:,.0f}" if "peak_bytes" in result else "–")
        rows.append(row)
    if not report["versions"]["transformers"]:
        rows += [[name, *[ABSENT] * (len(rows[0]) - 1)] for name in PEERS]
    return rows


def markdown(report: dict[str, Any]) -> str:
    """Return the report as a page."""
    parts = [f"# Language models of size {report['size']}, {report['dtype']}", describe_machine(report)]
    if version := report["versions"]["transformers"]:
        parts.append(f"transformers {version}")
    parts.append(METHOD)
    columns = ["model", "parameters", "tokens/s", "x Llama", "x DiffLlama", "time, ms (quartiles)"]
    for entry in report["tables"]:
        parts.append(f"## {entry['title'].capitalize()}")
        memory = ["peak memory, MiB"] if entry["task"] == "training" else []
        parts.append(table([*columns, *memory], model_rows(entry, report)))
    return "\n\n".join([*parts, *remarks(report, [(entry["title"], entry["models"]) for entry in report["tables"]])])


def picture(path: Path, report: dict[str, Any]) -> None:
    """Draw training and decoding side by side: a row for each shape, a dot for each model except the baseline."""
    panels = []
    for task in ("training", "decoding"):
        ratios = {
            entry["title"]: {
                name: result["ratio"]
                for name, result in entry["models"].items()
                if "ratio" in result and name != report["baseline"]
            }
            for entry in report["tables"]
            if entry["task"] == task
        }
        # A run that was stopped may have no decoding.
        if ratios:
            panels.append(Panel(f"{task.capitalize()}, time a token", ratios, {}))
    ours = {name for name in report["parameters"] if name not in PEERS}
    note = f"torch {report['versions']['torch']}, transformers {report['versions']['transformers'] or ABSENT}"
    title = f"Language models of size {report['size']}, {report['dtype']}, {device_in_words(report)}"
    draw(path, title, panels, ours, note, f"{report['baseline']}'s")


def run(args: Any) -> dict[str, Any]:
    """Measure all settings and write the files, anew after each setting."""
    dtype = str(args.dtype).removeprefix("torch.")
    name = f"language-{args.device.partition(':')[0]}-{dtype}"
    torch.manual_seed(0)
    built = Built(args.size, args.device)
    settings = [Setting("training", *shape) for shape in TRAINING]
    settings += [Setting("decoding", 1, prompt) for prompt in PROMPTS]
    report: dict[str, Any] = {"benchmark": "language", "size": args.size, "dtype": dtype, **environment(args.device)}
    if not built.installed:
        report["versions"]["transformers"] = None
    report |= {"rounds": args.rounds, "new_tokens": args.new, "baseline": built.plain}
    report["parameters"] = {model: built.parameters(model) for model in built.names}
    report["tables"] = []
    measured = {s.title: lambda s=s: report["tables"].extend(measure(s, built, args)) for s in settings}
    try:
        measure_all(args, name, report, measured)
    finally:
        # Also of what was measured when the run is stopped.
        if report["tables"]:
            picture(args.output / f"{name}.png", report)
    return report


def main(given: list[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--size", choices=list(language.SIZES), help="3m with --quick, else 30m")
    parser.add_argument("--new", type=int, default=64, help="tokens to decode, 64 by default")
    args = parse(parser, given)
    args.size = args.size or ("3m" if args.quick else "30m")
    if args.new < 2:
        parser.error(f"--new is {args.new}: give at least 2, for the first token's time is taken off")
    limit = language.SIZES[args.size].max_length
    if (longest := max([*PROMPTS, 0]) + args.new) > limit:
        parser.error(f"--new {args.new} makes {longest} tokens, over the models' {limit}: give fewer")
    report = run(args)
    if not report["tables"]:
        return 1
    print(markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
