from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest

from vembed.data.arrangements import ByClass, Contents, HardBatches, WithoutRepeats, whole_numbers
from vembed.data.sampler import GlobalSampler, Mixture
from vembed.errors import DataError

if TYPE_CHECKING:
    from vembed.data.arrangements import Arrangement


def epoch_rows(sampler: GlobalSampler, epoch: int) -> list[int]:
    first = epoch * sampler.batches_per_epoch
    steps = range(first, first + sampler.batches_per_epoch)
    return list(itertools.chain.from_iterable(sampler.rows(step).tolist() for step in steps))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("num_records", "batch_size"), [(2, 1), (2, 5), (10, 5), (11, 5), (12, 5), (14, 5), (1000, 64), (3, 3), (4, 3)]
)
def test_every_record_comes_once_per_epoch_but_for_the_stated_tail(
    num_records: int, batch_size: int, drop_last: bool
) -> None:
    sampler = GlobalSampler(num_records, batch_size=batch_size, seed=3, drop_last=drop_last)
    tail = num_records % batch_size
    drops = num_records > batch_size and tail > 0 and (drop_last or tail == 1)
    for epoch in range(3):
        rows = epoch_rows(sampler, epoch)
        assert len(rows) == len(set(rows)) == num_records - tail * drops
        assert set(rows) <= set(range(num_records))


@pytest.mark.parametrize(
    ("num_records", "accumulated", "shares"),
    [
        (1010, 100, [*[0.01] * 100, 1.0]),  # 101 batches: the last step has one
        (34, 2, [0.5, 0.5, 10 / 14, 4 / 14]),
        (30, 1, [1.0, 1.0, 1.0]),
        (30, 7, [1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_the_shares_of_a_step_are_those_of_its_rows(num_records: int, accumulated: int, shares: list[float]) -> None:
    sampler = GlobalSampler(num_records, batch_size=10, seed=3)
    found = [sampler.share(number, accumulated) for number in range(2 * sampler.batches_per_epoch)]
    assert found == 2 * shares, "bit for bit"


def test_rows_are_a_function_of_seed_and_step_alone() -> None:
    one = GlobalSampler(100, batch_size=8, seed=5)
    other = GlobalSampler(100, batch_size=8, seed=5)
    forward = [one.rows(step).tolist() for step in range(60)]
    backward = [other.rows(step).tolist() for step in reversed(range(60))]
    assert forward == backward[::-1]
    assert one.rows(17).tolist() == forward[17]


def test_epochs_and_seeds_have_different_orders() -> None:
    sampler = GlobalSampler(100, batch_size=10, seed=5)
    assert epoch_rows(sampler, 0) != epoch_rows(sampler, 1)
    assert epoch_rows(sampler, 0) != epoch_rows(GlobalSampler(100, batch_size=10, seed=6), 0)
    assert epoch_rows(sampler, 0) != list(range(100))


def test_the_order_is_the_stated_generator() -> None:
    sampler = GlobalSampler(20, batch_size=4, seed=9)
    order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([9, 2]))).permutation(20)
    assert epoch_rows(sampler, 2) == order.tolist()


def test_a_caller_cannot_change_the_order() -> None:
    sampler = GlobalSampler(20, batch_size=4, seed=9)
    with pytest.raises(ValueError, match="read-only"):
        sampler.rows(0)[0] = 1
    assert sampler.rows(0).dtype == np.int64


@pytest.mark.parametrize(
    ("num_records", "drop_last", "steps", "words"),
    [
        (20, False, 5, None),
        (20, True, 5, None),
        (22, False, 6, "2 records instead of 4"),
        (22, True, 5, "last 2 records"),
        (21, False, 5, "one record has no in-batch negatives"),
        (3, False, 1, "fewer than a batch"),
        (3, True, 1, "fewer than a batch"),
    ],
)
def test_the_rule_that_applies_is_stated(num_records: int, drop_last: bool, steps: int, words: str | None) -> None:
    sampler = GlobalSampler(num_records, batch_size=4, seed=0, drop_last=drop_last)
    assert sampler.batches_per_epoch == steps
    assert len(sampler.notes) == (words is not None)
    assert words is None or words in sampler.notes[0]


@pytest.mark.parametrize("num_records", [0, 1])
def test_less_than_two_records_are_refused(num_records: int) -> None:
    with pytest.raises(DataError, match=f"the data has {num_records}"):
        GlobalSampler(num_records, batch_size=4, seed=0)
    assert GlobalSampler(2, batch_size=4, seed=0).rows(0).size == 2


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("batch_size", {"batch_size": 0}),
        ("batch_size", {"batch_size": True}),
        ("batch_size", {"batch_size": 2.0}),
        ("seed", {"seed": -1}),
        ("num_records", {"num_records": -1}),
    ],
)
def test_bad_arguments_are_named(name: str, arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=name):
        GlobalSampler(**{"num_records": 10, "batch_size": 2, "seed": 0, **arguments})
    with pytest.raises(ValueError, match="step"):
        GlobalSampler(10, batch_size=2, seed=0).rows(-1)


def digest(sampler: GlobalSampler) -> str:
    """Return a hash of the batches of two epochs."""
    drawn = hashlib.sha256()
    for step in range(2 * sampler.batches_per_epoch):
        drawn.update(sampler.rows(step).astype("<i8").tobytes() + b"|")
    return drawn.hexdigest()[:12]


def test_epochs_draw_what_they_drew_in_earlier_versions() -> None:
    """A resumed run goes on with the batches that it would have had."""
    numbers = np.arange(523)
    contents = np.concatenate([numbers, 523 + numbers * 7 % 60])
    vectors = (numbers[:, None] * np.arange(3, 11) % 61 - 30).astype(np.float32)
    arrangements: dict[str, Arrangement | None] = {
        "at random": None,
        "without repeats": WithoutRepeats(Contents.of_pairs(np.tile(numbers, 2), contents, 523)),
        "by class": ByClass(numbers * 11 % 40, 4),
        "hard": HardBatches(whole_numbers(vectors), 0.95),
    }
    mixture = Mixture(("a", "b"), (400, 123), (1.0, 2.0), temperature=2.0, single=True)
    digests = {
        name: tuple(
            digest(GlobalSampler(523, batch_size=16, seed=5, arrangement=arrangement, mixture=sources))
            for sources in (None, mixture)
        )
        for name, arrangement in arrangements.items()
    }
    assert digests == {
        "at random": ("6c15b1b6b7e7", "192d2e2f9144"),
        "without repeats": ("bda43043a0e9", "5d84e0a97a2b"),
        "by class": ("07b92bdc89da", "70d156ca0300"),
        "hard": ("29beb01467ae", "b11bbeedcd67"),
    }
