"""Files that processes share: where the cache is, and what locks and whole files promise."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from diffvision import files
from diffvision.files import locked, locked_if_free, replacing, scratch, sweep, user_cache


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The user's cache folder as macOS has it, and the one of earlier versions."""
    new, former = tmp_path / "Library" / "Caches" / "diffvision", tmp_path / ".cache" / "diffvision"
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(files.platformdirs, "user_cache_dir", lambda _: str(new))
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return new, former


def test_what_earlier_versions_put_into_another_folder_is_found(folders):
    new, former = folders
    assert user_cache("index") == new / "index"
    (former / "index").mkdir(parents=True)
    assert user_cache("index") == former / "index"
    assert user_cache("tuning.json") == new / "tuning.json"
    (new / "index").mkdir(parents=True)
    assert user_cache("index") == new / "index"


def test_a_failed_write_leaves_the_older_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(TypeError), replacing(path) as file:
        file.writelines([b"new", None])
    assert path.read_bytes() == b"old"
    with replacing(path, sync=True) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_link_is_replaced_and_not_followed(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"of somebody else")
    link.symlink_to(target)
    with replacing(link) as file:
        file.write(b"new")
    assert (target.read_bytes(), link.read_bytes(), link.is_symlink()) == (b"of somebody else", b"new", False)


def test_locks_exclude_and_can_be_shared(tmp_path):
    lock = tmp_path / "lock"
    with locked(lock):
        with locked_if_free(lock) as free:
            assert not free
        with pytest.raises(TimeoutError, match="lock cannot be locked"), locked(lock, shared=True, timeout=0.1):
            pass
    with locked(lock, shared=True), locked(lock, shared=True, timeout=0), locked_if_free(lock) as free:
        assert not free
    with locked_if_free(lock) as free:
        assert free


def _leave(parent):
    with scratch(parent, "made-") as folder:
        (folder / "file").write_bytes(b"12345")
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_scratch_folder_of_a_killed_process_is_swept_and_no_other(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_leave, args=(tmp_path,))
    process.start()
    process.join()
    with scratch(tmp_path, "made-") as folder:
        (folder / "file").write_bytes(b"123")
        assert len(list(tmp_path.glob("made-*.part"))) == 2
        assert sweep(tmp_path, "made-") == 3
        assert list(tmp_path.glob("made-*.part")) == [folder]
    assert not list(tmp_path.iterdir())
