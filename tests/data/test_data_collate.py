"""Records of a batch as arrays, and ragged rows of any shape."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from vembed.batch import Features, Ragged, content_id, modality_words
from vembed.data.collate import collate
from vembed.data.table import Record
from vembed.losses.base import BatchStructure

COLUMNS = [("a", 0.5, 3), ("b", 2.0, 3), ("c", 1.0, -1)]


def record(
    name: str, *, positives: int = 1, negatives: int = 0, label: str | int | None = None, text: str = ""
) -> Record:
    return Record(
        f"q{name}",
        tuple(f"{text}p{name}.{i}" for i in range(positives)),
        tuple(f"n{name}.{i}" for i in range(negatives)),
        label,
        f"t.jsonl:{name}",
    )


def test_documents_stand_record_by_record_positives_first() -> None:
    batch = collate([record("a", positives=2, negatives=1), record("b"), record("c", negatives=2)], [7, 3, 9])
    assert batch.queries == ("qa", "qb", "qc")
    assert batch.documents == ("pa.0", "pa.1", "na.0", "pb.0", "pc.0", "nc.0", "nc.1")
    assert batch.positives_P2.tolist() == [[0, 0], [0, 1], [1, 3], [2, 4]]
    assert batch.negatives_P2 is not None
    assert batch.negatives_P2.tolist() == [[0, 2], [2, 5], [2, 6]]
    assert batch.record_ids == (7, 3, 9)


def test_ids_are_content_hashes_so_copies_share_one() -> None:
    records = [Record("q", ("same",), ("x",), None, "t:1"), Record(" q ", ("same\n",), ("same",), None, "t:2")]
    batch = collate(records, [0, 1])
    assert batch.query_ids_Q.tolist() == [content_id("q")] * 2
    assert batch.document_ids_D.tolist() == [content_id(text) for text in ("same", "x", "same", "same")]
    assert batch.query_ids_Q.dtype == batch.document_ids_D.dtype == batch.positives_P2.dtype == np.int64


def test_the_number_one_and_the_text_one_are_two_labels() -> None:
    assert collate([record("a", label=1), record("b", label="1")], [0, 1]).positives_P2.tolist() == [[0, 0], [1, 1]]
    assert len(collate([record("a", label=1), record("b", label=1)], [0, 1]).positives_P2) == 4


def test_the_positives_of_a_row_are_its_own_and_those_of_its_class_sorted_and_once() -> None:
    rng = np.random.default_rng(0)
    labels = [None if label == 0 else label for label in rng.integers(0, 6, size=50).tolist()]
    records = [
        record(str(i), positives=int(rng.integers(1, 4)), negatives=int(rng.integers(0, 3)), label=label)
        for i, label in enumerate(labels)
    ]
    batch = collate(records, list(range(50)))
    expected = {
        (row, batch.documents.index(text))
        for row, one in enumerate(records)
        for other in records
        if other is one or (other.label == one.label is not None)
        for text in other.positives
    }
    assert [tuple(pair) for pair in batch.positives_P2.tolist()] == sorted(expected)
    assert collate([record("a"), record("b")], [0, 1]).negatives_P2 is None


def test_a_copy_of_the_query_among_the_positives_of_its_class_is_none_of_its_own() -> None:
    pictures = [Record("x", ("y",), (), 1, "t:1"), Record("y", ("x",), (), 1, "t:2"), Record("z", ("z",), (), 1, "t:3")]
    pairs = [tuple(pair) for pair in collate(pictures, [0, 1, 2]).positives_P2.tolist()]
    assert pairs == [(0, 0), (0, 2), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)], "a copy that the row itself names stays"


def test_ids_must_match_the_records() -> None:
    with pytest.raises(ValueError, match="1 records, 2 ids"):
        collate([record("a")], [0, 1])
    with pytest.raises(ValueError, match="at least one record"):
        collate([], [])
    assert len(collate([record("a")], [0]).queries) == 1


def test_classes_are_numbered_as_they_first_occur() -> None:
    records = [record("a", label="x"), record("b"), record("c", label=7), record("d", label="x"), record("e", label=0)]
    batch = collate(records, list(range(5)))
    assert batch.classes_Q is not None
    assert batch.classes_Q.tolist() == [0, -1, 1, 0, 2]
    assert batch.classes_Q.dtype == np.int64
    assert collate([record("a"), record("b")], [0, 1]).classes_Q is None


def test_pairs_with_a_score_are_listed_at_their_documents() -> None:
    records = [
        Record("a", ("p", "r"), ("n",), None, "t:1", scores=(3.0, 2.5, 0.0)),
        record("b", positives=2),
        Record("c", (), ("m",), None, "t:3", scores=(0.0,)),
    ]
    batch = collate(records, [0, 1, 2])
    assert batch.documents == ("p", "r", "n", "pb.0", "pb.1", "m")
    assert batch.listed_P2 is not None
    assert batch.listed_scores_P is not None
    assert batch.listed_P2.tolist() == [[0, 0], [0, 1], [0, 2], [2, 5]]
    assert batch.listed_scores_P.tolist() == [3.0, 2.5, 0.0, 0.0]
    assert (batch.listed_P2.dtype, batch.listed_scores_P.dtype) == (np.int64, np.float64)
    assert batch.positives_P2.tolist() == [[0, 0], [0, 1], [1, 3], [1, 4]]
    plain = collate([record("b")], [0])
    assert plain.listed_P2 is None
    assert plain.listed_scores_P is None


def test_numbers_that_the_loss_asked_for_stand_by_query() -> None:
    records = [replace(record(name), columns={"weight": weight, "topic": topic}) for name, weight, topic in COLUMNS]
    columns = collate(records, [0, 1, 2]).columns
    assert columns["weight"].tolist() == [0.5, 2.0, 1.0]
    assert columns["topic"].tolist() == [3, 3, -1]
    assert (columns["weight"].dtype, columns["topic"].dtype) == (np.float64, np.int64)


def test_a_batch_keeps_its_supervision_as_tensors() -> None:
    records = [
        Record(f"q{row}", (f"p{row}",), (f"n{row}",), "x", f"t:{row}", scores=(2.0, 0.5), columns={"weight": 1.5})
        for row in range(3)
    ]
    structure = BatchStructure.of(collate(records, [0, 1, 2])).to(torch.device("cpu"))
    assert structure.classes_Q is not None
    assert structure.listed_P2 is not None
    assert structure.listed_scores_P is not None
    assert structure.classes_Q.tolist() == [0, 0, 0]
    assert structure.listed_P2.tolist() == [[0, 0], [0, 1], [1, 2], [1, 3], [2, 4], [2, 5]]
    assert structure.listed_scores_P.tolist() == [2.0, 0.5] * 3
    assert structure.columns["weight"].tolist() == [1.5] * 3
    plain = BatchStructure.of(collate([record("a")], [0]))
    assert plain.classes_Q is None
    assert plain.listed_P2 is None
    assert plain.listed_scores_P is None
    assert plain.columns == {}


# Ragged rows: packing, taking, joining and padding against lists


def rows_of(shape: tuple[int, ...], lengths: tuple[int, ...] = (2, 0, 3, 1)) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(length, *shape)).astype(np.float32) for length in lengths]


def unpacked(ragged: Ragged) -> list[Any]:
    return [ragged.values[start:stop] for start, stop in zip(ragged.offsets[:-1], ragged.offsets[1:], strict=True)]


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
def test_rows_of_any_shape_are_packed_taken_joined_and_padded(shape: tuple[int, ...]) -> None:
    rows = rows_of(shape)
    ragged = Ragged.from_rows(rows, np.float32)
    assert ragged.values.shape == (6, *shape)
    assert ragged.lengths.tolist() == [2, 0, 3, 1]
    taken = ragged.take(np.array([3, 1, 0, 3]))
    joined = Ragged.concat([ragged, taken])
    for found, wanted in (
        (ragged, rows),
        (taken, [rows[i] for i in (3, 1, 0, 3)]),
        (joined, [*rows, *unpacked(taken)]),
    ):
        assert all(np.array_equal(a, b) for a, b in zip(unpacked(found), wanted, strict=True))
    rectangle = ragged.padded(5, -1)
    assert rectangle.shape == (4, 5, *shape)
    for row, padded in zip(rows, rectangle, strict=True):
        assert np.array_equal(padded[: len(row)], row)
        assert (padded[len(row) :] == -1).all()


def test_rows_may_be_plain_lists() -> None:
    assert Ragged.from_rows([[1, 2], [], [3]]).values.tolist() == [1, 2, 3]
    assert Ragged.from_rows([[], [[1, 2], [3, 4]]]).values.tolist() == [[1, 2], [3, 4]]


def test_no_rows_and_empty_rows_are_fine() -> None:
    assert Ragged.from_rows([]).lengths.tolist() == []
    empty = Ragged.from_rows([np.zeros((0, 3)), np.zeros((0, 3))])
    assert empty.values.shape == (0, 3)
    full = Ragged.from_rows([np.ones((2, 3))])
    assert Ragged.concat([Ragged.from_rows([[]]), full]).values.shape == (2, 3)
    assert Ragged.concat([empty, empty]).lengths.tolist() == [0] * 4


def test_features_take_and_join_ragged_columns_of_any_shape() -> None:
    columns = {"patches": Ragged.from_rows(rows_of((4,)), np.float32), "ids": Ragged.from_rows(rows_of(()), np.float32)}
    features = Features(columns, columns["ids"].lengths)
    both = Features.concat([features, features.take(np.array([2]))])
    assert both.columns["patches"].values.shape == (9, 4)
    assert both.columns["patches"].lengths.tolist() == both.lengths.tolist() == [2, 0, 3, 1, 3]


def test_modalities_have_one_name_in_sentences() -> None:
    assert modality_words({"text", "image"}) == "pictures and texts"
    assert modality_words(["image+text"]) == "pictures with a text"
