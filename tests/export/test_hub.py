"""`diffvision push`: what is checked before anything is sent, and what is sent."""

import shutil
import socket
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

from diffvision import cli
from diffvision.export.hub import push


class Api:
    """The Hub's client, which notes what it is asked for."""

    asked: list
    public = False

    def __init__(self, token):
        assert token == "hf_secret"
        Api.asked = []

    def create_repo(self, repo_id, **settings):
        self.asked.append(("create_repo", repo_id, settings))
        return SimpleNamespace(repo_id=repo_id)

    def repo_info(self, repo_id):
        return SimpleNamespace(private=not Api.public)

    def upload_folder(self, **settings):
        self.asked.append(("upload_folder", settings))


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Whoever opens a connection fails; the token is there, and the client notes."""

    def refuse(*args, **settings):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_secret")
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    Api.asked, Api.public = [], False


@pytest.fixture
def folder(exported, tmp_path):
    return shutil.copytree(exported / "vision", tmp_path / "model")


def test_the_files_that_are_sent(folder, capsys):
    assert cli.main(["push", str(folder), "someone/digits", "--private"]) == 0
    made, sent = Api.asked
    assert made == ("create_repo", "someone/digits", {"private": True, "repo_type": "model", "exist_ok": True})
    assert sent[1]["allow_patterns"] == ["README.md", "config.json", "lambda.png", "loss.png", "model.safetensors"]
    assert sent[1]["folder_path"] == str(folder)
    out = capsys.readouterr().out
    assert "is diff_vit_debug: 5 files, " in out
    assert "/someone/digits" in out
    assert "hf_secret" not in out


def test_an_open_clip_folder_goes_too(exported):
    push(str(exported / "clip"), "someone/clip")
    assert "open_clip_model.safetensors" in Api.asked[1][1]["allow_patterns"]


@pytest.mark.parametrize("name", ["model.bin", "best.ckpt", ".netrc", "deeper/.env", "train.py", "metrics.csv"])
def test_files_of_other_kinds_are_refused(folder, name):
    (folder / "deeper").mkdir()
    (folder / name).write_bytes(b"x")
    with pytest.raises(ValueError, match="of kinds that are not sent, such as"):
        push(str(folder), "someone/digits")
    assert not Api.asked


def test_folders_that_do_not_load_are_refused(folder, tmp_path):
    (folder / "link.txt").symlink_to("/etc/hostname")
    with pytest.raises(ValueError, match=r"has links \(link.txt\)"):
        push(str(folder), "someone/digits")
    (folder / "link.txt").unlink()
    (folder / "README.md").rename(tmp_path / "README.md")
    with pytest.raises(ValueError, match=r"has no README.md, the model card"):
        push(str(folder), "someone/digits")
    (tmp_path / "README.md").rename(folder / "README.md")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ValueError, match=r"weights of .* are damaged, or no"):
        push(str(folder), "someone/digits")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has a configuration and no weights"):
        push(str(folder), "someone/digits")
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no config.json"):
        push(str(folder), "someone/digits")
    with pytest.raises(FileNotFoundError, match=r"no folder '.*nothing'"):
        push(str(tmp_path / "nothing"), "someone/digits")
    assert not Api.asked


def test_without_a_token_a_name_or_a_network(folder, monkeypatch):
    with pytest.raises(ValueError, match="repo_id is 'a/b/c', no name of"):
        push(str(folder), "a/b/c")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"HF_HUB_OFFLINE is set"):
        push(str(folder), "someone/digits")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ValueError, match=r"no token .* `hf auth login`, or set"):
        push(str(folder), "someone/digits")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(b"not loaded yet")
    with pytest.raises(ValueError, match="no token"):
        push(str(folder), "someone/digits")
    (folder / "model.safetensors").write_bytes(weights)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_secret")

    def unreachable(self, repo_id, **settings):
        raise RuntimeError("Connection refused\nand a page of it")

    monkeypatch.setattr(Api, "create_repo", unreachable)
    with pytest.raises(ConnectionError, match="did not take someone/digits"):
        push(str(folder), "someone/digits")


def test_private_means_private(folder):
    Api.public = True
    with pytest.raises(ValueError, match="someone/digits exists already"):
        push(str(folder), "someone/digits", private=True)
    assert [call[0] for call in Api.asked] == ["create_repo"]


def test_a_language_models_folder_goes_too(runs, tmp_path):
    pytest.importorskip("transformers")
    from diffvision.export.command import export

    with pytest.warns(UserWarning, match="no tokenizer next to"):
        export(str(runs.paths["text"]), str(tmp_path / "text"))
    push(str(tmp_path / "text"), "someone/text")
    assert "modeling_diffvision.py" in Api.asked[1][1]["allow_patterns"]
    assert torch.is_tensor(runs.text.head_weight)
