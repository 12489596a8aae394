"""Shards whose samples say who they are: image and caption both hold the sample's number."""

import io
import json
import tarfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch
import webdataset
from PIL import Image

from diffvision.data import CaptionMember, ImageMember, ImageText, ShardLoader, ShardSet, write_manifest
from diffvision.data.images.image_data import to_float
from diffvision.data.shards.writer import write_tar


def encode(image, form="PNG", **settings):
    data = io.BytesIO()
    image.save(data, form, **settings)
    return data.getvalue()


def png(number, size=(2, 2)):
    return encode(Image.new("RGB", size, (number // 256, number % 256, 7)))


def numbers_of(image):
    """Images [B, 3, h, w] -> the numbers drawn in them."""
    levels = (image[:, :2, 0, 0] * 255).round().long()
    return (levels[:, 0] * 256 + levels[:, 1]).tolist()


def tokenize(captions):
    return torch.tensor([[int(caption.split()[-1])] for caption in captions])


def write_members(path, *members, kind=tarfile.REGTYPE, form=tarfile.PAX_FORMAT):
    """Write a tar of (name, content) as they are given, whatever webdataset would make of them; return its path."""
    with tarfile.open(path, "w", format=form) as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.type, member.size = kind, len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def write_rows(folder, rows, ending, name="t"):
    """Write a table of a format, or of images embedded in parquet or as `datasets` saves them; return its path."""
    if ending in ("parquet", "embedded", "saved"):
        datasets = pytest.importorskip("datasets")
        if ending != "parquet":
            embedded = {row["file"]: (folder / row["file"]).read_bytes() for row in rows}
            rows = [row | {"file": {"bytes": embedded[row["file"]], "path": "image.png"}} for row in rows]
        saved = datasets.Dataset.from_list(rows)
        if ending == "saved":
            saved.cast_column("file", datasets.Image()).save_to_disk(folder / "saved")
            return folder / "saved"
        saved.to_parquet(str(folder / f"{name}.parquet"))
        return folder / f"{name}.parquet"
    table = folder / f"{name}.{ending}"
    if ending == "jsonl":
        table.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    else:
        separator = {"csv": ",", "tsv": "\t"}[ending]
        lines = [list(rows[0]), *(map(str, row.values()) for row in rows)]
        table.write_text("\n".join(map(separator.join, lines)))
    return table


def read_tars(directory):
    """Return the samples of the shards in a directory, as webdataset reads them."""
    tars = sorted(map(str, directory.glob("*.tar")))
    return list(webdataset.WebDataset(tars, shardshuffle=False, empty_check=False))


def flip(path, at, bit=0xFF):
    """Flip bits of one byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(data)


def fetch(cache, shard):
    """Return the copy of a shard in a cache, where no other shard is fetched meanwhile."""
    with cache.hold(shard) as path:
        return path


def make_sample(number):
    return {"__key__": f"{number:06d}", "png": png(number), "txt": f"sample {number}", "cls": str(number % 10)}


def write_corpus(directory, count=100, per_shard=10, change=None, manifest=True):
    """`change(sample)` may damage a sample before it is written."""
    directory.mkdir(parents=True, exist_ok=True)
    for start in range(0, count, per_shard):
        samples = [make_sample(n) for n in range(start, min(start + per_shard, count))]
        if change is not None:
            samples = [change(s) or s for s in samples]
        write_tar(directory / f"{start // per_shard:06d}.tar", samples)
    if manifest:
        write_manifest(directory)
    return directory


def image_text(transform=to_float):
    return ImageText(ImageMember(transform), CaptionMember(), tokenize)


def make_loader(source, batch_size=10, *, transform=to_float, cache=None, num_workers=0, **settings):
    kind = image_text(transform)
    return ShardLoader(ShardSet(source, cache), kind, batch_size, num_workers=num_workers, **settings)


def read_batches(loader):
    """The numbers of each batch of an epoch, images and captions in agreement."""
    batches = []
    for batch in loader:
        assert numbers_of(batch["image"]) == batch["text"][:, 0].tolist()
        batches.append(batch["text"][:, 0].tolist())
    return batches


@pytest.fixture(scope="session")
def corpus():
    """The functions that make and read such shards."""
    made = {"png": png, "sample": make_sample, "write": write_corpus, "kind": image_text, "loader": make_loader}
    return SimpleNamespace(**made, read=read_batches, numbers=numbers_of, tokenize=tokenize)


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """103 samples in 11 undamaged shards, not to be changed."""
    return write_corpus(tmp_path_factory.mktemp("whole") / "shards", count=103)


@pytest.fixture(autouse=True)
def _temporary_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))


class Quiet(SimpleHTTPRequestHandler):
    def log_request(self, *args):
        self.server.requests.append(self.path)

    def log_message(self, *args):
        pass


@pytest.fixture
def serve():
    """serve(directory) -> a web server on this machine, with its `url` and the paths of its `requests`."""
    servers = []

    def start(directory, handler=Quiet):
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(directory)))
        server.url, server.requests = f"http://127.0.0.1:{server.server_port}", []
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
