"""Several sources: joined into one table, sharing epochs by weight, one batch of each or mixed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from vembed.batch import Composed, Image, pictures_in
from vembed.config.schema import Config
from vembed.data.sampler import GlobalSampler, Mixture, allot
from vembed.data.table import Record, RecordTable
from vembed.data.table_writer import RecordWriter
from vembed.errors import DataError
from vembed.training.data import build_sampler

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def table_of(name: str, num_rows: int = 5, **row: Any) -> RecordTable:
    writer = RecordWriter()
    for number in range(num_rows):
        own = {key: value[number] if isinstance(value, list) else value for key, value in row.items()}
        positives = own.pop("positives", [f"{name} document {number}"])
        writer.add(f"{name} query {number}", positives=positives, file=f"{name}.jsonl", line=number + 1, **own)
    return writer.finish()


def content(record: Record) -> tuple[object, ...]:
    pictures = [None if picture.data is None else bytes(picture.data) for picture in pictures_in([*record.positives])]
    return (record.query, record.positives, record.negatives, record.location, record.scores, pictures)


def test_joined_tables_hold_the_records_of_each_and_know_their_source(tmp_path: Path) -> None:
    (tmp_path / "file.png").write_bytes(b"of a file")
    files = [Image(f"{number}.png", f"bytes {number}".encode()) for number in range(4)]
    several = Composed((files[0], Image(str(tmp_path / "file.png")), Image("4.png", b"bytes 4")), "text")
    tables = [
        table_of("a", negatives=[[], ["a query 0", "n"], [], ["n"], []]),
        table_of("b", positives=[[each] for each in (*files, several)], label=7),
        table_of("c", scores=[(0.5,), (), (1.0,), (), ()]).subset([4, 2]),
        table_of("d", label=["x", None, "y", "7", "x"], positives=[[each] for each in (several, *files)]),
    ]
    joined = RecordTable.joined(tables)
    assert list(map(content, joined)) == [content(record) for table in tables for record in table]
    labels = [record.label for record in joined]
    assert labels == [*[None] * 5, *["1:7"] * 5, None, None, "3:x", None, "3:y", "3:7", "3:x"]
    assert joined.sources.tolist() == [0] * 5 + [1] * 5 + [2] * 2 + [3] * 5
    assert joined.subset([16, 0, 11]).sources.tolist() == [3, 0, 2]
    assert joined.take([11])[0].query == "c query 2"
    numbers = [table.items.ids[table.numbers("positives")[1]] for table in tables]
    assert np.array_equal(joined.items.ids[joined.numbers("positives")[1]], np.concatenate(numbers))
    assert tables[0].sources.tolist() == [0] * 5


def test_joined_tables_on_disk_stay_there_and_keep_their_fingerprint(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        writer = RecordWriter(folder=folder)
        for number in range(40):
            document = f"{folder.name} document {number} {'x' * 50_000}"
            writer.add(f"query {number}", positives=[document], file=f"{folder.name}.jsonl", line=number + 1)
        writer.finish()
    parts = [RecordTable.mapped(folder) for folder in folders]
    before = pa.total_allocated_bytes()
    joined = RecordTable.joined(parts)
    assert joined[41].positives == parts[1][1].positives
    assert pa.total_allocated_bytes() - before < 500_000, "of texts of 4 MB"
    assert joined.fingerprint == RecordTable.joined([part.subset(range(40)) for part in parts]).fingerprint
    assert joined.fingerprint != RecordTable.joined(parts[::-1]).fingerprint


def sampler_of(sizes: Sequence[int], weights: Sequence[float], batch_size: int, **more: Any) -> GlobalSampler:
    names = tuple(f"source{number}" for number in range(len(sizes)))
    mixture = Mixture(names, tuple(sizes), tuple(weights), **more)
    return GlobalSampler(sum(sizes), batch_size=batch_size, seed=5, mixture=mixture)


def epoch_batches(sampler: GlobalSampler, epoch: int) -> list[np.ndarray]:
    first = epoch * sampler.batches_per_epoch
    return [sampler.rows(step) for step in range(first, first + sampler.batches_per_epoch)]


def source_counts(rows: np.ndarray, sizes: Sequence[int]) -> list[int]:
    return np.bincount(np.searchsorted(np.cumsum(sizes), rows, side="right"), minlength=len(sizes)).tolist()


def test_sources_of_equal_weight_come_once_an_epoch_each_row() -> None:
    sampler = sampler_of((30, 61, 9), (1, 1, 1), 10)
    for epoch in range(3):
        assert np.sort(np.concatenate(epoch_batches(sampler, epoch))).tolist() == list(range(100))


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(("weights", "temperature"), [((1, 1), 1.0), ((1, 3), 1.0), ((1, 1), 4.0), ((0.2, 1), 1e9)])
def test_an_epoch_has_the_shares_asked_for_and_no_row_comes_again_before_all_others(
    weights: tuple[float, float], temperature: float, single: bool
) -> None:
    sizes = (300, 100)
    sampler = sampler_of(sizes, weights, 10, temperature=temperature, single=single)
    raw = [weight * size ** (1 / temperature) for weight, size in zip(weights, sizes, strict=True)]
    wanted = [400 * each / sum(raw) for each in raw]
    uses = np.zeros(400, dtype=np.int64)
    for epoch in range(7):
        batches = epoch_batches(sampler, epoch)
        counts = source_counts(np.concatenate(batches), sizes)
        assert sum(counts) == 400
        assert np.abs(np.subtract(counts, wanted)).max() <= (10 if single else 1)
        assert all(len(set(batch.tolist())) > 5 for batch in batches)
        if single:
            assert all(max(source_counts(batch, sizes)) == 10 for batch in batches)
        np.add.at(uses, np.concatenate(batches), 1)
        for part in (uses[:300], uses[300:]):
            assert part.max() - part.min() <= 1


def test_the_smaller_last_batch_of_single_sources_is_of_the_largest() -> None:
    sizes = (35, 12)
    sampler = sampler_of(sizes, (1, 1), 10, single=True)
    counts = [source_counts(batch, sizes) for batch in epoch_batches(sampler, 0)]
    assert sorted(counts) == [[0, 10], [7, 0], [10, 0], [10, 0], [10, 0]]
    assert counts != [source_counts(batch, sizes) for batch in epoch_batches(sampler, 1)]


def test_rows_are_a_function_of_seed_and_step_alone() -> None:
    one, other = (sampler_of((30, 61), (2, 1), 8, single=True) for _ in range(2))
    forward = [one.rows(step).tolist() for step in range(40)]
    assert [other.rows(step).tolist() for step in reversed(range(40))] == forward[::-1]


def test_the_plan_says_what_each_source_gives() -> None:
    mixed = sampler_of((300, 100), (1, 3), 10)
    assert mixed.arrangement_notes() == (
        "source source0: 300 rows, weight 1: 200 rows of an epoch, each 0.67 times.",
        "source source1: 100 rows, weight 3: 200 rows of an epoch, each 2.00 times.",
    )
    single = sampler_of((300, 100), (1, 3), 10, single=True)
    assert single.arrangement_notes()[1] == (
        "source source1: 100 rows, weight 3: 200 rows of an epoch in 20 of 40 batches, each 2.00 times."
    )


@pytest.mark.parametrize(
    ("sizes", "words"), [((300, 9), "source1 has 9 rows to train on, fewer than a batch of 10"), ((5, 6), "has none")]
)
def test_sources_too_small_for_batches_of_their_own_are_refused(sizes: tuple[int, int], words: str) -> None:
    with pytest.raises(DataError, match=words):
        sampler_of(sizes, (1, 1), 10, single=True)


def test_every_source_has_a_part_whatever_its_share() -> None:
    assert allot(np.array([0.999, 0.0005, 0.0005]), 10).tolist() == [8, 1, 1]
    assert allot(np.array([0.5, 0.5]), 5).sum() == 5


def test_arrangements_and_sources_go_together() -> None:
    tables = [table_of("a", 40, label=[number % 8 for number in range(40)]), table_of("b", 80, label=[0, 1, 2, 3] * 20)]
    records = RecordTable.joined(tables)
    base = {"model_name": "m", "data": [{"path": "a", "weight": 3}, {"path": "b"}], "batch_size": 8}
    keys = {**base, "source_batches": "single", "batch_sampling": "classes"}
    sampler = build_sampler(Config.model_validate(keys), records, 8)
    labels = np.array([record.label for record in records])
    for batch in epoch_batches(sampler, 0):
        assert len(set(labels[batch])) == 2
        assert len({label.partition(":")[0] for label in labels[batch]}) == 1
    few = RecordTable.joined([tables[0], table_of("b", 80, label=["one class"] * 80)])
    with pytest.raises(DataError, match="holds 2 classes, and the smallest of the sources has 1"):
        build_sampler(Config.model_validate(keys), few, 8)
    sampler = build_sampler(Config.model_validate({**base, "batch_sampling": "no_duplicates"}), records, 8)
    assert all(len(set(batch.tolist())) == len(batch) for batch in epoch_batches(sampler, 0))
    assert sum(map(len, epoch_batches(sampler, 0))) == 120
