"""Order, resumption and account of the training loader."""

import gc
import multiprocessing
import os
import random
import time
from collections import Counter

import numpy as np
import pytest
import torch

from diffvision.data import BadDataError, Limits, ShardSet
from diffvision.data.shards.loader import EvaluationLoader
from tests.data.conftest import png

LENIENT = Limits(max_bad_fraction=1.0)


@pytest.fixture(scope="module")
def two_epochs(corpus, whole):
    loader = corpus.loader(whole, seed=3, window=4)
    return [corpus.read(loader), corpus.read(loader)]


def test_an_epoch_has_every_sample_but_the_tail_once(two_epochs, corpus, whole):
    for batches in two_epochs:
        assert [len(batch) for batch in batches] == [10] * 10
        numbers = Counter(n for batch in batches for n in batch)
        assert set(numbers.values()) == {1}
        assert set(numbers) <= set(range(103))
    assert two_epochs[0] != two_epochs[1]
    assert two_epochs[0] != corpus.read(corpus.loader(whole, seed=4, window=4))


def joined(parts):
    """The batches of each rank -> global batches."""
    return [[number for part in slices for number in part] for slices in zip(*parts, strict=True)]


def test_the_time_that_its_user_takes_is_no_wait(corpus, whole):
    loader = corpus.loader(whole)
    begun = time.monotonic()
    for _ in loader:
        time.sleep(0.02)
    assert 0 < loader.waited <= time.monotonic() - begun - 10 * 0.02


@pytest.mark.parametrize(("num_workers", "world_size"), [(1, 1), (2, 1), (0, 2), (0, 5)])
def test_order_does_not_depend_on_workers_and_ranks(corpus, whole, two_epochs, num_workers, world_size):
    settings = {"seed": 3, "window": 4, "num_workers": num_workers, "world_size": world_size}
    loaders = [corpus.loader(whole, rank=rank, **settings) for rank in range(world_size)]
    assert {len(loader) for loader in loaders} == {10}
    assert [joined([corpus.read(loader) for loader in loaders]) for _ in range(2)] == two_epochs


def test_a_batch_names_its_samples_which_warnings_of_skipped_steps_give(corpus, whole, two_epochs):
    loader = corpus.loader(whole, seed=3, window=4, rank=1, world_size=2)
    names = loader.names(1, 7)
    assert [int(name.split(": ")[1]) for name in names] == two_epochs[1][7]
    assert all(name.split(": ")[0].endswith(".tar") for name in names)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_epochs_follow_one_another_and_can_be_chosen(corpus, whole, two_epochs, num_workers):
    loader = corpus.loader(whole, seed=3, window=4, num_workers=num_workers)
    loader.sampler.set_epoch(1)  # as Lightning does
    assert corpus.read(loader) == two_epochs[1]
    assert loader.epoch == 2
    loader.set_epoch(0)
    iterator = iter(loader)
    next(iterator)
    iterator.close()
    assert corpus.read(loader) == two_epochs[0]  # a new iteration of an epoch that was left begins it again


@pytest.mark.quick("2-1-7", "0-2-7", "0-1-13", "2-1-0", "0-2-10")
@pytest.mark.parametrize("consumed", [0, 1, 7, 9, 10, 13])
@pytest.mark.parametrize(("num_workers", "world_size"), [(0, 1), (2, 1), (0, 2)])
def test_resumption_is_exact_on_other_workers_and_ranks(corpus, whole, two_epochs, consumed, num_workers, world_size):
    first = corpus.loader(whole, seed=3, window=4, num_workers=2 if consumed == 7 else 0)
    epoch, batches = (0, 10) if consumed == 10 else divmod(consumed, 10)
    first.set_epoch(epoch)
    iterator = iter(first)
    for _ in range(batches):
        next(iterator)
    state = first.state_dict()
    assert all(isinstance(value, (int, str)) for value in state.values())  # loads with weights_only=True
    settings = {"seed": 3, "window": 4, "num_workers": num_workers, "world_size": world_size}
    loaders = [corpus.loader(whole, rank=rank, **settings) for rank in range(world_size)]
    for loader in loaders:
        loader.load_state_dict(state)
        loader.set_epoch(consumed // 10)  # Lightning's call: the position stays
        assert len(loader) == 10
    resumed = joined([corpus.read(loader) for loader in loaders])
    assert resumed == two_epochs[consumed // 10][consumed % 10 :]
    assert (loaders[0].report.before, loaders[0].report.remaining) == (consumed % 10 * 10, 0)


def test_an_epoch_restored_at_its_end_is_accounted_for_and_not_begun_again(corpus, whole, two_epochs):
    first, again = corpus.loader(whole, seed=3, window=4), corpus.loader(whole, seed=3, window=4)
    list(first)
    again.load_state_dict(state := first.state_dict())
    again.set_epoch(0)  # Lightning's call, where only the epoch's end is still to be done
    assert (again.report.epoch, again.report.before, again.report.remaining) == (0, 100, 0)
    assert again.state_dict() == state
    again.set_epoch(1)
    assert corpus.read(again) == two_epochs[1]


def test_states_of_other_runs_are_refused(corpus, whole):
    state = corpus.loader(whole, seed=3).state_dict()
    for settings in ({"seed": 4}, {"batch_size": 5}, {"window": 3}):
        with pytest.raises(ValueError, match=f"cannot resume: {next(iter(settings))} was"):
            corpus.loader(whole, **{"seed": 3, **settings}).load_state_dict(state)
    with pytest.raises(ValueError, match="cannot resume: samples was 103"):
        corpus.loader(str(whole / "000000.tar"), seed=3).load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"world_size": 4}, "batch_size 10 is that of all ranks"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"num_workers": -1}, "num_workers"),
        ({"batch_size": 104}, "103 samples: fewer than one global"),
    ],
)
def test_settings_that_cannot_be(corpus, whole, settings, message):
    with pytest.raises(ValueError, match=message):
        corpus.loader(whole, **settings)
    with pytest.raises(ValueError, match="batch_size"):
        EvaluationLoader(ShardSet(whole), corpus.kind(), batch_size=0)


# ---- Augmentation ---------------------------------------------------------------------------------------------------


def noisy(image):
    """A transform that uses all three generators."""
    return torch.tensor([random.random(), float(np.random.rand()), float(torch.rand(()))]).reshape(3, 1, 1)  # noqa: NPY002


def test_augmentation_is_a_function_of_seed_epoch_and_sample(corpus, whole):
    def epoch(number, **settings):
        """{number of a sample: what was drawn for it}"""
        loader = corpus.loader(whole, transform=noisy, **settings)
        loader.set_epoch(number)
        pairs = [zip(batch["text"][:, 0].tolist(), batch["image"].flatten(1).tolist(), strict=True) for batch in loader]
        return {number: tuple(drawn) for one in pairs for number, drawn in one}

    random.seed(1)
    first = epoch(0)
    assert len({*first.values()}) == len(first)
    assert epoch(0, num_workers=2) == first
    again = epoch(0, batch_size=20)
    assert all(again[n] == first[n] for n in first.keys() & again.keys())
    assert not {*epoch(1).values()} & {*first.values()}
    assert not {*epoch(0, seed=1).values()} & {*first.values()}


def test_the_process_keeps_its_own_random_state(corpus, whole):
    def drawn():
        return random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002

    random.seed(0), np.random.seed(0), torch.manual_seed(0)  # noqa: NPY002
    expected = [drawn(), drawn()]
    random.seed(0), np.random.seed(0), torch.manual_seed(0)  # noqa: NPY002
    values = [drawn()]
    next(iter(corpus.loader(whole, transform=noisy)))
    assert [*values, drawn()] == expected


# ---- Bad samples ----------------------------------------------------------------------------------------------------


BAD = {
    # number of a sample: what is changed (None is left out), and the reason under which it is counted
    3: ({"png": b""}, "empty image"),
    10: ({"png": png(10)[:50]}, "truncated image"),
    17: ({"png": b"hello"}, "not a JPEG, PNG or WebP image"),
    24: ({"txt": " \n"}, "empty caption"),
    31: ({"txt": b"\xff\xfe\xfa"}, "caption not UTF-8"),
    38: ({"png": None}, "missing image: the sample has cls, txt, none of them jpg, jpeg, png, webp"),
    45: ({"txt": None}, "missing caption: the sample has cls, png, none of them txt, json"),
    52: ({"txt": ""}, "empty caption"),
}


def spoil(sample):
    change, _ = BAD.get(int(sample["__key__"]), ({}, None))
    return {name: value for name, value in (sample | change).items() if value is not None}


@pytest.fixture(scope="module")
def spoiled(corpus, tmp_path_factory):
    return corpus.write(tmp_path_factory.mktemp("spoiled") / "shards", count=103, change=spoil)


@pytest.mark.quick("0")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_samples_are_counted_and_their_places_filled(corpus, spoiled, num_workers):
    loader = corpus.loader(spoiled, num_workers=num_workers, limits=LENIENT)
    for epoch in range(3):
        batches = corpus.read(loader)
        report = loader.report
        order = [s * 10 + r for s, r in loader.order(epoch).samples(0, 103)]
        counted = BAD.keys() & set(order[:100])
        assert all(len(batch) == len(set(batch)) == 10 for batch in batches)
        assert not BAD.keys() & {n for batch in batches for n in batch}
        assert report.bad == report.substituted == len(counted)
        assert report.seen + report.bad + report.tail == report.total == 103
        assert report.skipped == Counter(BAD[number][1] for number in counted)
        for reason, examples in report.examples.items():
            assert len(examples) <= 3, reason
            assert all(int(example.split(": ")[1]) in BAD for example in examples)
    assert "empty caption: 0000" in report.summary()


def test_a_substitute_is_the_sample_of_the_same_slot_one_batch_further(corpus, spoiled):
    loader = corpus.loader(spoiled, limits=LENIENT)
    batches = corpus.read(loader)
    order = [s * 10 + r for s, r in loader.order(0).samples(0, 103)]
    for position, number in enumerate(order[:100]):
        given = batches[position // 10][position % 10]
        if number not in BAD:
            assert given == number
        elif position + 10 < 103 and order[position + 10] not in BAD:
            assert given == order[position + 10]


def test_substitutes_do_not_depend_on_ranks(corpus, spoiled):
    one = corpus.loader(spoiled, limits=LENIENT)
    two = [corpus.loader(spoiled, limits=LENIENT, rank=r, world_size=2) for r in range(2)]
    expected, parts = corpus.read(one), [corpus.read(loader) for loader in two]
    assert [a + b for a, b in zip(*parts, strict=True)] == expected
    assert two[0].report.skipped + two[1].report.skipped == one.report.skipped
    assert sum(loader.report.seen for loader in two) == one.report.seen


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_hundred_in_a_row_stop_even_a_lenient_run(corpus, tmp_path, num_workers):
    source = corpus.write(tmp_path / "s", count=300, per_shard=100, change=lambda s: s | {"png": b"x"})
    with pytest.raises(BadDataError, match="100 bad samples in a row"):
        corpus.read(corpus.loader(source, batch_size=150, limits=LENIENT, num_workers=num_workers))
    with pytest.raises(BadDataError, match="nothing good to take their place"):
        corpus.read(corpus.loader(source, batch_size=50, limits=LENIENT, num_workers=num_workers))


def test_a_failing_transform_is_no_bad_sample(corpus, whole):
    def broken(image):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug") as error:
        next(iter(corpus.loader(whole, transform=broken)))
    assert "while making the sample 0000" in error.value.__notes__[0]


# ---- Damaged shards; those with a manifest are in test_storage, hostile ones in tests/test_hostile.py ---------------


def test_a_damaged_shard_without_a_manifest_is_refused_and_counted_where_sizes_say_what_it_had(corpus, tmp_path):
    """Else samples would be missing from every epoch, and counted nowhere."""
    source = corpus.write(tmp_path / "s", count=40, manifest=False)
    os.truncate(source / "000001.tar", 512 * 6 * 3 + 1024 + 512 + 30)  # in the image of its fourth sample
    os.truncate(source / "000003.tar", 512 * 6 * 2 + 100)
    with pytest.raises(ValueError, match=r"(?s)000001\.tar .*\b4\b.*000003\.tar .*\b2\b"):
        ShardSet(source)
    (source / "sizes.json").write_text('{"000000.tar": 10, "000001.tar": 10, "000002.tar": 10, "000003.tar": 2}')
    loader = corpus.loader(source, batch_size=8, limits=LENIENT)
    assert not {*range(13, 20), *range(32, 40)} & {number for batch in corpus.read(loader) for number in batch}
    assert loader.report.skipped == {"truncated shard": 7}
    assert loader.report.seen + loader.report.bad == loader.report.total == 32


def test_workers_end_by_themselves_when_their_loader_is_collected_as_garbage(corpus, whole, monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 60.0)  # seconds until they are terminated
    before = set(multiprocessing.active_children())
    loader = corpus.loader(whole, num_workers=2)
    batches = iter(loader)
    next(batches)
    workers = set(multiprocessing.active_children()) - before
    list(batches)
    loader.circle = loader
    del loader, batches
    gc.collect()
    assert [worker.exitcode for worker in workers] == [0, 0]
