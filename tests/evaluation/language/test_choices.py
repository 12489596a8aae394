"""Constrained greedy decoding of a table of probabilities, by hand."""

import pytest

from diffvision.evaluation.language.many_shot import constrained_choices

NEXT = [[0.1, 0.6, 0.3], [0.2, 0.3, 0.5], [0.7, 0.2, 0.1]]  # 0 -> 1 -> 2 -> 0


def test_a_constrained_choice_takes_the_likeliest_step_by_step(table):
    # from 0: 1 is likelier than 2; after 1 only 0 and 1 lead on, and 1 is likelier
    choices = [[2, 0], [1, 0, 2], [1, 1, 2]]
    assert constrained_choices(table(NEXT), [[0], [1], [2, 0]], choices, batch_size=2) == [2, 0, 2]
    with pytest.raises(ValueError, match=r"\[1\] begins the choice \[1, 2\]"):
        constrained_choices(table(NEXT), [[0]], [[1], [1, 2]])
