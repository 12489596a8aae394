"""Files that processes share: what locks and whole files promise."""

import multiprocessing
import os
import signal

import pytest

from diffvision.files import locked, locked_if_free, replacing, scratch, sweep, user_cache


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


def test_a_user_without_a_home_has_a_cache(tmp_path, monkeypatch):
    def fail(name):
        raise RuntimeError

    monkeypatch.setattr("platformdirs.user_cache_dir", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert user_cache("index").is_relative_to(tmp_path)


def test_a_link_is_replaced_and_not_followed(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"of somebody else")
    link.symlink_to(target)
    with replacing(link) as file:
        file.write(b"new")
    assert (target.read_bytes(), link.read_bytes(), link.is_symlink()) == (b"of somebody else", b"new", False)


def test_a_lock_excludes_others_until_it_is_left(tmp_path):
    lock = tmp_path / "lock"
    with locked(lock), locked_if_free(lock) as free:
        assert not free
    for _ in range(2):
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
        sweep(tmp_path, "made-")
        assert list(tmp_path.glob("made-*.part")) == [folder]
    assert not list(tmp_path.iterdir())
