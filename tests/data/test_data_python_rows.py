"""Rows of a Python caller: whatever holds them, they are read and checked as those of a file."""

import base64
import datetime
import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pytest

from vembed.batch import Image, ImageLimits
from vembed.data.keys import DataKeys
from vembed.data.python_rows import write_rows
from vembed.data.read import DataSource
from vembed.errors import DataError, MachineError

ROWS = [
    {"query": "a red fox", "positive": ["un xofo", "dera"], "label": 3},
    {"query": "a blue car", "positive": ["un raco"], "negatives": ["un xofo"], "label": 4},
    {"query": "größer 漢字", "positive": ["x\ny"]},
]


def written(rows: Any, folder: Path, name: str = "data") -> list[Any]:
    path = write_rows(rows, folder, name, ImageLimits())
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def tables() -> Iterator[tuple[str, Any]]:
    rows = [{"query": f"q{n}", "positive": f"p{n}", "weight": float(n)} for n in range(2_500)]
    yield "list", rows
    yield "generator", (row for row in rows)
    yield "arrow", pa.Table.from_pylist(rows)
    datasets = pytest.importorskip("datasets")
    yield "datasets", datasets.Dataset.from_list(rows)
    yield "streamed", datasets.Dataset.from_list(rows).to_iterable_dataset()
    yield "shuffled twice", datasets.Dataset.from_list(rows[::-1]).select(range(2_499, -1, -1))
    yield "pandas", pytest.importorskip("pandas").DataFrame(rows)


def test_every_holder_of_the_same_rows_gives_the_same_file(tmp_path: Path) -> None:
    paths = {name: write_rows(table, tmp_path, "data", ImageLimits()) for name, table in tables()}
    assert len(set(paths.values())) == 1, paths
    assert len(paths["list"].read_text().splitlines()) == 2_500
    assert write_rows(ROWS, tmp_path, "data", ImageLimits()) not in paths.values(), "other rows, another path"
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".jsonl", ".jsonl"], "nothing else is left"


def test_the_rows_are_checked_as_those_of_a_file(tmp_path: Path) -> None:
    path = write_rows(ROWS, tmp_path, "data", ImageLimits())
    loaded = DataSource(str(path), "train", DataKeys(label_kind="class")).records()
    assert [record.query for record in loaded.table] == ["a red fox", "a blue car", "größer 漢字"]
    assert [list(record.negatives) for record in loaded.table] == [[], ["un xofo"], []]
    for wrong, words in (
        ([*ROWS, {"query": 5, "positive": "x"}], r"data-\w{16}\.jsonl:4: query: "),
        ([*ROWS, ("a", "b")], r"data-\w{16}\.jsonl:4: expected a JSON object, got list"),
        ([*ROWS, {"query": "\ud800", "positive": "x"}], r"data-\w{16}\.jsonl:4: invalid UTF-8"),
        ([*ROWS, {"query": b"abc", "positive": "x"}], r"data-\w{16}\.jsonl:4: query: "),
    ):
        path = write_rows(wrong, tmp_path, "data", ImageLimits())
        with pytest.raises(DataError, match=words):
            DataSource(str(path), "train", DataKeys(label_kind="class")).records()


def test_decimals_are_numbers(tmp_path: Path) -> None:
    values = [Decimal("4.2"), Decimal(2**60 + 1), Decimal("7.00"), Decimal("1E+30"), Decimal("Infinity")]
    (row,) = written([{"scores": values}], tmp_path)
    assert row["scores"] == [4.2, 2**60 + 1, 7, 1e30, float("inf")]
    assert [type(each) for each in row["scores"]] == [float, int, int, float, float]


def test_missing_values_of_a_pandas_table_are_null(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"query": ["a", None], "label": [1.0, float("nan")], "at": [pandas.Timestamp(0), None]})
    assert written(frame, tmp_path) == [
        {"query": "a", "label": 1.0, "at": "1970-01-01 00:00:00"},
        {"query": None, "label": None, "at": None},
    ]


def test_a_table_that_names_a_column_twice_is_refused_as_a_file_is(tmp_path: Path) -> None:
    names, cells = ["query", "positive", "positive"], ["q", "p", "other"]
    frame = pytest.importorskip("pandas").DataFrame([cells], columns=names)
    for table in (frame, pa.table([[cell] for cell in cells], names=names)):
        with pytest.raises(DataError, match="data names the column 'positive' twice"):
            written(table, tmp_path)


def test_numbers_of_other_libraries_and_dates_have_a_plain_form(tmp_path: Path) -> None:
    row = {"a": np.int64(3), "b": np.arange(2), "c": (1, "x"), "d": datetime.date(2026, 1, 2), 5: True}
    assert written([row], tmp_path) == [{"a": 3, "b": [0, 1], "c": [1, "x"], "d": "2026-01-02", "5": True}]


def test_pictures_come_in_every_form(tmp_path: Path) -> None:
    picture = PIL.Image.new("RGB", (4, 3), (200, 10, 10))
    file = tmp_path / "photos" / "red.png"
    file.parent.mkdir()
    picture.save(file)
    data = file.read_bytes()
    forms = [picture, data, memoryview(data), {"bytes": data, "path": None}, Image("red", data), file, Image(str(file))]
    rows = [{"query": f"red {number}", "positive_image": form} for number, form in enumerate(forms)]
    path = write_rows(rows, tmp_path / "rows", "data", ImageLimits())
    keys = DataKeys(image_root=str(tmp_path))
    loaded = DataSource(str(path), "train", keys).records()
    pixels = {PIL.Image.open(record.positives[0].path if record.positives[0].data is None else _file(record)).tobytes()
              for record in loaded.table}  # fmt: skip
    assert pixels == {picture.tobytes()}
    datasets = pytest.importorskip("datasets")
    held = datasets.Dataset.from_list([{"query": "red", "positive_image": str(file)}])
    held = held.cast_column("positive_image", datasets.Image())
    assert written(held, tmp_path / "rows")[0]["positive_image"]["path"] == str(file)


def _file(record: Any) -> Any:
    from io import BytesIO

    return BytesIO(bytes(record.positives[0].data))


def test_what_is_no_rows_is_refused_with_the_fix(tmp_path: Path) -> None:
    split = pytest.importorskip("datasets").Dataset.from_list(ROWS[:1])
    for wrong, words in (
        ({"query": ["a"]}, r"data is of type dict, which is not rows; give a list of dictionaries"),
        ({"train": split}, r"give one split, as in data=data\['train'\]"),
        (5, r"data is of type int"),
    ):
        with pytest.raises(TypeError, match=words):
            write_rows(wrong, tmp_path, "data", ImageLimits())
    with pytest.raises(DataError, match="val_data holds no rows"):
        write_rows(iter([]), tmp_path, "val_data", ImageLimits())
    with pytest.raises(DataError, match="data: row 2 holds a object"):
        write_rows([ROWS[0], {"query": object()}], tmp_path, "data", ImageLimits())
    assert not list(tmp_path.iterdir()), "nothing is left of rows that were refused"


def test_an_error_of_the_callers_own_generator_stays_his_and_a_disk_that_refuses_is_named(tmp_path: Path) -> None:
    def broken() -> Iterator[dict[str, str]]:
        yield {"query": "a", "positive": "b"}
        raise FileNotFoundError("mine")

    with pytest.raises(FileNotFoundError, match="mine"):
        write_rows(broken(), tmp_path, "data", ImageLimits())
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="can't be written"):
        write_rows(ROWS, tmp_path / "file", "data", ImageLimits())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_base64_may_be_broken_into_lines(tmp_path: Path) -> None:
    PIL.Image.effect_noise((40, 30), 50).save(tmp_path / "noise.png")
    data = (tmp_path / "noise.png").read_bytes()
    lines = base64.encodebytes(data).decode()  # 76 characters each, as the program base64 writes them
    assert lines.count("\n") > 1
    (tmp_path / "rows.jsonl").write_text(json.dumps({"query": "a", "positive_image": {"bytes": lines}}) + "\n")
    (record,) = DataSource(str(tmp_path / "rows.jsonl"), "train").records().table
    assert _file(record).read() == data


def test_base64_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"query": "a", "positive_image": {"bytes": "no!"}}) + "\n")
    with pytest.raises(DataError, match=r"rows.jsonl:1: positive_image: .*not base64"):
        DataSource(str(tmp_path / "rows.jsonl"), "train").records()
