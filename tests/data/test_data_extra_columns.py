"""Columns of numbers that a loss asks for: read from every kind of source, checked, and carried into the batch."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kit.rows import Jsonl

from vembed.data.collate import collate
from vembed.data.columns import ExtraColumn, LossNeeds
from vembed.data.keys import DataKeys, Role
from vembed.data.read import DataSource
from vembed.data.run_data import load_run_data
from vembed.data.table import LoadedRecords
from vembed.errors import ConfigError, DataError
from vembed.losses.base import BatchStructure
from vembed.losses.registry import RunLoss


def asking(*columns: ExtraColumn, **facts: Any) -> LossNeeds:
    """Return what a toy loss asks of rows."""
    return LossNeeds("weighted", columns, **facts)


WEIGHT = ExtraColumn("weight", "how much the row counts", least=0, most=10, aliases=("importance",))
TOPIC = ExtraColumn("topic", "number of its topic", required=False, kind="int", default=-1)
NEEDS = asking(WEIGHT, TOPIC)
ROWS = [{"query": f"q{n}", "positive": f"p{n}", "weight": n / 4, "topic": n % 3} for n in range(5)]


def rows_for(path: Path | str, needs: LossNeeds | None = NEEDS, role: Role = "train", **keys: Any) -> LoadedRecords:
    """Read rows for a toy loss."""
    return DataSource(str(path), role, DataKeys.model_construct(**keys), loss=needs).records()


def numbers(path: Path | str, **more: Any) -> list[dict[str, int | float]]:
    return [dict(record.columns) for record in rows_for(path, **more).table]


def refusal(path: Path | str, needs: LossNeeds = NEEDS, **keys: Any) -> str:
    with pytest.raises(DataError) as caught:
        rows_for(path, needs, **keys)
    return str(caught.value)


EXPECTED = [{"weight": row["weight"], "topic": row["topic"]} for row in ROWS]


def test_numbers_come_from_every_kind_of_file(tmp_path: Path, jsonl: Jsonl) -> None:
    header, *cells = [list(ROWS[0])] + [[str(cell) for cell in row.values()] for row in ROWS]
    jsonl([",".join(row) for row in (header, *cells)], "rows.csv")
    jsonl(["\t".join(row) for row in (header, *cells)], "rows.tsv")
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    jsonl(ROWS, "rows.jsonl")
    for name in ("rows.csv", "rows.tsv", "rows.json", "rows.jsonl", "rows.parquet"):
        found = numbers(tmp_path / name)
        assert found == EXPECTED, name
        assert all(type(row["weight"]) is float and type(row["topic"]) is int for row in found)
    notes = rows_for(tmp_path / "rows.parquet").notes
    assert notes == (), "no column is ignored"
    assert rows_for(tmp_path / "rows.parquet", None).notes == ("Ignored columns: weight, topic.",)


def test_numbers_come_from_the_hub_and_from_beir_queries(monkeypatch: pytest.MonkeyPatch, beir_files: Path) -> None:
    found = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: found)
    assert numbers("owner/name") == EXPECTED
    message = refusal(beir_files)
    assert message.startswith("queries.jsonl:2: no row of ")
    assert "tiny (tiny/train) has a column 'weight': missing (also looked for importance)" in message
    queries = beir_files / "queries.jsonl"
    lines = [json.loads(line) | {"importance": 2} for line in queries.read_text().splitlines()]
    queries.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert numbers(beir_files) == [{"weight": 2.0, "topic": -1}]


def test_batches_hold_them_by_query(jsonl: Jsonl) -> None:
    table = rows_for(jsonl(ROWS)).table
    batch = collate(table.subset([4, 0, 2]).take([0, 1, 2]), [0, 1, 2])
    assert {name: values.tolist() for name, values in batch.columns.items()} == {
        "weight": [1.0, 0.0, 0.5],
        "topic": [1, 0, 2],
    }
    plain = rows_for(jsonl(ROWS), None).table
    assert plain[0].columns == {}
    assert plain.fingerprint != table.fingerprint


def test_other_names_are_found_and_mapped(jsonl: Jsonl) -> None:
    row = {"query": "q", "positive": "p"}
    assert numbers(jsonl([{**row, "importance": 3}])) == [{"weight": 3.0, "topic": -1}]
    mapping = {"w": "weight", "t": "topic"}
    assert numbers(jsonl([{**row, "w": 3, "t": 4.0}]), column_mapping=mapping) == [{"weight": 3.0, "topic": 4}]
    twice = jsonl([{**row, "w": 3, "weight": 4}])
    assert "columns 'w' (mapped to 'weight') and 'weight' both mean 'weight'" in refusal(
        twice, column_mapping={"w": "weight"}
    )
    near = refusal(jsonl([{**row, "wieght": 3}]))
    assert "if 'wieght' is meant: column_mapping: {wieght: weight}" in near
    with pytest.raises(ConfigError, match=r"they have query, .*, label, title, weight, topic and negative_1"):
        rows_for(twice, column_mapping={"w": "weigt"})


def test_a_missing_number_is_refused_with_line_loss_and_meaning(jsonl: Jsonl) -> None:
    row = {"query": "q", "positive": "p"}
    message = refusal(jsonl([ROWS[0], row, {**row, "weight": None}]))
    assert "train.jsonl:2: weight: missing (also looked for importance); the row has query, positive; " in message
    assert "train.jsonl:2: weight: missing" in message
    assert message.count("loss_type weighted needs it: how much the row counts") == 2
    assert "train.jsonl:3: weight: empty; loss_type weighted needs it" in message
    everywhere = refusal(jsonl([row] * 3))
    assert everywhere.startswith("train.jsonl:1: no row of ")
    assert "has a column 'weight': missing" in everywhere
    assert everywhere.endswith("loss_type weighted needs it: how much the row counts")
    kept = rows_for(jsonl([ROWS[0], row]), skip_invalid_records=True, max_invalid_records=1)
    assert len(kept.table) == 1


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("weight", -0.5, "needs a number from 0 to 10 (how much the row counts), got the number -0.5"),
        *[("weight", 11, "got the number 11"), ("weight", "3", "got '3'"), ("weight", True, "got true")],
        *[("weight", [1], "got a list"), ("weight", float("nan"), "got the number nan")],
        *[("weight", float("inf"), "got the number inf"), ("weight", 10**400, "got the number 1000")],
        ("topic", 0.5, "needs a whole number (number of its topic), got the number 0.5"),
        ("topic", 2**63, "got the number 9223372036854775808"),
    ],
)
def test_a_number_that_cannot_be_is_refused(jsonl: Jsonl, column: str, value: Any, words: str) -> None:
    message = refusal(jsonl([ROWS[0], {**ROWS[1], column: value}]))
    assert f"train.jsonl:2: {column}: loss_type weighted needs" in message
    assert words in message


@pytest.mark.parametrize("cell", ["three", "nan", "inf", "1_0", "0x1"])
def test_a_csv_cell_that_is_no_number_is_refused(jsonl: Jsonl, cell: str) -> None:
    path = jsonl(["query,positive,weight,topic", "q,p,1,", f"q,p,{cell},2"], "rows.csv")
    assert (
        f"rows.csv:3: weight: loss_type weighted needs a number from 0 to 10 (how much the row counts), got {cell!r}"
        in (refusal(path))
    )


@pytest.mark.slow
def test_sets_with_fixed_columns_get_defaults_or_are_refused() -> None:
    message = refusal("builtin:pages")
    assert message == (
        "builtin:pages is a built-in set and has no column 'weight'; loss_type weighted needs it: how much the "
        "row counts"
    )
    optional = asking(TOPIC, ExtraColumn("share", "a share", required=False, default=1))
    table = rows_for("builtin:pages", optional).table
    assert dict(table.subset([3])[0].columns) == {"topic": -1, "share": 1.0}


@pytest.mark.parametrize("role", ["validation", "test"])
def test_other_sets_need_no_column_of_the_loss(jsonl: Jsonl, role: Role) -> None:
    row = {"query": "q", "positive": "p"}
    for rows in ([row], [{**row, "w": "no number"}]):
        assert numbers(jsonl(rows), role=role, column_mapping={"w": "weight"}) == [{}]


def test_rows_have_weights_for_our_own_losses_and_those_of_one_weight_are_as_before(jsonl: Jsonl) -> None:
    rows = [{"query": "q0", "positive": "p0", "weight": 2.5}, {"query": "q1", "positive": "p1"}]
    ours, nothing = RunLoss.chosen("infonce", {}).needs(), asking()
    table = rows_for(jsonl(rows, "weighted.jsonl"), ours).table
    weights_Q = BatchStructure.of(collate(list(table), [0, 1])).weights_Q
    assert weights_Q is not None
    assert weights_Q.tolist() == [2.5, 1.0]
    path = jsonl([{**row, "weight": 1} for row in rows], "equal.jsonl")
    equal, without = (rows_for(path, needs).table for needs in (ours, nothing))
    assert BatchStructure.of(collate(list(equal), [0, 1])).weights_Q is None
    assert equal.fingerprint == without.fingerprint != table.fingerprint


def test_a_loss_may_take_an_alias_and_no_name_of_ours(jsonl: Jsonl) -> None:
    needs = asking(ExtraColumn("score", "the teacher's score"))
    (record,) = rows_for(jsonl([{"query": "q", "positive": "p", "score": 0.25, "label": "x"}]), needs).table
    assert (dict(record.columns), record.label) == ({"score": 0.25}, "x")
    for name in ("query", "label", "negative_3"):
        with pytest.raises(ConfigError, match=f"can't ask for the column '{name}'"):
            ExtraColumn(name, "anything")


def test_sources_whose_losses_ask_for_other_columns_are_joined(jsonl: Jsonl) -> None:
    paths = [
        str(jsonl([{**row, "query": f"{name} {row['query']}"} for row in ROWS], name))
        for name in ("a.jsonl", "b.jsonl")
    ]
    needs = asking(WEIGHT, TOPIC, of_source=(asking(WEIGHT), asking(TOPIC)))
    keys = DataKeys.model_validate({"data": [{"path": path} for path in paths], "source_batches": "single"})
    records = load_run_data(keys, needs_dev=False, loss=needs).records
    assert [dict(record.columns) for record in records] == EXPECTED * 2


def test_rows_hold_what_the_loss_learns_from(jsonl: Jsonl) -> None:
    rows = [{"query": "q", "positive": "p", "label": "x"}, {"query": "r", "positive": "s"}]
    classes, pairs, either = (asking(takes=takes) for takes in (("classes",), ("pairs",), ("classes", "positives")))
    assert len(rows_for(jsonl(rows), either).table) == 2
    words = "loss_type weighted learns nothing from this row: it needs label_kind: "
    assert f"train.jsonl:2: {words}class and a label" in refusal(jsonl(rows), classes)
    assert f"train.jsonl:1: {words}pair or grade, and a label or score" in refusal(jsonl(rows), pairs)
    truths = [{"query": "q", "positive": "p", "label": truth} for truth in (1, 0)]
    assert len(rows_for(jsonl(truths), pairs, label_kind="pair").table) == 2
    lists = asking(takes=("lists",))
    with pytest.raises(DataError, match=r"train.jsonl:1: .* as label or score a list of numbers, one for each of its"):
        rows_for(jsonl(truths), lists, label_kind="grade")
    listed = [{"query": "q", "positive": "p", "negatives": ["n"], "label": [1, 0.5]}]
    assert len(rows_for(jsonl(listed), lists, label_kind="grade").table) == 1


@pytest.mark.parametrize(
    ("label", "given", "words"),
    [
        (4.5, (-1, 1), "label: loss_type weighted takes scores from -1 to 1, not the number 4.5: divide all of them"),
        ([0.5, -1.01], (-1, 1), "takes scores from -1 to 1, not the number -1.01"),
        ([1, -1], (-1, 1), ""),
        (1, None, "label: loss_type weighted doesn't take listed pairs and would ignore this score; give these rows a"),
    ],
)
def test_scores_that_the_loss_can_not_use_are_refused_by_line(
    jsonl: Jsonl, label: object, given: tuple[float, float] | None, words: str
) -> None:
    needs = asking(takes=("positives",)) if given is None else asking(takes=("pairs",), score_bounds=given)
    row = {"query": "q", "positive": "p", "label": label} | ({"negatives": ["n"]} if isinstance(label, list) else {})
    path = str(jsonl([row]))
    assert len(rows_for(path, needs, "test", label_kind="grade").table) == 1, "nothing is trained on these"
    if not words:
        assert len(rows_for(path, needs, label_kind="grade").table) == 1
        return
    with pytest.raises(DataError) as refused:
        rows_for(path, needs, label_kind="grade")
    assert "train.jsonl:1: " in str(refused.value)
    assert words in str(refused.value)
    if given is None:
        assert len(rows_for(path, needs, label_kind="grade", column_mapping={"label": None}).table) == 1
