"""What a run prints at its start and end; the command it ends with is run as it is printed."""

import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from training_fits import noise

from diffvision.cli import main
from diffvision.data.shards.writer import write_evaluation_split, write_shards
from diffvision.models.bundled import WEIGHTS
from diffvision.opening import best_checkpoint
from diffvision.training.classification import ClassificationModule
from diffvision.training.clip import ContrastiveModule
from diffvision.training.fit import fit
from diffvision.training.language import LanguageModule
from diffvision.training.progress import ProgressLine
from diffvision.training.summary import describe_run, evaluation_command
from diffvision.training.vision_language import VisionLanguageModule
from ranks import Ranks

NANO = WEIGHTS / "diffv2-nano.stdlib"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """32 noisy images with captions and labels, and an evaluation folder of 12 in three classes."""
    root = tmp_path_factory.mktemp("data")
    write_shards(root / "train", noise(32, txt=str, cls=lambda i: i % 3))
    classes = {"classnames": ["one", "two", "three"], "templates": ["a {c}"]}
    write_evaluation_split(root / "noise" / "test", noise(12, cls=lambda i: i % 3), **classes)
    return root


CONTRASTIVE = ["--model=ContrastiveModule", "--model.model=CLIP-debug", "--data=ImageTextData"]
CLASSIFICATION = ["--model=ClassificationModule", "--model.model=diff_vit_debug", "--model.num_classes=3"]
CLASSIFICATION += ["--data=ImageLabelData"]
OPTIONS = """
    --data.batch_size=16 --data.num_workers=0 --model.optimizer.warmup_steps=1 --trainer.accelerator=cpu
    --trainer.devices=1 --trainer.log_every_n_steps=1 --trainer.callbacks+=ModelCheckpoint
    --trainer.callbacks.filename=best --trainer.callbacks.mode=max
"""


def run(data: Path, root: Path, *arguments: str, monitor: str = "null", epochs: int = 2):
    places = [f"--data.train={data / 'train'}", f"--trainer.logger.save_dir={root}"]
    lengths = [f"--trainer.max_epochs={epochs}", f"--trainer.callbacks.monitor={monitor}"]
    return fit(["fit", *arguments, *places, *OPTIONS.split(), *lengths])


@pytest.mark.quick("arguments1---data.evaluation={}-val/acc1-acc1")
@pytest.mark.parametrize(
    ("arguments", "evaluation", "monitor", "metric"),
    [
        (CONTRASTIVE, "--data.evaluations+={}", "zero_shot/noise/acc1", "acc1"),
        (CLASSIFICATION, "--data.evaluation={}", "val/acc1", "acc1"),
    ],
)
def test_a_run_from_its_first_line_to_the_command_it_ends_with(
    arguments, evaluation, monitor, metric, data, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    arguments = [*arguments, evaluation.format(data / "noise")]
    cli = run(data, Path("runs"), *arguments, monitor=monitor)
    out, err = capfd.readouterr()
    assert not err, "output of other libraries"
    lines = [text.rstrip() for text in out.splitlines()]
    name = arguments[1].partition("=")[2]
    assert re.fullmatch(rf"{name}: [\d.]+ [KM] parameters, on cpu in 32-true", lines[0])
    assert "epoch 1/2 step 2/4: loss " in out
    assert "trained to step 4 in 0:00:0" in out
    assert re.search(rf"^  {monitor} +[01]\.\d{{4}}$", "\n".join(lines), re.M)
    best = f"runs/{name}/version_0/checkpoints/best.ckpt"
    assert any(re.fullmatch(rf"best {monitor} [01]\.\d{{4}}: {best}", text) for text in lines)
    assert best_checkpoint(Path(f"runs/{name}/version_0"))[0] == Path(best)
    measured = float(re.search(rf"^best {monitor} ([\d.]+)", out, re.M)[1])
    command = shlex.split(lines[-1].removeprefix("evaluate it: "))
    assert command[0] == "diffvision"
    assert main(command[1:]) == 0
    assert f"{measured:.4f}" in capfd.readouterr().out
    assert isinstance(cli.trainer.progress_bar_callback, ProgressLine)


@pytest.mark.filterwarnings("ignore:resumed from:UserWarning")  # with other epochs
def test_a_resumed_run_ends_with_its_last_evaluation(data, tmp_path, monkeypatch, capfd):
    """As the run itself did: where the last step is made again, and with an epoch more, which is evaluated again."""
    monkeypatch.chdir(tmp_path)

    def end_of(epochs: int) -> tuple[str, list[str]]:
        evaluated = [f"--data.evaluation={data / 'noise'}", "--trainer.callbacks+=EMA", "--trainer.callbacks.decay=0.5"]
        run(data, Path("runs"), *CLASSIFICATION, *evaluated, "--resume=auto", epochs=epochs)
        text = capfd.readouterr().out
        assert "last evaluation, averaged weights (EMA)" in text
        return text, re.findall(r"^ +(\S*/\S+ +[\d.]+) *$", text, re.M)

    _, rows = end_of(epochs=2)
    assert any(row.startswith("val/acc1") for row in rows)
    text, again = end_of(epochs=2)
    assert again == rows
    assert "trained from step 3 to step 4" in text
    text, later = end_of(epochs=3)
    assert [row.split()[0] for row in later] == [row.split()[0] for row in rows]
    assert "trained from step 3 to step 6" in text


def test_a_module_of_another_package_is_evaluated_by_validate():
    trainer = SimpleNamespace(datamodule=None, log_dir="r")
    command = evaluation_command(trainer, BoringModel(), "best.ckpt")
    expected = ["validate", "--config", "r/config.yaml", "--ckpt_path", "best.ckpt", "--allow", "lightning"]
    assert command == ["diffvision", *expected]


def clip_from(root):
    torch.save(ContrastiveModule("CLIP-debug").model.state_dict(), root / "clip.pt")
    return ContrastiveModule("CLIP-debug", pretrained=str(root / "clip.pt")), ["clip.pt"]


def classifier_from(root):
    made = ClassificationModule("diff_vit_debug", num_classes=3)
    torch.save(made.model.state_dict(), root / "vit.pt")
    args = {"checkpoint_path": str(root / "vit.pt")}
    return ClassificationModule("diff_vit_debug", num_classes=3, model_args=args), ["vit.pt"]


def language_from(root):
    return LanguageModule(f"local-dir:{NANO}"), [NANO.name]


def vision_language_from(root):
    tower = {"tower": "diff_vit_debug", "tower_pretrained": str(WEIGHTS / "diff_vit_debug.digits.safetensors")}
    return VisionLanguageModule("diff-vlm-debug", language=f"local-dir:{NANO}", **tower), ["digits.safe", NANO.name]


@pytest.mark.parametrize("make", [clip_from, classifier_from, language_from, vision_language_from])
def test_a_run_says_which_weights_it_starts_from(make, tmp_path):
    module, sources = make(tmp_path)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer = SimpleNamespace(strategy=strategy, world_size=1, precision="32-true", ckpt_path=None)
    _, _, named = describe_run(trainer, module).partition("; ")
    assert all(source in named for source in sources)
    trainer.ckpt_path = "last.ckpt"
    assert "; " not in describe_run(trainer, module)


@pytest.mark.slow
@pytest.mark.forks
def test_a_run_on_two_ranks_ends_with_its_summary(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["accelerator=cpu", "devices=2", "strategy=ddp", "max_steps=2", "log_every_n_steps=1"]
    words = [*CONTRASTIVE, f"--data.train={data / 'train'}", f"--data.evaluations+={data / 'noise'}"]
    words += ["--data.batch_size=4", "--data.num_workers=0", "--trainer.callbacks+=LastCheckpoint"]
    command = ["fit", *words, *(f"--trainer.{option}" for option in options)]
    first, second = Ranks(tmp_path / "ranks", lambda: sys.exit(main(command))).ended()
    assert (first.code, second.code) == (0, 0), first.output + second.output
    for printed in ("trained to step 2", "evaluate it: diffvision evaluate runs/CLIP-debug/version_0"):
        assert first.output.count(printed) == 1
        assert printed not in second.output
