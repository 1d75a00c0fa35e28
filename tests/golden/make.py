"""Freeze what the program does, or say what of it changed: `python tests/golden/make.py [--check] [PART ...]`."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import golden_pages  # noqa: E402
from golden_runs import RUNS, environment, run, without_measures  # noqa: E402
from golden_text import differences, digest, fingerprint, plain  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

TREE = HERE.parents[1]


def messages(tree: Path, folder: Path, *, which: str) -> dict[str, Any]:
    """Return what the program says: wrong configurations ("quick"), data and models ("slow"), "plans", "mistakes".

    Of data and models only the lines that the first run that is fine doesn't print as well.
    """
    folder.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, str(HERE / "golden_messages.py"), str(tree), str(folder), which],
        env=environment(tree), stdout=subprocess.PIPE, text=True, timeout=600, check=True,
    )  # fmt: skip
    places = {str(folder): "WORK", str(tree): "TREE"}
    answers = json.loads(done.stdout)
    usual = set(plain(answers["path d.jsonl"]["out"], places).splitlines()) if which == "slow" else set()
    return {
        name: {"code": answer["code"]}
        | {stream: _lines(answer[stream], places, usual) for stream in ("out", "err") if answer[stream]}
        for name, answer in answers.items()
    }


def _lines(text: str, places: dict[str, str], usual: set[str]) -> Any:
    """Return the lines of a text that aren't usual, or what it holds where it is JSON."""
    if text.startswith("{"):
        plan = without_measures(json.loads(text), places)
        return {key: value for key, value in plan.items() if key != "candidates"}  # the runs have theirs
    return [line for line in plain(text, places).splitlines() if line not in usual]


def reference(tree: Path, folder: Path) -> dict[str, Any]:
    """Return a hash of each key of docs/reference, and of each other part of the pages of keys."""
    pages = [tree / "docs" / "configuration.md", *sorted((tree / "docs" / "reference").glob("keys-*.md"))]
    found: dict[str, Any] = {}
    for page in pages:
        for part in re.split(r"^(?=#+ )", page.read_text("utf-8"), flags=re.MULTILINE):
            found[f"{page.stem}: {part.partition(chr(10))[0].strip('# `')}"] = digest(part)
    return found


PARTS: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "messages": lambda tree, folder: messages(tree, folder, which="quick"),
    "messages_of_data": lambda tree, folder: messages(tree, folder, which="slow"),
    "mistakes": lambda tree, folder: messages(tree, folder, which="mistakes"),
    "reference": reference,
    **{f"run_{name}": lambda tree, folder, name=name: run(name, tree=tree, folder=folder) for name in RUNS},
    "plans": lambda tree, folder: messages(tree, folder, which="plans"),
    "leaderboard": golden_pages.leaderboard,
    "search": golden_pages.search,
}


def produce(part: str, *, tree: Path = TREE, folder: Path | None = None) -> dict[str, Any]:
    """Return what a part of the program does now."""
    if folder is not None:
        return PARTS[part](tree, folder / part)
    with tempfile.TemporaryDirectory(prefix="golden-") as temporary:
        return PARTS[part](tree, Path(temporary).resolve() / part)


def frozen(part: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fingerprint of the machine that froze a part, and the part."""
    content = json.loads((HERE / f"{part}.json").read_text("utf-8"))
    return content["machine"], content["frozen"]


def compare(part: str, found: dict[str, Any]) -> list[str]:
    """Return what of a part changed, a paragraph for each place; numbers to the last bit on an equal machine only."""
    machine, expected = frozen(part)
    return differences(expected, json.loads(json.dumps(found)), exact=machine == fingerprint(), where=part)


def comparable(part: str) -> str | None:
    """Return why a part can't be compared on this machine, or None."""
    here, there = fingerprint()["python"], frozen(part)[0]["python"]
    if part == "run_text" and here != there:
        return f"its data are the standard library of Python {there}, and this is {here}"
    return None


def main() -> int:
    """Write or compare the goldens and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: all of {', '.join(PARTS)}")
    parser.add_argument("--check", action="store_true", help="compare with what is frozen, and write nothing")
    parser.add_argument("--tree", type=Path, default=TREE, metavar="DIR", help="repository whose program runs")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="new folder that keeps what the runs write")
    parsed = parser.parse_args()
    unknown = set(parsed.parts) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    changed = 0
    for part in parsed.parts or PARTS:
        why_not = comparable(part) if parsed.check else None
        if why_not is not None:
            print(f"{part}: not compared: {why_not}")
            continue
        found = produce(part, tree=parsed.tree.resolve(), folder=parsed.keep and parsed.keep.resolve())
        if not parsed.check:
            path = HERE / f"{part}.json"
            path.write_text(json.dumps({"machine": fingerprint(), "frozen": found}, indent=0, ensure_ascii=True) + "\n")
            print(f"{part}: {path.stat().st_size:,} bytes")
            continue
        changes = compare(part, found)
        changed += bool(changes)
        print(f"{part}: equal" if not changes else "\n".join([f"{part}: {len(changes)} places differ", *changes]))
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
