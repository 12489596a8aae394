"""Every recipe: the command at its head parses, its model builds on the meta device, and the debug ones train."""

import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from diffvision.cli import main
from diffvision.data.datasets.digits import make_digits
from diffvision.data.shards.writer import write_shards
from diffvision.models import language
from diffvision.training.fit import FitCLI, fit

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(ROOT.glob("configs/*/*.yaml"))
# Lightning's advice (more workers, a GPU that is there but unused) is not for these.
pytestmark = pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")


def head(path: Path) -> str:
    """The comment that the file starts with."""
    lines = path.read_text().splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines[:end])


def command(path: Path) -> list[str]:
    """The arguments of the `diffvision fit ...` at its head, its files made absolute."""
    (line,) = re.findall(r"^  diffvision (fit --config .*)$", head(path), re.M)
    words = shlex.split(line)
    return [str(ROOT / w) if w.startswith("configs/") else w for w in words]


def on_cpu(*extra: str) -> list[str]:
    return ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy=auto", *extra]


class Parsed(FitCLI):
    """The CLI up to the instances: nothing is run."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: f"{p.parent.name}/{p.stem}")
@pytest.mark.quick("clip/cc3m_diffclip", "language/3b", "vlm/debug")
def test_the_command_at_the_head_parses_and_builds_its_model(path, monkeypatch, tmp_path):
    text = head(path)
    assert "Hardware:" in text
    assert "Expect" in text or "overlays" in text  # a base says what it is a base of
    words = command(path)
    assert str(path) in words
    monkeypatch.chdir(tmp_path)
    with torch.device("meta"):
        given = on_cpu("--trainer.precision=32-true", "--trainer.num_nodes=1")
        # Without the files that the user names, and what data say that are not here.
        if path.parent.name == "vlm" or path.stem in ("finetune", "long_context", "sft_math_stage1", "sft_math_stage2"):
            given += ["--model.pretrained=null"]
        if path.parent.name == "vlm":
            given += ["--model.tokenizer=null", "--model.tower_pretrained=null"]
            given += ["--model.language=null"] if path.stem[0] != "d" else []
        if path.parent.name == "vision":
            given += ["--model.num_classes=10"]
        cli = Parsed([*words, *given])
    assert all(p.is_meta for p in cli.model.parameters())
    if path.parent.name == "vlm":
        assert cli.model.name == yaml.safe_load(path.read_text())["model"]["init_args"]["model"]
        assert cli.datamodule.length <= cli.model.model.config.text_config.max_position_embeddings
        return
    if path.parent.name == "language":
        assert cli.datamodule.tokenizer == cli.model.tokenizer
        return
    assert cli.datamodule.transform is cli.model.transform
    assert cli.datamodule.eval_transform is cli.model.eval_transform
    named = yaml.safe_load(path.read_text())["model"]["init_args"].get("model", "DiffCLIP-ViT-B-16")
    assert cli.model.name == named


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("data") / "digits"  # its name is in the names of its metrics
    make_digits(directory, copies=1)
    return directory


COMPILED = pytest.param("clip/debug_compile", marks=pytest.mark.nightly)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["clip/debug", "clip/debug_siglip", COMPILED, "vision/debug", "vision/debug_layer_decay"]
)
def test_debug_recipes_train_evaluate_and_save(name, digits, tmp_path):
    short = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=3", "--trainer.check_val_every_n_epoch=1"]
    given = ["--model.optimizer.warmup_steps=1", f"--data.train={digits}/train", "--trainer.log_every_n_steps=1"]
    where = [f"--trainer.logger.save_dir={tmp_path}", f"--trainer.default_root_dir={tmp_path}"]
    metric, evaluated = "val/acc1", f"--data.evaluation={digits}/zero_shot"
    if name.startswith("clip"):
        metric, evaluated = "zero_shot/digits/acc1", f"--data.evaluations=[{digits}]"
    cli = fit([*command(ROOT / f"configs/{name}.yaml"), *on_cpu(), *short, *given, *where, evaluated])
    assert 0 <= cli.trainer.callback_metrics[metric] <= 1
    run = Path(cli.trainer.log_dir)
    columns = (run / "metrics.csv").read_text().splitlines()[0].split(",")
    wanted = {"train/loss", "train/lr", "train/grad_norm", "train/samples_per_second", "lambda", "data/seen", metric}
    assert wanted <= set(columns)
    assert any(c.startswith("lambda/") and "blocks.0.attn" in c for c in columns)
    assert (run / "config.yaml").is_file()
    stored = torch.load(run / "checkpoints" / "final.ckpt", weights_only=True)
    assert stored["diffvision"]["model"] == cli.model.name
    assert (run / "checkpoints" / "best.ckpt").is_file()


def test_the_language_recipe_trains_validates_and_saves(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "text"
    samples = [{"__key__": f"{i:03}", "txt": f"def f{i}(x):\n    return x + {i}\n" * 60} for i in range(8)]
    for split in ("train", "validation"):
        write_shards(text / split, samples)
    assert main(["data", "tokenizer", str(text / "train"), str(text / "tokenizer.json"), "--vocab_size", "300"]) == 0
    given = [f"--model.tokenizer={text}/tokenizer.json", f"--data.train={text}/train", "--data.length=32"]
    given += [f"--data.evaluation={text}/validation", "--data.batch_size=4"]
    short = ["--trainer.max_steps=3", "--trainer.val_check_interval=3", "--trainer.log_every_n_steps=1"]
    short += ["--model.optimizer.warmup_steps=1"]
    where = [f"--trainer.logger.save_dir={tmp_path}", f"--trainer.default_root_dir={tmp_path}"]
    cli = fit([*command(ROOT / "configs/language/debug.yaml"), *on_cpu(), *short, *given, *where])
    assert 0 < cli.trainer.callback_metrics["val/loss"] < 10
    run = Path(cli.trainer.log_dir)
    columns = (run / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"train/loss", "train/grad_norm", "train/tokens_per_second", "lambda", "val/perplexity"} <= set(columns)
    model = language.load(run / "checkpoints" / "final.ckpt")
    assert model.config == cli.model.model.config


@pytest.mark.slow
def test_the_vision_language_recipes_train_in_two_stages_are_evaluated_and_exported(tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    data, vlm = "data/scenes-vqa", ROOT / "configs/vlm"
    assert main(["data", "make", "scenes-vqa", data, "--scenes", "100", "--evaluated", "3"]) == 0
    for line in re.findall(r"^  diffvision (data tokenizer .*)$", head(vlm / "debug_projector.yaml"), re.M):
        assert main(shlex.split(line)) == 0
    short = ["--trainer.max_steps=2", "--trainer.log_every_n_steps=1", "--data.batch_size=8"]
    for stage, name in (("debug_projector", "vlm_debug_projector"), ("debug", "vlm_debug")):
        validated = ["--trainer.val_check_interval=2", "--trainer.check_val_every_n_epoch=1"]
        cli = fit([*command(vlm / f"{stage}.yaml"), *on_cpu(), *short, *validated])
        run = Path("runs", name, "version_0")
        assert run.samefile(cli.trainer.log_dir)
        columns = (run / "metrics.csv").read_text().splitlines()[0].split(",")
        assert {"train/loss", "train/grad_norm", "lambda", "val/loss", "val/perplexity"} <= set(columns)
        assert {p.requires_grad for p in cli.model.model.language_model.parameters()} == {stage == "debug"}
    assert "evaluate it: diffvision validate" in capsys.readouterr().out
    given = ["--data", f"{data}/test", "--tasks", "pope,chair,vqa", "--output", "answers"]
    assert main(["evaluate-vlm", str(run), *given]) == 0
    assert main(["export", str(run), "vlm"]) == 0
    loaded = transformers.AutoModelForImageTextToText.from_pretrained("vlm")
    state = loaded.state_dict()
    best = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, state[name.removeprefix("model.")]) for name, value in best.items())
    assert transformers.AutoProcessor.from_pretrained("vlm").image_token_id == loaded.config.image_token_id
