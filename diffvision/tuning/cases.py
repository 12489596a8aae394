"""The calls that are tuned: the usual ones, or those of a model."""

from typing import Any, NamedTuple, cast

import torch
from torch import nn

from diffvision.ops.attention import Problem
from diffvision.ops.attention.choice import problems_seen
from diffvision.ops.attention.tuned import Kind, kind_of


class Case(NamedTuple):
    """A call with its name for people; `compiled`: within torch.compile."""

    name: str
    problem: Problem
    compiled: bool = False

    @property
    def kind(self) -> Kind:
        """The kind of call that it stands for."""
        return kind_of(self.problem, compiled=self.compiled)

    @property
    def passes(self) -> str:
        """What is timed."""
        words = "forward + backward" if self.problem.grad else "forward"
        return f"{words}, compiled" if self.compiled else words


# Name -> samples on a CPU and on a GPU, and the call: batch, heads, key/value heads, queries, keys, D, V. They are in
# the order of their importance, and the largest last, because the time may end before all are measured.
USUAL = {
    "ViT-B/16 at 224, V1": (8, 256, Problem(1, 6, 6, 197, 197, 64, 128)),
    "CLIP's text, V1": (16, 1024, Problem(1, 4, 4, 77, 77, 64, 128, causal=True)),
    "language, 1024 tokens, V1": (1, 16, Problem(1, 6, 6, 1024, 1024, 64, 128, causal=True)),
    "ViT-B/16 at 224, V2": (8, 256, Problem(1, 12, 12, 197, 197, 64, 64, shared_keys=True)),
    "ViT-B/16 at 384, V1": (2, 64, Problem(1, 6, 6, 577, 577, 64, 128)),
    "decoding at 1024 tokens, V1": (1, 32, Problem(1, 6, 6, 1, 1024, 64, 128)),
    "decoding at 4096 tokens, V2": (1, 32, Problem(1, 24, 6, 1, 4096, 128, 128, shared_keys=True)),
    "text of 512, padded, V1": (4, 64, Problem(1, 6, 6, 512, 512, 64, 128, masked=True)),
    "documents in a row of 1024, V1": (1, 16, Problem(1, 6, 6, 1024, 1024, 64, 128, causal=True, masked=True)),
    "packed, 1024 tokens, V1": (4, 16, Problem(1, 6, 6, 1024, 1024, 64, 128, causal=True, packed=True)),
    "language, 4096 tokens, V1": (1, 4, Problem(1, 12, 12, 4096, 4096, 128, 256, causal=True)),
    "language, 4096 tokens, V2": (1, 4, Problem(1, 24, 6, 4096, 4096, 128, 128, shared_keys=True, causal=True)),
}


def usual_cases(device: str, dtype: torch.dtype) -> list[Case]:
    """Return the usual calls, of training and of inference, on "cpu" or "cuda"."""
    cases = []
    for name, (on_cpu, on_gpu, problem) in USUAL.items():
        problem = problem._replace(batch=on_cpu if device == "cpu" else on_gpu, dtype=dtype, device=device)
        passes = (False,) if problem.queries == 1 else (True, False)
        cases += [Case(name, problem._replace(grad=grad)) for grad in passes]
    return cases


def model_cases(spec: str, batch: int, tokens: int | None, device: str, dtype: torch.dtype) -> list[Case]:
    """Return the calls of a model, of training and of inference, each kind of them once.

    Args:
        spec: one of our models' names, which is built without memory for its weights, or what `open_model` takes.
        batch: samples.
        tokens: of a row, for a language model; at most its maximum, which is the default.
        device: "cpu" or "cuda", which the model need not fit on.
        dtype: of the queries.

    Raises:
        ValueError: the model has no differential attention, or reads fewer tokens.
    """
    seen = []
    for part, problems in _calls(spec, tokens).items():
        for problem in problems:
            problem = problem._replace(batch=problem.batch * batch, device=device, dtype=dtype)
            if part == "decoding":
                seen.append(Case(f"{spec}, {part}", problem._replace(queries=1, causal=False, grad=False)))
            else:
                seen += [Case(f"{spec}, {part}", problem._replace(grad=grad)) for grad in (True, False)]
    if not seen:
        raise ValueError(f"{spec} has no differential attention to tune: give one of `diffvision models`")
    return list({case.kind: case for case in seen}.values())


def _calls(spec: str, asked: int | None) -> dict[str, list[Problem]]:
    """Return the calls of each part of a model for one sample."""
    module, tokens = _built(spec, asked)
    device = next(module.parameters()).device
    parts: dict[str, list[Problem]] = {}

    def record(part: str, function: Any, *shape: int, integers: bool = False) -> None:
        given = torch.zeros(*shape, device=device, dtype=torch.long if integers else None)
        with problems_seen() as seen, torch.no_grad():
            function(given)
        parts[part] = list(dict.fromkeys(seen))

    if tokens is not None:
        record("language", module, 1, tokens, integers=True)
        seen = parts["language"]
        parts["documents in a row"] = [problem._replace(masked=True) for problem in seen]
        parts["decoding"] = [problem._replace(masked=masked) for problem in seen for masked in (False, True)]
        return parts
    if asked is not None:
        raise ValueError(f"{spec} is a model of images: leave out --tokens, which is of a language model's rows")
    image = _image_size(module)
    if hasattr(module, "encode_text"):
        record("images", module.encode_image, 1, 3, *image)
        record("text", module.encode_text, 1, cast(Any, module).context_length, integers=True)
    else:
        record("images", module, 1, *image)
    return parts


def _image_size(module: Any) -> tuple[int, ...]:
    if hasattr(module, "encode_text"):
        size = module.visual.image_size
        return (size, size) if isinstance(size, int) else tuple(size)
    return tuple(module.pretrained_cfg["input_size"])


def _built(spec: str, tokens: int | None) -> tuple[nn.Module, int | None]:
    """Return a model in evaluation mode, and for a language model the tokens of a row."""
    from diffvision.models import parameters
    from diffvision.opening import open_model

    host = next((host for host, names in parameters.recorded().items() if spec in names), None)
    if host is not None:
        module, is_language = parameters.build_on_meta(host, spec).eval(), host == "text"
        longest = module.config.max_length if is_language else None
    else:
        model = open_model(spec)
        module, is_language, longest = model.module, model.is_language, model.max_length
        if is_language and longest is None and tokens is None:
            raise ValueError(f"{spec} does not say how many tokens it reads: give --tokens")
    if is_language and tokens is not None and longest is not None and tokens > longest:
        raise ValueError(f"{spec} reads at most {longest} tokens, not {tokens}: give --tokens up to that")
    return module, (tokens or longest) if is_language else None
