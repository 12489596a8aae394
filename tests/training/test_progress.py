"""The line that shows how far a run is: what is on it, its width, and what is printed where it cannot be redrawn."""

import io
import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from rich.text import Text

from diffvision.evaluation.retrieval import recalls
from diffvision.training import progress, terminal
from diffvision.training.progress import (
    Clock,
    ProgressLine,
    describe_position,
    format_duration,
    format_line,
    format_metrics,
    format_number,
    total_steps,
)
from diffvision.training.terminal import CLEAR, Screen

EVERYTHING = {
    "train/lr": 1e-3,
    "train/loss": torch.tensor(2.4134),
    "train/logit_scale": 14.28,
    "lambda": 0.7912,
    "train/samples_per_second": 812.3,
    "zero_shot/imagenet/acc1": 0.6412,
    "zero_shot/a-rather-long-name-of-a-data-set/acc1": 0.2,
    "retrieval/flickr30k/image_retrieval_recall@1": 0.512,
    "retrieval/flickr30k/text_retrieval_recall@1": 0.498,
    "composition/digits/acc": 0.9,
    "a metric of somebody else": 12345.678,
}


def trainer(**settings):
    known = {"max_steps": -1, "max_epochs": 6, "num_training_batches": 131, "accumulate_grad_batches": 1}
    known |= {"current_epoch": 1, "global_step": 140, "enable_validation": True, "val_check_batch": 131}
    return SimpleNamespace(**known | {"check_val_every_n_epoch": 1, "callbacks": [], "world_size": 1} | settings)


def test_aliases_in_order_of_importance():
    metrics = {key: value for key, value in EVERYTHING.items() if "imagenet" not in key and "rather" not in key}
    metrics.pop("composition/digits/acc")
    assert format_metrics(metrics) == [
        "loss 2.41",
        "t2i R@1 0.512",
        "i2t R@1 0.498",
        "812 img/s",
        "lr 1.0e-3",
        "lambda 0.791",
        "scale 14.3",
        "a metric of somebody else 12346",
    ]


def test_a_wait_for_data_is_shown_after_the_loss():
    assert format_metrics({"train/samples_per_second": 812.0, "train/data_wait": 0.124, "train/loss": 2.41}) == [
        "loss 2.41",
        "wait 0.124",
        "812 img/s",
    ]


def test_the_data_sets_are_named_where_there_are_several():
    assert format_metrics(EVERYTHING)[1:5] == [
        "imagenet acc1 0.641",
        "a-rather-long-name-of-a-data-set acc1 0.200",
        "flickr30k t2i R@1 0.512",
        "flickr30k i2t R@1 0.498",
    ]


def test_t2i_finds_images_by_text():
    """Two images and three texts of the first, two of which find the second: 1 of 3 texts, and 1 of 2 images."""
    images, texts = torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    metrics = recalls(images, texts, torch.tensor([0, 0, 0]), [1])
    named = format_metrics({f"retrieval/pairs/{key}": value for key, value in metrics.items()})
    assert named == ["t2i R@1 0.333", "i2t R@1 0.500"]


@pytest.mark.parametrize("width", [1, 20, 40, 77, 97, 250])
@pytest.mark.parametrize("doing", [[], ["evaluating zero_shot/a-rather-long-name-of-a-data-set classes 40%"]])
@pytest.mark.parametrize("head", ["epoch 2/6 step 120/786", "epoch 1234/10000 step 123456789/999999999", "step 1"])
def test_the_line_is_never_wider_and_its_names_are_whole(head, doing, width):
    parts = [*doing, *format_metrics(EVERYTHING)]
    for share, left in ((0.15, 192.0), (1.0, 0.0), (0.0, 9e6), (None, None), (0.5, None)):
        text = format_line(head, share, left, parts, width)
        assert text.cell_len <= width
        behind = text.plain.partition("  ")[2]
        assert not behind or "  ".join(parts).startswith(behind)
        assert not behind or any("  ".join(parts[:count]) == behind for count in range(1, len(parts) + 1))


def test_the_line_at_80_and_100_columns():
    parts = format_metrics(
        {key: value for key, value in EVERYTHING.items() if key.startswith(("train", "zero_shot/i"))}
    )
    at_80, at_100 = (format_line("epoch 1/6 step 120/786", 120 / 786, 192.0, parts, width).plain for width in (77, 97))
    assert at_80.startswith("epoch 1/6 step 120/786 ━")
    assert at_80.endswith(" 15% 3:12 left  loss 2.41  acc1 0.641  812 img/s")
    assert at_100.endswith(" 15% 3:12 left  loss 2.41  acc1 0.641  812 img/s  lr 1.0e-3")


@pytest.mark.parametrize(
    ("settings", "text", "total"),
    [
        ({}, "epoch 2/6 step 140/786", 786),
        ({"current_epoch": 0, "global_step": 0}, "epoch 1/6 step 0/786", 786),
        ({"max_steps": 300}, "epoch 2/3 step 140/300", 300),
        ({"max_epochs": -1, "max_steps": 300}, "epoch 2/3 step 140/300", 300),
        ({"max_epochs": -1}, "epoch 2 step 140", None),
        ({"num_training_batches": float("inf")}, "epoch 2/6 step 140", None),
        ({"num_training_batches": float("inf"), "max_steps": 300}, "epoch 2/6 step 140/300", 300),
        ({"accumulate_grad_batches": 2, "global_step": 70}, "epoch 2/6 step 70/396", 396),
    ],
)
def test_epochs_and_steps_are_those_of_the_whole_run(settings, text, total):
    run = trainer(**settings)
    assert total_steps(run) == total
    assert describe_position(run, total) == text


def test_time_left_is_that_of_the_remaining_steps_and_validations():
    now = [0.0]
    clock = Clock(lambda: now[0])
    clock.start(100)  # resumed
    assert clock.left(200, 0.1) is None
    for step in range(101, 111):
        now[0] += 30.0 if step == 101 else 2.0  # the first one compiles
        clock.stepped(step)
    assert clock.left(200, 0.1) == pytest.approx(90 * 2.0)
    clock.validation_started()
    now[0] += 10.0
    assert clock.left(200, 0.1, within=0.5) == pytest.approx(90 * 2.0 + 10.0)
    now[0] += 10.0
    clock.validation_ended()
    assert clock.left(200, 0.1) == pytest.approx(90 * 2.0 + 9 * 20.0)
    now[0] += 2.0
    clock.stepped(111)  # the validation is no part of the step
    assert clock.left(200, 0.1) == pytest.approx(89 * 2.0 + 8.9 * 20.0)


def test_validations_per_step():
    assert progress.validations_per_step(trainer()) == pytest.approx(1 / 131)
    assert progress.validations_per_step(trainer(check_val_every_n_epoch=2)) == pytest.approx(1 / 262)
    every = trainer(check_val_every_n_epoch=None, val_check_batch=50, accumulate_grad_batches=4)
    assert progress.validations_per_step(every) == pytest.approx(4 / 50)
    assert progress.validations_per_step(trainer(val_check_batch=float("inf"))) == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (192, "3:12"), (3723, "1:02:03"), (2 * 86400 + 11040, "2d 03:04")],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.4134, "2.41"),
        (12.345, "12.3"),
        (812.3, "812"),
        (0.0123, "0.0123"),
        (3e-4, "3.0e-4"),
        (0, "0"),
        (float("nan"), "nan"),
    ],
)
def test_numbers(value, text):
    assert format_number(value) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_others_print_is_above_the_line(monkeypatch):
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    log = logging.getLogger("tests.above")
    handler = logging.StreamHandler()
    log.addHandler(handler)
    log.propagate = False
    screen = Screen.opened()
    assert screen is not None
    assert screen.width == 77
    screen.draw(Text("step 1"))
    print("an account")
    log.warning("a message")
    print("half ", end="", file=sys.stderr)
    print("a line", file=sys.stderr)
    screen.draw(Text("step 2"))
    screen.close()
    print("the end")
    log.removeHandler(handler)
    assert sys.stdout is out
    assert handler.stream is out
    assert out.getvalue() == (
        f"{CLEAR}step 1{CLEAR}an account\nstep 1{CLEAR}a message\nstep 1{CLEAR}half a line\nstep 1"
        f"{CLEAR}step 2{CLEAR}the end\n"
    )


@pytest.mark.parametrize("kind", ["dumb terminal", "file"])
def test_a_file_and_a_dumb_terminal_are_not_redrawn(kind, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO() if kind == "file" else Terminal())
    monkeypatch.setenv("TERM", "dumb" if kind != "file" else "xterm")
    assert Screen.opened() is None


def a_run(**given):
    """The trainer of a run that logs every other step, before its first."""
    return trainer(
        current_epoch=0,
        global_step=0,
        log_every_n_steps=2,
        state=SimpleNamespace(fn="fit"),
        sanity_checking=False,
        testing=False,
        predicting=False,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        callback_metrics={"train/loss": torch.tensor(2.0)},
        progress_bar_metrics={},
        callbacks=[],
        is_global_zero=True,
        num_val_batches=[4],
        **given,
    )


def test_plain_lines_now_and_then(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(terminal.Screen, "opened", lambda: None)
    run = a_run()
    bar = ProgressLine()
    bar.setup(run, None, "fit")
    bar.on_train_start(run, None)
    for step in range(1, 14):
        now[0] += 3.0
        run.global_step = step
        bar.on_train_batch_end(run, None, None, None, step - 1)
    bar.on_validation_start(run, None)
    bar.on_validation_batch_start(run, None, None, 0)
    bar.on_validation_end(run, None)
    bar.on_train_epoch_end(run, None)
    bar.on_train_end(run, None)
    printed = capsys.readouterr().out
    assert "\r" not in printed
    steps = [text.split(" step ")[1].split(" ")[0] for text in printed.splitlines()]
    assert steps == ["4/786", "8/786", "12/786", "13/786"]
    assert printed.splitlines()[-1].endswith(" left  loss 2.00")


@pytest.mark.parametrize("overfits", [False, True])
def test_an_epoch_leaves_its_metrics_in_a_terminal(overfits, monkeypatch):
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    run = a_run(overfit_batches=overfits)
    bar = ProgressLine()
    bar.setup(run, None, "fit")
    bar.on_train_start(run, None)
    run.global_step = 131
    run.progress_bar_metrics["zero_shot/digits/acc1"] = 0.25
    bar.on_train_epoch_end(run, None)
    bar.on_train_end(run, None)
    left = [line.rpartition(CLEAR)[2] for line in out.getvalue().split("\n")[:-1]]
    assert left == ([] if overfits else ["epoch 1/6 step 131/786  loss 2.00  acc1 0.250"])


def test_other_ranks_are_silent(capsys):
    bar = ProgressLine()
    bar.setup(SimpleNamespace(is_global_zero=False), None, "fit")
    bar._show(trainer(), metrics=True)
    assert capsys.readouterr().out == ""
