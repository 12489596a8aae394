"""`diffvision tune`: find the fastest backend of differential attention on this machine, among those that are right."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.table import Table

    from diffvision.ops.attention.tuned import Choice, Tuning
    from diffvision.tuning.cases import Case
    from diffvision.tuning.worker import Tried

PROVING = 0.6  # of the time, at most, for the comparisons with the formula
HOPELESS = 3.0  # times the fastest's seconds in the first trial, from which on a backend is not timed in turns


def tune(
    *,
    model: str | None = None,
    batch: int | None = None,
    tokens: int | None = None,
    precision: Literal["fp32", "bf16", "fp16"] | None = None,
    device: str = "auto",
    minutes: float = 5.0,
    compile: bool = False,
) -> None:
    """Compare every backend of differential attention with the formula here, time them, and keep the fastest.

    From then on backend="auto" takes it for calls of that kind, on this device with these versions. A backend that is
    wrong, fails or crashes is never taken. Without a model the usual shapes are measured.

    Args:
        model: a name of ours (see `diffvision models`), a checkpoint, or a folder.
        batch: samples on one device; with a model it is needed.
        tokens: of a row, for a language model; as many as it reads by default.
        precision: fp32, bf16 or fp16; bf16 on a GPU and fp32 on a CPU by default.
        device: auto (cuda where there is one), cpu or cuda.
        minutes: when they have passed, the best so far counts.
        compile: measure for models within torch.compile, too; that takes minutes more.

    Raises:
        ValueError: a setting is out of its range, the model has no differential attention, or the file of measurements
            cannot be written.
    """
    import torch

    from diffvision.evaluation.distributed import resolve_device
    from diffvision.ops.attention import tuned
    from diffvision.tables import show
    from diffvision.tuning import cases, store

    if not 0 < minutes <= 24 * 60:
        raise ValueError(f"minutes must be above 0 and at most {24 * 60}, got {minutes}")
    for name, value in (("batch", batch), ("tokens", tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be 1 or more, got {value}")
        if value is not None and model is None:
            raise ValueError(f"{name} is of a model: give --model too")
    if model is not None and batch is None:
        raise ValueError("give --batch too, the samples on one device: which backend is the fastest depends on it")
    if torch.device(resolved := resolve_device(device)).index is not None:
        raise ValueError(f"device {device}: give cuda, and choose the GPU with CUDA_VISIBLE_DEVICES")
    device = torch.device(resolved).type
    if device not in tuned.DEVICES:
        raise ValueError(f"device {device}: only cpu and cuda have several backends")
    kind = precision or ("bf16" if device == "cuda" else "fp32")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    file = store.file_to_write()
    tuned.use(device, None)  # what is timed is compared with the rule
    if model is None:
        wanted = cases.usual(device, dtype)
    else:
        wanted = cases.of_model(model, batch or 1, tokens, device, dtype)
    end = time.perf_counter() + 60 * minutes
    machine = tuned.machine_of(device)
    before = store.known(file, machine)
    if compile:
        wanted += [case._replace(compiled=True) for case in wanted]
    today = datetime.now(UTC).date().isoformat()
    choices: dict[Case, Choice] = {}
    measured = _Measuring(wanted, before.excluded, end)
    for case, choice in measured.run():  # kept one by one, for whatever ends this early
        choices[case] = choice
        store.save(file, tuned.Tuning(machine, today, {case.kind: choice}, measured.excluded))
    tuning = store.save(file, tuned.Tuning(machine, today, {}, measured.excluded))
    tuned.use(device, tuning)
    left = [f"{case.name} ({case.passes})" for case in wanted if case not in choices]
    data = {
        "file": str(file),
        "machine": machine,
        "measured": [{"case": case.name, "pass": case.passes, **choice._asdict()} for case, choice in choices.items()],
        "excluded": tuning.excluded,
        "left_out": left,
    }
    show(*_report(tuning, choices, left, str(file)), data=data)


class _Measuring:
    """One tuning.

    Attributes:
        excluded: backend -> why.
    """

    def __init__(self, cases: list[Case], excluded: dict[str, str], end: float) -> None:
        self.cases, self.end = cases, end
        self.excluded = dict(excluded)

    def run(self) -> Iterator[tuple[Case, Choice]]:
        """Try every backend in a separate process, time those that are right in turns, and yield each case's choice.

        A case is left out where the time ends before, or no backend can compute it.
        """
        from diffvision.progress import track

        tried = self._tried(self._able())
        for index, case in enumerate(track(self.cases, "timing")):
            choice = self._timed(case, self._ways(index, tried), len(self.cases) - index)
            if choice is not None:
                yield case, choice

    def _able(self) -> dict[str, list[int]]:
        """Return backend -> the indices of its cases."""
        from diffvision.tuning.ways import backends_for

        able: dict[str, list[int]] = {}
        for index, case in enumerate(self.cases):
            for name in backends_for(case.problem):
                if name not in self.excluded:
                    able.setdefault(name, []).append(index)
        return able

    def _tried(self, able: dict[str, list[int]]) -> dict[str, Tried]:
        from diffvision.progress import bar
        from diffvision.tuning.worker import try_backend

        tried: dict[str, Tried] = {}
        start = time.perf_counter()
        proving = start + PROVING * (self.end - start)
        with bar("comparing with the formula", sum(map(len, able.values()))) as advance:
            for number, (name, indices) in enumerate(able.items()):
                now = time.perf_counter()
                until = now + max(1.0, proving - now) / (len(able) - number)
                result = try_backend(name, [self.cases[index] for index in indices], until, advance)
                tried[name] = result._replace(
                    seconds={indices[at]: seconds for at, seconds in result.seconds.items()},
                    cannot={indices[at]: reason for at, reason in result.cannot.items()},
                )
                if result.excluded is not None:
                    self.excluded[name] = result.excluded
        return tried

    def _ways(self, index: int, tried: dict[str, Tried]) -> list[str]:
        """Return the backends that are worth timing for a case, the rule's first; none where that was not tried."""
        from diffvision.ops.attention.choice import rule

        seconds = {
            name: result.seconds[index]
            for name, result in tried.items()
            if index in result.seconds and name not in self.excluded
        }
        usual, _ = rule(self.cases[index].problem)
        if not seconds or (usual not in seconds and usual not in self.excluded):
            return []
        limit = HOPELESS * min(seconds.values())
        ways = [name for name, value in seconds.items() if value <= limit or name == usual]
        return sorted(ways, key=lambda name: name != usual)

    def _timed(self, case: Case, ways: list[str], cases_left: int) -> Choice | None:
        """Return the choice for a case; None if the time is up, there is no memory, or nothing to choose from."""
        import torch

        from diffvision.ops.attention.tuned import Choice
        from diffvision.tuning.timing import in_turns, peak_memory
        from diffvision.tuning.ways import calls_of

        now, device = time.perf_counter(), case.problem.device
        if not ways or now > self.end:
            return None
        try:
            calls = calls_of(case, ways)
            for call in calls.values():
                call()
            peaks = {name: peak_memory(call, device) for name, call in calls.items()}
        except torch.OutOfMemoryError:  # in its own process there was enough
            return None
        timed = in_turns(calls, device, now + 2 * (self.end - now) / cases_left)
        usual, fastest = next(iter(calls)), timed.leader
        faster = 1.0
        if timed.is_slower(usual, fastest):
            faster = timed.median(usual) / timed.median(fastest)
        else:
            fastest = usual
        milliseconds = {name: round(1e3 * timed.median(name), 4) for name in calls}
        return Choice(fastest, usual, round(faster, 3), milliseconds, peaks)


def _report(tuning: Tuning, choices: dict[Case, Choice], left: list[str], file: str) -> Iterator[Table | str]:
    from rich.table import Table

    machine = tuning.machine
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "triton", "diffvision"))
    table = Table("attention of", "pass", "fastest", "faster than", "memory", title=f"{machine['name']}, {versions}")
    for case, choice in choices.items():
        same = choice.backend == choice.than
        memory = f"{choice.peak_bytes[choice.backend] / 2**20:,.0f} MiB"
        if not same:
            memory += f" for {choice.peak_bytes[choice.than] / 2**20:,.0f}"
        than = "as without tuning" if same else f"{choice.than}, {choice.faster:.2f}x"
        table.add_row(case.name, case.passes, choice.backend, than, memory)
    yield table
    for name, reason in tuning.excluded.items():
        yield f"{name} is never chosen here: {reason}"
    if left:
        yield f"not measured in the time given, or by no backend: {', '.join(left)}"
    yield f"kept in {file}"
