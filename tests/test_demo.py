"""`diffvision demo`: its data, its runs and its report."""

import re

import pytest

from diffvision.data.datasets import digits
from diffvision.demo import demo
from diffvision.demo import image_demo as images

SHORT = ("--trainer.max_epochs=1", "--trainer.limit_train_batches=3", "--trainer.log_every_n_steps=1")


def test_an_unfinished_dataset_is_made_again(tmp_path, monkeypatch):
    made = []

    def make(folder) -> None:
        folder.mkdir()
        made.append(folder)
        if len(made) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(images, "make_digits", make)
    with pytest.raises(KeyboardInterrupt):
        images.prepare(tmp_path / "digits")
    assert not (tmp_path / "digits").exists()
    for _ in range(2):
        images.prepare(tmp_path / "digits")
    assert (tmp_path / "digits").is_dir()
    assert len(made) == 2


@pytest.mark.nightly
def test_runs_are_trained_once_in_processes_that_print_little(tmp_path, capfd):
    """What `fit` prints is in the log; a run that cannot be trained says why; then the report of two runs."""
    digits.make_digits(tmp_path / "digits", copies=1)
    images.images(tmp_path, 1, *SHORT)
    out, err = capfd.readouterr()
    assert not err
    assert "DiffCLIP-debug-0.2, seed 0: step 3, loss " in out
    assert re.search(r"acc1 +CLIP-debug +\d+\.\d", out)
    page = (tmp_path / "report.html").read_text()
    assert "zero_shot/digits" in page
    assert not re.search("(src|href)=.https?:", page)  # fonts and images would be fetched from there
    images.images(tmp_path, 1, *SHORT)
    assert "step" not in capfd.readouterr().out.split("CLIP-debug: ")[0]


@pytest.mark.nightly
def test_the_whole_demo(tmp_path, capsys):
    """The README's first command: both models trained and compared, and DiffCLIP at 85% or more."""
    demo(str(tmp_path))
    accuracy = re.search(r"acc1 +CLIP-debug[^\n]*\n +DiffCLIP-debug-0\.2 +([\d.]+)", capsys.readouterr().out)
    assert accuracy is not None
    assert float(accuracy[1]) >= 85.0
