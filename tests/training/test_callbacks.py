"""The account of an epoch, lambda by layer and the throughput."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import timm
import torch
import training_fits
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

import diffvision
from diffvision.data.shards.report import Report
from diffvision.nn import depth_lambda_init
from diffvision.training import callbacks
from diffvision.training.callbacks import (
    DataReport,
    LambdaAnnealing,
    LambdaMonitor,
    LambdaWarmup,
    Throughput,
    TrainOnlyNew,
    add_reports,
    describe_epoch,
)


class Module(SimpleNamespace):
    """What a callback sees of a LightningModule: it notes what is logged and printed."""

    def __init__(self, model=None):
        super().__init__(model=model, device=torch.device("cpu"), logged={}, printed=[])

    def log(self, name, value, **_):
        self.logged[name] = value

    def log_dict(self, values, **_):
        self.logged |= values

    def print(self, text):
        self.printed.append(text)


def trainer(step: int = 10, **settings):
    return SimpleNamespace(**{"global_step": step, "log_every_n_steps": 10, "world_size": 1} | settings)


def reports():
    """Two ranks, 100 samples, batches of 2 x 16."""
    one = Report(100, epoch=3, tail=4, world_size=2, seen=46, skipped=Counter({"empty caption": 2}), substituted=2)
    two = Report(100, epoch=3, tail=4, world_size=2, seen=47, skipped=Counter({"truncated image": 1}), substituted=1)
    one.examples, two.examples = {"empty caption": ["0.tar: a", "0.tar: b"]}, {"truncated image": ["1.tar: c"]}
    return [one, two]


LINES = ["epoch 4: 93 seen + 3 skipped = 96 of 100 samples", "  2 x empty caption: 0.tar: a, 0.tar: b"]
LINES.append("  1 x truncated image: 1.tar: c")
RESUMED = Report(100, epoch=0, tail=4, before=32, seen=32, extra_counts={"padding_tokens": 4272, "empty": 0})
PARTS = "32 seen + 0 skipped + 32 before the run was resumed + 32 not reached"


@pytest.mark.parametrize(
    ("given", "consumed", "lines"),
    [
        (reports(), 96, LINES),
        ([replace(one, cut=20) for one in reports()], 96, [*LINES, "  40 captions cut"]),
        ([RESUMED], 32, [f"epoch 1: {PARTS} = 96 of 100 samples", "  besides: 4,272 padding tokens"]),
    ],
    ids=["two ranks", "captions cut", "resumed and cut short"],
)
def test_the_account_of_an_epoch_adds_up(given, consumed, lines):
    assert describe_epoch(given, consumed)[0].splitlines() == lines


def test_captions_that_are_cut_are_warned_of_once():
    account, loader = DataReport(), SimpleNamespace(report=Report(5000, seen=999, cut=60), batch_size=1)
    run = trainer(0, train_dataloader=loader)
    account.on_train_start(run, Module())
    account.on_train_batch_end(run)  # too few to know
    loader.report = Report(5000, seen=1000, cut=60)
    with pytest.warns(UserWarning, match="6% of captions.*context_length"):
        account.on_train_batch_end(run)
    account.on_train_batch_end(run)


def test_the_account_of_a_resumed_epoch_is_of_all_of_it():
    """Twice interrupted: what was counted before goes from checkpoint to checkpoint, whatever the number of ranks."""
    checkpoint: dict = {}
    parts = [reports(), [Report(200, epoch=3, tail=8, before=96, seen=31, skipped=Counter({"empty caption": 1}))]]
    parts[1][0].examples = {"empty caption": ["2.tar: d"]}
    for part in parts:
        report, loader = DataReport(), SimpleNamespace(report=add_reports(part))
        run = trainer(train_dataloader=loader, state=SimpleNamespace(fn=TrainerFn.FITTING))
        report.on_load_checkpoint(run, None, checkpoint)
        report.batches = 0
        report.on_train_batch_end(run)
        loader.report = replace(loader.report, seen=99)  # of a batch that is loaded and not trained yet
        report.on_save_checkpoint(run, None, checkpoint)
    report.on_load_checkpoint(run, None, checkpoint)
    last = Report(200, epoch=3, tail=8, before=128, seen=64)
    text, counts = describe_epoch([last], consumed=64, earlier=[report.earlier])
    assert counts == {"seen": 188, "skipped": 4, "substituted": 3, "tail": 8}
    assert text.splitlines()[:2] == [
        "epoch 4: 188 seen + 4 skipped = 192 of 200 samples",
        "  3 x empty caption: 0.tar: a, 0.tar: b, 2.tar: d",
    ]
    assert report._reports_before_resume(4) == []


@pytest.mark.parametrize("consumed", [95, 128])
def test_an_account_that_does_not_add_up_stops_the_run(consumed):
    with pytest.raises(RuntimeError, match="93 seen, 3 skipped of 100"):
        describe_epoch(reports(), consumed=consumed)


@pytest.mark.parametrize(("total", "step", "says"), [(240, 0, True), (1300, 0, False), (240, 3, False)])
def test_a_large_incomplete_batch_is_reported_once(total, step, says):
    """Over 5% of an epoch, and not where a run is resumed."""
    loader = SimpleNamespace(report=Report(total, tail=total % 64), batch_size=64)
    module = Module()
    DataReport().on_train_start(trainer(step=step, train_dataloader=loader), module)
    assert module.printed == ["192/240 samples used in each epoch (incomplete last batch of 64 dropped)"] * says


def test_data_report_counts_the_loops_batches():
    loader = SimpleNamespace(report=Report(50, tail=2, seen=48), batch_size=16)
    run, module, report = trainer(train_dataloader=loader), Module(), DataReport()
    report.on_train_start(run, module)
    for _ in range(3):
        report.on_train_batch_end(run, module, None, {}, 0)
    report.on_train_epoch_end(run, module)
    assert module.printed == ["epoch 1: 48 seen + 0 skipped = 48 of 50 samples"]
    assert module.logged["data/seen"] == 48
    report.on_train_batch_end(run, module, None, {}, 0)
    with pytest.raises(RuntimeError, match="trained on 16 samples"):
        report.on_train_epoch_end(run, module)  # an epoch that gave one batch, with an account of three


def test_lambda_monitor_logs_each_layer_on_logging_steps_only():
    batch = {"image": torch.rand(2, 3, 32, 32)}
    for name, low, high in (("diff_vit_debug", -1.0, 2.0), ("diffv2_vit_debug", 0.0, 1.0)):
        model = timm.create_model(name)
        module, monitor = Module(model), LambdaMonitor()
        monitor.on_train_batch_end(trainer(step=9), module, None, batch, 0)
        assert not module.logged
        before = torch.get_rng_state()
        monitor.on_train_batch_end(trainer(), module, None, batch, 0)
        assert torch.equal(before, torch.get_rng_state())
        layers = {k: v for k, v in module.logged.items() if k.startswith("lambda/")}
        assert layers.keys() == {f"lambda/blocks.{i}.attn" for i in range(4)}
        assert all(low < value < high for value in layers.values())
        assert module.logged["lambda"] == pytest.approx(sum(layers.values()) / 4)


def test_throughput_leaves_validation_out(monkeypatch):
    clock = iter([0.0, 0.0, 1.0, 10.0, 11.0, 20.0])
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: next(clock))
    run, module, meter = trainer(step=1, world_size=2), Module(), Throughput()
    loader = run.train_dataloader = SimpleNamespace(waited=5.0)  # seconds, before this run
    batch = {"image": torch.zeros(8, 3, 2, 2)}
    meter.on_train_start(run, module)
    meter.on_train_epoch_start(run, module)
    meter.on_train_batch_end(run, module, None, batch, 0)
    meter.on_validation_end(run, module)
    loader.waited += 0.5
    run.global_step = 10
    meter.on_train_batch_end(run, module, None, batch, 1)
    assert module.logged["train/samples_per_second"] == 2 * 2 * 8 / 2
    assert module.logged["train/data_wait"] == 0.5 / 2


# --- DEX's lambda along a run, and what is trained in it ---


class Adapted(pl.LightningModule):
    def __init__(self):
        super().__init__()
        sizes = {"img_size": 32, "patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}
        self.model = diffvision.adapt(timm.create_model("vit_tiny_patch16_224", **sizes), "dex")
        self.lambdas, self.learned, self.losses = [], [], []

    def training_step(self, batch, batch_idx):
        layer = self.model.blocks[1].attn
        self.lambdas.append(layer.current_lambda().item())
        self.learned.append(layer.dex_lambda.item())
        loss = self.model(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.03)


@pytest.mark.parametrize("schedule", [LambdaAnnealing, LambdaWarmup])
def test_lambda_follows_its_schedule_and_what_is_new_learns(schedule):
    module = Adapted()
    names = {name for name, _ in module.named_parameters() if ".dex" in name}
    data = DataLoader(torch.randn(1, 3, 32, 32).expand(8, -1, -1, -1))
    training_fits.trainer(schedule(4), TrainOnlyNew(), max_steps=8).fit(module, data)
    init, done = depth_lambda_init(1), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]
    fixed = [part * (1 - part) if schedule is LambdaAnnealing else part for part in done]
    expected = [f * init + part * learned for f, part, learned in zip(fixed, done, module.learned, strict=True)]
    assert module.lambdas == pytest.approx(expected, abs=1e-6)
    assert module.lambdas[0] > 0
    assert module.learned[-1] != 0
    assert module.losses[-1] < module.losses[0]
    assert {name for name, parameter in module.named_parameters() if parameter.requires_grad} == names


@pytest.mark.parametrize(("schedule", "steps"), [(LambdaAnnealing, 1), (LambdaWarmup, 0)])
def test_a_schedule_takes_steps(schedule, steps):
    """Over one step, the annealed lambda and the projection are both 0 at it, where nothing has a gradient."""
    with pytest.raises(ValueError, match=f"steps must .* got {steps}"):
        schedule(steps)
