"""How long `vembed data check` takes for a million rows of JSONL, and in how much memory.

Rows of a query, a positive and a hard negative, 460 bytes each, and 10,000 rows to check them against; one query in a
hundred of those is one of the training data with a word changed.

    OMP_NUM_THREADS=1 python benchmarks/data_check.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from data_start import write_rows

TEST_ROWS = 10_000

PROGRAM = """
import json, sys, time
from vembed.entrypoints.data import main
wall, cpu = time.perf_counter(), time.process_time()
code = main(["check", sys.argv[1], "--against", sys.argv[2], "--json", sys.argv[3]], program="vembed data")
told = {"seconds": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "code": code}
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps(told | {name: int(status[name].split()[0]) / 1024 for name in ("VmHWM", "RssAnon", "RssFile")}))
"""


def main() -> None:
    """Write the rows, check them, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    with tempfile.TemporaryDirectory() as name:
        train, test, report = (Path(name) / file for file in ("train.jsonl", "test.jsonl", "check.json"))
        write_rows(train, parser.parse_args().rows)
        write_test(test, train)
        words = [sys.executable, "-c", PROGRAM, str(train), str(test), str(report)]
        subprocess.run(words, check=True)


def write_test(path: Path, train: Path) -> None:
    """Write rows that aren't in the training data, but for one in a hundred queries, a word of which is changed."""
    write_rows(path, TEST_ROWS)
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    with train.open(encoding="utf-8") as file:
        for number, (row, line) in enumerate(zip(rows, file, strict=False)):
            is_leak = number % 100 == 0
            words = json.loads(line)["query"].split() if is_leak else row["query"].split()[::-1]
            row["query"] = " ".join([*words[:-1], f"leak{number}" if is_leak else "test"])
            row["positive"] = row["positive"][::-1]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


if __name__ == "__main__":
    main()
