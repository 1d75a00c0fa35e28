"""Folders that `datasets` saved, and lists of files that are one source."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import datasets
import pyarrow as pa
import pytest
from image_cases import png

from vembed.config.load import load_config
from vembed.data import table_cache
from vembed.data.keys import DataKeys
from vembed.data.read import read
from vembed.data.run_data import load_run_data
from vembed.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import WriteJsonl

    from vembed.data.keys import Role

TRAIN = {"role": "train"}


def saved(folder: Path, names: str, **more: list[object]) -> datasets.Dataset:
    rows = datasets.Dataset.from_dict({"query": [f"q {name}" for name in names], "answer": [*names], **more})
    rows.save_to_disk(str(folder))
    return rows


def queries(path: Path | str, options: dict[str, Any] = TRAIN) -> list[object]:
    read(str(path), **options).refuse_missing()
    return [record.query for record in read(str(path), **options).records().table]


def refusal(path: Path | str, options: dict[str, Any] = TRAIN) -> str:
    with pytest.raises(DataError) as caught:
        queries(path, options)
    return str(caught.value)


def test_a_saved_set_is_read(tmp_path: Path) -> None:
    saved(tmp_path / "set", "abc", extra=[1, 2, 3])
    (tmp_path / "set" / "cache-0123.arrow").write_bytes(b"of another step of the user's code")
    loaded = read(str(tmp_path / "set"), **TRAIN).records()
    assert [record.query for record in loaded.table] == ["q a", "q b", "q c"]
    assert loaded.table[2].location == "data-00000-of-00001.arrow:3"
    assert loaded.columns.ignored == ("extra",)
    assert "has no splits" in refusal(tmp_path / "set", {"role": "train", "split": "train"})


def test_a_saved_set_of_several_files_is_read_in_order_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(table_cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(table_cache, "LEAST_BYTES", 1)
    names = [chr(ord("a") + number) for number in range(20)]
    rows = datasets.Dataset.from_dict({"query": names, "positive": [name * 2 for name in names]})
    rows.save_to_disk(str(tmp_path / "set"), num_shards=3)
    for _ in range(2):
        assert queries(tmp_path / "set") == names
    assert read(str(tmp_path / "set"), **TRAIN).records().table.folder is not None


@pytest.mark.parametrize(
    ("role", "split", "expected"), [("train", None, "q a"), ("validation", None, "q b"), ("train", "extra", "q c")]
)
def test_a_saved_set_with_splits_is_never_read_across_them(
    tmp_path: Path, role: Role, split: str | None, expected: str
) -> None:
    parts = {"train": "a", "validation": "b", "extra": "c"}
    sets = {name: datasets.Dataset.from_dict({"query": [f"q {row}"], "text": [row]}) for name, row in parts.items()}
    datasets.DatasetDict(sets).save_to_disk(str(tmp_path / "set"))
    assert queries(tmp_path / "set", {"role": role, "split": split}) == [expected]
    assert "has no split 'test'; it has: train, validation, extra" in refusal(tmp_path / "set", {"role": "test"})


def test_pictures_of_a_saved_set_are_read(tmp_path: Path) -> None:
    pictures = [{"bytes": png(), "path": None}, {"bytes": png("blue"), "path": None}]
    features = datasets.Features({"caption": datasets.Value("string"), "image": datasets.Image()})
    rows = datasets.Dataset.from_dict({"caption": ["a", "b"], "image": pictures}, features=features)
    rows.save_to_disk(str(tmp_path / "set"))
    first, second = read(str(tmp_path / "set"), **TRAIN).records().table
    assert [bytes(each.positives[0].data) for each in (first, second)] == [png(), png("blue")]  # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize("name", ["../x.arrow", "/etc/x.arrow", "", 7])
def test_a_saved_set_leads_out_of_its_folder_by_no_name(tmp_path: Path, name: object) -> None:
    saved(tmp_path / "set", "a")
    (tmp_path / "set" / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    assert "state.json: expected the names of files of Arrow" in refusal(tmp_path / "set")


def test_a_broken_file_of_arrow_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "set", "abc")
    path = tmp_path / "set" / "data-00000-of-00001.arrow"
    data = path.read_bytes()
    for broken in (b"x" * 100, data[: len(data) // 2], data[:-200]):
        path.write_bytes(broken)
        assert "can't be read as Arrow" in refusal(tmp_path / "set")


def test_offsets_that_lead_out_of_a_column_are_refused(tmp_path: Path) -> None:
    offsets, values = pa.py_buffer(b"\0\0\0\0\xff\xff\xff\x00\4\0\0\0"), pa.py_buffer(b"text")
    cells = pa.Array.from_buffers(pa.string(), 2, [None, offsets, values])
    batch = pa.record_batch({"query": cells, "text": ["p", "r"]})
    with pa.OSFile(str(tmp_path / "t.arrow"), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    assert "t.arrow:1: can't be read as Arrow" in refusal(tmp_path / "t.arrow")


def test_a_list_of_files_is_one_source(write_jsonl: WriteJsonl, tmp_path: Path) -> None:
    paths = []
    for name in "cab":
        rows = [{"query": f"{name}{row}", "positive": f"p{name}{row}"} for row in range(10)]
        paths.append(str(write_jsonl(rows, f"{name}.jsonl")))
    (tmp_path / "d.csv").write_text("query,positive\nd0,pd0\n")
    keys = DataKeys.model_validate({"data_path": [*paths, str(tmp_path / "d.c*")]})
    data = load_run_data(keys, needs_dev=False)
    assert [record.query for record in data.records] == [f"{name}{row}" for name in "cab" for row in range(10)] + ["d0"]
    assert data.sources == (keys.data_path,)
    assert queries("{" + ",".join(paths[:2]) + "}") == [f"{name}{row}" for name in "ca" for row in range(10)]
    assert DataKeys.model_validate({"data_path": paths[:1]}).data_path == paths[0]


def test_a_list_names_files_that_are_there_and_no_sets(write_jsonl: WriteJsonl, beir_files: Path) -> None:
    good = str(write_jsonl([{"query": "q", "positive": "p"}]))
    assert "did you mean 'train.jsonl'" in refusal("{" + good + "," + good.replace("train", "trian") + "}")
    assert "takes files and folders of rows" in refusal("{" + good + ",owner/name}")
    assert "takes files and folders of rows" in refusal("{" + good + f",{beir_files}" + "}")


@pytest.mark.parametrize(
    ("given", "words"), [("[a,b,3]", "must be a text or null"), ("['a,b', c]", "can't hold a comma")]
)
def test_a_list_that_names_no_files_is_a_config_error(given: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, ["model_name=m", f"data_path={given}"])
    assert load_config(None, ["model_name=m", "data_path=[a, 'b{0..3}.tar']"]).config.data_path == "{a,b{0..3}.tar}"
