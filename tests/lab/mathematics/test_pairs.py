"""Pairs of answers that are equal, and that are not, each in both orders; and answers that would take all time."""

import time

import pytest

from diffvision.lab.mathematics import answers
from diffvision.lab.mathematics.answers import equal, has_math_verify, math_verify

SAME = r"""
1e3 | 1000
1E+3 | 1000
1.5e-3 | 0.0015
10^3 | 1000
10^{3} | 1,000
10**3 | 1000
10³ | 1000
10⁻² | 0.01
10^{-2} | 1/100
2^{10} | 1024
1.5 \times 10^{3} | 1500
1.5×10³ | 1500
2 \cdot 10^6 | 2,000,000
½ | 1/2
½ | \frac{1}{2}
1½ | 3/2
1 ½ | 1.5
2⅓ cups | 7/3
1⁄2 | 0.5
5 million | 5,000,000
$5 million | 5000000
5 million dollars | \$5,000,000
2.5 billion | 2500000000
3 hundred thousand | 300,000
4 dozen | 48
4 dozen eggs | 48 eggs
4\text{ dozen} | 48
\frac{1}{-2} | -1/2
\frac{-1}{2} | -\frac{1}{2}
-\frac{1}{-2} | 0.5
\sqrt{4} | 2
√4 | 2
√(9) | 3
\sqrt{\frac{1}{4}} | 0.5
\sqrt[3]{8} | 2
\frac{\sqrt{16}}{2} | 2
\frac{\frac{1}{2}}{3} | 1/6
\frac12 | 0.5
\cfrac{1}{2} | .5
$18 | 18
$18 | 18 dollars
\$18.00 | 18
18 dollars | 18
US$18 | 18 USD
-$5 | -5 dollars
$-5 | -$5
€18 | 18 euros
18€ | 18
£5 | 5 pounds
5 lbs | 5 pounds
50% | 50
50\% | 50 percent
50% | 0.5
50 per cent | 50%
$50\%$ | 50
90° | 90
90^\circ | 90 degrees
90^{\circ} | 90°
20°C | 20 degrees Celsius
20℃ | 20
20^\circ\text{C} | 20°C
1 1/2 | 3/2
1\frac{1}{2} | 1.5
-1 1/2 | -1.5
-2\frac{1}{3} | -7/3
1,234,567 | 1234567
1{,}234 | 1234
1\,234 | 1234
1 234 | 1234
-0 | 0
-0.0 | 0
0.50 | .5
−5 | -5
–5 | -5
+7 | 7
(5) | 5
(-5) | -5
3 hours | 3 hrs
3 hours | 3
1 hour | 1 hours
5 cm | 5 centimeters
5 centimetres | 5\text{ cm}
12 cm^2 | 12 square centimeters
12\text{ cm}^2 | 12 cm²
12 square feet | 12 sq ft
60 mph | 60 miles per hour
18 dollars / hour | $18 per hour
5 inches | 5 in
6 feet | 6 ft
3 pennies | 3 cents
3¢ | 3 cents
3 cups of flour | 3 cups
5 apples left | 5 apples
7 dishes | 7 dish
$5 dollars | 5 dollars
5cm | 5 cm
5ft | 5 feet
18 miles per gallon | 18 miles/gallon
2 ponies | 2 pony
Yes | yes.
\text{Monday} | monday
(B) | B
(1, 2) | (1,2)
(1/2, 3) | (0.5, 3)
(½, −1) | (0.5, -1)
[0, 1) | [0,1)
(-\infty, 3] | (-∞, 3]
\left(0, \frac{1}{2}\right] | (0, 0.5]
\{1, 2\} | \{2, 1\}
\{1, 2\} | {1,2}
x = 3 | 3
x \in [0, 1] | [0,1]
2π | 2\pi
x ≤ 4 | x \le 4
x² | x^2
x^{2} | x^2
2\sqrt{3} | 2√3
2\sqrt{3}\text{ cm} | 2\sqrt{3}
１２３ | 123
3 + 4i | 3+4i
"""
OTHER = r"""
3 hours | 3 minutes
3 dollars | 3 cents
$3 | 3 cents
$3 | 3¢
$3 | €3
£3 | $3
3 lb | £3
4 dozen | 4
5 million | 5
5 million | 5 billion
5 million | 5 thousand
$$ | $$
. | .
3 miles | 3 kilometers
3 miles | 3 miles per hour
3 feet | 3 square feet
3 cm | 3 cm^2
3 cm² | 3 cm³
3 cm | 3 mm
3\text{ cm} | 3\text{ m}
3\text{ mW} | 3\text{ MW}
20°C | 20°F
90 degrees | 90 radians
50% | 50 degrees
50% | 0.05
5% | 5/1000
5% | 500
50% | 50 apples
1e3 | 1e4
1e3 | 13
1e3 | 1
10^3 | 103
10^3 | 30
10³ | 103
x² | x2
cm² | cm2
10^{-2} | -100
2^{-1} | -2
½ | 12
1½ | 1/2
1½ | 11/2
1 1/2 | 11/2
1 | 1/2
\frac{1}{-2} | 1/2
\frac{1}{2} | 12
\sqrt{4} | 4
\sqrt{4} | -2
\sqrt{8} | 2
\sqrt{8} | 8
\sqrt[3]{8} | \sqrt{8}
\sqrt{-4} | 2
-2^2 | 4
(-2)^2 | -4
1,234 | 1.234
1, 234 | 1234
(1,234) | 1234
(1, 2) | (2, 1)
(1, 2) | [1, 2]
[0, 1) | [0, 1]
(1, 2) | (1, 2, 3)
(1, 2) | 1, 2
\{1, 2\} | \{1, 3\}
\{1, 1\} | \{1, 2\}
\{1, 2\} | (1, 2)
(1, 2) and (3, 4) | (1, 2)
(1,2),(3,4) | (1,2),(3,5)
1 2 | 12
5 6 | 56
12 | 1 2
x=3 | y=3
3 | 4
3 | 3a
2\pi | 2
2\sqrt{3} | 2
2\sqrt{3}\text{ cm} | 2\sqrt{3}\text{ m}
3+4 | 7
3-4 | -1
2:1 | 2
2:1 | 2/1
1/0 | 0
0/0 | 0/1
\frac{1}{0} | \frac{2}{0}
\infty | -\infty
yes | no
A | B
A | a
Monday | Tuesday
101_2 | 101
101_2 | 5
9**9**9**9 | 9
10^{10^{10}} | 10
1e999999999 | 1
5 pm | 5 am
5 pm | 5
3rd | 3
half | 1/2 apples
2 thirds | 2
2 tenths | 2
3 pounds | 3 euros
3 apples | 3 oranges
3:30 | 3.30
-5 | 5
5- | 5
- | -5
3 m | 3 n
3! | 6
3! | 3
"""
EMPTY = ["", " ", ".", "$$", r"\text{}"]
# What math-verify takes for right is its own matter where an answer is no number of ours.
NUMBERS = [
    "3 hours | 3 minutes",
    "3 dollars | 3 cents",
    "4 dozen | 4",
    "5 million | 5",
    r"2\sqrt{3}\text{ cm} | 2\sqrt{3}\text{ m}",
]
HOSTILE = [
    "9**9**9**9",
    "10^{10^{10}}",
    "1e999999999",
    "2^{9999999999}",
    "2^" * 300 + "2",
    "9" * 100_000,
    "(" * 50_000,
    "(" * 400 + "1" + ")" * 400,
    r"\frac{" * 20_000,
    r"\sqrt{" * 9_999 + "4" + "}" * 9_999,
    "1 a" * 30_000,
    "½" * 30_000,
    "1" + " " * 100_000 + "a!",
    r"\{" + "a," * 480 + r"b\}",
]


def pairs(table):
    return [tuple(part.strip() for part in line.split(" | ")) for line in table.strip().splitlines()]


@pytest.mark.parametrize(("gold", "answer"), pairs(SAME))
def test_equal_answers(gold, answer):
    assert equal(gold, answer)
    assert equal(answer, gold)


@pytest.mark.parametrize(("gold", "answer"), pairs(OTHER))
def test_other_answers(gold, answer):
    assert not equal(gold, answer)
    assert not equal(answer, gold)


def test_empty_answers_are_equal_to_nothing():
    assert not any(equal(gold, answer) or math_verify(gold, answer) for gold in EMPTY for answer in EMPTY)


@pytest.mark.parametrize(("gold", "answer"), pairs("\n".join(NUMBERS)))
def test_math_verify_is_not_asked_where_units_or_numbers_differ(gold, answer, monkeypatch):
    monkeypatch.setattr(answers, "_verified", lambda pair: True)
    assert not math_verify(gold, answer)
    assert math_verify("x + 1", "1 + x")


@pytest.mark.parametrize("answer", HOSTILE, ids=lambda answer: answer[:12])
def test_an_answer_is_compared_in_bounded_time(answer):
    before = time.process_time()
    for gold in ("5", answer[:-1], answer):
        equal(gold, answer)
    assert time.process_time() - before < 2  # some would take for ever


@pytest.mark.slow
@pytest.mark.skipif(not has_math_verify(), reason="needs math-verify")
@pytest.mark.parametrize("answer", ["10^{10^{10}}", "(10^9)!", r"\binom{10^9}{5\cdot10^8}"])
def test_math_verify_has_limits(answer):
    assert not math_verify("5", answer)
    assert math_verify("x + 1", "1 + x")
