"""Every rank knows the whole batch and makes features of its own rows: together each row once, none of them twice."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from test_batch_loading import source_of, write_rows

from vembed.batch import Augmentation
from vembed.training.loop import batch_seed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vembed.batch import Features, Item, Side
    from vembed.training.batches import FeaturedBatch

PLAIN = Augmentation("none", flip=False, seed=0)


def of_ranks(rows: Path, world_size: int, step: int) -> list[FeaturedBatch]:
    source = source_of(rows, augmentation=PLAIN)
    return [replace(source, rank=rank, world_size=world_size).features(step) for rank in range(world_size)]


def real_slots(featured: FeaturedBatch) -> list[int]:
    return [int(slot) for _, slots in featured.parts for slot in slots if slot >= 0]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_ranks_make_each_row_of_the_same_batch_once(tmp_path: Path, world_size: int) -> None:
    rows = write_rows(tmp_path)
    alone = source_of(rows, augmentation=PLAIN).features(0)
    shared = of_ranks(rows, world_size, 0)
    num_rows = alone.structure.num_queries + alone.structure.num_documents
    assert sorted(slot for each in shared for slot in real_slots(each)) == list(range(num_rows))
    for rank, each in enumerate(shared):
        assert each.record_ids == alone.record_ids
        assert [own.tolist() for own in each.assignment.slots] == [own.tolist() for own in shared[0].assignment.slots]
        assert sorted(real_slots(each)) == each.assignment.slots[rank].tolist()
    pixels = {int(slot): row for features, slots in alone.parts for slot, row in _pictures(features, slots)}
    for each in shared:
        for features, slots in each.parts:
            for slot, row in _pictures(features, slots):
                np.testing.assert_array_equal(row, pixels[slot])


def test_each_rank_reads_its_own_rows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(write_rows(tmp_path), augmentation=PLAIN)
    featurize, num_items = type(source.encoder).featurize, 0

    def counted(encoder: Any, items: Sequence[Item], side: Side) -> Features:
        nonlocal num_items
        num_items += len(items)
        return featurize(encoder, items, side)

    monkeypatch.setattr(type(source.encoder), "featurize", counted)
    counts = []
    for rank in range(4):
        featured = replace(source, rank=rank, world_size=4).features(0)
        counts.append(num_items)
        num_items = 0
    num_rows = featured.structure.num_queries + featured.structure.num_documents
    assert sum(counts) == num_rows >= 8
    assert max(counts) - min(counts) <= 1


def _pictures(features: object, slots: np.ndarray) -> list[tuple[int, np.ndarray]]:
    per_row = getattr(features, "per_row", {})
    [values] = per_row.values() or [None]
    return [] if values is None else [(int(slot), row) for slot, row in zip(slots, values, strict=True) if slot >= 0]


def test_a_rank_without_a_row_of_a_modality_gets_a_spare_one_so_that_all_call_every_tower(tmp_path: Path) -> None:
    """A batch of 2 captions on 3 ranks: one has none."""
    shared = of_ranks(write_rows(tmp_path), 3, 2)
    assert shared[0].structure.num_queries == 2
    assert all(len(each.parts) == 2 for each in shared)
    spares = [slots.tolist() for each in shared for _, slots in each.parts if (slots < 0).any()]
    assert spares == [[-1]] * len(spares)
    assert spares
    assert all(len(features) == len(slots) for each in shared for features, slots in each.parts)
    source = source_of(tmp_path / "rows.jsonl", augmentation=PLAIN)
    num_cut = 0
    for each in shared:
        cut = tuple((replace(features, num_truncated=len(slots)), slots) for features, slots in each.parts)
        num_cut += source.prepared(replace(each, parts=cut)).num_truncated
    structure = shared[0].structure
    assert num_cut == structure.num_queries + structure.num_documents, "a spare row is not counted a second time"


def test_no_two_ranks_and_no_two_batches_draw_the_same_random_numbers() -> None:
    """A CPU's generator looks at the lower half of a seed alone."""
    drawn = set()
    for rank in (0, 1, 2, 7, 8, 63, 1999):
        for number in (0, 1, 1000):
            torch.manual_seed(batch_seed(2**32 - 1, number, rank=rank))
            drawn.add(tuple(torch.rand(4).tolist()))
    assert len(drawn) == 7 * 3
