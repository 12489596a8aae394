"""Mistakes on every command line: one line with the setting, value and remedy, status 2 or 1, and no traceback."""

import re
import warnings

import pytest
from PIL import Image

from diffvision import cli

CLIP = (
    "--model ContrastiveModule --model.model CLIP-debug --data ImageTextData --data.train . --data.batch_size 2 "
    "--trainer.accelerator cpu --trainer.max_epochs 1"
)
# The command line itself is wrong: status 2. A command -> what its message names.
OF_THE_LINE = {
    # commands
    "evalute CLIP-debug": "evaluate?",
    "data chek x": "data check?",
    "data make": "data make --help",
    "data make digits": "directory",
    "run": "program",
    "fit": "--config clip/debug.yaml",
    "qqq": "'qqq'",
    # options
    "data make digits out --copis 3": "--copies?",
    "evaluate CLIP-debug --data x --options.recal_k [1]": "--options.recall_k?",
    "evaluate-language x --task needle": "--tasks",
    "evaluate CLIP-debug --data": "--data",
    "evaluate --model CLIP-debug --data .": "evaluate MODEL",
    "fit CLIP --trainer.acelerator cpu": "--trainer.accelerator?",
    "fit CLIP --modle.loss clip": "--model.loss?",
    "fit CLIP --sed_everything 3": "--seed_everything?",
    "fit CLIP --lr 1": "--model.optimizer.lr?",
    "validate --config clip/debug.yaml --ckptpath x": "--ckpt_path?",
    "fit CLIP --data.train": "--data",
    # values
    "convert x out --to opnclip": "openclip?",
    "generate x --prompt hi --top_k a": "top_k must be int or null, got 'a'",
    "evaluate CLIP-debug --data x --precision fp8": "precision must be fp32, bf16 or fp16, got 'fp8'",
    "evaluate CLIP-debug --data x --options x": "options",
    "evaluate CLIP-debug --data x --config nope.yaml": "nope.yaml",
    "fit CLIP --trainer.precision bf16-mxed": "bf16-mixed?",
    "fit CLIP --seed_everything x": "seed_everything must be true, false or int, got 'x'",
    "fit CLIP --model.model null": "required: model; see",
    "fit CLIP --model.optimizer.lr fast": "model.optimizer.lr must be float, got 'fast'",
    "fit CLIP --data.num_workers null": "data.num_workers must be int, got null",
    "fit CLIP --allow *": "--allow",
    # classes and their settings
    "fit --model ContrastivModule --data ImageTextData": "ContrastiveModule?",
    "fit --model.lr 3": "--model ContrastiveModule",
    "fit --model ContrastiveModule --model.model CLIP-debug --data.train x": "--data ImageTextData",
    "fit CLIP --model CLIP-debug": "--model.model CLIP-debug",
    "fit CLIP --model {class_path:[[": "model must be",
    "fit CLIP --data photos": "--data.train photos",
    "fit CLIP --trainer.callbacks+=ModelChekpoint": "ModelCheckpoint?",
    "fit CLIP --trainer.callbacks+=ModelCheckpoint --trainer.callbacks.monitr x": "trainer.callbacks: Option 'monitr'",
    # files
    "fit --config nope.yaml": "nope.yaml",
    "fit --config clip/debgu.yaml": "clip/debug.yaml",
    "fit --config last.ckpt": "--ckpt_path",
    "fit --config empty.yaml": "empty.yaml",
    "fit --config broken.yaml": "broken.yaml, line 3",
    "fit --config misspelt.yaml": "--trainer.max_epochs?",
    "fit --config section.yaml": "--model.class_path?",
    "fit CLIP --config key.yaml": "--data.class_path?",
    "fit CLIP --config many.yaml": "trainer.max_epochs must be int or null, got 'many'",
    "fit --config class.yaml": "StepGuard?",
}
# What a right line names is missing or impossible: status 1, before a model is loaded.
OF_THE_INPUT = {
    "data make digitz out": "digits?",
    "data make digits out --copies 0": "copies must be at least 1, got 0",
    "data check nowhere": "nowhere",
    "models diff_vit_bse": "diff_vit_base",
    "fit --config clip/debug.yaml": "diffvision data make digits data/digits",
    "fit CLIP --trainer.accelerator gpu": "trainer.accelerator gpu",
    "fit CLIP --trainer.accelerator cup": "cpu",
    "fit CLIP --model.model DiffCLIP-ViT-B16": "DiffCLIP-ViT-B-16",
    "fit CLIP --model.pretrained last.ckpt": "last.ckpt",
    "fit CLIP --data.evaluations [nowhere]": "nowhere",
    "fit CLIP --ckpt_path nowhere.ckpt": "nowhere.ckpt",
    "evaluate CLIP-debg --data photos": "CLIP-debug",
    "evaluate CLIP-debug --data photos --batch_size 0": "batch_size must be at least 1, got 0",
    "evaluate CLIP-debug --data photos --tasks zeroshot": "zero_shot",
    "evaluate CLIP-debug --data photos --device cudda": "cudda",
    "evaluate CLIP-debug --data photos --output words.txt/x.json": "words.txt",
    "evaluate-language diff-debug --tasks perplexity --data words.txt --output words.txt/x": "words.txt",
    "evaluate CLIP-debug --data photos --preprocess.mean 3": "preprocess.mean",
    "evaluate diff_vit_debug --data photos --preprocess.interpolation x": "lanczos",
    "evaluate-language diff-debug nowhere.ckpt --tasks perplexity --data words.txt": "nowhere.ckpt",
    "generate last.ckpt --prompt hi": "last.ckpt",
    "generate last.ckpt --prompt hi --temperature -1": "temperature",
    "convert nowhere.pt out --to openclip": "nowhere.pt",
}
MISTAKES = [(2, *row) for row in OF_THE_LINE.items()] + [(1, *row) for row in OF_THE_INPUT.items()]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.yaml").write_text("model:\n  class_path: ContrastiveModule\n init_args: [\n")
    (tmp_path / "misspelt.yaml").write_text("trainer:\n  max_epocs: 3\n")
    (tmp_path / "section.yaml").write_text("modle:\n  class_path: ContrastiveModule\n")
    (tmp_path / "key.yaml").write_text("data:\n  class_pth: ImageTextData\n")
    (tmp_path / "many.yaml").write_text("trainer:\n  max_epochs: many\n")
    (tmp_path / "class.yaml").write_text("trainer:\n  callbacks:\n  - class_path: StepGaurd\n")
    (tmp_path / "words.txt").write_text("some words\n")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    (tmp_path / "last.ckpt").write_bytes(b"PK\x03\x04\xa9\xff")
    (tmp_path / "photos/cat").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "photos/cat/1.png")


QUICK = {"convert x out --to opnclip", "fit --config class.yaml", "evaluate --model CLIP-debug --data ."}
QUICK |= {"fit --model.lr 3", "fit CLIP --data.num_workers null", *(command for _, command, _ in MISTAKES[::4])}
QUICK |= {"fit --model ContrastiveModule --model.model CLIP-debug --data.train x"}


@pytest.mark.quick(*QUICK)
@pytest.mark.parametrize(("status", "command", "names"), MISTAKES, ids=[command for _, command, _ in MISTAKES])
@pytest.mark.usefixtures("folder")
def test_a_mistake_is_answered_in_one_line(status, command, names, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ended, last_words = exit_status(command.replace("fit CLIP", f"fit {CLIP}").split())
    (error,) = (capsys.readouterr().err + last_words).splitlines()
    assert ended == status
    assert names in error
    assert re.match("diffvision( run)?: ", error)
    assert "Traceback" not in error


def exit_status(words):
    try:
        return cli.main(words), ""
    except SystemExit as stopped:  # sys.exit of a text prints it, and is 1
        return (1, stopped.code) if isinstance(stopped.code, str) else (stopped.code, "")
