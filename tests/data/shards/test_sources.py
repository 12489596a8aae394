"""The shards that a source names: folders, patterns, URLs, and the manifests that count them."""

import json
import os

import pytest

from diffvision.data.check import check_shards
from diffvision.data.shards.remote import Shard
from diffvision.data.shards.sources import checked_location, expand_braces, find_shards, list_splits


def touch(directory, *names):
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        (directory / name).write_bytes(b"")
    return directory


def names(source):
    return [shard.name for shard in find_shards(source)]


def test_braces_stand_for_several_locations():
    assert expand_braces("a-{008..011}.tar") == ["a-008.tar", "a-009.tar", "a-010.tar", "a-011.tar"]
    assert expand_braces("{b,a}/{0..1}.tar") == ["b/0.tar", "b/1.tar", "a/0.tar", "a/1.tar"]
    assert expand_braces("x{a,b{1..2}}") == ["xa", "xb1", "xb2"]
    assert expand_braces("plain.tar") == ["plain.tar"]
    with pytest.raises(ValueError, match="balanced"):
        expand_braces("a-{008..011.tar")


@pytest.mark.parametrize(
    "location",
    [
        *("pipe:touch ran", "a.tar::pipe:touch ran", "-rf.tar", "", "file:///etc/passwd", "ftp://example.org/a.tar"),
        *("a\0.tar", "{pipe:touch ran,b}.tar", "{-a,b}.tar"),
    ],
)
def test_commands_and_unknown_schemes_are_refused(location):
    for source in (location, [location]):
        with pytest.raises(ValueError, match=r"must be at a path or a URL"):
            find_shards(source)


def test_paths_and_known_urls_pass():
    for location in ("a.tar", "./pipe:a.tar", "/a/b c#?.tar", "https://x.org/a.tar", "s3://b/a.tar", "gs://b/a.tar"):
        assert checked_location(location) == location
    assert Shard("s3://bucket/a.tar").remote
    assert not Shard("s3/a.tar").remote


def test_shards_of_a_directory_are_in_natural_order(tmp_path):
    with pytest.raises(ValueError, match="no shards in"):
        find_shards(tmp_path)
    touch(tmp_path, "10.tar", "9.tar", "readme.txt", "3.tar.part")
    assert names(tmp_path) == ["9.tar", "10.tar"]
    assert names([str(tmp_path / "10.tar"), str(tmp_path / "9.tar")]) == ["10.tar", "9.tar"]  # as it was given
    for missing in ("{8..10}.tar", "readme.txt"):
        with pytest.raises(ValueError, match=r"8\.tar|readme"):
            find_shards(f"{tmp_path}/{missing}")


@pytest.mark.parametrize("name", ["1.tar.gz", "1.tgz", "1.tar.bz2", "1.tar.xz"])
def test_compressed_shards_are_not_left_out(tmp_path, name):
    touch(tmp_path / "train", "0.tar", name)
    url = f"https://x.org/{name}"
    given = [f"{tmp_path}/train/{part}" for part in ("", "*", name, f"{{0.tar,{name}}}")]
    for source in [*given, url, [url]]:
        with pytest.raises(ValueError, match=r"\b1\.t"):
            find_shards(source)
    touch(tmp_path / "val", name)
    (tmp_path / "train" / name).unlink()
    for read in (list_splits, check_shards):
        with pytest.raises(ValueError, match="unpack it"):
            read(tmp_path)


def test_wildcards_match_shards_alone(tmp_path):
    touch(tmp_path, "part-10.tar", "part-9.tar", "other.tar", "part-1.txt")
    touch(tmp_path / "a" / "b", "part-2.tar")
    touch(tmp_path / "[x]", "0.tar")
    assert names(f"{tmp_path}/*.tar") == ["other.tar", "part-9.tar", "part-10.tar"]
    assert names(f"{tmp_path}/**/part-*") == ["part-2.tar", "part-9.tar", "part-10.tar"]
    assert names(f"{tmp_path}/{{part-?,other}}.tar") == ["part-9.tar", "other.tar"]
    assert names(f"{tmp_path}/[x]") == names(f"{tmp_path}/[x]/0.tar") == ["0.tar"]  # as it is called
    for pattern in ("none-*.tar", "*.txt"):
        with pytest.raises(ValueError, match="no shards in"):
            find_shards(f"{tmp_path}/{pattern}")
    (tmp_path / "sizes.json").write_text(json.dumps({"part-9.tar": 7}))
    assert [shard.samples for shard in find_shards(f"{tmp_path}/part-*.tar")] == [7, None]


def manifest(*shards):
    full = [{"name": "0.tar", "samples": 1, "bytes": 1, "sha256": "x"} | shard for shard in shards]
    return json.dumps({"format": "diffvision-shards-1", "shards": full})


def test_counts_are_those_of_the_manifest_or_of_openclips_sizes(tmp_path):
    touch(tmp_path, "0.tar", "1.tar")
    (tmp_path / "sizes.json").write_text("{}")  # which counts nothing
    assert names(tmp_path) == ["0.tar", "1.tar"]
    (tmp_path / "sizes.json").write_bytes(b'\xef\xbb\xbf{"1.tar": 5, "0.tar": 4}')  # with the mark of an editor
    assert [shard.samples for shard in find_shards(tmp_path)] == [4, 5]
    (tmp_path / "manifest.json").write_text(manifest({"name": "1.tar"}, {"name": "0.tar", "samples": 0, "sha256": "X"}))
    found = [(shard.name, shard.samples, shard.bytes, shard.sha256) for shard in find_shards(tmp_path)]
    assert found == [("1.tar", 1, 1, "x"), ("0.tar", 0, 1, "x")]
    assert find_shards(str(tmp_path / "0.tar"))[0].samples == 0  # also for a shard by its name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("manifest.json", text) for text in ("{", "[]", '{"format": "other", "shards": []}', manifest({}, {}))),
        *(("manifest.json", '{"format": "diffvision-shards-1"' + more) for more in ("}", ', "shards": []}')),
        *(("manifest.json", manifest(shard)) for shard in ({"name": 3}, {"name": "../0.tar"}, {"sha256": None})),
        *(("manifest.json", manifest({field: n})) for field in ("samples", "bytes") for n in (-1, "3", True)),
        *(("sizes.json", text) for text in ("[1]", "[" * 100_000)),
        *(("sizes.json", json.dumps({name: 1})) for name in ("../0.tar", "/etc/0.tar", "-0.tar", "..")),
        *(("sizes.json", json.dumps({"0.tar": count})) for count in (-1, 2.5, "3", None, True, [1], 1 << 62)),
        *(("sizes.json", json.dumps(dict.fromkeys(listed, 1))) for listed in (["1.tar"], ["0.tar", "1.tar"])),
        *(("nshards.txt", text) for text in ("2", "many")),
    ],
)
def test_listings_that_are_wrong_are_named_with_their_remedy(tmp_path, name, text):
    touch(tmp_path, "0.tar")
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name}|the manifest of .*write_manifest"):
        find_shards(tmp_path)


def test_clip_benchmarks_number_of_shards_is_that_of_shards_read(tmp_path):
    touch(tmp_path, "0.tar", "1.tar", "2.tar")
    (tmp_path / "nshards.txt").write_text("2\n")
    assert names(tmp_path) == ["0.tar", "1.tar"]


def test_pipes_and_devices_are_not_opened(tmp_path):
    os.mkfifo(tmp_path / "0.tar")
    assert [result.problems for result in check_shards(tmp_path, 0)] == [["not a file"]]
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / "0.tar").symlink_to("/dev/zero")
    for source in (tmp_path, tmp_path / "device"):
        with pytest.raises(ValueError, match=r"must be \.tar files, got .*0\.tar"):
            find_shards(source)


@pytest.mark.parametrize("name", ["manifest.json", "sizes.json", "nshards.txt"])
def test_a_file_that_is_not_utf_8_is_named(name, tmp_path, serve):
    touch(tmp_path, "0.tar")
    (tmp_path / name).write_bytes('{"format": "é"}'.encode("latin-1"))
    for read in (find_shards, check_shards):
        with pytest.raises(ValueError, match=rf"{tmp_path}/{name} is not UTF-8 \(.* at"):
            read(tmp_path)
    if name.endswith(".json"):
        url = serve(tmp_path).url
        with pytest.raises(ValueError, match=r"has no manifest\.json"):
            find_shards(f"{url}/elsewhere")
        with pytest.raises(ValueError, match=f"{url}/{name} is not UTF-8"):
            find_shards(f"{url}/0.tar")
