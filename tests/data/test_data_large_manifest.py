"""Large manifests: the last row is checked before anything trains, and memory stays near the size of the texts."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from vembed.data.keys import DataKeys
from vembed.data.read import read
from vembed.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

TRAIN = {"role": "train"}


def write_rows(path: Path, count: int, last: str) -> None:
    with path.open("w") as handle:
        handle.writelines(
            f'{{"query": "query number {i}", "positive": "passage number {i}", "negatives": ["other {i}"]}}\n'
            for i in range(count - 1)
        )
        handle.write(last + "\n")


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_an_error_in_the_last_row_is_named(tmp_path: Path, count: int) -> None:
    path = tmp_path / "train.jsonl"
    write_rows(path, count, '{"query": "q", "positive": "p", "negatives": ["p"]}')
    with pytest.raises(DataError, match=rf"train\.jsonl:{count}: negatives: holds the row's own positive"):
        read(str(path), **TRAIN).records()
    loaded = read(str(path), "train", DataKeys(skip_invalid_records=True, max_invalid_records=1)).records()
    assert len(loaded.table) == count - 1
    assert loaded.table[count - 2].location == f"train.jsonl:{count - 1}"


PEAK = """
import resource, sys
from vembed.data.read import read
loaded = read(sys.argv[1], "train").records()
print(len(loaded.table), int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]))
"""


@pytest.mark.slow
def test_memory_stays_near_the_size_of_the_texts(tmp_path: Path) -> None:
    peaks = {}
    for count in (1000, 1_000_000):
        path = tmp_path / f"{count}.jsonl"
        write_rows(path, count, '{"query": "q", "positive": "p"}')
        done = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True)
        rows, peaks[count] = (int(value) for value in done.stdout.split())
        assert rows == count
    grown_bytes = (peaks[1_000_000] - peaks[1000]) * 1024
    # As Python objects the rows would take over 600 bytes each; as Arrow, about 50 of text and 80 of offsets.
    assert grown_bytes < 400 * 1_000_000, f"{grown_bytes / 1e6:.0f} MB"
