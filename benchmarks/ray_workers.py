"""Rows a second of `vembed encode --ray` with 1 and 2 workers on this machine, over generated short documents.

    python benchmarks/ray_workers.py --rows 1000000

The rate counts from the first slice that is written to the last, without the start of Ray, workers and model; that of
one process without Ray stands beside it.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import vembed
from vembed.files import file_sha256
from vembed.models.tables import NgramBag, NgramBagConfig
from vembed.vectors import store

SLICE_ROWS = 8192


def write_case(folder: Path, num_rows: int) -> None:
    """Write the model (64 dimensions) and the corpus: 4 to 12 words of 5,000 a document."""
    torch.manual_seed(0)
    NgramBag(NgramBagConfig(dimension=64, buckets=4096, max_words=16)).save(folder / "bag")
    draw, words = random.Random(0), [f"word{number}" for number in range(5000)]
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as file:
        for number in range(num_rows):
            text = " ".join(draw.choices(words, k=4 + number % 9))
            file.write(json.dumps({"_id": f"d{number}", "text": text}) + "\n")


def main() -> None:
    """Encode the corpus in each way, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    num_rows = parser.parse_args().rows
    times: list[float] = []
    append = store._Part.append

    def timed(*given: Any, **facts: Any) -> None:
        append(*given, **facts)
        times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_case(folder, num_rows)
        for num_workers in (None, 1, 2):
            times.clear()
            started = time.perf_counter()
            ray: dict[str, Any] = {} if num_workers is None else {"ray": "local", "ray_workers": num_workers}
            with patch.object(store._Part, "append", timed):
                vembed.build_index(
                    folder / "bag", folder / "corpus.jsonl", folder / f"{num_workers}.parquet", format="parquet", **ray
                )
            rate = (num_rows - SLICE_ROWS) / (times[-1] - times[0])
            name = "without Ray" if num_workers is None else f"{num_workers} workers"
            took = time.perf_counter() - started
            print(
                f"{name}: {rate:,.0f} rows/s, {rate / (num_workers or 1):,.0f} a worker, {took:.0f} s in all",
                flush=True,
            )
        same = len({file_sha256(path) for path in folder.glob("*.parquet")}) == 1
        print(f"{num_rows:,} rows; the three files are the same: {same}")


if __name__ == "__main__":
    main()
