import gzip
import http.server
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import threading
import time

import pytest

from diffvision.data.shards.remote import Shard, ShardCache
from diffvision.data.shards.report import Limits
from diffvision.data.shards.sample import BadSample
from diffvision.data.shards.sources import find_shards
from diffvision.data.shards.storage import ShardSet
from diffvision.data.shards.writer import write_tar
from diffvision.data.text.tokenize import cached_tokens
from diffvision.data.text.tokenizers import train_tokenizer
from tests.data.conftest import fetch


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between tries
    return ShardCache(tmp_path / "cache", max_bytes=10**6)


def tars(cache):
    return sorted(path.name.partition("-")[2] for path in cache.directory.glob("*.tar"))


def test_a_remote_shard_is_fetched_once(corpus, whole, serve, cache):
    url, requests = serve(whole)
    shard = Shard(f"{url}/000002.tar")
    first, second = fetch(cache, shard), fetch(cache, shard)
    assert first == second
    assert first.read_bytes() == (whole / "000002.tar").read_bytes()
    assert len([path for path in requests if "000002.tar" in path]) == 1


def test_a_cut_copy_is_fetched_again(whole, serve, cache):
    (shard,) = cache.pin([Shard(f"{serve(whole)[0]}/000002.tar")])
    os.truncate(fetch(cache, shard), 1000)
    assert fetch(cache, shard).read_bytes() == (whole / "000002.tar").read_bytes()


def test_the_least_recently_used_shards_make_room(whole, serve, cache):
    url, _ = serve(whole)
    size = (whole / "000000.tar").stat().st_size
    cache.max_bytes = 3 * size
    shards = [Shard(f"{url}/00000{n}.tar") for n in range(5)]
    for number in (0, 1, 2, 0, 3, 4):
        fetch(cache, shards[number])
    assert tars(cache) == ["000000.tar", "000003.tar", "000004.tar"]
    assert not list(cache.directory.glob("*.part"))
    cache.max_bytes = size - 1
    with pytest.raises(OSError, match="cache_bytes"):
        fetch(cache, shards[1])
    with pytest.raises(ValueError, match="cache_bytes"):
        ShardSet(shards[1], cache)


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        ({"bytes": 7}, "must be 7 bytes"),
        ({"sha256": "0" * 64}, "sha256 is not the manifest's"),
    ],
)
def test_what_is_not_as_the_manifest_says_is_refused(whole, serve, cache, shard, message):
    url, _ = serve(whole)
    with pytest.raises(OSError, match=message):
        fetch(cache, Shard(f"{url}/000000.tar", **shard))
    assert not tars(cache)
    assert not list(cache.directory.glob("*.part"))


def test_compressed_shards_are_unpacked_once_and_anew_when_they_change(corpus, whole, tmp_path, cache):
    source = tmp_path / "s"
    source.mkdir()
    for number in range(3):
        packed = gzip.compress((whole / f"00000{number}.tar").read_bytes())
        (source / f"00000{number}.tar.gz").write_bytes(packed)
    loader = corpus.loader(source, cache=cache)
    assert sorted(n for batch in corpus.read(loader) for n in batch) == list(range(30))
    assert tars(cache) == ["000000.tar", "000001.tar", "000002.tar"]
    (source / "000002.tar.gz").write_bytes(gzip.compress((whole / "000009.tar").read_bytes()))
    again = corpus.read(corpus.loader(source, cache=cache))
    assert sorted(n for batch in again for n in batch) == [*range(20), *range(90, 100)]


def test_a_decompression_bomb_stops_early(tmp_path, cache):
    bomb = tmp_path / "bomb.tar.gz"
    bomb.write_bytes(gzip.compress(bytes(50_000_000)))
    with pytest.raises(OSError, match="cache_bytes, 1,000,000"):
        fetch(cache, Shard(str(bomb)))
    assert not tars(cache)
    assert not list(cache.directory.glob("*.part"))


def test_a_cut_gzip_is_an_error_not_a_short_shard(whole, tmp_path, cache):
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(gzip.compress((whole / "000000.tar").read_bytes())[:-200])
    with pytest.raises(OSError, match="cannot fetch shard"):
        fetch(cache, Shard(str(cut)))
    assert not tars(cache)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_training_from_a_web_server_is_training_from_disk(corpus, whole, serve, cache, num_workers):
    url, requests = serve(whole)
    local = corpus.loader(whole, seed=5, window=2)
    remote = corpus.loader(f"{url}/{{000000..000010}}.tar", cache=cache, seed=5, window=2, num_workers=num_workers)
    assert "/manifest.json" in str(requests)
    assert not any("000000.tar" in str(line) for line in requests)  # counts come from the manifest alone
    assert corpus.read(remote) == corpus.read(local)
    assert remote.state_dict() == local.state_dict()


def test_a_cache_smaller_than_the_data_still_gives_all_of_it(corpus, whole, serve, cache):
    url, _ = serve(whole)
    cache.max_bytes = 4 * (whole / "000000.tar").stat().st_size
    remote = corpus.loader(f"{url}/{{000000..000010}}.tar", cache=cache, seed=5, window=2)
    assert corpus.read(remote) == corpus.read(corpus.loader(whole, seed=5, window=2))
    assert len(tars(cache)) <= 4


def test_a_remote_shard_that_goes_away_is_counted(corpus, whole, tmp_path, serve, cache):
    source = corpus.write(tmp_path / "s", 100)
    url, _ = serve(source)
    loader = corpus.loader(f"{url}/{{000000..000009}}.tar", cache=cache, limits=Limits(1.0))
    os.unlink(source / "000004.tar")
    corpus.read(loader)
    assert loader.report.skipped == {"unreadable shard": 10}
    assert loader.report.seen == 90


def test_a_remote_manifest_gives_the_hashes_to_verify(whole, serve):
    url, _ = serve(whole)
    local, remote = find_shards(whole), find_shards(f"{url}/{{000000..000010}}.tar")
    assert [shard.sha256 for shard in remote] == [shard.sha256 for shard in local]
    assert [shard.samples for shard in remote] == [10] * 10 + [3]
    assert find_shards(f"{url}/") == remote
    with pytest.raises(ValueError, match=r"has no manifest\.json"):
        find_shards(f"{url}/elsewhere")


# ---- versions ------------------------------------------------------------------------------------------------------


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
    url, requests = serve(counted)
    source = f"{url}/{{000000..000002}}.tar"
    assert sorted(n for batch in corpus.read(corpus.loader(source, cache=cache)) for n in batch) == [*range(30)]
    requests.clear()
    corpus.read(corpus.loader(source, cache=cache))
    assert sorted(path for path in requests if path.endswith(".tar")) == [f"/00000{n}.tar" for n in range(3)]
    replace_shard(corpus, counted / "000001.tar", 70)  # of the same size
    again = corpus.read(corpus.loader(source, cache=cache))
    assert sorted(n for batch in again for n in batch) == [*range(10), *range(20, 30), *range(70, 80)]


def test_a_server_that_lacks_a_shard_is_an_error_at_the_start(corpus, counted, serve, cache):
    url, _ = serve(counted)
    (counted / "000001.tar").unlink()
    with pytest.raises(OSError, match=r"000001\.tar cannot be read: it does not exist"):
        ShardSet([f"{url}/00000{n}.tar" for n in range(3)], cache)


def without_copies(shards):
    """The shards as another process has them, after others made room in the cache."""
    for copy in shards.cache.directory.glob("*.tar"):
        copy.unlink()
    return pickle.loads(pickle.dumps(shards))


def test_what_replaces_a_shard_during_a_run_is_not_read_in_its_place(corpus, counted, serve, cache):
    url, _ = serve(counted)
    shards, kind = ShardSet([f"{url}/00000{n}.tar" for n in range(3)], cache), corpus.kind()
    assert kind.decode(shards.members((1, 0)))["text"] == "sample 10"
    replace_shard(corpus, counted / "000001.tar", 70)
    assert kind.decode(shards.members((1, 3)))["text"] == "sample 13"  # it is open
    shards = without_copies(shards)
    with pytest.raises(BadSample, match="unreadable shard"):
        kind.decode(shards.members((1, 0)))
    assert kind.decode(shards.members((2, 0)))["text"] == "sample 20"


def test_a_compressed_shard_that_is_overwritten_is_not_read_in_its_place(corpus, whole, tmp_path, cache):
    source = tmp_path / "000000.tar.gz"
    source.write_bytes(gzip.compress((whole / "000000.tar").read_bytes()))
    shards, kind = ShardSet(source, cache), corpus.kind()
    source.write_bytes(gzip.compress((whole / "000009.tar").read_bytes()))
    assert kind.decode(shards.members((0, 3)))["text"] == "sample 3"  # of its copy
    shards = without_copies(shards)
    with pytest.raises(BadSample, match="unreadable shard"):
        kind.decode(shards.members((0, 3)))


def test_tokens_of_text_that_its_server_replaced_are_made_again(tmp_path, serve):
    source = tmp_path / "text"
    source.mkdir()
    write_tar(source / "0.tar", [{"__key__": "0", "txt": "one two three"}])
    url, _ = serve(source)
    tokenizer = train_tokenizer(["one two three four"], 257)
    first = cached_tokens(ShardSet(f"{url}/0.tar"), tokenizer, num_workers=0)
    assert cached_tokens(ShardSet(f"{url}/0.tar"), tokenizer, num_workers=0) == first
    write_tar(source / "0.tar", [{"__key__": "0", "txt": "one two three four"}])
    os.utime(source / "0.tar", (0, 0))
    assert cached_tokens(ShardSet(f"{url}/0.tar"), tokenizer, num_workers=0) != first


TOKEN_DAMAGE = {
    "no account": lambda folder: (folder / "tokens.json").unlink(),
    "a cut file": lambda folder: os.truncate(folder / "tokens.bin", 4),
    "a file": lambda folder: (shutil.rmtree(folder), folder.touch()),
}


@pytest.mark.parametrize("damage", TOKEN_DAMAGE)
def test_damaged_tokens_are_made_again(damage, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    write_tar(tmp_path / "0.tar", [{"__key__": "0", "txt": "one two three"}])
    source, tokenizer = ShardSet(tmp_path / "0.tar"), train_tokenizer(["one two three four"], 257)
    folder = cached_tokens(source, tokenizer, num_workers=0)
    before = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    TOKEN_DAMAGE[damage](folder)
    assert cached_tokens(source, tokenizer, num_workers=0) == folder
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} == before


# ---- room ----------------------------------------------------------------------------------------------------------


def test_a_shard_that_is_held_makes_no_room(whole, serve, cache):
    """Between its fetching and its opening another process may make room: the shard counted as unreadable then."""
    url, _ = serve(whole)
    cache.max_bytes = int(1.05 * (whole / "000000.tar").stat().st_size)
    shards = [Shard(f"{url}/00000{n}.tar") for n in range(3)]
    with cache.hold(shards[0]) as path:
        fetch(cache, shards[1])
        assert path.exists()
    fetch(cache, shards[2])
    assert tars(cache) == ["000002.tar"]


@pytest.mark.filterwarnings("ignore:cache_bytes should be")
def test_a_cache_with_room_for_one_shard_loses_no_sample(corpus, whole, serve, cache):
    url, _ = serve(whole)
    cache.max_bytes = int(1.05 * (whole / "000000.tar").stat().st_size)
    source = f"{url}/{{000000..000010}}.tar"
    remote = corpus.loader(source, cache=cache, seed=5, window=4, num_workers=2, limits=Limits(1.0))
    assert corpus.read(remote) == corpus.read(corpus.loader(whole, seed=5, window=4))
    assert remote.report.skipped == {}


@pytest.mark.parametrize("manifest", [True, False])
def test_a_cache_that_is_too_small_is_told_at_the_start(corpus, tmp_path, serve, cache, manifest):
    source = corpus.write(tmp_path / "s", 60, manifest=manifest)
    url, _ = serve(source)
    size = (source / "000000.tar").stat().st_size
    named = f"{url}/{{000000..000005}}.tar"
    cache.max_bytes = 4 * size - 1
    with pytest.warns(UserWarning, match=rf"cache_bytes should be at least {4 * size:,}"):
        corpus.loader(named, cache=cache, window=2)
    cache.max_bytes = size - 1
    with pytest.raises(ValueError, match=rf"{size:,} bytes.* {size - 1:,}"):
        ShardSet(named, cache)


def test_what_a_killed_download_left_is_removed_and_what_is_coming_counts(whole, cache):
    """A process that is killed while a shard comes leaves a folder that no other one may mistake for one in use."""
    data, slow = (whole / "000000.tar").read_bytes(), threading.Event()

    class HalfFirst(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            if "slow" in self.path:
                slow.wait(10)
            self.wfile.write(data[len(data) // 2 :])

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), HalfFirst)
    server.daemon_threads, server.handle_error = True, lambda *args: None  # the killed one's connection breaks
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        start = multiprocessing.get_context("fork")
        process = start.Process(target=fetch, args=(cache, Shard(f"{url}/slow.tar")))
        process.start()
        while not any(path.stat().st_size for path in cache.directory.glob("*.part/*")):
            time.sleep(0.01)
        cache.max_bytes = int(2.4 * len(data))
        fetch(cache, Shard(f"{url}/0.tar"))
        (part,) = cache.directory.glob("*.part")  # it lives
        fetch(cache, Shard(f"{url}/1.tar"))
        assert tars(cache) == ["1.tar"]  # two and half of one would be more than there is room for
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert part.exists()
        fetch(cache, Shard(f"{url}/2.tar"))
        assert tars(cache) == ["1.tar", "2.tar"]
        assert not list(cache.directory.glob("*.part*"))
    finally:
        slow.set()
        server.shutdown()
        server.server_close()
