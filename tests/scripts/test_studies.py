"""Studies on a few samples: a run has all its numbers, and a report calls nothing better that it cannot."""

import itertools

import pytest
import torch

import common_mode
from common_mode import COLOURS, FACTORS, Data, Run


@pytest.fixture
def file(tmp_path):
    """Scenes of random pixels."""
    values = list(itertools.product(*FACTORS.values()))[::7]
    truth = [
        {
            "garments": [{"kind": kind, "colour": colour}],
            "background": background,
            "count": 1 + number % 3,
            "layout": ("middle", "top left")[number % 2],
        }
        for number, (kind, colour, background) in enumerate(values + values)
    ]
    names = ("single/train", "single/validation", "single/test", "colours/validation", "colours/test")
    names += ("several/validation", "several/test")
    images = {name: torch.randint(0, 256, (len(truth), 3, 48, 48), dtype=torch.uint8) for name in names}
    torch.save({"images": images, "truth": dict.fromkeys(names, truth), "mean": 0.5, "std": 0.3}, tmp_path / "data.pt")
    return tmp_path / "data.pt"


@pytest.mark.slow
@pytest.mark.parametrize(("family", "row_sum"), [("plain", 1.0), ("V1 0.8", 0.2), ("DINT 0.8", 1.0), ("VCA", None)])
def test_a_run_of_the_common_mode(family, row_sum, file):
    numbers = common_mode.train(Run(family, 1e-4, 1), Data(file), epochs=1)
    assert not numbers["diverged"]
    assert set(common_mode.PRIMARY) <= set(numbers["test"])
    assert all(set(row) == {"mean component", *FACTORS, "layout", "count"} for row in numbers["layers"])
    assert len(numbers["layers"]) == 4
    assert numbers["row sums"] == ([] if row_sum is None else [pytest.approx(row_sum, abs=0.15)] * 4)


def test_a_difference_whose_interval_includes_zero_is_level():
    assert common_mode.cells_of([50.0, 52.0], (1.0, 3.0)) == ("51.0 ± 1.4", "+1.0 [-2.0, +4.0] level")
    assert common_mode.cells_of([50.0], (-4.0, 3.0)) == ("50.0", "-4.0 [-7.0, -1.0] lower")


def test_captions_name_a_share_of_what_is_there(file):
    data = Data(file)
    named = [any(f" {colour} " in caption for colour in COLOURS) for caption in data.captions.distinct]
    assert 0 < sum(named) < len(named)
