import tracemalloc

import numpy as np
import pytest

from diffvision.data.shards.order import SequentialOrder, ShuffledOrder

COUNTS = np.array([7, 0, 12, 1, 30, 5, 9, 9, 2, 11])


def everything(counts):
    return [(shard, row) for shard, count in enumerate(counts) for row in range(count)]


def test_sequential_order_is_the_order_of_the_shards():
    order = SequentialOrder(COUNTS)
    assert len(order) == COUNTS.sum()
    assert order.samples(0, len(order)) == everything(COUNTS)
    assert order.samples(18, 22) == everything(COUNTS)[18:22]


@pytest.mark.parametrize("window", [1, 3, 10, 99])
def test_shuffled_order_has_every_sample_once_and_any_part_alone_is_the_same(window):
    order = ShuffledOrder(COUNTS, seed=1, epoch=2, window=window)
    full = order.samples(0, len(order))
    assert sorted(full) == everything(COUNTS)
    fresh = ShuffledOrder(COUNTS, seed=1, epoch=2, window=window)
    assert fresh.samples(40, 77) == full[40:77]
    assert fresh.samples(3, 41) == full[3:41]


def test_the_order_within_a_shard_is_a_function_of_seed_and_epoch():
    orders = [ShuffledOrder(np.array([50]), seed, epoch).samples(0, 50) for seed in range(3) for epoch in range(3)]
    assert len(set(map(tuple, orders))) == 9


def test_shards_are_mixed_within_a_window_and_only_there():
    order = ShuffledOrder(np.full(12, 50), seed=0, epoch=0, window=4)
    windows = [{shard for shard, _ in order.samples(n * 200, (n + 1) * 200)} for n in range(3)]
    assert [sorted(w) for w in windows] == [sorted(order.window_shards(n)) for n in range(3)]
    assert set.union(*windows) == set(range(12))
    assert windows[0] != {0, 1, 2, 3}
    early = [shard for shard, _ in order.samples(0, 50)]
    assert len(set(early)) == 4  # mixed, not one shard after another


def test_four_hundred_million_samples_take_no_memory_to_speak_of():
    counts = np.full(40_000, 10_000)
    tracemalloc.start()
    order = ShuffledOrder(counts, seed=0, epoch=0)
    samples = order.samples(399_000_000, 399_004_096)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(samples)) == 4096
    assert peak < 20e6  # a permutation of them all would take 3.2e9 bytes


def test_places_outside_and_windows_of_nothing_are_errors():
    with pytest.raises(IndexError):
        ShuffledOrder(COUNTS, 0, 0).samples(80, 87)
    with pytest.raises(ValueError, match="window must be at least 1"):
        ShuffledOrder(COUNTS, 0, 0, window=0)
