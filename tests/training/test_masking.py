"""The count of masked false negatives is that of the mask which the loss applies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from vembed.data.collate import collate
from vembed.data.table import Record
from vembed.losses.base import BatchStructure
from vembed.losses.cells import false_negative_mask, positive_mask
from vembed.training.batches import count_masked

if TYPE_CHECKING:
    from vembed.batch import ContrastiveBatch


def row(query: str, positives: tuple[str, ...], negatives: tuple[str, ...], label: int | None = None) -> Record:
    return Record(query, positives, negatives, label, "rows.jsonl:1")


def masked_by_the_loss(batch: ContrastiveBatch) -> int:
    structure = BatchStructure.of(batch)
    return int(false_negative_mask(structure, positive_mask(structure)).sum())


def batch_of(*records: Record) -> ContrastiveBatch:
    return collate(records, range(len(records)))


def test_a_batch_of_different_things_masks_nothing() -> None:
    batch = batch_of(*(row(f"q{n}", (f"d{n}",), ()) for n in range(4)))
    assert count_masked(batch) == masked_by_the_loss(batch) == 0


def test_a_repeated_positive_is_masked_for_every_query_that_it_is_right_for() -> None:
    batch = batch_of(row("a", ("same",), ()), row("b", ("same",), ()), row("c", ("other",), ()))
    assert count_masked(batch) == masked_by_the_loss(batch) == 2


def test_a_repeated_query_masks_the_others_positives_and_the_query_itself() -> None:
    batch = batch_of(row("a", ("x",), ("b",)), row("a", ("y",), ()), row("b", ("z",), ()))
    assert count_masked(batch) == masked_by_the_loss(batch) == 3, "x and y for the other a, the negative b for b"


def test_rows_of_one_class_are_positives_and_arent_counted() -> None:
    batch = batch_of(*(row(f"q{n}", (f"d{n % 3}",), (), n % 2) for n in range(6)))
    assert count_masked(batch) == masked_by_the_loss(batch)


@pytest.mark.parametrize("seed", range(20))
def test_any_batch_is_counted_as_the_mask_says(seed: int) -> None:
    draw = np.random.default_rng(seed)
    words = [f"w{n}" for n in range(int(draw.integers(3, 30)))]

    def some(most: int) -> tuple[str, ...]:
        return tuple(draw.choice(words, size=int(draw.integers(0, most + 1))).tolist())

    records = [row(str(draw.choice(words)), some(2) or ("x",), some(3)) for _ in range(int(draw.integers(1, 25)))]
    batch = batch_of(*records)
    assert count_masked(batch) == masked_by_the_loss(batch)


def test_the_random_batches_do_hold_what_is_masked() -> None:
    draw = np.random.default_rng(0)
    records = [row(str(draw.integers(5)), (str(draw.integers(5)),), ()) for _ in range(20)]
    assert count_masked(batch_of(*records)) > 10
