"""`diffvision tune`: find the fastest backend of differential attention on this machine, among those that are right."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

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
    wrong, fails, hangs or crashes is never taken. Without a model the usual shapes are measured.

    Args:
        model: a name of ours (see `diffvision models`), a checkpoint, or a folder.
        batch: samples on one device; with a model it is needed.
        tokens: of a row, for a language model; as many as it reads by default.
        precision: fp32, bf16 or fp16; by default fp32 on a CPU, and bf16 on a GPU, fp16 on one without it.
        device: auto (cuda where there is one), cpu or cuda.
        minutes: when they have passed, the best so far counts.
        compile: measure for models within torch.compile, too; that takes minutes more.

    Raises:
        ValueError: a setting is out of its range, the model has no differential attention, the file of measurements
            cannot be written, or nothing was measured in time.
        ChildProcessError: no separate process could be started.
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
        raise ValueError(f"device is {device}: choose cpu or cuda, which have several backends")
    if precision is None:
        has_bfloat16 = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "fp32" if device == "cpu" else "bf16" if has_bfloat16 else "fp16"
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    file = store.file_to_write()
    machine, today = tuned.machine_of(device), datetime.now(UTC).date().isoformat()
    choices: dict[Case, Choice] = {}
    with tuned.restore_at_end():
        for each in tuned.DEVICES:  # what is timed is compared with the rule, and the file need not exist yet
            tuned.use(each, None)
        if model is None:
            wanted = cases.usual_cases(device, dtype)
        else:
            wanted = cases.model_cases(model, batch or 1, tokens, device, dtype)
        if compile:
            wanted += [case._replace(compiled=True) for case in wanted]
        measured = _Measuring(wanted, store.read_tuning(file, machine).excluded, 60 * minutes, today)
        try:
            for case, choice in measured.run():  # kept one by one, for whatever ends this early
                choices[case] = choice
                store.save(file, tuned.Tuning(machine, {case.kind: choice}, measured.excluded))
        finally:
            if measured.excluded:
                store.save(file, tuned.Tuning(machine, {}, measured.excluded))
    tuning = store.read_tuning(file, machine)
    if not choices:
        raise ValueError(
            "; ".join([f"nothing was measured in {minutes:g} minutes: give more", *_list_excluded(tuning)])
        )
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

    def __init__(self, cases: list[Case], excluded: dict[str, str], seconds: float, today: str) -> None:
        self.cases, self.today = cases, today
        self.end, self.proving = time.perf_counter() + seconds, PROVING * seconds
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
        """Compare every backend with the formula in a separate process, and return what each gave."""
        from diffvision.progress import bar
        from diffvision.tuning.worker import try_backend

        tried: dict[str, Tried] = {}
        left = self.proving
        with bar("comparing with the formula", sum(map(len, able.values()))) as advance:
            for number, (name, indices) in enumerate(able.items()):
                start = time.perf_counter()
                result = try_backend(
                    name, [self.cases[index] for index in indices], left / (len(able) - number), advance
                )
                left = max(1.0, left - (time.perf_counter() - start))
                tried[name] = result._replace(seconds={indices[at]: value for at, value in result.seconds.items()})
                if result.excluded is not None:
                    self._exclude(name, result.excluded)
        return tried

    def _exclude(self, name: str, reason: str) -> None:
        """Never choose a backend again, unless it is the formula itself, which is what others are compared with."""
        if name != "eager":
            self.excluded[name] = f"{self.today}: {reason}"

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
        ways = [name for name, value in seconds.items() if (value <= limit or name == usual) and value < math.inf]
        return sorted(ways, key=lambda name: name != usual)

    def _timed(self, case: Case, ways: list[str], cases_left: int) -> Choice | None:
        """Return the choice for a case; None if the time is up, there is no memory, or nothing to choose from."""
        from diffvision.ops.attention.choice import rule
        from diffvision.ops.attention.tuned import Choice
        from diffvision.tuning.timing import in_turns, peak_memory
        from diffvision.tuning.ways import calls_of
        from diffvision.tuning.worker import is_excused

        now, device = time.perf_counter(), case.problem.device
        if not ways or now > self.end:
            return None
        calls, peaks = calls_of(case, ways), dict[str, int]()
        for name in ways:
            try:
                calls[name]()
                peaks[name] = peak_memory(calls[name], device)
            except Exception as error:  # next to others it fails, which it did not by itself
                del calls[name]
                if not is_excused(str(error), case):
                    reason = (str(error).strip().splitlines() or [""])[0]
                    self._exclude(name, f"{type(error).__name__}: {reason}")
                    if device == "cuda":  # its context may be broken, and would break the others
                        raise ChildProcessError(
                            f"backend {name} failed next to the others ({reason}): tune again"
                        ) from error
        if not calls:
            return None
        timed = in_turns(calls, device, now + (self.end - now) / cases_left)
        usual, _ = rule(case.problem)
        # On a CPU flex compiles again for every length, so that "auto" is not to take it for others.
        able = [name for name in calls if (name, device) != ("flex", "cpu")]
        if not able:
            return None
        fastest, faster = min([name for name in able if name in timed.running] or able, key=timed.median), 1.0
        if usual in calls:  # it is not excluded, and has memory
            if timed.is_slower(usual, fastest):
                faster = timed.median(usual) / timed.median(fastest)
            else:
                fastest = usual
        milliseconds = {name: round(1e3 * timed.median(name), 4) for name in calls}
        return Choice(fastest, usual, round(faster, 3), self.today, milliseconds, peaks)


def _list_excluded(tuning: Tuning) -> list[str]:
    return [f"{name} is never chosen here: {reason}" for name, reason in tuning.excluded.items()]


def _report(tuning: Tuning, choices: dict[Case, Choice], left: list[str], file: str) -> Iterator[Table | Text]:
    from rich.table import Table
    from rich.text import Text

    machine = tuning.machine
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "triton", "diffvision"))
    table = Table("attention of", "pass", "fastest", "faster than", "memory", title=f"{machine['name']}, {versions}")
    for case, choice in choices.items():
        same = choice.backend == choice.than
        memory = f"{choice.peak_bytes[choice.backend] / 2**20:,.0f} MiB"
        than = "none was faster" if same else f"{choice.than}, which cannot here"
        if not same and choice.than in choice.milliseconds:
            memory += f" for {choice.peak_bytes[choice.than] / 2**20:,.0f}"
            than = f"{choice.than}, {choice.faster:.2f}x"
        table.add_row(case.name, case.passes, choice.backend, than, memory)
    yield table
    yield from map(Text, _list_excluded(tuning))
    if left:
        yield Text(f"not measured, for time or memory: {', '.join(left)}")
    yield Text(f"saved in {file}; remove it to start over")
