"""English from packages: which are found, and what is refused."""

import pytest

import text


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


def documents(source):
    return {name: dict(text.SOURCES[name].read(path)) for name, path in text.resolve(source).items()}


def test_a_folder_is_searched_for_all_that_is_known(packages):
    found = documents(str(packages))
    assert list(found) == ["gcide", "wordnet", "python-doc", "linux-doc", "perl-doc", "rust-doc"]
    assert found["gcide"]["word7"] == "Word7, n. Meaning 7."
    assert found["python-doc"] == {
        "library/cats": "Cats\n\nA cat.",
        "library/copy": "Cats\n\nA cat.",
        "library/empty": "",
    }
    assert [*found["linux-doc"], *found["perl-doc"], *found["rust-doc"]] == ["mm/pages", "perlcat", "book/cats"]
    assert found["rust-doc"]["book/cats"] == "Rust"
