"""Many-shot accuracy and order robustness of models whose answers are known."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from diffvision.evaluation.language.many_shot import (
    Example,
    Task,
    encode_prompts,
    label_tokens,
    many_shot,
    order_robustness,
    read_task,
)

PAIRS = [Example(f"{kind}{number}", kind) for kind in ("ja", "nein") for number in range(4)]


@pytest.fixture
def task():
    return Task(PAIRS, [Example("ja9", "ja"), Example("nein9", "nein"), Example("ja8", "ja")], name="words")


class Last(nn.Module):
    """Says the label that it saw last."""

    def __init__(self, labels):
        super().__init__()
        self.labels = labels

    def forward(self, tokens):
        said = torch.zeros_like(tokens)
        for row, own in enumerate(tokens.tolist()):
            seen = 0
            for place, token in enumerate(own):
                seen = token if token in self.labels else seen
                said[row, place] = seen
        return F.one_hot(said, 512).float()


def test_a_constant_answer_is_right_as_often_as_it_is_true(task, words, copier):
    ja = copier(blind=words.encode(" ja")[0])
    metrics = many_shot(ja, words, [task], shots=(1, 4))
    assert metrics == pytest.approx({"accuracy/1": 2 / 3, "accuracy/4": 2 / 3, "chance": 0.5})
    robustness = order_robustness(ja, words, [task], shots=4, permutations=3)
    for arrangement in ("random", "alternating"):
        assert robustness[f"{arrangement}/spread"] == 0
        assert robustness[f"{arrangement}/mean"] == pytest.approx(2 / 3)


def test_a_model_that_minds_the_order_has_a_spread(task, words):
    model = Last({words.encode(f" {label}")[0] for label in task.labels})
    metrics = order_robustness(model, words, [task], shots=6, permutations=10)
    assert metrics["random/best"] == pytest.approx(2 / 3)  # the last one seen is ja
    assert metrics["random/worst"] == pytest.approx(1 / 3)
    assert metrics["random/spread"] == pytest.approx(1 / 3)
    assert metrics["random/worst"] < metrics["random/mean"] < metrics["random/best"]


def test_a_prompt_ends_where_the_label_begins(task, words):
    text = task.prompt(PAIRS[:1], task.queries[0])
    assert text == "Text: ja0\nLabel: ja\n\nText: ja9\nLabel:"
    (prompt, *_) = encode_prompts(task, PAIRS[:1], words)
    assert words.decode(prompt) == "<end>" + text
    assert [words.decode(tokens) for tokens in label_tokens(task, words)] == [" ja\n", " nein\n"]
    with pytest.raises(ValueError, match="8 shots of words with a label are"):
        encode_prompts(task, PAIRS, words, max_length=80)


def test_tasks_from_files(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text('{"text": "a", "label": 1}\n\n{"text": "b", "label": "2"}\n')
    queries = tmp_path / "test.jsonl"
    queries.write_text('{"text": "c", "label": "1"}\n')
    task = read_task(file, queries)
    assert (task.name, task.labels, task.queries) == ("test", ["1", "2"], [Example("c", "1")])
    queries.write_text('{"text": "c", "label": "1"}\n{"text": "b", "label": "2"}\n')
    with pytest.warns(UserWarning, match=r"1 of the 2 queries in .*test.jsonl"):
        read_task(file, queries)
    queries.write_text('{"text": "c", "label": "1"}\n{"text": "d"}\n')
    with pytest.raises(ValueError, match=r"line 2 of .*test\.jsonl is no"):
        read_task(file, queries)
    queries.write_text('{"text": "c", "label": null}\n')
    with pytest.raises(ValueError, match=r"line 1 of .* is no example"):
        read_task(file, queries)
