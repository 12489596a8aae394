"""Shards that changed, or differ from their manifest: never a wrong pair, never an unreported loss."""

import json
import os
import pickle
import warnings
from contextlib import nullcontext

import pytest

from diffvision.data import BadDataError, Limits, ShardSet, write_manifest
from diffvision.data.shards import reader
from diffvision.data.shards.remote import ShardCache
from diffvision.data.shards.sample import BadSample
from diffvision.data.shards.sidecars import sha256_of, sidecar
from diffvision.data.shards.sources import find_shards
from diffvision.data.shards.writer import write_tar
from diffvision.files import sha256
from tests.data.conftest import flip, write_members

LENIENT = Limits(max_bad_fraction=1.0)
OTHER = "shard not as its manifest says"


def crossed(data):
    """A tar of the same ten samples whose captions have changed places with those of their neighbours."""
    members = [data[start : start + 1024] for start in range(0, 30 * 1024, 1024)]  # cls, png, txt of each sample
    for caption in range(2, 30, 6):
        members[caption], members[caption + 3] = members[caption + 3], members[caption]
    return b"".join(members) + data[30 * 1024 :]


def overwrite(path, data, times=None):
    """Write into the file, which keeps its inode, and perhaps its times."""
    path.write_bytes(data)
    if times is not None:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def replaced(path, data, times=None):
    """By another file of this name, and perhaps these times."""
    part = path.with_suffix(".part")
    part.write_bytes(data)
    if times is not None:
        os.utime(part, ns=(times.st_atime_ns, times.st_mtime_ns))
    os.replace(part, path)


def written(corpus, directory, known, count=20):
    source = corpus.write(directory, count, manifest=known == "manifest")
    if known == "sizes":
        (source / "sizes.json").write_text(json.dumps({path.name: 10 for path in source.glob("*.tar")}))
    return source


# ---- changed during a run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", ["open", "closed", "worker"])
@pytest.mark.parametrize("times", ["new times", "old times"])
@pytest.mark.parametrize("change", [overwrite, replaced])
@pytest.mark.parametrize("known", ["manifest", "sizes", "nothing"])
def test_a_shard_with_other_content_is_not_read_in_its_place(corpus, tmp_path, known, change, times, again):
    """By a reader that has it open, one that opens it again as after 64 others, and a copy in another process."""
    source = written(corpus, tmp_path / "s", known)
    shards, path = ShardSet(source), source / "000001.tar"
    assert [shards.members((number, 0))["txt"] for number in range(2)] == [b"sample 0", b"sample 10"]
    change(path, crossed(path.read_bytes()), path.stat() if times == "old times" else None)
    if again == "closed":
        shards.reader(1).close()
    shards = pickle.loads(pickle.dumps(shards)) if again == "worker" else shards
    if change is replaced and again == "open":
        assert shards.members((1, 2))["txt"] == b"sample 12"  # of the file that it has
        return
    error = BadSample if known == "manifest" else ValueError
    for _ in range(2):
        with pytest.raises(error, match=OTHER if known == "manifest" else r"000001\.tar was changed"):
            shards.members((1, 0))
    assert shards.members((0, 3))["txt"] == b"sample 3"


@pytest.mark.parametrize("known", ["manifest", "sizes", "nothing"])
def test_a_shard_that_changed_before_it_was_first_opened(corpus, tmp_path, known):
    source = written(corpus, tmp_path / "s", known)
    shards, path = ShardSet(source), source / "000001.tar"
    (source / "000000.tar").chmod(0o400)
    assert shards.members((0, 0))["txt"] == b"sample 0"
    replaced(path, crossed(path.read_bytes()), path.stat())
    with pytest.raises((BadSample, ValueError), match=OTHER if known == "manifest" else "was changed"):
        shards.members((1, 0))


@pytest.mark.parametrize("known", ["manifest", "nothing"])
def test_a_shard_with_the_same_content_is_read_on(corpus, tmp_path, known):
    source = written(corpus, tmp_path / "s", known, 60)
    loader = corpus.loader(source)
    batches = iter(loader)
    seen = next(batches)["text"][:, 0].tolist()  # all shards are open: they are shuffled together
    for number, path in enumerate(sorted(source.glob("*.tar"))):
        change, data = (overwrite, replaced)[number % 2], path.read_bytes()
        change(path, data, None if known == "manifest" else path.stat())
    path.chmod(0o400)
    (tmp_path / "link").hardlink_to(path)
    seen += [number for batch in corpus.read(batches) for number in batch]
    assert sorted(seen) == list(range(60))
    assert loader.report.bad == 0


def test_a_remote_shard_is_fetched_again_unless_it_is_another_one(corpus, tmp_path, serve):
    path = corpus.write(tmp_path / "s", 10, manifest=False) / "000000.tar"
    url = serve(path.parent).url
    shards = ShardSet(f"{url}/000000.tar", ShardCache(tmp_path / "cache"))
    for _ in range(2):
        assert shards.members((0, 2))["txt"] == b"sample 2"
        shards.reader(0).close()
        for copy in (tmp_path / "cache").glob("*.tar"):
            copy.unlink()
    overwrite(path, crossed(path.read_bytes()), path.stat())  # so that the server does not notice it
    with pytest.raises(ValueError, match=r"000000\.tar was changed"):
        shards.members((0, 2))


# ---- another shard than the manifest's ------------------------------------------------------------------------------


def flip_at(path, find, at=0):
    flip(path, path.read_bytes().index(find) + at, bit=1)


def longer(path, corpus):
    path.write_bytes(corpus.write(path.parent.parent / "t", 30, per_shard=30).joinpath("000000.tar").read_bytes())


DAMAGE = {
    "caption": lambda path, _: flip_at(path, b"sample 4", at=7),  # another digit: only the hash can notice it
    "header size": lambda path, _: flip_at(path, b"000043.txt", at=124 + 10),
    "cut": lambda path, _: os.truncate(path, 512 * 6 * 3 + 600),
    "fewer samples": lambda path, corpus: write_tar(path, [corpus.sample(number) for number in range(900, 905)]),
    "more samples": longer,
    "vanished": lambda path, _: path.unlink(),
    "a directory": lambda path, _: (path.unlink(), path.mkdir()),
}


@pytest.mark.quick("0-caption", "0-cut", "1-caption", "0-vanished", "0-a directory")
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_damage_costs_its_shard_and_pairs_stay_right(corpus, tmp_path, damage, num_workers):
    source = corpus.write(tmp_path / "s", 100)
    shards = find_shards(source)
    DAMAGE[damage](source / "000004.tar", corpus)
    loader = corpus.loader(shards, limits=LENIENT, num_workers=num_workers)
    batches = corpus.read(loader)  # asserts that image and caption belong together
    assert {n for b in batches for n in b} == set(range(100)) - set(range(40, 50))
    reason = "unreadable shard" if damage in ("vanished", "a directory") else OTHER
    assert loader.report.skipped == {reason: 10}
    assert loader.report.seen + loader.report.bad + loader.report.tail == 100
    with pytest.raises(BadDataError, match=reason):
        corpus.read(corpus.loader(shards, limits=Limits(0.05)))


def test_an_unreadable_shard_has_no_first_samples(corpus, tmp_path):
    shards = ShardSet(corpus.write(tmp_path / "s", 20))
    assert len(shards.first()) == 10
    (tmp_path / "s" / "000000.tar").unlink()
    assert ShardSet(shards.shards).first() == []


def test_where_only_counts_are_known_a_shard_must_have_as_many_samples(corpus, tmp_path):
    source = written(corpus, tmp_path / "s", "sizes", 60)
    path = source / "000002.tar"
    DAMAGE["fewer samples"](path, corpus)
    loader = corpus.loader(source, limits=LENIENT)
    assert {number for batch in corpus.read(loader) for number in batch} == set(range(60)) - set(range(20, 30))
    assert loader.report.skipped == {OTHER: 10}
    longer(path, corpus)
    with pytest.raises(ValueError, match=r"000002\.tar .*\b30\b"):
        corpus.read(corpus.loader(source))


def test_a_manifest_that_was_written_of_a_damaged_shard_hides_nothing(corpus, tmp_path):
    source = corpus.write(tmp_path / "s", 60)
    path = source / "000002.tar"
    flip(path, 9 * 3072)  # of the last header
    manifest = json.loads((source / "manifest.json").read_text())
    manifest["shards"][2] |= {"samples": 9, "sha256": sha256(path)}
    (source / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"000002\.tar"):
        corpus.read(corpus.loader(source))


# ---- what is noted of files -----------------------------------------------------------------------------------------


def test_each_version_of_a_file_is_hashed(corpus, tmp_path, monkeypatch):
    path = corpus.write(tmp_path / "s", 10) / "000000.tar"
    first = sha256_of(path)
    assert first == sha256(path) == sha256_of(path)
    replaced(path, path.read_bytes().replace(b"sample 4", b"sample 5"), path.stat())
    second = sha256_of(path)
    assert second == sha256(path) != first
    sidecar(path, ".sha256").write_text("what is this")
    assert sha256_of(path) == second
    (tmp_path / "blocked").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "blocked"))  # where nothing can be noted
    assert sha256_of(path) == second


def test_training_compares_a_window_ahead_and_an_unharmed_set_costs_nothing_twice(corpus, tmp_path):
    source = corpus.write(tmp_path / "s", 100)
    loader = corpus.loader(source, num_workers=1, window=2)
    corpus.read(loader)
    assert loader.report.bad == 0
    assert all(sidecar(path, ".sha256").exists() for path in source.glob("*.tar"))


# ---- shards with other content --------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", ["sha256", "index", "ends"])
def test_a_run_does_not_resume_on_other_content(corpus, tmp_path, known):
    def made(name, add=""):
        directory = tmp_path / name
        corpus.write(directory, 40, manifest=known != "index", change=lambda s: s | {"txt": f"{add}{s['txt']}"})
        if known == "ends":
            (directory / "manifest.json").unlink()
        return directory

    here, there, moved = made("here"), made("there", "longer "), made("moved")
    state = corpus.loader(here).state_dict()
    assert state["content"].startswith(f"{known}:")
    corpus.loader(moved).load_state_dict(state)
    assert ShardSet(here).fingerprint == ShardSet(there).fingerprint
    with pytest.raises(ValueError, match=rf"cannot resume.* \({known}:"):
        corpus.loader(there).load_state_dict(state)


def test_content_that_cannot_be_compared_is_a_warning(corpus, tmp_path):
    source = corpus.write(tmp_path / "s", 40, manifest=False)
    state = corpus.loader(source).state_dict()
    write_manifest(source)
    loader = corpus.loader(source)
    for content in ({}, {"content": "names:0123"}):  # as earlier versions wrote it
        with pytest.warns(UserWarning, match="the checkpoint knows their"):
            loader.load_state_dict(state | content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.load_state_dict(loader.state_dict())


# ---- what one sample is ---------------------------------------------------------------------------------------------


def test_fewer_bytes_than_asked_for_are_no_sample(tmp_path, monkeypatch):
    shards = ShardSet(write_members(tmp_path / "a.tar", ("a.txt", b"one")))
    monkeypatch.setattr(os, "pread", lambda file, size, offset: b"on")
    with pytest.raises(BadSample, match="unreadable shard"):
        shards.members((0, 0))


def test_a_sample_is_a_dictionary_of_its_members_of_which_only_what_can_be_used_is_read(tmp_path, monkeypatch):
    between = ("a.mp4", bytes(1 << 20)), ("a.npy", b"not read"), ("a.cls", bytes(5000))
    members = ("a.TXT", b"one"), *between, ("a.json", b"{}"), ("b.txt", b"two")
    shards = ShardSet(write_members(tmp_path / "a.tar", *members))
    expected = {"txt": b"one", "json": b"{}", "npy": b"", "mp4": b"", "cls": bytes(1025)}
    assert shards.members((0, 0)) == expected
    assert shards.members((0, 1)) == {"txt": b"two"}
    with pytest.raises(BadSample, match="truncated shard"):
        shards.members((0, 2))
    for most, reason in ((1030, ""), (1029, "sample too large")):
        monkeypatch.setattr(reader, "_MAX_SAMPLE", most)
        with pytest.raises(BadSample, match=reason) if reason else nullcontext():
            shards.members((0, 0))
