import os

import pytest

from diffvision.data.checks import check_shards, shard_stats
from diffvision.data.make import check, stats


@pytest.fixture
def shards(corpus, tmp_path):
    return corpus.write(tmp_path / "data" / "train", 40)


def problems(directory):
    return {result.path.name: result.problems for result in check_shards(directory, 1) if result.problems}


def test_whole_shards_pass(shards, capsys):
    results = check_shards(shards.parent)
    assert [(r.path.name, r.samples, r.good, r.ok) for r in results] == [
        (f"00000{n}.tar", 10, 10, True) for n in range(4)
    ]
    assert check(str(shards.parent)) == 0
    assert "problems" not in capsys.readouterr().out


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


def test_every_kind_of_damage_is_named(shards, capsys):
    flip(shards / "000000.tar", -600)  # in the zeros behind the last member: only the hash can tell
    os.truncate(shards / "000001.tar", 512 * 20)
    (shards / "000002.tar").unlink()
    (shards / "000009.tar").write_bytes((shards / "000003.tar").read_bytes())
    (shards / "nshards.txt").write_text("7")
    found = problems(shards)
    assert found["000000.tar"][-1] == "sha256 is not the manifest's"
    assert any("tar is damaged" in p for p in found["000001.tar"])
    assert "4 samples, the manifest says 10" in found["000001.tar"]
    assert found["000002.tar"] == ["in the manifest, but not there"]
    assert found["000009.tar"] == ["not in the manifest"]
    assert found["nshards.txt"] == ["says '7', but there are 4 shards"]
    assert "000003.tar" not in found
    assert check(str(shards)) == 1
    assert "sha256 is not" in capsys.readouterr().out


def test_a_flipped_bit_anywhere_is_found(shards):
    for at in (10, 600, 1600, 9000):
        original = (shards / "000000.tar").read_bytes()
        flip(shards / "000000.tar", at)
        assert not check_shards(shards, 1)[0].ok
        (shards / "000000.tar").write_bytes(original)


def test_samples_are_decoded_and_counted_by_reason(corpus, tmp_path):
    ways = {1: {"png": b"x"}, 2: {"txt": ""}, 3: {"cls": "cat"}, 4: {"png": None}, 5: {"txt": None, "cls": None}}

    def spoil(sample):
        changed = sample | ways.get(int(sample["__key__"]), {})
        return {k: v for k, v in changed.items() if v is not None}

    source = corpus.write(tmp_path / "s", 10, change=spoil)
    (result,) = check_shards(source)
    assert not result.problems
    assert result.good == 5
    assert result.bad == {
        "not a JPEG, PNG or WebP image": 1,
        "empty caption": 1,
        "label is not a class number": 1,
        "missing image": 1,
        "missing caption or label": 1,
    }
    assert result.examples["empty caption"] == "000002"


def test_elongated_images_are_bad_here_as_in_training(corpus, tmp_path):
    wide = corpus.png(0, size=(300_000, 1))
    source = corpus.write(tmp_path / "s", 2, change=lambda s: s | {"png": wide} if s["__key__"] == "000001" else s)
    (result,) = check_shards(source)
    assert (result.good, result.bad) == (1, {"image too elongated": 1})


def test_keys_that_come_twice_are_a_problem(corpus, tmp_path):
    source = corpus.write(tmp_path / "s", 10, change=lambda s: s | {"__key__": "same"})
    assert problems(source) == {"000000.tar": ["1 keys come more than once, first 'same': members apart?"]}


def test_stats(shards, capsys, corpus):
    (own,) = shard_stats(shards.parent).values()
    assert (own.samples, own.members) == (40, {"png": 40, "txt": 40, "cls": 40})
    assert own.sizes == {(2, 2): 40}
    assert own.modes == {"PNG RGB": 40}
    assert sorted(own.caption_lengths) == [8] * 10 + [9] * 30
    assert own.labels == dict.fromkeys(range(10), 4)
    assert own.bytes == sum(p.stat().st_size for p in shards.glob("*.tar"))
    assert stats(str(shards.parent)) == 0
    printed = capsys.readouterr().out
    assert "PNG RGB 40" in printed
    rows = {line.split("│")[1].strip() for line in printed.splitlines() if "│" in line}
    assert rows >= {"samples", "width"}
    assert not rows & {"texts", "tokens"}
    with pytest.raises(ValueError, match=r"no .tar files in or under"):
        stats(str(shards / "none"))
