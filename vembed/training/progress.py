"""Lines of a run while it trains: steps in columns, the time left, a word in a long step, and the total at the end."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING

from vembed.json_text import read_object
from vembed.text import show_duration
from vembed.training.trackers import read_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from vembed.plan.batch import Steps
    from vembed.plan.plan import Plan
    from vembed.training.output import OutputFolder

_log = logging.getLogger(__name__)

FIRST_SILENCE_SECONDS, LONGEST_SILENCE_SECONDS = 10.0, 60.0
"""Longest time of a step without a line: short at first, twice as long after each line."""

POLL_SECONDS = 1.0

LABEL_COLUMNS = 12
"""Columns of what a line of a run is about: a step, an evaluation, what the run ends with."""

PACE_STEPS = 20
"""The latest steps, by which the time left is told."""


class RunClock:
    """Clock of a run: seconds of its steps and evaluations, and the time left. It starts with this object."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._earlier_evaluation = 0.0
        self._steps = self._evaluation = 0.0
        self._step_seconds: deque[float] = deque(maxlen=PACE_STEPS)
        self._dev_seconds = 0.0  # of the latest evaluation that comes again
        self._end_seconds = 0.0  # of the evaluation of the untrained model, which that of the kept one repeats

    def go_on(self, evaluations: Path) -> None:
        """Count the evaluations before a run was resumed, by their folder; its steps are in metrics.jsonl."""
        self._earlier_evaluation = evaluation_seconds(evaluations)
        self._end_seconds = sum(_seconds_in(path.read_bytes()) for path in evaluations.glob("**/baseline/metrics.json"))

    @contextmanager
    def evaluating(self, *, comes_again: bool = False, comes_at_end: bool = False) -> Iterator[None]:
        """Count what runs inside the block as evaluation.

        Args:
            comes_again: Whether it is one of those that training is interrupted by.
            comes_at_end: Whether the kept model is evaluated on the same sets.
        """
        began = time.monotonic()
        yield
        seconds = time.monotonic() - began
        self._evaluation += seconds
        self._dev_seconds = seconds if comes_again else self._dev_seconds
        self._end_seconds = max(seconds, self._end_seconds) if comes_at_end else self._end_seconds

    def add_step(self, seconds: float) -> None:
        """Count a step."""
        # The first step of a process compiles, allocates and waits for its batch. Beside a second one it tells nothing
        # about the pace.
        if len(self._step_seconds) == 1 and self._steps == self._step_seconds[0]:
            self._step_seconds.clear()
        self._steps += seconds
        self._step_seconds.append(seconds)

    def seconds_left(self, steps: Steps, done: int) -> float:
        """Return about how long the rest takes: steps, evaluations on the dev set, and at the end on all other sets."""
        pace = sum(self._step_seconds) / len(self._step_seconds)
        # Evaluations of the whole run, rounded up as the last step has one, less those that are done.
        every = steps.eval_every
        evaluations = 0 if every is None else -(-steps.total // every) - done // every
        return (steps.total - done) * pace + evaluations * self._dev_seconds + self._end_seconds

    def total(self, rows: Sequence[Mapping[str, float]]) -> str:
        """Return how long the run took and what for, e.g. "3:12 for 200 steps: 1:50 steps, ...".

        Args:
            rows: Those of metrics.jsonl, which has the steps of earlier processes too.
        """
        parts = {
            "steps": sum(row["step_seconds"] for row in rows),
            "evaluation": self._earlier_evaluation + self._evaluation,
            "start, saving and report": time.monotonic() - self._started - self._steps - self._evaluation,
        }
        shares = ", ".join(f"{show_duration(seconds)} {name}" for name, seconds in parts.items())
        noun = "step" if len(rows) == 1 else "steps"
        return f"{show_duration(sum(parts.values()))} for {len(rows):,} {noun}: {shares}"


SAME_SPEED = (
    *("model", "strategy", "mode", "world_size", "batch_size", "global_batch_size", "dtype", "memory_bytes"),
    *("gradient_checkpointing", "use_lora"),
)
"""Keys of plan.json that are equal where steps take about as long."""


def measured_step_seconds(output: OutputFolder, plan: Plan) -> float | None:
    """Return what a step of the run in a folder took, where the run was planned alike; None elsewhere."""
    if not output.holds_run:
        return None
    try:
        before, now = read_object(output.path / "plan.json"), plan.to_json()
    except (OSError, ValueError):  # nothing says how that run was planned
        return None
    if any(before.get(key) != now[key] for key in SAME_SPEED):
        return None
    return usual_step_seconds(read_rows(output.path / "metrics.jsonl"))


def usual_step_seconds(rows: Sequence[Mapping[str, float]]) -> float | None:
    """Return the median time of the steps after the first, which also warms everything up; None without any."""
    seconds = [row["step_seconds"] for row in rows[1:] if "step_seconds" in row]
    return median(seconds) if seconds else None


def evaluation_seconds(folder: Path) -> float:
    """Return how long the evaluations of a folder took; reversed ones are part of the others, a copy counts once."""
    written = {path.parent.relative_to(folder).as_posix(): path.read_bytes() for path in folder.glob("**/metrics.json")}
    if written.get("baseline") == written.get("step-0"):  # without a test set
        written.pop("baseline", None)
    return sum(_seconds_in(content) for name, content in written.items() if not name.endswith("-reversed"))


def _seconds_in(metrics: bytes) -> float:
    """Return how long an evaluation took; 0 of a damaged file, of which whoever reads its results tells."""
    try:
        return float(json.loads(metrics)["seconds"])
    except (ValueError, TypeError, KeyError):
        return 0.0


def step_line(metrics: Mapping[str, float], steps: Steps, done: int, *, seconds_left: float) -> str:
    """Return the line of a step, 80 columns wide for hundreds of steps; those of a run stand in columns.

    Args:
        metrics: "grad_norm" is shown as norm, "samples_per_second" as /s.
    """
    # Columns are as wide as the last line of the run needs, so that no line moves those below it.
    count, epochs = len(str(steps.total)), len(f"{steps.total / steps.per_epoch:.1f}")
    left = f"  {show_duration(seconds_left)} left" if done < steps.total else ""
    rate = f"{metrics['learning_rate']:.1e}".replace("e-0", "e-").replace("0.0e+00", "0")
    return (
        f"{f'step {done:{count}d}/{steps.total}':<{LABEL_COLUMNS}}  epoch {metrics['epoch']:{epochs}.1f}  "
        f"loss {metrics['loss']:7.4f}  norm {metrics['grad_norm']:<5.2g}  lr {rate:<6}  "
        f"{metrics['samples_per_second']:5.0f}/s{left}"
    )


class Heartbeat:
    """Says from a thread of its own where a step is that takes long, so that nobody takes it for a hang.

    Args:
        doing: Returns what the step is at, in words.
    """

    def __init__(self, doing: Callable[[], str]) -> None:
        self._doing = doing
        self._silence = FIRST_SILENCE_SECONDS
        self._running: tuple[int, float] | None = None  # the step, and when it began
        self._spoke = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vembed-heartbeat", daemon=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the steps inside the block."""
        self._thread.start()
        try:
            yield
        finally:
            self._ended.set()
            self._thread.join()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Speak inside the block, where the step takes long."""
        self._running = number, time.monotonic()
        try:
            yield
        finally:
            self._running = None

    def reset(self) -> None:
        """Begin the silence anew: something else was logged."""
        self._spoke = time.monotonic()

    def _run(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            # Read once: the step may end between two reads. Silence is counted from the last line of whatever kind, and
            # a step must have run for a while itself before it is said to be long.
            running, now = self._running, time.monotonic()
            if running is None or now - self._spoke < self._silence or now - running[1] < FIRST_SILENCE_SECONDS:
                continue
            _log.info("step %d: %s", running[0], self._doing())
            self._silence = min(2 * self._silence, LONGEST_SILENCE_SECONDS)
            self.reset()
