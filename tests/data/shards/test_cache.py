"""Remote shards and their bounded cache, from servers that stall, fail, cut off, replace and come back."""

import errno
import hashlib
import json
import multiprocessing
import os
import pickle
import signal
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fsspec.implementations.http import HTTPFileSystem

from diffvision.data import Limits, ShardSet
from diffvision.data.shards import remote
from diffvision.data.shards.reader import ShardReader
from diffvision.data.shards.remote import Shard, ShardCache, read, without_secrets
from diffvision.data.shards.sample import BadSample
from diffvision.data.shards.sources import find_shards
from diffvision.data.shards.writer import write_tar
from tests.data.conftest import Quiet, fetch

TRIES = 4


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    for name, value in {"_PAUSE": 0.02, "_LONGEST_PAUSE": 0.1, "_READ": 0.2}.items():
        monkeypatch.setattr(remote, name, value)


class Failing(Quiet):
    """Answers each request for a file with the next of `answers`, the last one for ever; a URL is a redirect."""

    def do_GET(self):
        self.server.times.append(time.monotonic())
        answers = self.server.answers
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer == "good":
            super().do_GET()
        elif isinstance(answer, int):
            self.send_error(answer)
        elif "/" in answer:
            self.send_response(302)
            self.send_header("Location", answer)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            data = Path(self.translate_path(self.path)).read_bytes()
            self.send_response(200)
            if answer != "cut without length":
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            if answer == "stall":
                time.sleep(1.0)
            self.close_connection = True


@pytest.fixture
def serving(whole, serve):
    def start(*answers):
        server = serve(whole, Failing)
        server.answers, server.times, server.shard = list(answers), [], Shard(f"{server.url}/000000.tar")
        return server

    return start


@pytest.fixture
def cache(tmp_path):
    return ShardCache(tmp_path / "cache", max_bytes=10**6)


def tars(cache):
    return sorted(path.name.partition("-")[2] for path in cache.directory.glob("*.tar"))


# ---- servers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "tries", "error"),
    [
        ((500, 503, 429, "good"), 4, None),
        (("stall", "good"), 2, None),
        (("cut", "cut", "good"), 3, None),
        (("cut without length", "good"), 2, None),
        ((404,), 1, "does not exist"),
        ((403,), 1, "Forbidden"),
        ((500,), TRIES, "Internal Server Error"),
        (("stall",), TRIES, "imeout"),
        (("cut",), TRIES, "payload is not completed"),
    ],
)
def test_what_may_pass_is_asked_for_again_with_growing_pauses(serving, cache, whole, answers, tries, error, caplog):
    data, server = (whole / "000000.tar").read_bytes(), serving(*answers)
    shard = replace(server.shard, samples=10, bytes=len(data))
    with pytest.raises(OSError, match=f"cannot fetch shard http.*{error}") if error else nullcontext():
        assert fetch(cache, shard).read_bytes() == data
    gaps = [b - a for a, b in zip(server.times, server.times[1:], strict=False)]
    assert len(server.times) == tries
    assert all(gap >= 0.02 * 2**number for number, gap in enumerate(gaps))
    assert len(caplog.records) == tries - 1
    assert len(list(cache.directory.glob("*.tar"))) == (error is None)
    assert not list(cache.directory.glob("*.part"))


def test_small_files_are_waited_for_too_and_redirects_followed(serving, cache, whole):
    data, server = (whole / "000000.tar").read_bytes(), serving(503, "stall", "good")
    assert read(server.shard.location) == data
    assert read(serving(404).shard.location) is None
    with pytest.raises(OSError, match="Service Unavailable"):
        read(serving(503).shard.location)
    assert fetch(cache, serving(server.shard.location).shard).read_bytes() == data


def test_an_unreadable_shard_is_not_asked_for_at_each_sample(corpus, serving, tmp_path):
    """Its samples are counted at once; or an epoch would wait for each of them."""
    server, good = serving(404), corpus.write(tmp_path / "s", 90, manifest=False)
    bad = replace(server.shard, samples=10, version="1")
    loader = corpus.loader([str(good), bad], cache=ShardCache(tmp_path), limits=Limits(1.0))
    corpus.read(loader)
    corpus.read(loader)
    assert (loader.report.skipped, loader.report.seen) == ({"unreadable shard": 10}, 90)
    assert len(server.times) <= 4  # a thread fetches ahead


def test_a_full_disk_is_one_error_at_once_and_no_bad_sample(serving, cache, monkeypatch):
    server, tries = serving("good"), []

    async def full(files, location, target, **_):
        tries.append(location)
        raise OSError(errno.ENOSPC, "No space left on device", target)

    monkeypatch.setattr(HTTPFileSystem, "_get_file", full)
    HTTPFileSystem.clear_instance_cache()  # an instance keeps the methods that it was made with
    reader = ShardReader(replace(server.shard, samples=20), cache)
    for attempt in (lambda: fetch(cache, server.shard), lambda: reader.index):
        with pytest.raises(OSError, match="No space left") as caught:
            attempt()
        assert caught.value.errno == errno.ENOSPC
    assert len(tries) == 2
    HTTPFileSystem.clear_instance_cache()


def test_messages_have_no_secrets_of_a_url(serving, cache, caplog):
    shard = serving(500, 403).shard
    secret = replace(shard, location=shard.location.replace("://", "://user:secret@") + "?token=secret")
    with pytest.raises(OSError, match="cannot fetch shard http://127") as caught:
        fetch(cache, secret)
    assert "secret" not in "".join([str(caught.value), *(record.getMessage() for record in caplog.records)])
    assert without_secrets("s3://bucket/a.tar and /local/what?.tar") == "s3://bucket/a.tar and /local/what?.tar"


# ---- copies ---------------------------------------------------------------------------------------------------------


def test_a_copy_is_fetched_again_only_if_it_lost_its_content(serving, cache, whole):
    data, server = (whole / "000000.tar").read_bytes(), serving("good")
    shard = replace(server.shard, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    copy = fetch(cache, shard)
    assert fetch(cache, shard) == copy
    assert len(server.times) == 1
    copy.write_bytes(bytes(len(data)))
    assert fetch(cache, shard).read_bytes() == data
    assert len(server.times) == 2
    os.truncate(copy, 1000)
    assert fetch(cache, shard).read_bytes() == data
    assert len(server.times) == 3


def test_the_least_recently_used_shards_make_room(whole, serve, cache):
    url = serve(whole).url
    size = (whole / "000000.tar").stat().st_size
    cache.max_bytes = 3 * size
    shards = [Shard(f"{url}/00000{n}.tar") for n in range(5)]
    for number in (0, 1, 2, 0, 3, 4):
        fetch(cache, shards[number])
        time.sleep(0.01)
    assert tars(cache) == ["000000.tar", "000003.tar", "000004.tar"]
    cache.max_bytes = size - 1
    with pytest.raises(ValueError, match="cache_bytes"):
        ShardSet(shards[1], cache)
    assert not list(cache.directory.glob("*.part"))


@pytest.mark.parametrize("shard", [{"bytes": 7}, {"sha256": "0" * 64}])
def test_what_is_not_as_the_manifest_says_is_refused(whole, serve, cache, shard):
    url = serve(whole).url
    with pytest.raises(OSError, match=f"{next(iter(shard)).replace('bytes', 'size')} "):
        fetch(cache, Shard(f"{url}/000000.tar", **shard))
    assert not list(cache.directory.glob("*.tar")) + list(cache.directory.glob("*.part"))


@pytest.mark.parametrize(("room", "num_workers"), [(1.05, 0), (1.05, 2), (4, 2), (20, 0)])
def test_training_from_a_web_server_is_training_from_disk(corpus, whole, serve, cache, room, num_workers):
    server = serve(whole)
    cache.max_bytes = int(room * (whole / "000000.tar").stat().st_size)
    local = corpus.loader(whole, seed=5, window=2)
    source = f"{server.url}/{{000000..000010}}.tar"
    remote = corpus.loader(source, cache=cache, seed=5, window=2, num_workers=num_workers, limits=Limits(1.0))
    assert not any("000000.tar" in str(line) for line in server.requests)  # counts come from the manifest alone
    assert find_shards(f"{server.url}/") == find_shards(source)
    assert corpus.read(remote) == corpus.read(local)
    assert remote.state_dict() == local.state_dict()
    assert remote.report.skipped == {}
    assert len(tars(cache)) <= max(room, 2)  # another process may hold one


def test_a_shard_that_is_held_makes_no_room(whole, serve, cache):
    """Between its fetching and its opening another process may make room: the shard counted as unreadable then."""
    url = serve(whole).url
    cache.max_bytes = int(1.05 * (whole / "000000.tar").stat().st_size)
    shards = [Shard(f"{url}/00000{n}.tar") for n in range(3)]
    with cache.hold(shards[0]) as path:
        fetch(cache, shards[1])
        assert path.exists()
    fetch(cache, shards[2])
    assert tars(cache) == ["000002.tar"]


def test_what_a_killed_download_left_is_removed(whole, serving, cache):
    server, size = serving("stall"), (whole / "000000.tar").stat().st_size
    process = multiprocessing.get_context("fork").Process(target=fetch, args=(cache, server.shard))
    process.start()
    while not any(path.stat().st_size for path in cache.directory.glob("*.part")):
        time.sleep(0.01)
    cache._make_room(10**6)
    assert list(cache.directory.glob("*.part"))  # it lives
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    server.answers = ["good"]
    cache.max_bytes = size
    fetch(cache, Shard(server.shard.location.replace("000000", "000001")))
    assert not list(cache.directory.glob("*.part"))
    assert tars(cache) == ["000001.tar"]


# ---- versions -------------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(corpus, tmp_path):
    """Three shards with sizes.json and no manifest, so that their content is not known."""
    source = corpus.write(tmp_path / "counted", 30, manifest=False)
    (source / "sizes.json").write_text(json.dumps({f"00000{n}.tar": 10 for n in range(3)}))
    return source


def replace_shard(corpus, path, first, later=5):
    """Another shard of as many samples, `later` seconds younger than the one that was there."""
    before = path.stat()
    write_tar(path, [corpus.sample(n) for n in range(first, first + 10)])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + later * 10**9))


@pytest.mark.parametrize("sizes", [True, False], ids=["sizes.json", "nothing"])
def test_a_shard_that_its_server_replaced_is_fetched_again_by_the_next_run(corpus, counted, serve, cache, sizes):
    if not sizes:
        (counted / "sizes.json").unlink()
    server = serve(counted)
    source = f"{server.url}/{{000000..000002}}.tar"
    assert sorted(n for batch in corpus.read(corpus.loader(source, cache=cache)) for n in batch) == [*range(30)]
    server.requests.clear()
    corpus.read(corpus.loader(source, cache=cache))
    assert sorted(path for path in server.requests if path.endswith(".tar")) == [f"/00000{n}.tar" for n in range(3)]
    replace_shard(corpus, counted / "000001.tar", 70)  # of the same size
    again = corpus.read(corpus.loader(source, cache=cache))
    assert sorted(n for batch in again for n in batch) == [*range(10), *range(20, 30), *range(70, 80)]
    (counted / "000001.tar").unlink()
    with pytest.raises(OSError, match=r"000001\.tar cannot be read: it does not exist"):
        ShardSet([f"{server.url}/00000{n}.tar" for n in range(3)], cache)


def test_what_replaces_a_shard_during_a_run_is_not_read_in_its_place(corpus, counted, serve, cache):
    url = serve(counted).url
    shards, kind = ShardSet([f"{url}/00000{n}.tar" for n in range(3)], cache), corpus.kind()
    assert kind.decode(shards.members((1, 0)))["text"] == "sample 10"
    replace_shard(corpus, counted / "000001.tar", 70)
    assert kind.decode(shards.members((1, 3)))["text"] == "sample 13"  # it is open
    for copy in cache.directory.glob("*.tar"):
        copy.unlink()
    shards = pickle.loads(pickle.dumps(shards))  # as another process has them
    with pytest.raises(BadSample, match="unreadable shard"):
        kind.decode(shards.members((1, 0)))
    assert kind.decode(shards.members((2, 0)))["text"] == "sample 20"


@pytest.mark.parametrize(
    ("scheme", "said", "same", "other"),
    [
        ("s3", {"ETag": '"a"', "LastModified": 1, "size": 5}, {"StorageClass": "COLD"}, {"ETag": '"b"'}),
        ("gs", {"generation": "7", "etag": "x", "size": 5}, {"etag": "y", "updated": 2}, {"generation": "8"}),
        ("https", {"ETag": '"a"', "Last-Modified": "x", "size": 5}, {"ETag": 'W/"a"'}, {"Last-Modified": "y"}),
        ("hf", {"size": 5, "blob_id": "a"}, {"last_commit": 1}, {"blob_id": "b"}),
        ("http", {"size": 5}, {"mimetype": "x"}, {"size": 6}),
    ],
)
def test_a_version_is_what_the_store_says_of_the_content(scheme, said, same, other, monkeypatch):
    files = SimpleNamespace(info=lambda path: answer, invalidate_cache=lambda path: None)
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda location, **settings: (files, location))
    pins = []
    for more in ({}, same, other):
        answer = said | more
        pins += ShardCache().pin([Shard(f"{scheme}://bucket/0.tar")])
    assert pins[0] == pins[1] != pins[2]
    assert pins[0].bytes == 5
