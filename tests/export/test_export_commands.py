"""`diffvision export` from every kind of source, and what it refuses."""

from typing import get_args

import pytest
import torch

from diffvision import cli
from diffvision.export.export_commands import To, export
from diffvision.export.formats import DEFAULTS, FORMATS


def test_the_command_line(runs, tmp_path, capsys):
    target = tmp_path / "deeper" / "vision"
    assert cli.main(["export", str(runs.paths["vision"]), str(target), "--to", "timm", "--license", "mit"]) == 0
    assert "best.ckpt is diff_vit_debug, averaged weights (EMA): wrote" in capsys.readouterr().out
    assert (target / "README.md").read_text().split("---")[1].splitlines().count("license: mit") == 1
    assert cli.main(["export", str(runs.paths["vision"]), str(target)]) == 1
    assert "is there already: remove it, or name another" in capsys.readouterr().err
    assert [path.name for path in target.parent.iterdir()] == ["vision"]


def test_bad_input_is_one_error_and_leaves_nothing(runs, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(FileNotFoundError, match=r"no file or folder ./nowhere"):
        export("./nowhere", str(out))
    with pytest.raises(ValueError, match="is a model of timm, and openclip"):
        export(str(runs.paths["vision"]), str(out), "openclip")
    with pytest.raises(ValueError, match=r"to .*'gguf'"):
        export(str(runs.paths["vision"]), str(out), "gguf")
    torch.save(runs.vision.model.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ValueError, match="does not say of which model"):
        export(str(tmp_path / "weights.pt"), str(out))
    with pytest.raises(ValueError, match=r"does not fit the model"):
        export("CLIP-debug", str(out), checkpoint=str(tmp_path / "weights.pt"))
    with pytest.raises(ValueError, match=r"checkpoint is 'x', but .*best.ckpt"):
        export(str(runs.paths["clip"]), str(out), checkpoint="x")
    with pytest.raises(ValueError, match="diff_vit_debug has new weights"):
        export("diff_vit_debug", str(out))
    with pytest.raises(ValueError, match=r"not loaded from URLs"):
        export("https://example.org/model.ckpt", str(out))
    assert not out.exists()


def test_formats_are_those_of_the_command():
    assert set(get_args(To)) == set(FORMATS)
    assert all(library in FORMATS[name].libraries for library, name in DEFAULTS.items())
