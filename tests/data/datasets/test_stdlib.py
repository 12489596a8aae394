"""The corpus that Python brings along, and checks of text and tokens."""

import pytest

from diffvision.data import ShardSet, make, train_tokenizer
from diffvision.data.check import check_shards
from diffvision.data.datasets.stdlib import make_stdlib, split_of
from diffvision.data.shards.writer import write_shards
from diffvision.data.text.tokenize import documents_of, tokenize_shards
from diffvision.data.text.tokenizers import END

TOPICS = "topics = {'assert': 'The assert statement\\n' 'is.\\n', 'x.y': ' Prose'}\nraise SystemExit\n"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A small standard library. Not to be changed."""
    root = tmp_path_factory.mktemp("library")
    files = {f"package{n % 5}/module{n}.py": f"def function{n}():\n    return {n}\n" for n in range(80)}
    files |= {
        "empty.py": "\n",
        "latin.py": b"# coding: latin-1\n# \xe4\n",
        "broken.py": b"# coding: utf-8\n\xff\n",
        "_sysconfigdata__linux.py": "paths = 1\n",
        "test/test_it.py": "left out\n",
        "site-packages/other.py": "left out\n",
        "notes.txt": "left out\n",
        "pydoc_data/topics.py": TOPICS,
    }
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def documents(directory):
    return list(documents_of(ShardSet(directory)))


def test_each_file_and_topic_is_a_document_of_one_split(library, tmp_path):
    summary = make_stdlib(tmp_path, library)
    train, validation = documents(tmp_path / "train"), documents(tmp_path / "validation")
    assert sorted(train + validation) == sorted(
        [f"def function{n}():\n    return {n}\n" for n in range(80)]
        + ["# coding: latin-1\n# ä\n", "The assert statement\nis.\n", "Prose\n"]
    )
    counts = f"{len(train)} documents of {sum(map(len, train)):,} characters in train, {len(validation)} documents"
    assert summary.startswith(counts)
    assert {split_of(f"package{n % 5}/module{n}.py") for n in range(80) if f"return {n}\n" in " ".join(train)} == {
        "train"
    }
    shares = [split_of(f"some/file{n}.py") for n in range(10_000)].count("validation")
    assert 400 < shares < 600


def test_the_same_library_gives_the_same_bytes_and_one_without_source_is_refused(library, tmp_path):
    for name in ("a", "b"):
        make_stdlib(tmp_path / name, library)
    made = [path for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert len(made) == 6
    for path in made:
        assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes()
    with pytest.raises(ValueError, match="has no Python source files"):
        make_stdlib(tmp_path / "c", tmp_path)
    with pytest.raises(ValueError, match="train has shards already"):
        make_stdlib(tmp_path / "a", library)


def test_the_commands_from_corpus_to_checked_tokens(tmp_path, monkeypatch, library):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(library)})
    corpus, file, tokens = (str(tmp_path / name) for name in ("corpus", "tokenizer.json", "tokens"))
    assert make.make("stdlib", corpus) == 0
    assert make.tokenizer(corpus + "/train", file, 300) == 0
    assert make.tokenize(corpus + "/train", tokens, file, num_workers=0) == 0
    assert [make.check(directory, num_workers=1) for directory in (corpus, tokens)] == [0, 0]


def test_checks_find_bad_text_and_bad_tokens(tmp_path):
    samples = [{"txt": "good"}, {"txt": b"\xff"}, {"txt": " "}]
    samples += [{"json": "{"}, {"json": "{}"}, {"jsonl": '{}\n\n{"a": 1}'}]
    write_shards(tmp_path / "text", [{"__key__": f"k{n}", **s} for n, s in enumerate(samples)])
    (result,) = check_shards(tmp_path / "text", 1)
    assert (result.samples, result.good) == (6, 3)
    assert result.bad == {"text not UTF-8": 1, "empty document": 1, "damaged JSON": 1}
    write_shards(tmp_path / "good", [{"__key__": "a", "txt": f"some text, {END}"}])
    tokens = tmp_path / "tokens"
    tokenize_shards(ShardSet(tmp_path / "good"), tokens, train_tokenizer(["a"], 257), num_workers=0)
    assert all(result.ok for result in check_shards(tokens, 1))
    (tokens / "tokens.bin").write_bytes(b"\0" * (tokens / "tokens.bin").stat().st_size)
    (result,) = check_shards(tmp_path / "tokens", 1)
    assert "tokens.bin" in result.problems[0]
