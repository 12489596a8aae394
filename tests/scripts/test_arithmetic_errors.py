"""Solutions of worded problems that went wrong in every way."""

import pytest

from arithmetic_errors import judge

PROMPT = (
    "Rimu has 14 pears. Lano has 9 pears. Gati has 5 more pears than Rimu. Taba has 3 more pears than Rimu. "
    "Seno has 2 times as many pears as Taba. How many pears does Seno have?"
)
RIGHT = "Taba: 14 + 3 = 17\nSeno: 17 x 2 = 34\n#### 34"


@pytest.mark.parametrize(
    ("written", "kind", "first_wrong"),
    [
        (RIGHT, "correct", None),
        ("Taba: 3 + 14 = 17\nSeno: 2 x 17 = 34\n#### 34\n", "correct", None),
        # The answer alone decides what is correct.
        ("Taba: 14 + 2 = 16\nSeno: 17 x 2 = 34\n#### 34", "correct", 1),
        ("Taba: 9 + 3 = 12\nSeno: 12 x 2 = 24\n#### 24", "distracted", 1),
        ("Taba: 14 + 3 = 17\nSeno: 17 + 5 = 22\n#### 22", "distracted", 2),
        # About a person who does not matter, with numbers that do.
        ("Taba: 14 + 3 = 17\nLano: 17 x 2 = 34\n#### 17", "distracted", 2),
        ("Taba: 14 + 3 = 17\n#### 9", "distracted", 2),
        ("Taba: 14 + 77 = 91\nSeno: 91 x 2 = 182\n#### 182", "fabricated", 1),
        ("Taba: 14 + 3 = 17\nSeno: 16 x 2 = 32\n#### 32", "fabricated", 2),
        ("Taba: 14 + 3 = 17\nSeno: 17 x 2 = 34\n#### 35", "fabricated", 3),
        ("Taba: 14 + 3 = 18\nSeno: 18 x 2 = 36\n#### 36", "miscalculated", 1),
        ("Taba: 14 - 3 = 11\nSeno: 11 x 2 = 22\n#### 22", "miscalculated", 1),
        ("Taba: 14 + 3 = 17\n#### 17", "miscalculated", 2),
        ("Taba: 14 + 3 = 17\nSeno: 17 x 2 = 34", "malformed", 3),
        ("Taba has 17 pears.\n#### 17", "malformed", 1),
        ("", "malformed", 1),
        # More digits than Python reads as a number.
        ("Taba: 14 + 3 = " + "7" * 5000 + "\n#### " + "7" * 5000, "malformed", 1),
    ],
)
def test_the_first_wrong_step_decides(written, kind, first_wrong):
    assert judge(PROMPT, RIGHT, written) == (kind, first_wrong)


def test_a_solution_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="is not one of `diffvision"):
        judge("How many?", "She has 3.\n#### 3", "#### 3")
