"""What runs differ in before they begin: settings, data, versions and hardware, and what each took."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vembed.evaluation.report.speed import rate, seconds_text, settled_rows
from vembed.pages.page import Cell
from vembed.pages.text import bytes_text, count_text, finite, number_text, value_text
from vembed.text import show_duration
from vembed.training.progress import evaluation_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vembed.comparison.runs import Run

NOT_KNOWN = "not recorded"

OWN_KEYS = ("output_dir", "overwrite_output_dir", "resume")
"""Keys that say where a run lies and how it was started."""

DECIDED = ("strategy", "mode", "world_size", "dtype", "steps", "gradient_cache")
"""What only the plan says."""

HASH_CHARACTERS = 12

PEAK_KEYS = ("peak_memory_bytes", "largest_rank_memory_bytes")


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that isn't the same in all runs."""

    name: str
    values: tuple[str, ...]  # of each run


def resolved(run: Run) -> dict[str, Any]:
    """Return the settings of a run with what `auto` became."""
    decided = {key: run.plan[key] for key in run.plan if key in run.config or key in DECIDED}
    kept = {key: value for key, value in decided.items() if value is not None}
    return {**run.config, **kept}


def config_differences(runs: Sequence[Run]) -> list[Difference]:
    """Return the settings that differ between runs which know them."""
    settings = [resolved(run) for run in runs]
    names = [name for name in dict.fromkeys(name for each in settings for name in each) if name not in OWN_KEYS]
    return [
        Difference(name, tuple(value_text(name, each[name]) if name in each else NOT_KNOWN for each in settings))
        for name in names
        if _differ([each[name] for each in settings if name in each])
    ]


def unknown_keys(runs: Sequence[Run]) -> list[str]:
    """Return a note for each run whose version lacks settings that another one has."""
    names = list(dict.fromkeys(name for run in runs for name in run.config))
    missing = {run.name: [name for name in names if name not in run.config] for run in runs if run.config}
    return [
        f"{name} is of a version of vembed without {', '.join(lacking)}."
        for name, lacking in missing.items()
        if lacking
    ]


def data_differences(runs: Sequence[Run]) -> list[Difference]:
    """Return what the runs' data differ in: counts, sources, and content by its hash."""
    facts = [_data_facts(run) for run in runs]
    return _differences(facts)


def data_sentence(runs: Sequence[Run]) -> str:
    """Say whether all runs trained on the same rows, as far as that is known."""
    hashes = [_part(run, "data_hashes").get("training", "") for run in runs]
    known = {each for each in hashes if each}
    if len(known) > 1:
        return "The runs didn't train on the same rows."
    if not all(hashes):
        return "Not every run recorded the content of its training rows."
    return f"All runs trained on the same rows (hash {hashes[0][:HASH_CHARACTERS]})."


def environment_differences(runs: Sequence[Run]) -> list[Difference]:
    """Return the versions and the hardware that differ between finished runs."""
    return _differences([_part(run, "environment") for run in runs])


def _differences(facts: Sequence[Mapping[str, str]]) -> list[Difference]:
    names = dict.fromkeys(name for each in facts for name in each)
    return [
        Difference(name, tuple(each.get(name, NOT_KNOWN if not each else "none") for each in facts))
        for name in names
        if len({each.get(name) for each in facts if each}) > 1
    ]


def _data_facts(run: Run) -> dict[str, str]:
    facts = {row[0]: row[1] for row in run.report.get("data_facts") or [] if len(row) == 2 and row[0] != "note"}
    hashes = _part(run, "data_hashes")
    return facts | {f"content of {_set_label(key)}": value[:HASH_CHARACTERS] for key, value in hashes.items()}


def _set_label(key: str) -> str:
    return "the training rows" if key == "training" else f"the set {key}"


def _part(run: Run, key: str) -> dict[str, str]:
    """Return names and texts of a report; empty where they aren't there."""
    return run.report.get(key) or {}


def _differ(values: Sequence[object]) -> bool:
    return any(value != values[0] or isinstance(value, bool) != isinstance(values[0], bool) for value in values[1:])


@dataclass(frozen=True, slots=True)
class Cost:
    """What a run took; a number that isn't known is None."""

    device: str
    strategy: str
    processes: int | None
    global_batch_size: int | None
    steps_done: int
    steps_planned: int | None
    step_seconds: float | None  # of all steps
    evaluation_seconds: float | None
    samples_per_second: float | None
    tokens_per_second: float | None
    peak_bytes: float | None  # measured, of the process that used most
    planned_bytes: float | None  # of one device
    planned_step_seconds: float | None  # of as many steps, on a device whose speed the plan knows

    @property
    def cells(self) -> tuple[str | Cell, ...]:
        """The numbers as the table shows them, in the order of `COST_HEADS`; what was planned stands small."""
        planned = "" if self.steps_planned in (None, self.steps_done) else f" of {count_text(self.steps_planned or 0)}"
        return (
            self.device,
            " x ".join(filter(None, (self.strategy, str(self.processes or "")))),
            "" if self.global_batch_size is None else count_text(self.global_batch_size),
            f"{count_text(self.steps_done)}{planned}",
            _beside_plan(self.step_seconds, self.planned_step_seconds, _duration),
            _shown(self.evaluation_seconds, _duration),
            _shown(self.samples_per_second, number_text),
            _shown(self.tokens_per_second, number_text),
            _beside_plan(self.peak_bytes, self.planned_bytes, bytes_text),
        )


COST_HEADS = (
    *("Device", "Strategy x processes", "Global batch", "Steps", "Time in steps", "Time in evaluation"),
    *("Samples/s", "Tokens/s", "Memory at the peak"),
)


def cost_of(run: Run) -> Cost:
    """Return what a run took, from its rows; what only a report knows is empty without one."""
    settled = settled_rows(run.rows)
    seconds = [value for row in run.rows if math.isfinite(value := finite(row.get("step_seconds")))]
    peaks = [value for row in run.rows for key in PEAK_KEYS if math.isfinite(value := finite(row.get(key)))]
    candidates = [each for each in run.plan.get("candidates") or [] if each.get("recommended")]
    parts = [each["bytes_per_device"] for each in candidates if isinstance(each.get("bytes_per_device"), dict)]
    planned = [finite(each.get("total")) for each in parts]
    planned_seconds = finite(run.plan.get("rough_step_seconds")) * len(seconds)
    return Cost(
        device=_part(run, "environment").get("device", NOT_KNOWN),
        strategy=" ".join(filter(None, (str(run.plan.get("strategy") or ""), str(run.plan.get("mode") or "")))),
        processes=run.plan.get("world_size"),
        global_batch_size=run.plan.get("global_batch_size"),
        steps_done=int(run.rows[-1]["step"]) if run.rows else 0,
        steps_planned=run.plan.get("steps"),
        step_seconds=sum(seconds) if seconds else None,
        evaluation_seconds=_evaluation_seconds(run),
        samples_per_second=rate(settled, "samples_per_second"),
        tokens_per_second=rate(settled, "tokens_per_second"),
        peak_bytes=max(peaks, default=None),
        planned_bytes=planned[0] if planned else None,
        planned_step_seconds=planned_seconds if math.isfinite(planned_seconds) else None,
    )


def _evaluation_seconds(run: Run) -> float | None:
    try:
        return evaluation_seconds(run.folder / "evaluation") or None
    except (OSError, ValueError, TypeError, KeyError):
        return None  # of a broken file, which a note of the run tells of


def _duration(seconds: float) -> str:
    return seconds_text(seconds) if seconds < 60 else show_duration(seconds)


def _shown(value: float | None, show: Callable[[float], str]) -> str:
    return NOT_KNOWN if value is None else show(value)


def _beside_plan(value: float | None, planned: float | None, show: Callable[[float], str]) -> Cell:
    return Cell(_shown(value, show), "" if planned is None else f"planned {show(planned)}")
