"""Hub ids. There is no network in tests: the one call that needs it is replaced where a data set is to be found."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import datasets
import pytest

from vembed.data.keys import DataKeys
from vembed.data.read import read
from vembed.errors import DataError, MachineError

if TYPE_CHECKING:
    from pathlib import Path

ROWS = [{"anchor": f"q{i}", "positive": f"p{i}", "label": f"topic {i % 2}", "extra": i} for i in range(2500)]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Serve a data set of real Arrow data under any hub id; return the calls."""
    calls: list[tuple[Any, ...]] = []
    found = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "validation": datasets.Dataset.from_list(ROWS[:3])}
    )

    def load_dataset(*args: Any, **options: Any) -> datasets.DatasetDict:
        calls.append((*args, options))
        return found

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


def test_a_hub_set_becomes_records(hub: list[tuple[Any, ...]]) -> None:
    loaded = read("owner/name:some-config", "train").records()
    assert len(loaded.table) == len(ROWS)
    assert loaded.table[2400].query == "q2400"
    assert loaded.table[1].label == "topic 1"
    assert loaded.table[1].location == "owner/name:some-config/train:2"
    assert loaded.notes == ("Ignored columns: extra.",)
    assert hub == [("owner/name", "some-config", {})], "no option that would run a data set's code"


def test_the_role_or_the_split_chooses(hub: list[tuple[Any, ...]]) -> None:
    assert len(read("owner/name", "validation").records().table) == 3
    assert len(read("owner/name", "test", split="validation").records().table) == 3
    assert read("owner/name", "validation").judged().name == "owner/name"
    with pytest.raises(
        DataError, match=r"no split 'test'; it has: train, validation\. Choose one with test_data_split"
    ):
        read("owner/name", "test").records()


def test_columns_of_a_hub_set_are_checked_like_any_other(hub: list[tuple[Any, ...]]) -> None:
    with pytest.raises(DataError, match=r"did you mean 'anchor'"):
        read("owner/name", "train", DataKeys(column_mapping={"anchr": "query"})).records()
    with pytest.raises(DataError, match="no row of owner/name has a column 'query'"):
        read("owner/name", "train", DataKeys(column_mapping={"anchor": None})).records()


@pytest.mark.parametrize(
    ("raised", "expected", "words"),
    [
        (datasets.exceptions.DatasetNotFoundError("not there"), DataError, "no data set 'owner/name'"),
        (ConnectionError("no route"), MachineError, "hub can't be reached: no route"),
        (ValueError("BuilderConfig 'x' not found"), DataError, "can't be read: BuilderConfig 'x' not found"),
        (RuntimeError("Dataset scripts are no longer supported"), DataError, "scripts are no longer supported"),
    ],
)
def test_each_failure_of_the_hub_has_its_error(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, expected: type[Exception], words: str
) -> None:
    def load_dataset(*args: Any) -> None:
        raise raised

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(expected, match=words):
        read("owner/name", "train").records()


def run_python(code: str, folder: Path) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, timeout=60
    ).stdout


@pytest.mark.slow
def test_offline_without_a_cached_copy_says_how_to_get_one(tmp_path: Path) -> None:
    code = (
        "from vembed.data.read import read; from vembed.errors import MachineError\n"
        "try: read('owner/no-such-set', 'train').records()\n"
        "except MachineError as error: print(int(error.exit_code), error)"
    )
    out = run_python(code, tmp_path)
    assert out.startswith("5 the data set 'owner/no-such-set' is not in the local cache")
    assert "hf download owner/no-such-set --repo-type dataset" in out
