"""Many-shot accuracy and order robustness of models whose answers are known."""

import pytest
import torch
from language_fixtures import Copier, Table
from torch import nn
from torch.nn import functional as F

from diffvision.data.datasets import mapping_text
from diffvision.evaluation.language import many_shot as module
from diffvision.evaluation.language.many_shot import Example, Task, encode_prompts, many_shot, order_robustness

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


def test_a_constant_answer_is_right_as_often_as_it_is_true(task, words):
    ja = Copier(blind=words.encode(" ja")[0])
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


def test_mappings_are_one_to_one_differ_by_task_and_ask_for_unseen_words():
    tasks = module.label_mapping_tasks(4, classes=4, queries=16)
    kind_of = {word: kind for kind, own in mapping_text.KINDS.items() for word in own.split()}
    for task in tasks:
        mapping = {(kind_of[example.text], example.label) for example in [*task.demonstrations, *task.queries]}
        assert len(mapping) == len(dict(mapping)) == len(set(task.labels)) == 4
        asked = {query.text for query in task.queries}
        assert len(asked) == 16
        assert not asked & {example.text for example in task.demonstrations}
    assert len({tuple(task.labels) for task in tasks}) > 1


def test_orders_and_draws_are_even_among_classes(task, draw):
    order = module.alternate([*PAIRS, Example("ja10", "ja")], draw)
    labels = [example.label for example in order]
    assert sorted(order) == sorted([*PAIRS, Example("ja10", "ja")])
    assert all(set(labels[place : place + 2]) == {"ja", "nein"} for place in (0, 2, 4, 6))
    drawn = module.draw_demonstrations(task, 4, seed=0)
    assert sorted(example.label for example in drawn) == ["ja", "ja", "nein", "nein"]


def test_a_constrained_choice_takes_the_likeliest_step_by_step():
    model = Table([[0.1, 0.6, 0.3], [0.2, 0.3, 0.5], [0.7, 0.2, 0.1]])  # 0 -> 1 -> 2 -> 0
    # from 0: 1 is likelier than 2; after 1 only 0 and 1 lead on, and 1 is likelier
    choices = [[2, 0], [1, 0, 2], [1, 1, 2]]
    assert module.constrained_choices(model, [[0], [1], [2, 0]], choices, batch_size=2) == [2, 0, 2]


def test_a_prompt_ends_where_the_label_begins(task, words):
    text = task.prompt(PAIRS[:1], task.queries[0])
    assert text == "Text: ja0\nLabel: ja\n\nText: ja9\nLabel:"
    (prompt, *_) = encode_prompts(task, PAIRS[:1], words)
    assert words.decode(prompt) == "<end>" + text
    assert [words.decode(tokens) for tokens in module.label_tokens(task, words)] == [" ja\n", " nein\n"]
    with pytest.raises(ValueError, match="8 shots"):
        encode_prompts(task, PAIRS, words, max_length=80)
