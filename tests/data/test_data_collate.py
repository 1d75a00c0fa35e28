from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from vembed.batch import content_id
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


def test_records_of_one_label_are_positives_of_each_other() -> None:
    records = [
        record("a", positives=2, negatives=1, label="x"),
        record("b", label=None),
        record("c", label="x"),
        record("d", label="y"),
    ]
    batch = collate(records, [0, 1, 2, 3])
    # documents: pa.0 pa.1 na.0 pb.0 pc.0 pd.0
    assert batch.positives_P2.tolist() == [[0, 0], [0, 1], [0, 4], [1, 3], [2, 0], [2, 1], [2, 4], [3, 5]]


def test_rows_without_a_label_are_not_one_class() -> None:
    batch = collate([record("a"), record("b")], [0, 1])
    assert batch.positives_P2.tolist() == [[0, 0], [1, 1]]
    assert batch.negatives_P2 is None


def test_the_number_one_and_the_text_one_are_two_labels() -> None:
    assert collate([record("a", label=1), record("b", label="1")], [0, 1]).positives_P2.tolist() == [[0, 0], [1, 1]]
    assert len(collate([record("a", label=1), record("b", label=1)], [0, 1]).positives_P2) == 4


def test_positive_pairs_are_sorted_and_unique_for_any_labels() -> None:
    rng = np.random.default_rng(0)
    records = [
        record(str(i), positives=int(rng.integers(1, 4)), negatives=int(rng.integers(0, 3)), label=label)
        for i, label in enumerate(rng.integers(0, 6, size=50).tolist())
    ]
    batch = collate(records, list(range(50)))
    pairs = [tuple(pair) for pair in batch.positives_P2.tolist()]
    expected = {
        (row, batch.documents.index(text))
        for row, one in enumerate(records)
        for other in records
        if other.label == one.label
        for text in other.positives
    }
    assert pairs == sorted(expected)


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
