"""Mistakes on every command line: at most three lines on stderr, with the nearest real name, and no traceback."""

import warnings

import pytest

from diffvision import cli
from diffvision.errors import did_you_mean, nearest

CLIP = (
    "--model ContrastiveModule --model.model CLIP-debug --data ImageTextData --data.train . --data.batch_size 2 "
    "--trainer.accelerator cpu --trainer.max_epochs 1"
)
LINE = "--config clip/debug.yaml"

MISTAKES = [
    # commands
    ("evalute CLIP-debug", "evaluate"),
    ("evaluate-languag x", "evaluate-language"),
    ("data chek x", "data check"),
    ("data tokeniser x", "data tokenizer"),
    ("instect CLIP-debug", "inspect"),
    # unknown flags
    ("demo --sedes 3", "--seeds"),
    ("models --filtr x", "--filter"),
    ("doctor --verbose", "--verbose"),
    ("data make digits out --copis 3", "--copies"),
    ("data check x --num_wokers 3", "--num_workers"),
    ("data check x --workers 3", "--num_workers"),
    ("data tokenizer x y --vocab_sise 3", "--vocab_size"),
    ("data tokenize x y --tokenizer z", "--tokenizer"),
    ("evaluate CLIP-debug --data x --batchsize 3", "--batch_size"),
    ("evaluate CLIP-debug --data x --options.recal_k [1]", "--options.recall_k"),
    ("evaluate-language x --task needle", "--tasks"),
    ("evaluate-language x --tasks needle --options.frm text", "--options.form"),
    ("generate x --promt hi", "--prompt"),
    ("export x out --tokeniser y", "--tokenizer"),
    ("inspect x --output new --imgae y", "--image"),
    ("adapt x out --methd v2", "--method"),
    ("convert x out --too openclip", "--to"),
    ("fit CLIP --trainer.acelerator cpu", "--trainer.accelerator"),
    ("fit CLIP --trainer.max_epocs=3", "--trainer.max_epochs"),
    ("fit CLIP --modle.loss clip", "--model.loss"),
    ("fit CLIP --trianer.max_steps 3", "--trainer.max_steps"),
    ("fit --confg x", "--config"),
    ("validate RECIPE --ckptpath x", "--ckpt_path"),
    # wrong values
    ("demo --seeds two", "seeds must be int, got 'two'"),
    ("data make digits out --copies x", "copies must be int, got 'x'"),
    ("data make digit out", "digits"),
    ("convert x out --to opnclip", "openclip?"),
    ("adapt x out --method v3", "v2, dex or v1"),
    ("export x out --to onx", "onnx?"),
    ("evaluate CLIP-debug --data x --precision fp8", "fp32, bf16 or fp16"),
    ("evaluate CLIP-debug --data x --batch_size many", "batch_size must be int, got 'many'"),
    ("generate x --prompt hi --temperature warm", "temperature must be float, got 'warm'"),
    ("models --filter diff_vit_bse", "diff_vit_base"),
    ("fit CLIP --trainer.precision 17", "bf16-mixed"),
    ("fit CLIP --trainer.precision bf16-mxed", "bf16-mixed?"),
    ("fit CLIP --trainer.accelerator gpu", "trainer.accelerator is gpu"),
    ("fit CLIP --trainer.accelerator cup", "cpu"),
    ("fit CLIP --trainer.strategy ddpp", "ddp?"),
    ("fit CLIP --trainer.strategy DDPStrateg", "DDPStrategy?"),
    ("fit CLIP --trainer.devices x", "trainer.devices"),
    ("fit CLIP --trainer.max_epochs many", "trainer.max_epochs must be int or null, got 'many'"),
    ("fit CLIP --seed_everything x", "seed_everything must be true, false or int, got 'x'"),
    ("fit CLIP --resume maybe", "auto, must or never"),
    ("fit CLIP --model.loss siglap", "siglip?"),
    # classes and their settings
    ("fit --model ContrastivModule --data ImageTextData", "ContrastiveModule?"),
    ("fit --model diffvision.training.ContrastivModule --data ImageTextData", "no attribute 'ContrastivModule'"),
    ("fit --model ContrastiveModule --data ImageTextDat", "ImageTextData?"),
    ("fit --model.lr 3", "ContrastiveModule"),
    ("fit CLIP --model.modle x", "model?"),
    ("fit CLIP --model.optimizer.lrr 1", "optimizer.lr?"),
    ("fit CLIP --data.batchsize 3", "batch_size?"),
    ("fit CLIP --data.init_args.trian x", "train?"),
    ("fit CLIP --trainer.callbacks+=ModelChekpoint", "ModelCheckpoint?"),
    ("fit CLIP --trainer.callbacks+=ModelCheckpoint --trainer.callbacks.monitr x", "monitor?"),
    ("fit CLIP --trainer.logger CSVLoger", "CSVLogger?"),
    ("fit CLIP --trainer.logger CSVLogger --trainer.logger.save_dri x", "save_dir?"),
    ("fit CLIP --model.model DiffCLIP-ViT-B16", "DiffCLIP-ViT-B-16"),
    ("fit CLIP --data.num_workers null", "data.num_workers must be int, got null"),
    ("fit CLIP --data.evaluations null", "data.evaluations must be"),
    ("fit CLIP --data.max_bad_fraction null", "data.max_bad_fraction must be float, got null"),
    ("fit CLIP --lr 1", "--model.optimizer.lr?"),
    ("fit CLIP --model.lr 1", "optimizer.lr?"),
    ("fit CLIP --model.optimizer.lr fast", "model.optimizer.lr must be float, got 'fast'"),
    ("fit CLIP --model CLIP-debug", "--model.model CLIP-debug"),
    ("fit CLIP --data photos", "--data.train photos"),
    ("fit CLIP --model {class_path:[[", "model must be"),
    ("fit CLIP --config many.yaml", "trainer.max_epochs must be int or null, got 'many'"),
    # missing values
    ("fit CLIP --data.train", "--data: expected one argument"),
    ("evaluate CLIP-debug --data", "expected one argument"),
    ("data", "make, check"),
    ("data make digits", "directory"),
    ("convert x out", "to"),
    ("fit", "--config clip/debug.yaml"),
    ("validate", "--config clip/debug.yaml"),
    # files
    ("fit --config nope.yaml", "nope.yaml"),
    ("fit --config clip/debgu.yaml", "clip/debug.yaml"),
    ("fit --config last.ckpt", "last.ckpt is not YAML: --config takes YAML, and --ckpt_path a checkpoint"),
    ("fit --config empty.yaml", "empty.yaml must be"),
    ("fit --config broken.yaml", "broken.yaml, line 3"),
    ("fit --config list.yaml", "list.yaml"),
    ("fit --config misspelt.yaml", "did you mean --trainer.max_epochs?"),
    ("fit --config class.yaml", "StepGuard?"),
    ("evaluate-language x --tasks needle --options nope.yaml", "no configuration file nope.yaml"),
    # inputs, which are checked before a model is loaded
    ("export last.ckpt out --tokenizer nothing.json", "no tokenizer nothing.json"),
    ("convert last.ckpt out.bin --to timm", "out.bin ends in '.bin'"),
    ("generate last.ckpt --prompt hi --temperature -1", "temperature is -1"),
    ("generate last.ckpt --prompt hi --max_new_tokens 0", "max_new_tokens is 0"),
    ("generate last.ckpt --prompt hi --tokenizer nothing.json", "nothing.json"),
    ("inspect last.ckpt --output new --image nope.jpg", "nope.jpg"),
    ("evaluate-language nowhere.ckpt --tasks perplexity --data nothing.txt", "nothing.txt"),
    ("evaluate-language diff-debug nowhere.ckpt --tasks perplexity --data words.txt", "nowhere.ckpt"),
    # models and their preprocessing
    ("evaluate CLIP-debug --data photos --preprocess.mean 3", "preprocess.mean is 3: give three numbers"),
    ("evaluate CLIP-debug --data photos --preprocess.interpolation x", "choose one of bicubic, bilinear, random"),
    ("evaluate diff_vit_debug --data photos --preprocess.interpolation x", "nearest, box, hamming, lanczos"),
    ("evaluate CLIP-debug --data nowhere", "nowhere"),
    ("evaluate CLIP-debug --data photos --batch_size 0", "batch_size must be at least 1, got 0"),
    ("evaluate CLIP-debug --data photos --tasks zeroshot", "zero_shot"),
    ("evaluate CLIP-debug --data photos --device cudda", "cudda"),
    ("evaluate-language diff-debug --tasks bogus", "bogus"),
    ("compare CLIP-debug nomodel --data photos", "nomodel"),
    ("inspect CLIP-debug --versus nomodel --output new", "nomodel"),
    ("data make digits out --copies 0", "copies must be at least 1, got 0"),
    ("data make digits out --seed -1", "seed must be at least 0, got -1"),
    ("fit --config clip/debug.yaml", "diffvision data make digits data/digits"),
    ("evaluate CLIP-debg --data photos", "CLIP-debug"),
    ("data check nowhere", "nowhere"),
    ("data make folder out --source nowhere", "nowhere"),
    ("fit CLIP --data.evaluations [nowhere]", "nowhere"),
    ("fit CLIP --ckpt_path nowhere.ckpt", "nowhere.ckpt"),
    ("generate nowhere.ckpt --prompt hi", "nowhere.ckpt"),
    ("export nowhere.ckpt out", "nowhere.ckpt"),
    ("convert nowhere.pt out --to openclip", "nowhere.pt"),
    ("adapt vit_base_patch16_225 out", "vit_base_patch16_224"),
    ("inspect CLIP-debgu --output new", "CLIP-debug"),
    ("run nowhere.py", "nowhere.py"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.yaml").write_text("model:\n  class_path: ContrastiveModule\n init_args: [\n")
    (tmp_path / "list.yaml").write_text("- 1\n- 2\n")
    (tmp_path / "misspelt.yaml").write_text("trainer:\n  max_epocs: 3\n")
    (tmp_path / "many.yaml").write_text("trainer:\n  max_epochs: many\n")
    (tmp_path / "class.yaml").write_text("trainer:\n  callbacks:\n  - class_path: StepGaurd\n")
    (tmp_path / "words.txt").write_text("some words\n")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    (tmp_path / "last.ckpt").write_bytes(b"PK\x03\x04\xa9\xff")
    (tmp_path / "photos/cat").mkdir(parents=True)
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (8, 8)).save(tmp_path / "photos/cat/1.png")


@pytest.mark.quick(*[command for command, _ in MISTAKES[::4]])
@pytest.mark.parametrize(("command", "names"), MISTAKES, ids=[command for command, _ in MISTAKES])
@pytest.mark.usefixtures("folder")
def test_a_mistake_is_answered_in_three_lines(command, names, capsys):
    words = command.replace("CLIP ", f"{CLIP} ", 1) if command.startswith("fit CLIP") else command
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        status, last_words = exit_status(words.replace("RECIPE", LINE).split())
    error = capsys.readouterr().err + last_words
    assert status in (1, 2)
    assert names in error
    assert len(error.splitlines()) <= 3
    assert "Traceback" not in error
    assert "usage:" not in error


def exit_status(words):
    try:
        return cli.main(words), ""
    except SystemExit as stopped:  # sys.exit of a text prints it, and is 1
        return (1, stopped.code) if isinstance(stopped.code, str) else (stopped.code, "")


def test_nearest_names():
    known = ["diff_vit_base", "diff_vit_small", "CLIP-debug"]
    assert nearest("diff_vit_bse", known) == ["diff_vit_base"]
    assert nearest("clip-DEBUG", known, 2)[0] == "CLIP-debug"
    assert nearest("zzz", known, min_ratio=0.6) == []
    assert did_you_mean("CLIP-debgu", known) == "; did you mean CLIP-debug?"
    assert did_you_mean("zzz", known) == ""
