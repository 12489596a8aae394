"""`diffvision.fit`: the command's run from Python, several times in one process, with errors that are exceptions."""

from pathlib import Path

import pytest
from lightning.pytorch.callbacks import Callback
from training_fits import noise

import diffvision
from diffvision.data.shards.writer import write_evaluation_split, write_shards
from diffvision.errors import Mistake
from diffvision.training import fit as command
from diffvision.training.from_python import _data_options, options

# Lightning's advice is not for these; the recipe monitors a metric that a few steps without evaluation do not have.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*could not find the monitored key"),
    pytest.mark.filterwarnings("ignore:The lr scheduler dict contains the key"),
]
CLIP, VISION, LANGUAGE = ["clip/debug.yaml"], ["vision/debug.yaml"], ["language/debug.yaml"]
EVALUATION = "data.init_args.evaluation"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A folder as `data make` writes it: shards in train/, and an evaluation folder for each of two tasks."""
    root = tmp_path_factory.mktemp("made") / "data"
    write_shards(root / "train", noise(16, txt=str))
    classes = {"classnames": ["one", "two"], "templates": ["a {c}"]}
    write_evaluation_split(root / "zero_shot" / "test", noise(4, cls=lambda i: 1), **classes)
    write_evaluation_split(root / "retrieval" / "test", noise(4, txt=str), dataset_type=["retrieval"])
    (root / "validation").mkdir()
    return root


def run(data: Path, root: Path, **settings):
    quiet = {"enable_progress_bar": False, "limit_val_batches": 0, "accelerator": "cpu", "max_steps": 2}
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": str(root), "name": "run"}}
    model = {"model": "CLIP-debug", "optimizer": {"warmup_epochs": 0, "lr": 5e-4}}
    evaluated = {"evaluation": data / "zero_shot"}
    sizes = {"data.init_args.batch_size": 8}
    return diffvision.fit("clip/debug.yaml", data=data / "train", trainer={"logger": logger}, **quiet, **sizes,
                          **{"model": model} | evaluated | settings)  # fmt: skip


def test_two_runs_in_one_process(data, tmp_path):
    class Steps(Callback):
        count = 0

        def on_train_batch_end(self, *args):
            self.count += 1

    first = run(data, tmp_path, callbacks=[steps := Steps()])
    assert (first.trainer.global_step, steps.count) == (2, 2)
    assert first.module.name == "CLIP-debug"
    assert first.module.settings.lr == 5e-4
    assert first.folder == tmp_path / "run" / "version_0"
    assert (first.folder / "config.yaml").is_file()
    assert first.checkpoint == first.folder / "checkpoints" / "final.ckpt"
    assert first.metrics["train/loss"] > 0
    assert first.data.train == str(data / "train")
    assert "ContrastiveModule" not in repr(first)  # a cell of a notebook shows a line, not a page

    more = {"model.optimizer.warmup_epochs": 0}
    second = run(data, tmp_path, model="DiffCLIP-debug", seed_everything=3, **more)
    assert second.module.name == "DiffCLIP-debug"
    assert second.folder == tmp_path / "run" / "version_1"
    assert steps.count == 2
    opened = diffvision.open_model(second.checkpoint)
    assert opened.name == "DiffCLIP-debug"


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"max_epocs": 3}, Mistake, r"did you mean --trainer\.max_epochs"),
        ({"batch_size": 3}, Mistake, r"did you mean --data\.batch_size"),
        ({"model": {"modle": 1}}, Mistake, r"modle.*did you mean .*model"),
        ({"data": "nowhere"}, FileNotFoundError, "data must be a file or folder that exists, got 'nowhere'"),
        ({"callbacks": [3]}, TypeError, "callbacks must be a list .*, got 3"),
        ({"callbacks": Callback()}, TypeError, "callbacks must be a list"),
        ({"data": 3}, TypeError, "data must be a path or settings, got int"),
        ({"data": {"transform": print}}, TypeError, r"data\.transform must be .* builtin_function_or_method"),
        ({"model": Callback()}, TypeError, "model must be .* Callback"),
        ({"data": [".", "nowhere"]}, FileNotFoundError, "data must be a file or folder that exists, got 'nowhere'"),
        ({"resume": "maybe"}, Mistake, "resume must be auto, must or never"),
    ],
)
def test_errors_are_exceptions_of_one_sentence(settings, kind, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind, match=message) as raised:
        diffvision.fit("clip/debug.yaml", accelerator="cpu", **settings)
    assert "\n" not in str(raised.value)


@pytest.mark.filterwarnings("ignore:.*is what the model is trained on")
@pytest.mark.filterwarnings("ignore:ModelCheckpoint saves nothing")
def test_the_number_of_classes_is_that_of_the_data(tmp_path):
    photos = tmp_path / "photos"
    for name in ("cat", "dog", "fox"):
        (photos / name).mkdir(parents=True)
        for sample in noise(4):
            (photos / name / f"{sample['__key__']}.png").write_bytes(sample["png"])
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "max_epochs": 1, "limit_val_batches": 0}
    settings = quiet | {"data.init_args.batch_size": 4, "trainer.logger.init_args.save_dir": str(tmp_path / "runs")}
    done = diffvision.fit("vision/debug.yaml", data=photos, **settings)
    assert (done.module.num_classes, done.module.hparams["num_classes"], done.data.num_classes) == (3, 3, 3)
    assert "num_classes: 3" in (done.folder / "config.yaml").read_text()
    for classes in (2, 10):
        with pytest.raises(ValueError, match=rf"num_classes must be 3.* {classes}$"):
            diffvision.fit("vision/debug.yaml", data=photos, model={"num_classes": classes}, **settings)


@pytest.mark.parametrize(("evaluation", "classes"), [("zero_shot", 2), (None, None)])
def test_of_shards_the_evaluation_folder_names_the_classes(data, evaluation, classes, tmp_path, monkeypatch):
    class Built(Exception):
        pass

    def built(cli):
        raise Built(cli.config["fit"]["model"]["init_args"]["num_classes"])

    monkeypatch.setattr(command.FitCLI, "instantiate_trainer", built)
    with pytest.raises(ValueError if classes is None else Built, match="num_classes" if classes is None else "2"):
        diffvision.fit("vision/debug.yaml", data=data / "train", evaluation=evaluation and data / evaluation)


def test_an_interrupted_run_is_an_interrupt(monkeypatch):
    """A notebook's stop button: SystemExit would be shown as a fault of the notebook. SIGTERM still ends a process."""
    for code, kind in ((130, KeyboardInterrupt), (143, SystemExit)):

        def ended(args, callbacks, code=code):
            raise SystemExit(code)

        monkeypatch.setattr(command, "fit", ended)
        with pytest.raises(kind):
            diffvision.fit("clip/debug.yaml", data=".")


def test_settings_are_options_of_the_command_line():
    settings = {
        "trainer": {"max_epochs": 3, "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "x"}}},
        "model.loss": "siglip",
        "data": {"train": Path("a b"), "evaluations": ["x", Path("y")], "caption_key": None, "columns": {}},
        "resume": False,
    }
    assert options(settings) == [
        "--trainer.max_epochs=3",
        '--trainer.logger={"class_path": "CSVLogger", "init_args": {"save_dir": "x"}}',
        "--model.loss=siglip",
        "--data.train=a b",
        '--data.evaluations=["x", "y"]',
        "--data.caption_key=null",
        "--data.columns={}",
        "--resume=false",
    ]


BROUGHT = [
    # the data and the evaluation that are named, by their place in the folder; the recipe; what the evaluation is
    ("", None, CLIP, ("data.init_args.evaluations", '["{}"]')),
    ("", None, VISION, (EVALUATION, "{}/zero_shot")),
    ("", None, LANGUAGE, (EVALUATION, "{}/validation")),
    ("train", None, CLIP, ("data.init_args.evaluations", "[]")),
    ("train", None, VISION, (EVALUATION, "null")),
    ("train", "zero_shot", VISION, (EVALUATION, "{}/zero_shot")),
]


@pytest.mark.parametrize(("source", "evaluation", "recipe", "brought"), BROUGHT)
def test_a_folder_brings_its_evaluation(source, evaluation, recipe, brought, data):
    name, value = brought
    words = [f"--data.init_args.train={data / 'train'}", f"--{name}={value.format(data)}"]
    assert _data_options(data / source, evaluation and data / evaluation, recipe) == words


def test_photos_bring_their_evaluation(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split / "cat").mkdir(parents=True)
        (tmp_path / split / "cat" / "1.png").write_bytes(b"")
    words = [f"--data.init_args.train={tmp_path}", f"--{EVALUATION}={tmp_path}"]
    assert _data_options(str(tmp_path), None, VISION) == words
    assert _data_options(None, None, CLIP) == []
    assert _data_options(None, tmp_path, VISION) == words[1:]
