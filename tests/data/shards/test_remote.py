"""Servers that stall, fail, cut off and come back, on this machine and with small limits."""

import errno
import gzip
import hashlib
import http.server
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fsspec.implementations.http import HTTPFileSystem

from diffvision.data.shards import remote
from diffvision.data.shards.reader import ShardReader
from diffvision.data.shards.remote import Shard, ShardCache, read, without_secrets
from diffvision.data.shards.report import Limits
from diffvision.files import sha256
from tests.data.conftest import fetch

TRIES = 4


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    for name, value in {"_TRIES": TRIES, "_PAUSE": 0.05, "_READ": 0.2}.items():
        monkeypatch.setattr(remote, name, value)


class Server(http.server.ThreadingHTTPServer):
    """Answers each request for the file with the next of `answers`, the last one for ever; a URL is a redirect."""

    daemon_threads = True

    def __init__(self, data, answers):
        super().__init__(("127.0.0.1", 0), Handler)
        self.data, self.answers, self.times = data, list(answers), []

    @property
    def shard(self):
        return Shard(f"http://127.0.0.1:{self.server_port}/000000.tar")


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.times.append(time.monotonic())
        answer = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
        if isinstance(answer, int) or "/" in answer:
            self.send_response(answer if isinstance(answer, int) else 302)
            if isinstance(answer, str):
                self.send_header("Location", answer)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        if answer == "encoded":
            self.send_header("Content-Encoding", "gzip")
        if answer != "cut without length":
            self.send_header("Content-Length", str(len(server.data)))
        self.end_headers()
        half = len(server.data) // 2
        if answer in ("good", "encoded"):
            self.wfile.write(server.data)
        else:
            self.wfile.write(server.data[:half])
            if answer == "stall":
                time.sleep(1.0)
        self.close_connection = True

    def do_HEAD(self):
        self.send_response(405)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def serving(whole):
    servers = []

    def start(*answers):
        servers.append(Server((whole / "000000.tar").read_bytes(), answers))
        threading.Thread(target=servers[-1].serve_forever, args=(0.02,), daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def cache(tmp_path):
    return ShardCache(tmp_path / "cache")


@pytest.mark.parametrize(
    "answers",
    [(500, 503, 429, "good"), ("stall", "good"), ("cut", "cut", "good")],
    ids=["errors", "stalls", "cut-off"],
)
def test_what_may_pass_is_asked_for_again_with_growing_pauses(serving, cache, whole, answers, caplog):
    server = serving(*answers)
    assert fetch(cache, server.shard).read_bytes() == (whole / "000000.tar").read_bytes()
    assert len(server.times) == len(answers)
    gaps = [b - a for a, b in zip(server.times, server.times[1:], strict=False)]
    assert all(gap >= 0.05 * 2**number for number, gap in enumerate(gaps))
    assert len(caplog.records) == len(answers) - 1
    assert not list(cache.directory.glob("*.part"))


@pytest.mark.parametrize(("status", "error"), [(404, "does not exist"), (403, "Forbidden"), (401, "Unauthorized")])
def test_what_cannot_pass_is_an_error_at_once(serving, cache, status, error):
    server = serving(status)
    with pytest.raises(OSError, match=f"cannot fetch shard http.*{error}"):
        fetch(cache, server.shard)
    assert len(server.times) == 1


@pytest.mark.parametrize(
    ("answer", "error"),
    [(500, "Internal Server Error"), ("stall", "imeout"), ("cut", "payload is not completed")],
)
def test_patience_ends(serving, cache, answer, error):
    server = serving(answer)
    with pytest.raises(OSError, match=f"cannot fetch shard http.*{error}"):
        fetch(cache, server.shard)
    assert len(server.times) == TRIES
    assert not list(cache.directory.glob("*.tar")) + list(cache.directory.glob("*.part"))


def test_a_redirect_is_followed(serving, cache, whole):
    shard = serving(serving("good").shard.location).shard
    assert fetch(cache, shard).read_bytes() == (whole / "000000.tar").read_bytes()


def test_a_gzip_that_its_server_calls_an_encoding_is_unpacked_once(serving, cache, whole):
    server = serving("encoded")
    data, server.data = server.data, gzip.compress(server.data)
    assert fetch(cache, Shard(f"{server.shard.location}.gz")).read_bytes() == data


def test_half_a_shard_without_a_length_is_told_by_the_manifest(serving, cache, whole):
    data = (whole / "000000.tar").read_bytes()
    server = serving("cut without length", "good")
    shard = Shard(server.shard.location, samples=10, bytes=len(data))
    assert fetch(cache, shard).read_bytes() == data
    assert len(server.times) == 2


def test_small_files_are_waited_for_too(serving, whole):
    server = serving(503, "stall", "good")
    assert read(server.shard.location) == (whole / "000000.tar").read_bytes()
    assert read(serving(404).shard.location) is None
    with pytest.raises(OSError, match="Service Unavailable"):
        read(serving(503).shard.location)


def test_an_unreadable_shard_is_asked_for_less_and_less(corpus, serving, tmp_path, monkeypatch):
    """Its samples are counted at once; or an epoch would wait for each of them."""
    monkeypatch.setattr(remote, "_TRIES", 1)
    server, cache = serving(500), ShardCache(tmp_path)
    good = corpus.write(tmp_path / "s", 90)
    (tmp_path / "s" / "sizes.json").write_text("{}")
    shards = [str(p) for p in sorted(good.glob("*.tar"))]
    monkeypatch.setattr("diffvision.data.shards.sources.read_counts", lambda directory: {"000000.tar": {"samples": 10}})
    monkeypatch.setattr(ShardCache, "pin", lambda self, shards: [replace(shard, version="1") for shard in shards])
    loader = corpus.loader([*shards[1:], server.shard.location], cache=cache, limits=Limits(1.0))
    corpus.read(loader)
    corpus.read(loader)
    assert loader.report.skipped == {"unreadable shard": 10}
    assert len(server.times) <= 4  # a thread fetches ahead


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


def test_a_full_disk_is_one_error_at_once_and_no_bad_sample(serving, cache, monkeypatch):
    server, tries = serving("good"), []

    async def full(files, location, target, **_):
        tries.append(location)
        raise OSError(errno.ENOSPC, "No space left on device", target)

    monkeypatch.setattr(HTTPFileSystem, "_get_file", full)
    HTTPFileSystem.clear_instance_cache()  # an instance keeps the methods that it was made with
    reader = ShardReader(replace(server.shard, samples=20), cache)
    for attempt in (lambda: fetch(cache, server.shard), lambda: reader._open()):
        with pytest.raises(OSError, match="cache_bytes") as caught:
            attempt()
        assert caught.value.errno == errno.ENOSPC
    assert len(tries) == 2
    HTTPFileSystem.clear_instance_cache()


def test_a_copy_that_lost_its_content_is_fetched_again_and_a_good_one_is_read_once(serving, cache, whole, monkeypatch):
    data, read = (whole / "000000.tar").read_bytes(), []
    server = serving("good")
    shard = replace(server.shard, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    monkeypatch.setattr("diffvision.data.shards.sidecars.sha256", lambda path, _: read.append(path) or sha256(path))
    copy = fetch(cache, shard)
    assert fetch(cache, shard) == copy
    assert (len(server.times), read) == (1, [])  # compared as it came, and noted
    copy.write_bytes(bytes(len(data)))
    assert fetch(cache, shard).read_bytes() == data
    assert (len(server.times), read) == (2, [copy])
    ShardCache(cache.directory, max_bytes=1)._make_room(0)
    assert [path.name for path in cache.directory.rglob("*") if path.is_file()] == ["room.lock"]


def test_messages_have_no_secrets_of_a_url(serving, cache, caplog):
    shard = serving(500, 403).shard
    secret = replace(shard, location=shard.location.replace("://", "://user:secret@") + "?token=secret")
    with pytest.raises(OSError, match="cannot fetch shard http://127") as caught:
        fetch(cache, secret)
    assert "secret" not in "".join([str(caught.value), *(record.getMessage() for record in caplog.records)])
    assert without_secrets("s3://bucket/a.tar and /local/what?.tar") == "s3://bucket/a.tar and /local/what?.tar"
