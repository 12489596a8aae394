import pytest

from diffvision.data import BadDataError, Limits, Report
from diffvision.data.shards.report import Tally


def bad(*positions):
    return {position: ("damaged image", f"a.tar: {position}") for position in positions}


def test_the_account_adds_up_at_every_moment():
    report = Report(total=103, tail=3, before=20)
    assert report.remaining == 80
    for start in range(20, 100, 10):
        report.add(Tally(start, start + 10, bad(start + 1), substituted=1), Limits(1.0))
        assert report.seen + report.bad + report.tail + report.before + report.remaining == 103
    assert (report.seen, report.bad, report.substituted, report.remaining) == (72, 8, 8, 0)
    assert report.examples == {"damaged image": ["a.tar: 21", "a.tar: 31", "a.tar: 41"]}
    report.cut, report.extra_counts = 1200, {"padding_tokens": 4272, "empty": 0}
    assert report.summary().splitlines() == [
        "epoch 1: 72 seen, 8 skipped, 8 substituted, 3 in the incomplete last batch, of 103",
        "  8 x damaged image: a.tar: 21, a.tar: 31, a.tar: 41",
        "  1,200 captions cut",
        "  besides: 4,272 padding tokens",
    ]


def test_bad_samples_in_a_row_count_across_batches_and_a_good_one_ends_the_row():
    limits = Limits(1.0, max_bad_in_a_row=5)
    report = Report(total=1000)
    report.add(Tally(0, 10, bad(6, 7, 8, 9)), limits)
    report.add(Tally(10, 20, bad(11, 12, 13, 14)), limits)
    report.add(Tally(20, 30, bad(29)), limits)
    with pytest.raises(BadDataError, match="5 bad samples in a row"):
        report.add(Tally(30, 40, bad(30, 31, 32, 33)), limits)


def test_a_rank_answers_for_its_share_of_the_limit():
    limits = Limits(0.01)
    report = Report(total=1000, world_size=2)
    report.add(Tally(0, 10, bad(0, 2, 4, 6, 8)), limits)  # 1% of 500
    with pytest.raises(BadDataError, match=r"6 bad samples: the limit is 1\.00%"):
        report.add(Tally(10, 20, bad(11)), limits)


def test_limits_that_cannot_be():
    for settings in ({"max_bad_fraction": -0.1}, {"max_bad_fraction": 1.5}, {"max_bad_in_a_row": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(settings))} is"):
            Limits(**settings)


def test_a_run_resumed_near_an_epoch_s_end_has_the_whole_epoch_s_limit():
    report = Report(total=1000, before=990)
    report.add(Tally(990, 1000, bad(995)), Limits(0.01))
    assert report.remaining == 0


def test_a_passed_limit_says_what_can_be_done():
    for limits, is_setting in ((Limits(), True), (Limits(settable=False), False), (Limits(1.0, 1), False)):
        with pytest.raises(BadDataError, match=r"^1 bad sample") as error:
            Report(total=60).add(Tally(0, 10, bad(3)), limits)
        assert ("raise max_bad_fraction" in str(error.value)) is is_setting


def test_a_dead_mount_is_told_apart_from_damaged_files():
    gone = {position: ("unreadable shard", f"a.tar: {position}") for position in range(100)}
    with pytest.raises(BadDataError, match=r"^100 bad samples in a row, .*disk is mounted"):
        Report(total=1000).add(Tally(0, 100, gone), Limits(1.0))
