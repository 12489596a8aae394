"""The evaluation from files to rates: judged once a row, resumed, paired, and refused where it cannot work."""

import json
import math

import pytest
import torch

from diffvision.data.text.tokenizers import train_tokenizer
from diffvision.lab.command import run
from diffvision.lab.faithfulness.judges import Entailment, InProcess, open_judges
from diffvision.lab.faithfulness.options import JudgeOptions
from diffvision.lab.faithfulness.rows import Row
from diffvision.lab.faithfulness.task import cohen_kappa
from diffvision.lab.language.options import LabOptions
from diffvision.models import language
from diffvision.opening import open_model

ROWS = [{"id": f"r{n}", "task": "qa", "document": f"Ann has {n} of them.", "question": "How many?", "answers": [str(n)]}
        for n in range(10, 16)]  # fmt: skip
OPTIONS = LabOptions(new_tokens=8, batch_size=2)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("faithfulness")
    tokenizer = train_tokenizer([row["document"] for row in ROWS], 300)
    for seed, name in enumerate(("transformer-debug", "diff-debug")):
        torch.manual_seed(seed)
        module = language.create(name, vocab_size=tokenizer.vocab_size, max_length=512)
        torch.nn.init.normal_(module.embed.weight, std=1.0)
        language.save(module, home / name, tokenizer)
    (home / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    return home


def evaluated(home, *models, **settings):
    given = {"tasks": "faithfulness", "data": str(home / "rows.jsonl"), "device": "cpu", "options": OPTIONS}
    return run([str(home / model) for model in models], **given | settings)


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_run_that_was_ended_counts_every_row_once(home, judging, tmp_path, monkeypatch):
    """The server accepts odd rows, has no verdict of r12, and fails after four rows until it is mended."""
    monkeypatch.setenv("THE_KEY", "secret")
    healthy, judged = False, set()

    def answer(prompt):
        number = next(n for n in range(10, 16) if f"Ann has {n} " in prompt)
        if not healthy and len(judged | {number}) > 4:
            return 500, "<html>overloaded</html>"
        judged.add(number)
        return "I cannot say." if number == 12 else f"So.\n**Conclusion: {bool(number % 2)}**"

    server = judging(answer)
    judge = JudgeOptions(by="llm,contains", llm="big", url=server.url, key_env="THE_KEY", tries=1, parallel=1)
    settings = {"judge": judge, "output": str(tmp_path)}
    with pytest.raises(ValueError, match="did not answer about row 'r14'"):
        evaluated(home, "diff-debug", **settings)
    file = tmp_path / "faithfulness" / "diff-debug" / "judgements-llm.jsonl"
    assert [row["id"] for row in lines_of(file)] == ["r10", "r11", "r12", "r13"]
    with file.open("a") as torn:
        torn.write('{"id": "r14", "acc')
    healthy = True
    metrics = evaluated(home, "diff-debug", **settings)["diff-debug"]
    assert [row["id"] for row in lines_of(file)] == [f"r{number}" for number in range(10, 16)]
    assert [row["accurate"] for row in lines_of(file)] == [False, True, None, True, False, True]
    assert len(server.asked) == 4 + 1 + 2  # answered, failed, and those that were missing
    assert set(server.keys) == {"Bearer secret"}
    assert metrics["faithfulness/llm/accuracy"] == 3 / 6
    assert metrics["faithfulness/llm/undecided"] == 1 / 6
    assert metrics["faithfulness/rows"] == 6
    assert 0 < metrics["faithfulness/llm/accuracy_low"] < 0.5 < metrics["faithfulness/llm/accuracy_high"] < 1
    assert "faithfulness/kappa/llm+contains" in metrics
    outputs = lines_of(file.with_name("generations.jsonl"))
    assert sorted(row["id"] for row in outputs) == [row["id"] for row in ROWS]
    assert all(row["stopped_by"] in ("end", "length", "stop") and row["cut"] == 0 for row in outputs)
    assert evaluated(home, "diff-debug", **settings)["diff-debug"] == metrics
    assert len(server.asked) == 7
    assert json.loads((tmp_path / "faithfulness.json").read_text())["judge"]["llm"] == "big"
    written = [path.read_text() for path in tmp_path.rglob("*.json*")]
    assert not any("secret" in text for text in written)


def test_two_models_are_paired_and_another_model_does_not_resume_from_files(home, tmp_path, capsys):
    results = evaluated(home, "transformer-debug", "diff-debug", judge=JudgeOptions("contains"), output=str(tmp_path))
    first, other = results["transformer-debug"], results["diff-debug"]
    key = "faithfulness/contains/accuracy"
    assert other[f"{key}_difference"] == pytest.approx(other[key] - first[key])
    assert 0 < other[f"{key}_mcnemar_p"] <= 1
    assert f"{key}_difference" not in first
    assert "McNemar" in capsys.readouterr().out
    assert (tmp_path / "faithfulness.png").stat().st_size > 1000
    folder = tmp_path / "faithfulness"
    (folder / "diff-debug").rename(folder / "old")
    (folder / "transformer-debug").rename(folder / "diff-debug")
    with pytest.raises(ValueError, match=r"line 1 of .*generations\.jsonl"):
        evaluated(home, "diff-debug", output=str(tmp_path))


def test_rows_and_documents_are_cut_by_the_options_and_counted(home):
    long = {"id": "long", "task": "summary", "document": "Ann has 10 of them. " * 90}
    (home / "long.jsonl").write_text(json.dumps(long))
    metrics = evaluated(home, "diff-debug", data=str(home / "long.jsonl"))["diff-debug"]
    assert metrics["faithfulness/cut"] == 1
    assert metrics["faithfulness/cut_tokens"] > 100
    few = evaluated(home, "diff-debug", options=LabOptions(new_tokens=2, rows=2))["diff-debug"]
    assert few["faithfulness/rows"] == 2
    assert few["faithfulness/output_tokens"] <= 2


def test_finished_metrics_and_their_samples_are_cached(home, tmp_path):
    settings = {"judge": JudgeOptions("contains"), "cache": str(tmp_path)}
    models = ("transformer-debug", "diff-debug")
    assert evaluated(home, *models, **settings) == evaluated(home, *models, **settings)


def test_entailment_is_the_least_sentence_by_its_best_chunk(home, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(home / "diff-debug" / "tokenizer.json"), pad_token="<|endoftext|>", model_max_length=40
    )
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    labels = {"id2label": {0: "CONTRADICTION", 1: "ENTAILMENT"}, "label2id": {"CONTRADICTION": 0, "ENTAILMENT": 1}}
    config = transformers.BertConfig(vocab_size=300, max_position_embeddings=40, **sizes, **labels)
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    judge = Entailment(str(tmp_path), "cpu")
    row = Row("r", "summary", "abcdefgh " * 12)
    said = ("It is so.", "Or not so.")
    for sentence in (*said, "A sentence without an end that has far more tokens than the classifier can read of it"):
        chunks = judge._chunks(tokenizer.encode(row.document, add_special_tokens=False), sentence)
        assert len(chunks) > 1
        for chunk in chunks:  # read whole, whatever stands behind it
            ids = tokenizer(chunk, sentence, truncation="only_second", max_length=40)["input_ids"]
            assert tokenizer.decode(ids).startswith(chunk)
    marked = [
        judge._chunks(tokenizer.encode("ab " * count + "z", add_special_tokens=False), said[0])
        for count in range(30, 60)
    ]
    assert all("z" in chunks[-1] for chunks in marked)  # the end of a document is read
    ((_, judgement),) = judge.judge([(row, "It is so. Or not so.")])
    with torch.no_grad():
        scores = [
            max(judge.module(**tokenizer(chunk, sentence, return_tensors="pt")).logits.softmax(-1)[0, 1].item()
                for chunk in judge._chunks(tokenizer.encode(row.document, add_special_tokens=False), sentence))
            for sentence in said
        ]  # fmt: skip
    assert judgement.reason == f"P(entail) is at least {min(scores):.3f}"
    assert judgement.accurate == (min(scores) >= 0.5)
    labels = {"id2label": {0: "yes", 1: "no"}, "label2id": {"yes": 0, "no": 1}}
    transformers.BertForSequenceClassification(transformers.BertConfig(**config.to_dict() | labels)).save_pretrained(
        tmp_path / "other"
    )
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="whose labels are yes, no"):
        Entailment(str(tmp_path / "other"), "cpu")
    transformers.BertModel(config).save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="bare is of BertModel: give"):
        Entailment(str(tmp_path / "bare"), "cpu")


def test_a_judge_in_process_needs_room_for_questions(home):
    with pytest.raises(ValueError, match="new_tokens is 512, and diff-debug"):
        InProcess(open_model(str(home / "diff-debug")), 512)


def test_a_judge_in_process_reads_a_chat_or_is_undecided(home, monkeypatch):
    from diffvision.lab.faithfulness import judges

    model = open_model(str(home / "diff-debug"))
    judge = InProcess(model, 8)
    rows = [Row("a", "qa", "Ann. " * 200, "Who?", ("Ann",)), Row("b", "qa", "Ann.", "Who?", ("Ann",))]
    judge.template = "{document}{question} {output}"
    replies = {"Ann.Who? Ann": "**Conclusion: True**"}

    def continued(model, prompts, *, max_new_tokens):
        return [model.tokenizer.encode(replies[model.tokenizer.decode(prompt[1:])]) for prompt in prompts]

    monkeypatch.setattr(judges, "continued", continued)
    given = dict(judge.judge([(row, "Ann") for row in rows]))
    assert given[1].accurate is True
    assert given[0].accurate is None
    assert "tokens, and diff-debug reads 512 tokens, reply included" in given[0].reason


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"judge": JudgeOptions("best")}, "judge.by has 'best': choose among contains, grounded, nli, llm, hf"),
        ({"judge": JudgeOptions(["llm"])}, "judge.by has llm, and judge.llm is missing: give the model's name"),
        ({"judge": JudgeOptions("llm", llm="m")}, "there is no server: give judge.url, or set OPENAI_BASE_URL"),
        ({"judge": JudgeOptions("nli")}, "judge.by has nli, and judge.nli is missing"),
        ({"judge": JudgeOptions("hf")}, "judge.by has hf, and judge.hf is missing"),
        ({"data": None}, "faithfulness needs documents with questions: give data"),
        ({"tasks": "perplexity,faithfulness"}, "perplexity reads text and faithfulness documents .* in two commands"),
        ({"options": LabOptions(new_tokens=512)}, "new_tokens is 512, and diff-debug reads 512 tokens in all"),
        ({"options": LabOptions(new_tokens=500)}, "row 'r10' has a prompt of .* without its document"),
    ],
)
def test_bad_commands_are_one_sentence(home, settings, message, monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(ValueError, match=message):
        evaluated(home, "diff-debug", **settings)


@pytest.mark.parametrize("by", ["", []])
def test_judges_have_names(by):
    with pytest.raises(ValueError, match=r"judge.by is .* which names no judge"):
        JudgeOptions(by)


def test_contains_needs_answers():
    with pytest.raises(ValueError, match="row 's' has no answers for"):
        open_judges(JudgeOptions("contains"), [Row("s", "summary", "d")], "cpu")
    with pytest.raises(ValueError, match=r"judge\.tries is 0: give a number"):
        JudgeOptions(tries=0)


def test_a_key_in_place_of_its_variable_is_not_recorded():
    with pytest.raises(ValueError, match=r"judge\.key_env is not a variable") as raised:
        JudgeOptions(key_env="sk-proj-0123")
    assert "0123" not in str(raised.value)


def test_kappa_by_hand():
    """Agreement 6/8; chance's (4/8)(4/8) + (3/8)(4/8) + 0 = 0.4375."""
    first = [True] * 4 + [False] * 3 + [None]
    other = [True] * 3 + [False] + [False] * 3 + [True]
    assert cohen_kappa(first, other) == pytest.approx((6 / 8 - 0.4375) / (1 - 0.4375))
    assert cohen_kappa(first, first) == 1
    assert math.isnan(cohen_kappa([True] * 3, [True] * 3))
