"""Shards whose samples say who they are: image and caption both hold the sample's number."""

import io
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from PIL import Image

from diffvision.data import CaptionMember, ImageMember, ImageText, ShardLoader, ShardSet
from diffvision.data.images.image_data import to_float
from diffvision.data.shards.writer import write_manifest, write_tar


def png(number, size=(2, 2)):
    data = io.BytesIO()
    Image.new("RGB", size, (number // 256, number % 256, 7)).save(data, "PNG")
    return data.getvalue()


def numbers_of(image):
    """Images [B, 3, h, w] -> the numbers drawn in them."""
    levels = (image[:, :2, 0, 0] * 255).round().long()
    return (levels[:, 0] * 256 + levels[:, 1]).tolist()


def tokenize(captions):
    return torch.tensor([[int(caption.split()[-1])] for caption in captions])


def fetch(cache, shard):
    """Return the copy of a shard in a cache, where no other shard is fetched meanwhile."""
    with cache.hold(shard) as path:
        return path


class Corpus:
    """Makes and reads such shards."""

    png = staticmethod(png)
    numbers = staticmethod(numbers_of)
    tokenize = staticmethod(tokenize)

    @staticmethod
    def sample(number):
        return {"__key__": f"{number:06d}", "png": png(number), "txt": f"sample {number}", "cls": str(number % 10)}

    @staticmethod
    def write(directory, count=100, per_shard=10, change=None, manifest=True):
        """`change(sample)` may damage a sample before it is written."""
        directory.mkdir(parents=True, exist_ok=True)
        for start in range(0, count, per_shard):
            samples = [Corpus.sample(n) for n in range(start, min(start + per_shard, count))]
            if change is not None:
                samples = [change(s) or s for s in samples]
            write_tar(directory / f"{start // per_shard:06d}.tar", samples)
        if manifest:
            write_manifest(directory)
        return directory

    @staticmethod
    def kind(transform=to_float):
        return ImageText(ImageMember(transform), CaptionMember(), tokenize)

    @staticmethod
    def loader(source, batch_size=10, *, transform=to_float, cache=None, num_workers=0, **settings):
        shards = ShardSet(source, cache)
        return ShardLoader(shards, Corpus.kind(transform), batch_size, num_workers=num_workers, **settings)

    @staticmethod
    def read(loader):
        """The numbers of each batch of an epoch, images and captions in agreement."""
        batches = []
        for batch in loader:
            assert numbers_of(batch["image"]) == batch["text"][:, 0].tolist()
            batches.append(batch["text"][:, 0].tolist())
        return batches


@pytest.fixture(scope="session")
def corpus():
    return Corpus


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """103 samples in 11 undamaged shards, not to be changed."""
    return Corpus.write(tmp_path_factory.mktemp("whole") / "shards", count=103)


@pytest.fixture(autouse=True)
def _temporary_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))


class _Quiet(SimpleHTTPRequestHandler):
    def log_request(self, *args):
        self.server.requests.append(self.path)

    def log_message(self, *args):
        pass


@pytest.fixture
def serve():
    """serve(directory) -> (URL, list of the paths asked for): a web server on this machine."""
    servers = []

    def start(directory):
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(directory)))
        server.requests = []
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}", server.requests

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
