"""Compare what a disturbed command left with what the undisturbed one left, bit for bit but for times."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMES = re.compile(
    r"(.*_)?seconds|.*_per_second|milliseconds_\w+|.*_imbalance|scaling_efficiency|slowest_rank"
    r"|(peak|largest_rank)_memory_bytes|checksum|findings"
)
"""Keys of JSON that no two runs have alike: times, what a report finds in them, and the checksum of a manifest, whose
plan says what was resumed."""

OF_AN_EVALUATION = re.compile(rf"{TIMES.pattern}|evaluated_step|evaluations|stale_evaluations|best_step|best_metric")
"""The same of a checkpoint that was saved by a stop, before the evaluation of its step: the run does it on resuming."""

OF_THE_STATE = re.compile(rf"{TIMES.pattern}|state\.json|best")
"""The same of a checkpoint's manifest: the file that it names is compared itself, and so is BEST."""

UNCOMPARED = re.compile(r"train\.log|run\.lock|events\.out\..*|report\.(html|md)|leaderboard\.(html|md)")
"""Files that must be there, but show times; what they say beside stands in a JSON file that is compared."""

RESUMED = re.compile(r"resumed from step .*")
"""A reason that only the plan of a resumed run has."""

CHECKPOINT = re.compile(r"(?P<folder>.*/?checkpoints)/(?P<name>(abandoned-\d+-)?step-\d+)/.*")
"""A file of a checkpoint: which ones a stopped run keeps depends on where it was stopped."""

EVENTS = re.compile(r"events\.out\..*")
"""TensorBoard's files: each start of a run adds one, named by the clock."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two folders differ."""

    divergences: tuple[str, ...]  # missing files, and files with another content
    leftovers: tuple[str, ...]  # files that the undisturbed command didn't leave


def compare(whole: Path, other: Path) -> Comparison:
    """Compare the folder that a disturbed and repeated command worked in with that of the undisturbed one."""
    expected, found = _files(whole), _files(other)
    last = _last_checkpoint(expected)
    divergences = [f"{name} is missing" for name in sorted(expected - found) if _must_be_there(name, last)]
    both = [name for name in sorted(expected & found) if not UNCOMPARED.fullmatch(Path(name).name)]
    divergences += [f"{name}: {what}" for name in both if (what := difference(whole, other, name))]
    leftovers = [name for name in sorted(found - expected) if not _may_be_there(name)]
    return Comparison(tuple(divergences), tuple(leftovers))


def _files(folder: Path) -> set[str]:
    """Return the paths of all files, and with a slash behind them those of empty folders."""
    return {
        f"{path.relative_to(folder)}{'/' if path.is_dir() else ''}"
        for path in folder.rglob("*")
        if not path.is_dir() or not any(path.iterdir())
    }


def _last_checkpoint(names: set[str]) -> str:
    steps = [found["name"] for name in names if (found := CHECKPOINT.fullmatch(name))]
    return max(steps, default="")


def _must_be_there(name: str, last: str) -> bool:
    found = CHECKPOINT.fullmatch(name)
    return not EVENTS.fullmatch(Path(name).name) and (found is None or found["name"] == last)


def _may_be_there(name: str) -> bool:
    return bool(CHECKPOINT.fullmatch(name) or EVENTS.fullmatch(Path(name).name))


def difference(whole: Path, other: Path, name: str, *, ignored: str = "") -> str:
    """Say how two files differ; an empty text when they don't.

    Args:
        ignored: Regular expression of further keys of JSON that needn't agree.
    """
    if name.endswith("/"):
        return ""
    contents = [(folder / name).read_bytes() for folder in (whole, other)]
    if contents[0] == contents[1]:
        return ""
    if not name.endswith((".json", ".jsonl")):
        return _first_difference(*contents)
    try:
        one, two = (_parse(name, content) for content in contents)
    except ValueError as error:
        return f"no JSON ({error})"
    keys = _ignored_keys(name, one, two)
    return _json_difference(one, two, re.compile(f"{keys.pattern}|{ignored}") if ignored else keys)


def _ignored_keys(name: str, one: Any, two: Any) -> re.Pattern[str]:
    """Return the keys that needn't agree in two JSON files of a name."""
    if CHECKPOINT.fullmatch(name) is None:
        return TIMES
    if name.endswith("manifest.json"):
        return OF_THE_STATE
    evaluated = [content.get("run", {}).get("evaluated_step") for content in (one, two)]
    return TIMES if evaluated[0] == evaluated[1] else OF_AN_EVALUATION


def _first_difference(one: bytes, two: bytes) -> str:
    if len(one) != len(two):
        return f"{len(one):,} bytes undisturbed, {len(two):,} bytes now"
    first = next(n for n, (left, right) in enumerate(zip(one, two, strict=True)) if left != right)
    return f"differs first at byte {first:,}"


def _parse(name: str, content: bytes) -> Any:
    text = content.decode("utf-8")
    return [json.loads(line) for line in text.splitlines()] if name.endswith(".jsonl") else json.loads(text)


def _json_difference(one: Any, two: Any, ignored: re.Pattern[str], where: str = "") -> str:
    """Return the first difference of two JSON values beside ignored keys; an empty text when there is none."""
    if isinstance(one, dict) and isinstance(two, dict):
        keys = [key for key in one | two if not ignored.fullmatch(key)]
        if missing := [key for key in keys if key not in one or key not in two]:
            return f"{where}/{missing[0]} is on one side only"
        return next(filter(None, (_json_difference(one[key], two[key], ignored, f"{where}/{key}") for key in keys)), "")
    if isinstance(one, list) and isinstance(two, list):
        two = [each for each in two if not (isinstance(each, str) and RESUMED.fullmatch(each))]
        if len(one) != len(two):
            return f"{where} has {len(one)} entries undisturbed, {len(two)} now"
        pairs = enumerate(zip(one, two, strict=True))
        found = (_json_difference(left, right, ignored, f"{where}[{n}]") for n, (left, right) in pairs)
        return next(filter(None, found), "")
    same = one == two and type(one) is type(two)
    return "" if same else f"{where} is {str(one)[:60]} undisturbed, {str(two)[:60]} now"
