"""Shards that changed, or differ from their manifest: never a wrong pair, never an unreported loss."""

import hashlib
import io
import json
import os
import pickle
import tarfile
import warnings

import pytest

from diffvision.data import Limits, ShardSet
from diffvision.data.shards import reader
from diffvision.data.shards.index import shard_index
from diffvision.data.shards.remote import ShardCache
from diffvision.data.shards.sample import BadSample
from diffvision.data.shards.writer import write_manifest, write_tar

LENIENT = Limits(max_bad_fraction=1.0)
EACH = 10


def crossed(data, *, samples=EACH):
    """A tar of the same size whose first captions have changed places with those of their neighbours."""
    target = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(data)) as source:
        members = source.getmembers()
        names = [member.name for member in members]
        captions = [number for number, name in enumerate(names[: 3 * samples]) if name.endswith(".txt")]
        order = list(range(len(names)))
        for first, second in zip(captions[::2], captions[1::2], strict=False):
            order[first], order[second] = second, first
        blocks = [data[member.offset : member.offset + 1024] for member in members]
        target.write(b"".join(blocks[number] for number in order))
    return target.getvalue() + data[len(target.getvalue()) :]


def overwrite(path, data):
    """Write into the file, which keeps its inode."""
    with open(path, "r+b") as file:
        file.write(data)
        file.truncate()


def rest(corpus, batches):
    """The numbers of the batches that are left, images and captions in agreement."""
    for batch in batches:
        assert corpus.numbers(batch["image"]) == batch["text"][:, 0].tolist()
        yield from batch["text"][:, 0].tolist()


# ---------------------------------------------------------------------------------------------------------------------
# Changed during a run


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_shard_that_is_overwritten_is_compared_with_its_manifest_again(corpus, tmp_path, num_workers):
    source = corpus.write(tmp_path / "s", 60)
    loader = corpus.loader(source, limits=LENIENT, num_workers=num_workers)
    batches = iter(loader)
    next(batches)  # all shards are open: they are shuffled together
    for path in sorted(source.glob("*.tar"))[:3]:
        overwrite(path, crossed(path.read_bytes()))
    list(rest(corpus, batches))
    report = loader.report
    # A worker reads on meanwhile, and may open a shard between two writes.
    reasons = {"shard not as its manifest says (sha256)", *(["unreadable shard"] if num_workers else [])}
    assert set(report.skipped) <= reasons
    assert 0 < report.bad <= 30
    assert report.seen + report.bad == report.total == 60


def test_a_shard_that_is_overwritten_with_the_same_is_read_on(corpus, tmp_path):
    source = corpus.write(tmp_path / "s", 60)
    loader = corpus.loader(source)
    batches = iter(loader)
    seen = next(batches)["text"][:, 0].tolist()
    for number, path in enumerate(sorted(source.glob("*.tar"))):
        data = path.read_bytes()
        if number % 2:
            path.unlink()
            path.write_bytes(data)
        else:
            overwrite(path, data)
            os.utime(path, ns=(1, number))
    path.chmod(0o400)
    (tmp_path / "link").hardlink_to(path)
    seen += rest(corpus, batches)
    assert sorted(seen) == list(range(60))
    assert loader.report.bad == 0


def test_a_shard_that_is_being_written_is_no_cut_one(corpus, tmp_path):
    source = corpus.write(tmp_path / "s", 60)
    loader = corpus.loader(source, limits=LENIENT)
    batches = iter(loader)
    next(batches)
    for path in sorted(source.glob("*.tar"))[:3]:
        overwrite(path, crossed(path.read_bytes())[:-12000])
    list(rest(corpus, batches))
    assert set(loader.report.skipped) == {"shard not as its manifest says (bytes)"}


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_without_a_manifest_a_changed_shard_is_an_error(corpus, tmp_path, counted, reopened):
    source = corpus.write(tmp_path / "s", 60, manifest=False)
    if counted:
        (source / "sizes.json").write_text(json.dumps({f"{n:06d}.tar": EACH for n in range(6)}))
    loader = corpus.loader(source, window=1, limits=LENIENT)
    batches = iter(loader)
    next(batches)
    for path in source.glob("*.tar"):
        overwrite(path, crossed(path.read_bytes()))
    with pytest.raises(ValueError, match=r"\.tar was changed after it was"):
        list(rest(corpus, batches))
    first = loader.order(0).samples(0, 1)[0][0]
    if reopened:
        loader.shards.reader(first).close()  # as when more shards are open than may be
    with pytest.raises(ValueError, match=r"\.tar was changed after it was"):
        loader.shards.members((first, 0))["png"]


def test_an_open_shard_is_read_on_when_another_takes_its_name(corpus, tmp_path):
    source = corpus.write(tmp_path / "s", 60)
    loader = corpus.loader(source, limits=LENIENT)
    batches = iter(loader)
    seen = next(batches)["text"][:, 0].tolist()
    for path in source.glob("*.tar"):
        data = crossed(path.read_bytes())
        path.unlink()
        path.write_bytes(data)
    seen += rest(corpus, batches)
    assert sorted(seen) == list(range(60))
    shards = loader.shards
    for number in range(6):
        shards.reader(number).close()  # as when more shards are open than may be
        with pytest.raises(BadSample, match="shard not as its manifest says"):
            shards.members((number, 0))


def test_a_worker_believes_no_file_that_it_has_not_compared(corpus, tmp_path):
    """What the process that started it knows is of another version of the file."""
    source = corpus.write(tmp_path / "s", 60)
    shards = ShardSet(source)
    for number in range(6):
        shards.members((number, 0))["txt"]
    for path in source.glob("*.tar"):
        data = crossed(path.read_bytes())
        path.unlink()
        path.write_bytes(data)
    copy = pickle.loads(pickle.dumps(shards))
    for number in range(6):
        with pytest.raises(BadSample, match="shard not as its manifest says"):
            copy.members((number, 0))


def replaced(path, data):
    """By another file of this name, size and time of change."""
    before, part = path.stat(), path.with_suffix(".part")
    part.write_bytes(data)
    assert part.stat().st_size == before.st_size
    os.utime(part, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(part, path)


def reopened(shards, *, worker):
    """A shard set that has to open its shards again; in a worker it is an unpickled copy."""
    if worker:
        return pickle.loads(pickle.dumps(shards))
    for number in range(len(shards.counts)):
        shards.reader(number).close()
    return shards


@pytest.mark.parametrize("worker", [False, True])
@pytest.mark.parametrize("counted", ["headers", "sizes", "sizes, not opened"])
def test_without_a_manifest_another_file_must_hold_the_same(corpus, tmp_path, counted, worker):
    source = corpus.write(tmp_path / "s", 20, manifest=False)
    if counted != "headers":
        (source / "sizes.json").write_text(json.dumps({f"{n:06d}.tar": EACH for n in range(2)}))
    shards = ShardSet(source)
    for number in range(0 if counted.endswith("opened") else 2):
        shards.members((number, 0))["txt"]
    path = source / "000001.tar"
    replaced(path, path.read_bytes())
    path.chmod(0o400)
    shards = reopened(shards, worker=worker)
    assert shards.members((1, 0))["txt"] == b"sample 10"
    replaced(path, crossed(path.read_bytes()))
    with pytest.raises(ValueError, match=r"000001\.tar was changed after"):
        reopened(shards, worker=worker).members((1, 0))


def test_a_shard_overwritten_with_its_times_restored_is_compared_with_its_manifest_again(corpus, tmp_path):
    source = corpus.write(tmp_path / "s", 20)
    shards = ShardSet(source)
    path = source / "000001.tar"
    assert shards.members((1, 0))["txt"] == b"sample 10"
    before = path.stat()
    overwrite(path, path.read_bytes().replace(b"sample 10", b"another10"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(BadSample, match="shard not as its manifest says"):
        shards.members((1, 0))


def test_the_use_of_a_cached_copy_is_no_change(corpus, tmp_path, serve, monkeypatch):
    url, _ = serve(corpus.write(tmp_path / "s", 20))
    shards = ShardSet(url, ShardCache(tmp_path / "cache"))
    shards.members((1, 0))
    monkeypatch.setattr(reader, "sha256_of", None)
    opened = shards.reader(1)._opened
    with shards.cache.hold(shards.shards[1]):
        pass
    assert shards.members((1, 0))["txt"] == b"sample 10"
    assert shards.reader(1)._opened is opened


def test_a_distant_shard_that_is_fetched_again_must_be_the_same(corpus, tmp_path, serve):
    source = corpus.write(tmp_path / "s", 20, manifest=False)
    url, _ = serve(source)
    shards = ShardSet([f"{url}/000000.tar", f"{url}/000001.tar"], ShardCache(tmp_path / "cache"))

    def fetched_again():
        for number in range(2):
            shards.reader(number).close()
        for path in (tmp_path / "cache").glob("*.tar"):
            path.unlink()

    assert shards.members((1, 2))["txt"] == b"sample 12"
    fetched_again()
    assert shards.members((1, 2))["txt"] == b"sample 12"
    fetched_again()
    path = source / "000001.tar"
    before = path.stat()
    overwrite(path, crossed(path.read_bytes()))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # so that the server does not notice it
    with pytest.raises(ValueError, match=r"000001\.tar was changed after"):
        shards.members((1, 2))


# ---------------------------------------------------------------------------------------------------------------------
# Another shard than the manifest's


def test_a_whole_shard_that_is_shorter_is_another_one(corpus, tmp_path):
    source = corpus.write(tmp_path / "s", 60)
    other = [corpus.sample(number) | {"__key__": f"{number - 900:06d}"} for number in range(920, 930)]
    write_tar(source / "000002.tar", [{k: v for k, v in sample.items() if k != "cls"} for sample in other])
    with pytest.warns(UserWarning, match="its manifest says"):
        loader = corpus.loader(source, limits=LENIENT)
    seen = {number for batch in corpus.read(loader) for number in batch}
    assert seen == set(range(60)) - set(range(20, 30))
    assert loader.report.skipped == {"shard not as its manifest says (bytes)": 10}
    (source / "manifest.json").unlink()
    loader = corpus.loader(source, limits=LENIENT)  # sizes.json agrees, and no more is known
    assert 929 in {number for batch in corpus.read(loader) for number in batch}


def test_a_whole_shard_with_fewer_samples_than_were_counted_is_another_one(corpus, tmp_path):
    source = corpus.write(tmp_path / "s", 60)
    (source / "manifest.json").unlink()
    write_tar(source / "000002.tar", [corpus.sample(number) for number in range(900, 905)])
    loader = corpus.loader(source, limits=LENIENT)
    seen = {number for batch in corpus.read(loader) for number in batch}
    assert seen == set(range(60)) - set(range(20, 30))
    assert loader.report.skipped == {"shard not as its manifest says (samples)": 10}


def test_a_manifest_that_was_written_of_a_damaged_shard_hides_nothing(corpus, tmp_path):
    """Before zeros inside of a tar were seen, `write_manifest` recorded what lies before them."""
    source = corpus.write(tmp_path / "s", 60)
    path = source / "000002.tar"
    data = bytearray(path.read_bytes())
    data[9 * 3072 : 9 * 3072 + 512] = bytes(512)
    path.write_bytes(data)
    manifest = json.loads((source / "manifest.json").read_text())
    manifest["shards"][2] |= {"samples": 9, "sha256": hashlib.sha256(data).hexdigest()}
    (source / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"000002\.tar is damaged after 9"):
        corpus.read(corpus.loader(source))


# ---------------------------------------------------------------------------------------------------------------------
# Sidecars


def test_the_index_of_another_tar_of_the_same_size_and_time_gives_no_wrong_pair(corpus, tmp_path):
    source = corpus.write(tmp_path / "s", 100, per_shard=100, manifest=False)
    path = source / "000000.tar"
    shard_index(path)
    before, data = path.stat(), path.read_bytes()
    overwrite(path, crossed(data))  # captions and images apart: these are other samples
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    loader = corpus.loader(source, limits=LENIENT)
    seen = [number for batch in corpus.read(loader) for number in batch]  # image and caption in agreement
    assert len(seen) == loader.report.seen + loader.report.substituted
    assert loader.report.bad


def test_a_shard_without_a_manifest_overwritten_with_its_times_restored_is_an_error(corpus, tmp_path):
    source = corpus.write(tmp_path / "s", 20, manifest=False)
    shards, path = ShardSet(source), source / "000001.tar"
    assert shards.members((1, 0))["txt"] == b"sample 10"
    before = path.stat()
    overwrite(path, crossed(path.read_bytes()))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ValueError, match=r"000001\.tar was changed after"):
        shards.members((1, 0))


# ---------------------------------------------------------------------------------------------------------------------
# Shards with other content


def other_content(corpus, directory, **settings):
    """The same names, counts and keys; other samples."""
    return corpus.write(
        directory, change=lambda s: corpus.sample(int(s["__key__"]) + 100) | {"__key__": s["__key__"]}, **settings
    )


def longer(corpus, directory, **settings):
    """The same names, counts and keys; captions of another length."""
    return corpus.write(directory, change=lambda s: s | {"txt": f"a {s['txt']}"}, **settings)


@pytest.mark.parametrize("known", ["sha256", "members", "ends"])
def test_a_run_does_not_resume_on_other_content(corpus, tmp_path, known):
    def made(make, name):
        directory = make(tmp_path / name, count=40, manifest=known != "members")
        if known == "ends":
            (directory / "manifest.json").unlink()
        return directory

    other = longer if known == "members" else other_content
    here, there = made(corpus.write, "here"), made(lambda *args, **kw: other(corpus, *args, **kw), "there")
    moved = made(corpus.write, "moved")
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
    with pytest.warns(UserWarning, match="the checkpoint knows their members"):
        corpus.loader(source).load_state_dict(state)
    del state["content"]  # as earlier versions wrote it
    loader = corpus.loader(source)
    with pytest.warns(UserWarning, match="the checkpoint knows their names"):
        loader.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.load_state_dict(loader.state_dict())


# ---------------------------------------------------------------------------------------------------------------------
# What one sample is


def write_members(path, *members):
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return ShardSet(path)


def test_a_sample_is_a_dictionary_of_its_members_and_is_read_at_once(tmp_path, monkeypatch):
    between = ("a.mp4", bytes(1000)), ("a.npy", b"not read")
    shards = write_members(tmp_path / "a.tar", ("a.TXT", b"one"), *between, ("a.json", b"{}"), ("b.txt", b"two"))
    reads, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, offset: reads.append(size) or pread(file, size, offset))
    assert shards.members((0, 0)) == {"txt": b"one", "json": b"{}", "npy": b"", "mp4": b""}
    assert shards.members((0, 1)) == {"txt": b"two"}
    assert len(reads) == 2
    with pytest.raises(BadSample, match="truncated shard"):
        shards.members((0, 2))


def test_what_lies_between_members_is_read_only_if_it_is_little(tmp_path, monkeypatch):
    shards = write_members(tmp_path / "a.tar", ("a.txt", b"one"), ("a.mp4", bytes(1 << 20)), ("a.cls", b"1"))
    reads, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, offset: reads.append(size) or pread(file, size, offset))
    assert shards.members((0, 0)) == {"txt": b"one", "cls": b"1", "mp4": b""}
    assert reads == [3, 1]


def test_no_more_than_can_be_used_of_a_member_is_read(tmp_path):
    shards = write_members(tmp_path / "a.tar", ("a.cls", bytes(5000)), ("a.txt", b"one"), ("b.txt", b"two"))
    members = shards.members((0, 0))
    assert (len(members["cls"]), members["txt"]) == (1025, b"one")
    with (tmp_path / "b.tar").open("wb") as file:  # whose images are holes in the file
        for number in range(11):
            member = tarfile.TarInfo(f"a.{number}.jpg")
            member.size = 1 << 30
            file.write(member.tobuf(tarfile.GNU_FORMAT))
            file.seek(member.size, os.SEEK_CUR)
        file.write(bytes(1024))
    with pytest.raises(BadSample, match="sample too large"):
        ShardSet(tmp_path / "b.tar").members((0, 0))
