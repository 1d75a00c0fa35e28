"""Data sets of plugins: rows as dictionaries or records, their retrieval task, and wrong ones by number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from image_cases import png

import vembed
from vembed.batch import Image
from vembed.data.columns import ExtraColumn, LossNeeds
from vembed.data.judged import RetrievalData
from vembed.data.keys import DataKeys
from vembed.data.read import read
from vembed.data.table import Record
from vembed.errors import ConfigError, DataError
from vembed.registry import DATASETS

if TYPE_CHECKING:
    from collections.abc import Callable

TRAIN = {"role": "train"}
ROWS = [{"anchor": f"q{n}", "positive": f"p{n}"} for n in range(3)]


@pytest.fixture
def add(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Register a set called toy-set, for one test."""
    for table in ("_entries", "_plugins"):
        monkeypatch.setattr(DATASETS, table, dict(getattr(DATASETS, table)))

    def register(make: Callable[[str], Any], **options: Any) -> None:
        def toy_set(split: str) -> Any:
            return make(split)

        if options:
            vembed.register_dataset(**options)(toy_set)
        else:
            assert vembed.register_dataset(toy_set) is toy_set

    return register


def test_dictionaries_are_read_as_rows_of_a_file_are(add: Callable[..., None]) -> None:
    add(lambda split: ({**row, "query_id": 1} for row in ROWS) if split == "train" else ROWS[:1])
    loaded = read("builtin:toy-set", **TRAIN).records()
    assert [(record.query, record.location) for record in loaded.table] == [
        (f"q{n}", f"toy-set/train:{n + 1}") for n in range(3)
    ]
    assert loaded.notes == ("Ignored columns: query_id.",)
    assert len(read("builtin:toy-set", "train", split="dev").records().table) == 1
    mapped = {"role": "train", "keys": DataKeys(column_mapping={"anchor": "positive", "positive": "query"})}
    assert read("builtin:toy-set", **mapped).records().table[0].query == "p0"
    task = read("builtin:toy-set", "test").judged()
    assert (task.name, list(task.documents.values())) == ("toy-set/test", ["p0"])
    assert [document.text for document in read("builtin:toy-set", "test").documents()] == ["p0"]


def test_columns_of_training_rows_mean_nothing_to_a_corpus(add: Callable[..., None]) -> None:
    add(lambda split: ROWS)
    of_training = DataKeys(column_mapping={"anchor": "positive", "positive": "query", "mine": None}, label_kind="pair")
    documents = list(read("builtin:toy-set", "train", of_training).documents())
    assert [document.text for document in documents] == ["p0", "p1", "p2"]


def test_pictures_come_as_bytes(add: Callable[..., None]) -> None:
    add(lambda _: [{"query": "red", "image": png("red")}])
    (record,) = read("builtin:toy-set", **TRAIN).records().table
    assert record.positives == (Image("toy-set/train:1 image", png("red")),)


def test_records_are_kept_as_they_are(add: Callable[..., None]) -> None:
    records = [
        Record("q", ("p",), ("n",), 7, "where:5", scores=(1.0, 0.5), columns={"weight": 2.0, "other": 1}),
        Record("r", ("s",), (), None, "where:6"),
    ]
    add(lambda _: iter(records))
    assert [record.label for record in read("builtin:toy-set", **TRAIN).records().table] == [7, None]
    optional = ExtraColumn("weight", "how much it counts", required=False)
    facts = LossNeeds("toy", (optional,))
    first, second = read("builtin:toy-set", "train", loss=facts).records().table
    assert (first.scores, dict(first.columns), first.location) == ((1.0, 0.5), {"weight": 2.0}, "where:5")
    assert dict(second.columns) == {"weight": 0.0}
    needed = LossNeeds("toy", (ExtraColumn("weight", "how much it counts"),))
    with pytest.raises(DataError, match=r"^where:6: weight: missing; loss_type toy needs it: how much it counts$"):
        read("builtin:toy-set", "train", loss=needed).records()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([ROWS[0], {"query": "", "positive": "p"}], "toy-set/train:2: query: empty text"),
        ([ROWS[0], ["q", "p"]], "toy-set/train:2: expected a dictionary or a Record, got list"),
        ([], "builtin:toy-set holds no rows"),
        ([{"query": "q", "image": "a.png"}], "no folder of its own; set image_root"),
        ([{"query": "q", "positive": "p", "label": 1}], "toy-set/train:1: label holds 1 beside two texts"),
    ],
)
def test_what_is_wrong_is_named_by_number(add: Callable[..., None], rows: list[Any], words: str) -> None:
    add(lambda _: rows)
    with pytest.raises(DataError, match=words):
        read("builtin:toy-set", **TRAIN).records()


def test_judgements_of_its_own_are_taken(add: Callable[..., None]) -> None:
    def judged(split: str) -> RetrievalData:
        return RetrievalData(f"toy-set/{split}", {"1": "q"}, {"2": "p", "3": "also p"}, {"1": {"2": 1, "3": 1}})

    add(lambda _: ROWS, retrieval=judged)
    assert read("builtin:toy-set", "validation").judged().name == "toy-set/validation"
    assert len(read("builtin:toy-set", **TRAIN).records().table) == 3


def test_a_record_without_a_line_is_refused(add: Callable[..., None]) -> None:
    add(lambda _: [Record("q", ("p",), (), None, "nowhere")])
    with pytest.raises(DataError, match=r"stands in 'nowhere'; write its location as file:line"):
        read("builtin:toy-set", **TRAIN).records()


def test_a_taken_name_is_refused() -> None:
    def shapes(split: str) -> list[Any]:
        return []

    with pytest.raises(ConfigError, match=r"data set 'shapes' of .* is already that of vembed"):
        vembed.register_dataset(shapes)
