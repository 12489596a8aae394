import io
import json
import os
import tarfile

import pytest
import torch

from diffvision.data import ImageLabelData, ImageTextData
from diffvision.data.check import check_shards
from diffvision.data.make import check
from diffvision.data.shards.writer import write_evaluation_split, write_shards
from tests.data.conftest import flip, png, write_members


@pytest.fixture
def shards(corpus, tmp_path):
    return corpus.write(tmp_path / "data" / "train", 40)


def problems(directory):
    return {result.path.name: result.problems for result in check_shards(directory, 1) if result.problems}


def test_every_kind_of_damage_is_named(shards, capsys):
    flip(shards / "000000.tar", -600)  # in the zeros behind the last member: only the hash can tell
    os.truncate(shards / "000001.tar", 512 * 20)
    (shards / "000002.tar").unlink()
    (shards / "000009.tar").write_bytes((shards / "000003.tar").read_bytes())
    (shards / "nshards.txt").write_text("7")
    by_name = problems(shards)
    assert by_name["000000.tar"][-1] == "sha256 is not the manifest's"
    assert any("tar is damaged" in p for p in by_name["000001.tar"])
    assert "4 samples, the manifest says 10" in by_name["000001.tar"]
    assert by_name["000002.tar"] == ["missing"]
    assert by_name["000009.tar"] == ["not in the manifest"]
    assert by_name["nshards.txt"] == ["says '7', but there are 4 shards"]
    assert "000003.tar" not in by_name
    assert check(str(shards)) == 1
    assert "sha256 is not" in capsys.readouterr().out


def test_samples_are_decoded_and_counted_by_reason(corpus, tmp_path):
    ways = {1: {"png": b"x"}, 2: {"txt": ""}, 3: {"cls": "cat"}, 4: {"png": None}, 5: {"txt": None, "cls": None}}

    def spoil(sample):
        changed = sample | ways.get(int(sample["__key__"]), {})
        return {k: v for k, v in changed.items() if v is not None}

    source = corpus.write(tmp_path / "s", 10, change=spoil)
    for key, value, example in (("caption_key", "txt", "000002"), ("label_key", "cls", "000003")):
        (result,) = check_shards(source, **{key: value})
        assert not result.problems
        assert (result.read, result.good) == (f"{key} {value}", 6)
        assert (result.good, result.bad) == account(source, **{key: value})
        assert example in result.examples.values()
    assert check_shards(source)[0].read == "caption_key txt"
    assert check_shards(source, image_key=["jpg"])[0].good == 0
    with pytest.raises(ValueError, match="gif"):
        check_shards(source, image_key="gif")
    with pytest.raises(ValueError, match="caption_key and label_key belong"):
        check_shards(source, caption_key="txt", label_key="cls")


def test_conversations_are_read_with_their_images(tmp_path):
    def row(image, question):
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": "yes"}]
        return {"png": image, "json": json.dumps({"conversations": turns})}

    image, wide = png(0), png(0, (9000, 9))  # which padded to a square has 81 million pixels
    rows = [row(image, "<image>?"), row(image, "?"), row(b"GIF89a", "<image>?"), row(wide, "<image>?")]
    write_shards(tmp_path, [{"__key__": str(number), **one} for number, one in enumerate(rows)])
    (result,) = check_shards(str(tmp_path), num_workers=1)
    assert (result.read, result.good) == ("conversations", 1)
    reasons = ["image without placeholder", "not a JPEG, PNG or WebP image", "image too elongated"]
    assert result.bad == dict.fromkeys(reasons, 1)


def test_links_are_a_problem_also_where_the_rest_is_text(tmp_path):
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        text, link = tarfile.TarInfo("a.txt"), tarfile.TarInfo("a.jpg")
        text.size, link.type, link.linkname = 3, tarfile.SYMTYPE, "cats/a.jpg"
        tar.addfile(text, io.BytesIO(b"cat"))
        tar.addfile(link)
    (problem,) = problems(tmp_path)["0.tar"]
    assert "'a.jpg'" in problem


def test_keys_that_come_twice_are_a_problem(corpus, tmp_path):
    source = corpus.write(tmp_path / "s", 10, change=lambda s: s | {"__key__": "same"})
    assert problems(source) == {"000000.tar": ["1 keys come more than once, first 'same': members apart?"]}


def tar(path, *samples):
    """A shard of samples (key, {member type: bytes}), whose members are named key.type, whatever the key is."""
    write_members(path, *((f"{key}.{name}", data) for key, sample in samples for name, data in sample.items()))


IMAGE = png(3)
GOOD = [(f"good{n}", {"png": IMAGE, "txt": b"a caption"}) for n in range(3)]
ODD = {
    "text": [("a", {"png": IMAGE})],
    "two images": [("a", {"0.jpg": IMAGE, "1.jpg": IMAGE, "txt": b"a"})],
    "json without text": [("a", {"png": IMAGE, "json": b'{"caption": "a"}'})],
    "few keys with dots": [(f"photo.{n}", {"png": IMAGE, "txt": b"a"}) for n in range(4)],
    "keys that begin with a dot": [(f".{n}", {"png": IMAGE, "txt": b"a"}) for n in range(2)],
    "images of other types": [("a", {"bmp": IMAGE, "txt": b"a"})],
    "repeated": [GOOD[2], GOOD[2]],
    "members apart": [("a", {"png": IMAGE}), ("b", {"txt": b"b"}), ("a", {"txt": b"a"})],
    "macOS": [("._good0", {"png": b"\0"}), ("a", {"PNG": IMAGE, "TXT": b"a"})],
    "blank and damaged": [("a", {"png": IMAGE, "txt": b" "}), ("b", {"png": IMAGE[:40], "txt": b"b"})],
    "no member that is read": [("a", {"pkl": b"a"}), ("b", {"mp4": b"a", "txt": b"b"})],
    "names of folders": [("x.y/a", {"png": IMAGE, "txt": b"a"}), ("x/y/b", {"jpeg": IMAGE, "txt": b"b"})],
}


def account(source, **settings):
    """(seen, skipped by reason) of an epoch of training."""
    kind = ImageLabelData if settings.keys() & {"label_key"} else ImageTextData
    data = kind(str(source), 1, num_workers=0, max_bad_fraction=1, **settings)
    data.tokenizer = lambda captions: torch.zeros(len(captions), 1)
    loader = data.train_dataloader()
    for _ in loader:
        pass
    return loader.report.seen, loader.report.skipped


@pytest.mark.parametrize("odd", ODD)
def test_check_and_training_count_the_same(odd, tmp_path):
    tar(tmp_path / "0.tar", *GOOD, *ODD[odd])
    (result,) = check_shards(tmp_path, 0)
    assert result.samples == result.good + result.bad.total()
    assert (result.good, result.bad) == account(tmp_path)


def test_shards_of_img2dataset_are_read_in_place(tmp_path):
    """With its notes next to them; a shard of which every URL failed is empty, and in order."""
    record = {"caption": "a", "url": "http://127.0.0.1/0.jpg", "status": "success", "exif": "{}"}
    sample = {"jpg": IMAGE, "txt": b"a", "json": json.dumps(record).encode()}
    for shard, rows in enumerate((2, 0, 1)):
        tar(tmp_path / f"{shard:05d}.tar", *((f"{shard:05d}{row:04d}", sample) for row in range(rows)))
        (tmp_path / f"{shard:05d}.parquet").write_bytes(b"PAR1")
        (tmp_path / f"{shard:05d}_stats.json").write_text('{"count": 2}')
    assert [result.samples for result in check_shards(tmp_path, 0) if result.ok] == [2, 0, 1]
    assert account(tmp_path) == (3, {})


def test_check_takes_the_keys_of_training(tmp_path):
    samples = [
        (f"{n}", {"jpg": IMAGE, "json": json.dumps({"alt": "a", "label": label}).encode()})
        for n, label in enumerate([0, "7", "cat", True, None])
    ]
    tar(tmp_path / "0.tar", *samples)
    for keys, good in (({"caption_key": "json:alt"}, 5), ({"label_key": "json:label"}, 2)):
        (result,) = check_shards(tmp_path, 0, **keys)
        assert (result.good, result.bad) == account(tmp_path, **keys)
        assert result.good == good
    assert len(result.bad) == 2


@pytest.mark.parametrize(
    ("member", "read"),
    [({"cls": b"1"}, "label_key cls"), ({"json": b'{"caption": ["", "a"]}'}, "caption_key json:caption")],
)
def test_labels_alone_and_json_alone_are_read_without_a_setting(tmp_path, member, read):
    tar(tmp_path / "0.tar", ("a", {"png": IMAGE, **member}))
    (result,) = check_shards(tmp_path, 0)
    assert (result.read, result.good) == (read, 1)
    if "json" in member:
        assert account(tmp_path) == (1, {})


def test_whole_shards_pass_however_training_takes_them(shards, serve, capsys):
    url = serve(shards).url
    patterns = [f"{shards}/*.tar", f"{shards.parent}/**/00000{{0..3}}.tar", f"{url}/{{000000..000003}}.tar"]
    for source in (shards.parent, *patterns, url, [f"{shards}/00000{n}.tar" for n in range(4)]):
        results = check_shards(source, 1)
        whole = [(f"00000{n}.tar", 10, 10, True) for n in range(4)]
        assert [(r.path.name, r.samples, r.good, r.ok) for r in results] == whole
    assert check(str(shards.parent), 2) == 0
    assert "problems" not in capsys.readouterr().out


def test_the_samples_of_an_evaluation_folder_are_read_as_evaluation_does(corpus, tmp_path):
    samples = [{"png": IMAGE, "txt": "", "cls": "1"}, {"png": IMAGE, "txt": "a", "cls": "cat"}]
    folder = tmp_path / "pets"
    write_evaluation_split(folder / "test", [{"__key__": f"{n}", **s} for n, s in enumerate(samples)])
    (result,) = check_shards(tmp_path, 0)
    assert (result.read, result.bad) == ("zero_shot", {"label is not a class number": 1})
    (folder / "dataset_type.txt").write_text("retrieval")
    (result,) = check_shards(tmp_path, 0)
    assert (result.read, result.bad) == ("retrieval", {"empty caption": 1})
