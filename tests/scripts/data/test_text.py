"""English from packages: which are found, how they are split, and what is refused."""

import json

import pytest

import text
from diffvision.data import ShardSet
from diffvision.data.check import check_shards
from diffvision.data.datasets.stdlib import split_of
from diffvision.data.text.tokenize import documents_of


@pytest.fixture(scope="module")
def packages(tmp_path_factory, write_dictd, write_wordnet):
    """A folder of unpacked packages. Not to be changed."""
    root = tmp_path_factory.mktemp("packages")
    dictd = root / "usr/share/dictd"
    entries = [([f"word{n}"], f"Word{n} \\Word\\, n.\n   Meaning {n}.\n") for n in range(60)]
    write_dictd(dictd, entries).rename(dictd / "gcide.dict.dz")
    (dictd / "x.index").rename(dictd / "gcide.index")
    write_wordnet(root / "usr/share/wordnet")
    files = {
        "doc/python3.9/html/_sources/old.rst.txt": "old\n",
        "doc/python3.11/html/_sources/library/cats.rst.txt": "Cats\n====\n\nA *cat*.\n",
        "doc/python3.11/html/_sources/library/copy.rst.txt": "Cats\n----\n\nA cat.\n",
        "doc/python3.11/html/_sources/library/empty.rst.txt": ".. toctree::\n",
        "doc/linux-doc-6.1/html/_sources/mm/pages.rst.txt": "Pages\n",
        "doc/linux-doc-6.1/html/_sources/translations/zh/pages.rst.txt": "left out\n",
        "perl/5.36.0/pod/perlcat.pod": "=head1 CAT\n",
        "perl/5.36.0/pod/perltoc.pod": "=head1 left out\n",
        "doc/rust-doc/html/book/cats.html": "<html><nav>x</nav><main><p>Rust</p></main></html>",
        "doc/rust-doc/html/book/first-edition/cats.html": "<p>left out</p>",
        "doc/rust-doc/html/book/print.html": "<p>left out</p>",
        "doc/rust-doc/html/std/cats.html": "<p>left out</p>",
    }
    for name, content in files.items():
        (root / "usr/share" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "usr/share" / name).write_text(content)
    return root


def documents(directory):
    return list(documents_of(ShardSet(directory)))


def test_a_folder_is_searched_for_all_that_is_known(packages, tmp_path):
    printed = text.make_text(tmp_path, str(packages))
    train, validation = documents(tmp_path / "train"), documents(tmp_path / "validation")
    assert sorted(train + validation) == sorted(
        [f"Word{n}, n. Meaning {n}.\n" for n in range(60)]
        + ["Cats\n\nA cat.\n", "Pages\n", "CAT\n", "Rust\n", "able (adjective): having power.\n"]
        + ["entity (noun): that which is.\nentity (noun): another.\n"]
        + ['Physical entity (noun): a thing; "it | was a thing!". Also: thing.\n']
    )
    assert {f"Word{n}, n. Meaning {n}.\n" for n in range(60) if split_of(f"word{n}") == "validation"} <= {*validation}
    about = json.loads((tmp_path / "about.json").read_text())
    assert about["sources"]["python-doc"] == {
        "package": "python3.11-doc", "licence": "PSF-2.0", "documents": 1, "bytes": 13, "repeated": 1,
    }  # fmt: skip
    assert list(about["sources"]) == ["gcide", "wordnet", "python-doc", "linux-doc", "perl-doc", "rust-doc"]
    assert about["splits"]["train"]["documents"] == len(train)
    assert str(packages) not in json.dumps(about)
    assert "gcide: GPL-3.0-or-later" in about["licence"]
    assert printed.startswith(f"{len(train)} documents of 0.0 MB in train, {len(validation)} documents")
    assert all(result.ok for result in check_shards(tmp_path, 1))


def test_sources_are_named_with_or_without_a_path(packages, tmp_path, monkeypatch):
    library = tmp_path / "library"
    library.mkdir()
    for n in range(40):
        (library / f"module{n}.py").write_text(f"x = {n}\n")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(library)})
    file = packages / "usr/share/dictd/gcide.dict.dz"
    text.make_text(tmp_path / "a", f"stdlib, gcide={file}")
    about = json.loads((tmp_path / "a/about.json").read_text())
    assert {name: facts["documents"] for name, facts in about["sources"].items()} == {"gcide": 60, "stdlib": 40}
    text.make_text(tmp_path / "b", f"gcide={packages},wordnet={packages / 'usr/share/wordnet'}")
    assert json.loads((tmp_path / "b/about.json").read_text())["source"] == "gcide, wordnet"
    words = [
        [one for one in documents(tmp_path / name / "validation") if one.startswith("Word")] for name in ("a", "b")
    ]
    assert words[0] == words[1]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("gcide=EMPTY", "source gcide is not in .*apt-get install dict-gcide"),
        ("EMPTY", "has no source of text that is known; .*apt-get download dict-gcide"),
        ("gcid=EMPTY", "no source of text is called 'gcid': .*gcide, "),
        ("nowhere", "no source of text is called 'nowhere', and no folder"),
        ("python-doc=EMPTY", "source python-doc: .* has no documents; .*python3.11-doc"),
        (",", "--source names nothing"),
    ],
)
def test_what_is_not_there_is_answered_with_how_to_get_it(tmp_path, source, message):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
        text.make_text(tmp_path / "out", source.replace("EMPTY", str(tmp_path / "empty")))
    assert not (tmp_path / "out").exists()


def test_too_little_text_for_a_split_is_said_before_anything_is_written(tmp_path, write_dictd):
    write_dictd(tmp_path / "usr/share/dictd", [(["a"], "a\n")]).rename(tmp_path / "usr/share/dictd/gcide.dict.dz")
    (tmp_path / "usr/share/dictd/x.index").rename(tmp_path / "usr/share/dictd/gcide.index")
    with pytest.raises(ValueError, match=r"none of the documents in .* is"):
        text.make_text(tmp_path / "out", str(tmp_path))
    assert not (tmp_path / "out").exists()


def test_a_folder_with_shards_is_refused(packages, tmp_path):
    text.make_text(tmp_path, str(packages))
    with pytest.raises(ValueError, match="train has shards already"):
        text.make_text(tmp_path, str(packages))
