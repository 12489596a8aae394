"""Checkpoints on disk through all evaluations, to files; bad input refused before anything runs."""

import json
import math

import pytest
import torch

from diffvision.data import BadDataError, ShardSet
from diffvision.data.datasets.recall import recall_documents
from diffvision.data.shards.writer import write_shards
from diffvision.data.text.documents import TextMember
from diffvision.data.text.tokenize import tokenize_shards
from diffvision.data.text.tokenizers import load_tokenizer, train_tokenizer
from diffvision.evaluation.language import low_bit, pruning
from diffvision.evaluation.language.evaluate_language_command import run
from diffvision.evaluation.language.language_options import METHODS, SCHEMES, LanguageOptions
from diffvision.evaluation.language.language_suite import measure, write_numbers
from diffvision.evaluation.language.read_documents import Reading, cut_rows, read_documents, tokenise
from diffvision.evaluation.language.tasks import LANGUAGE_EVALUATIONS, Work
from diffvision.models import language
from diffvision.opening import open_model

RETRIEVAL = {"form": "synthetic", "lengths": (90,), "depths": (0.0, 1.0), "needles": ("1x1", "2x2"), "facts": (1, 2)}
LEARNING = {"samples": 1, "shots": (1, 4), "permutations": 2, "mappings": 1}
CACHE = {"pruning_methods": ("snap",), "pruning_ratios": (0.5,), "continuation": 8}
SMALL = LanguageOptions(
    tokens=120, window=24, batch_size=16, schemes=("qk_int4_smooth", "cache_2"), **RETRIEVAL, **LEARNING, **CACHE
)
TASKS = [task for task, evaluation in LANGUAGE_EVALUATIONS.items() if evaluation.reads != "questions"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Two checkpoints with a tokenizer of texts, and these in texts/, in a .jsonl and a .txt file."""
    home, texts = tmp_path_factory.mktemp("language"), list(recall_documents(40, 90))
    tokenizer = train_tokenizer(texts, 400)
    for name in ("transformer-debug", "diff-debug"):
        torch.manual_seed(0)
        language.save(language.create(name, vocab_size=400, max_length=128), home / name, tokenizer)
    (home / "texts").mkdir()
    (home / "texts" / "a.jsonl").write_text("\n\n".join(json.dumps({"text": text}) for text in texts[:8]))
    (home / "texts" / "b.txt").write_text("Grüße " * 20, encoding="utf-8")
    return home


def test_every_task_of_every_model_has_numbers(home):
    models = [f"plain={home / 'transformer-debug'}", str(home / "diff-debug")]
    given = {"tasks": TASKS, "data": str(home / "texts"), "output": str(home / "out"), "device": "cpu"}
    results = run(models, **given, options=SMALL)
    assert list(results) == ["plain", "diff-debug"]
    for metrics in results.values():
        assert {key.partition("/")[0] for key in metrics} == set(TASKS)
        assert 0 <= metrics["needle/2x2/accuracy/90/1"] <= 1
        assert metrics["perplexity/tokens"] == 120
        assert 0.9 * math.log(400) < metrics["perplexity/nll"] < 1.3 * math.log(400)  # untrained
        assert metrics["recall_errors/2x1/malformed/90_high"] >= metrics["recall_errors/2x1/malformed/90"]
        assert metrics["many_shot/chance"] == 0.25
    for task in TASKS:
        written = json.loads((home / "out" / f"{task}.json").read_text())
        assert set(written["models"]) == set(results)
        assert written["options"]["window"] == 24
        key, value = next(iter(written["models"]["plain"].items()))
        assert value == results["plain"][f"{task}/{key}"]


def test_work_in_python_has_the_lengths_of_its_model(home):
    work = Work(open_model(str(home / "diff-debug")), LanguageOptions(), [torch.arange(200)])
    assert (work.window, work.lengths) == (128, (128,))
    assert measure(work, "outliers")


def test_names_of_options_are_those_of_the_tables():
    assert list(METHODS) == [*pruning.METHODS]
    assert (*low_bit.SCHEMES,) == SCHEMES


def read(source, reading=None):
    return list(read_documents([source], None, reading))


def test_what_is_not_finite_is_null(tmp_path):
    metrics = {"perplexity/nll": 800.0, "perplexity/perplexity": math.inf}
    write_numbers("perplexity", {"a": metrics, "b": {}}, SMALL, tmp_path)
    written = json.loads((tmp_path / "perplexity.json").read_text())
    assert written["models"] == {"a": {"nll": 800.0, "perplexity": None}}


def test_texts_are_read_in_order_and_cut(home, words, tmp_path):
    texts = read(home / "texts")
    assert len(texts) == 9
    assert texts[8].startswith("Grüße")
    documents, num_bytes = tokenise(["ab cd ef", "gh ij"], words, at_most=4)
    assert [len(document) for document in documents] == [4, 2]  # each after a start token
    assert num_bytes == 10
    assert cut_rows(documents, 2).shape == (3, 2)
    with pytest.raises(ValueError, match="row of 7"):
        cut_rows(documents, 7)
    with pytest.raises(ValueError, match="token"):
        tokenise([""], words, at_most=4)
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xfa")
    (tmp_path / "none").mkdir()
    for source, named in (("bad.txt", r"bad\.txt"), ("none", r"no \.txt, \.jsonl or \.tar in")):
        with pytest.raises(ValueError, match=named):
            read(tmp_path / source)


def test_lines_of_json_end_at_line_feeds_alone_and_hold_text(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('\ufeff{"text": "one\u2028line\x85"}\r\n\n{"text": "", "body": "b"}\n', encoding="utf-8")
    assert read(file) == ["one\u2028line\x85", ""]
    for line in ('{"t": 1}', '{"text": null}', '{"text": 5}', '{"text": "abc \\ud800 def"}', "[]", "{"):
        file.write_text(f'{{"text": "a"}}\n{line}\n')
        with pytest.raises(ValueError, match=r"line 2 of .*a\.jsonl"):
            read(file)


@pytest.fixture
def corpus(home, tmp_path):
    """Shards of a jsonl member whose documents are in the field "body", the same as token shards, and the texts."""
    texts = ["a first text", "another one", "and the third"]
    lines = "".join(json.dumps({"body": text}) + "\n" for text in texts)
    write_shards(tmp_path / "shards", [{"__key__": "a", "jsonl": lines}])
    tokenizer = load_tokenizer(home / "diff-debug")
    key = TextMember("jsonl:body")
    tokenize_shards(ShardSet(tmp_path / "shards"), tmp_path / "tokens", tokenizer, key, num_workers=0)
    return tmp_path, tokenizer, texts


def test_shards_and_token_files_are_the_same_documents(corpus, words):
    root, tokenizer, texts = corpus
    assert read(root / "shards", Reading("jsonl:body")) == texts
    for at_most, documents in ((1000, 3), (5, 1)):
        plain = tokenise(texts, tokenizer, at_most)
        of_files = tokenise(read_documents([root / "tokens"], tokenizer), tokenizer, at_most)
        assert [d.tolist() for d in of_files[0]] == [d.tolist() for d in plain[0]]
        assert of_files[1] == plain[1]
        assert len(of_files[0]) == documents
    for strange in (train_tokenizer(["of another text"], 300), words):
        with pytest.raises(ValueError, match="400"):
            list(read_documents([root / "tokens"], strange))


def test_documents_that_cannot_be_used_are_told_and_limited(home, corpus, capsys):
    root, _, texts = corpus
    given = {"models": str(home / "diff-debug"), "tasks": "perplexity", "device": "cpu"}
    with pytest.raises(BadDataError, match="1 document"):
        run(**given, data=str(root / "shards"))
    samples = [{"__key__": str(n), "txt": text} for n, text in enumerate([*texts, b"\xff\xff"])]
    write_shards(root / "half", samples)
    with pytest.raises(BadDataError, match=r"the limit is 1.00% of 4 .*\n.*\n  1"):
        run(**given, data=str(root / "half"), options=LanguageOptions(window=4))
    run(**given, data=str(root / "half"), options=LanguageOptions(window=4, max_bad_fraction=0.5))
    assert "of the data, 3 documents, 0 empty, 1 skipped\n  1 x text not UTF-8" in capsys.readouterr().err
    assert run(**given, data=str(root / "shards"), options=LanguageOptions(window=4, text_key="jsonl:body"))


def test_bad_commands_are_refused_before_anything_runs(home):
    checkpoint = str(home / "diff-debug")
    for settings, message in [
        ({"tasks": "speed"}, "unknown task 'speed'"),
        ({"tasks": "needle,perplexity"}, "perplexity needs text: give data"),
        ({"tasks": "needle", "models": "a,b", "checkpoint": "c"}, "checkpoint"),
        ({"tasks": "needle", "models": "diff-debug"}, "diff-debug has new weights: give --checkpoint"),
        ({"tasks": "needle", "models": "CLIP-debug"}, "CLIP-debug is a model of images"),
        ({"tasks": "needle", "models": f"{checkpoint},{checkpoint}"}, "two models are named 'diff-debug'"),
        ({"tasks": "needle", "options": LanguageOptions(lengths=(256,))}, "lengths has 256, over the 128 tokens"),
        ({"tasks": "needle", "device": "tpu"}, "device .*tpu"),
    ]:
        given = {"models": checkpoint, "options": SMALL, "device": "cpu", **settings}
        with pytest.raises(ValueError, match=message):
            run(**given)
    with pytest.raises(ValueError, match=r"window.*500"):
        _ = Work(open_model(checkpoint), LanguageOptions(window=500)).window
    small = language.create("diff-debug", vocab_size=100)
    language.save(small, home / "small")
    with pytest.raises(ValueError, match="400"):
        open_model(str(home / "small"), tokenizer=checkpoint)
    assert open_model(str(home / "small")).tokenizer is None
    with pytest.raises(ValueError, match="tokenizer"):
        measure(Work(open_model(str(home / "small"))), "needle")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lengths", (64, 64)),
        ("needles", ("2x4",)),
        ("depths", ()),
        ("samples", 0),
        ("pruning_ratios", (0.5, 1.0)),
        ("pruning_methods", ("best",)),
        ("schemes", ("fp4",)),
        ("template", "no place"),
        ("max_bad_fraction", 2.0),
    ],
)
def test_options_that_would_count_twice_or_never_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        LanguageOptions(**{name: value})
    assert LanguageOptions(max_bad_fraction=0, depths=(0, 1)).max_bad_fraction == 0  # whole numbers are shares, too
