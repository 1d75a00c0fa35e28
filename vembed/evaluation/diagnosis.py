"""Diagnose a run by its numbers: pure rules from metrics.jsonl to advice, each with its threshold.

A rule looks at one thing, speaks only beyond its threshold, and names the key to change. The first step is left out of
all times: it also warms everything up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from vembed.distributed.runtime import NVML_PACKAGE, can_measure_utilisation
from vembed.evaluation.report.inputs import Finding
from vembed.evaluation.report.speed import percent_text, rate, seconds_text, settled_rows, split_time
from vembed.gradcache.engine import DRIFT_TOLERANCE
from vembed.pages.text import bytes_text
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from vembed.evaluation.judge import Verdict
    from vembed.evaluation.report.speed import TimeSplit
    from vembed.plan.devices import Machine
    from vembed.plan.plan import Plan

EARLY_STEPS = 10
"""Steps after which a loss that is still 0 is told, while there is time to stop the run."""

NO_LOSS = 1e-6
"""A loss up to this is 0: rounding of float32 leaves about 1e-7 of the logits."""

CURVE_STEPS = 20
"""Steps below which the course of the loss says nothing."""

CURVE_SHARE = 0.1
"""Share of the steps whose mean loss stands for the start, and for the end."""

LITTLE_LEARNT = 0.15
"""Share of its start that the loss should lose at least. Built-in models lose 0.04 to 0.12 at a hundredth of the
learning rate that fits them, 0.34 and more at one that does (benchmarks/RESULTS.md#learning-rates)."""

LITTLE_GAIN = 0.05
"""Share of what the metric lacks to 1 that training should win at least where the loss lost little: up to 0.04 at a
hundredth of the learning rate that fits."""

HIGH_LOSS = 0.4
"""Share of its start from which the loss at the end is high: 0.5 to 1.4 at 100 to 10,000 times the learning rate that
fits. Most runs that learn end below."""

PEAK_LOSS = 2.0
"""Loss of a step in the second half of a run over that at the start, which no rate that fits reaches: 4 at 25,000 times
such a rate."""

SHRUNK_GRADIENT, GROWN_GRADIENT = 0.25, 20.0
"""Gradient norm at the end over that at the start, relative to the same of the loss. Steps that are too large let the
weights grow, and the gradient of a cosine similarity shrinks as they do: 0.02 to 0.15 at such a learning rate, 0.9 and
more at one that fits or is lower, while the loss is high. Or the gradient explodes: 7,000."""

IDLE_SHARE = 0.1
"""Share of the steps with a gradient of exactly 0: where a loss has something to learn from, there are none."""

DATA_SHARE = 0.2
"""Share of a step spent waiting for its batch from which more workers pay."""

LEAST_WAIT_SECONDS = 1.0
"""Time that a run waited for its batches in all, below which nothing is to be gained."""

PADDING_RATIO = 1.25
"""Padded tokens over real ones: chunks of rows sorted by length usually stay under 1.1."""

DRIFT_SHARE = 0.2
"""Share of the drift that rounding explains: beyond it the next model or length may cross the limit."""

COMMUNICATION_SHARE = 0.2
"""Share of a step spent adding gradients up: replicated training usually stays under 0.05, sharded under 0.15."""

WAIT_SHARE = 0.1
"""Share of a step in which the ranks wait for the slowest."""

TOKEN_IMBALANCE = 1.15
"""Largest over mean tokens of a rank from which the assignment of the rows is what makes ranks wait."""

LEAST_UTILISATION = 0.8
"""Share of the time in which a GPU should run a kernel."""

FREE_SHARE, FULL_SHARE = 0.5, 0.92
"""Memory in use at the peak, of what there is: under the first, graphs could be kept; over the second, little is left
for a batch of longer rows."""

LEAST_STEPS = 5
"""Settled steps below which times say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The set-up of a run, as far as the rules need it."""

    device: str  # type of the device, e.g. "cuda"
    memory_bytes: int  # of one process
    num_cores: int
    world_size: int
    dtype: str  # of the encoder's computation, e.g. "bfloat16"
    num_workers: int
    chunk_rows: int  # most rows of one encoder call, as planned
    chunk_tokens: int  # most padded tokens of one encoder call, as planned
    keeps_all: bool  # whether every graph is kept, so that nothing is encoded twice
    # rows and tokens of a chunk that running out of memory left the run with, or None
    smaller_chunk: tuple[int, int] | None
    learning_rate: float  # peak
    skipped_steps: int  # steps whose numbers weren't finite
    keeps_some: bool = True  # whether any graph may be kept, so that retain can be lowered
    can_measure_utilisation: bool = True  # whether the counters of the GPU's driver can be read
    oom_ladder: tuple[str, ...] = ()  # what the plan would do against running out of memory, in this order


def setup_of(
    plan: Plan,
    machine: Machine,
    rows: Sequence[Mapping[str, float]],
    *,
    skipped_steps: int,
    smaller_chunk: tuple[int, int] | None,
) -> Setup:
    """Return the setup of a run from its plan, its machine and its rows of metrics.jsonl."""
    # Real tokens per second, times the seconds, times the padding: padded tokens of a step over all processes.
    tokens = [row["padding_ratio"] * row["tokens_per_second"] * row["step_seconds"] for row in settled_rows(rows)]
    most = max(tokens, default=0.0) / plan.world_size
    return Setup(
        device=machine.device,
        memory_bytes=machine.memory_bytes,
        num_cores=machine.num_cores,
        world_size=plan.world_size,
        dtype=plan.dtype,
        num_workers=plan.num_workers,
        chunk_rows=plan.chunks.rows,
        chunk_tokens=plan.chunks.tokens,
        keeps_all=plan.chunks.retain >= 1 and (plan.chunks.retain_tokens is None or most <= plan.chunks.retain_tokens),
        keeps_some=plan.chunks.retain > 0 and plan.chunks.retain_tokens != 0,
        smaller_chunk=smaller_chunk,
        learning_rate=plan.batch.learning_rate,
        skipped_steps=skipped_steps,
        can_measure_utilisation=can_measure_utilisation(),
        oom_ladder=plan.oom_ladder,
    )


@dataclass(frozen=True)
class Numbers:
    """The rows of a run with its set-up and its verdict."""

    setup: Setup
    rows: Sequence[Mapping[str, float]]  # all rows of metrics.jsonl
    verdict: Verdict | None = None  # of the kept model against the untrained one

    @cached_property
    def settled(self) -> Sequence[Mapping[str, float]]:
        """The rows whose times count."""
        return settled_rows(self.rows)

    @cached_property
    def split(self) -> TimeSplit | None:
        """The time of a step by part; None where no row has times."""
        return split_time(self.rows)

    def share(self, key: str) -> float:
        """Return the share of a part in the step; 0 where it took no time."""
        parts = () if self.split is None else self.split.parts
        return next((part.share for part in parts if part.key == key), 0.0)

    def ends(self, key: str) -> tuple[float, float] | None:
        """Return the means of a key over the first and over the last steps, or None where there are too few."""
        values = [row[key] for row in self.rows if key in row]
        if len(values) < CURVE_STEPS:
            return None
        count = int(CURVE_SHARE * len(values))
        return sum(values[:count]) / count, sum(values[-count:]) / count

    @property
    def gain(self) -> float | None:
        """Gain of training, as a share of what the untrained model's metric lacks to 1; None where that is 0."""
        if self.verdict is None or self.verdict.comparison.baseline >= 1:
            return None
        return self.verdict.comparison.difference / (1 - self.verdict.comparison.baseline)

    def mean(self, key: str) -> float | None:
        """Return the mean of a key over the settled rows that have it, or None."""
        values = [row[key] for row in self.settled if key in row]
        return sum(values) / len(values) if values else None

    def largest(self, key: str) -> float | None:
        """Return the largest value of a key over all rows, or None."""
        return max((row[key] for row in self.rows if key in row), default=None)

    @property
    def are_timed(self) -> bool:
        """True where there are enough steps for their times to mean something."""
        return len(self.settled) >= LEAST_STEPS


def diagnose(rows: Sequence[Mapping[str, float]], setup: Setup, verdict: Verdict | None = None) -> tuple[Finding, ...]:
    """Return what stands out in the numbers of a run: broken numbers first, then what was learnt, then what costs most.

    Args:
        verdict: Of the kept model against the untrained one, on the test set or else the dev set.
    """
    numbers = Numbers(setup, rows, verdict)
    return tuple(finding for rule in RULES if (finding := rule(numbers)) is not None)


def _skipped(numbers: Numbers) -> Finding | None:
    skipped = numbers.setup.skipped_steps
    if not skipped:
        return None
    return Finding(
        "numbers that aren't finite",
        f"{plural(skipped, 'step was', 'steps were')} skipped because the loss or a gradient was NaN or infinite.",
        "Look at the batches in nonfinite-step-N.json; lower learning_rate, set max_grad_norm: 1.0, raise temperature.",
    )


def diagnose_start(rows: Sequence[Mapping[str, float]]) -> Finding | None:
    """Return what is wrong where the loss is 0 from the first step; None where it isn't.

    Args:
        rows: All steps so far.
    """
    losses = [abs(row["loss"]) for row in rows if "loss" in row]
    if not losses or max(losses) > NO_LOSS:
        return None
    return Finding(
        "loss of 0",
        f"The loss was 0 in {'the only step' if len(losses) == 1 else f'each of the {len(losses):,} steps so far'}: "
        f"the model learns nothing.",
        "Look at the rows: all positives of a batch may be copies of each other, which mask_false_negatives leaves out "
        "as negatives, or of one class; then at loss_type and its keys: a margin that every row meets, or a "
        "false_negative_filter that leaves out every negative (lower false_negative_margin).",
    )


def _idle(numbers: Numbers) -> Finding | None:
    # Exactly 0, not small: rounding alone leaves some gradient wherever there is a loss.
    norms = [row["grad_norm"] for row in numbers.settled if "grad_norm" in row]
    share = norms.count(0.0) / max(1, len(norms))
    if share <= IDLE_SHARE or diagnose_start(numbers.rows) is not None:
        return None
    return Finding(
        "steps without a gradient",
        f"{percent_text(share)} of the steps taught the model nothing: their gradient was exactly 0.",
        "Look for a false_negative_filter that leaves out every negative (lower false_negative_margin), batches of one "
        "class or of one row, and a source whose rows have nothing that its loss learns from.",
    )


def _rate_too_high(numbers: Numbers) -> Finding | None:
    """Find a loss that stays high or rises while the gradient shrinks or explodes."""
    losses, norms = numbers.ends("loss"), numbers.ends("grad_norm")
    if losses is None or norms is None or min(*losses, norms[0]) <= NO_LOSS:
        return None
    course = f"only went from {losses[0]:.4g} to {losses[1]:.4g}"
    if losses[1] < HIGH_LOSS * losses[0]:
        # Mostly lower, but thrown back again and again: where the last steps happen to fall says little.
        values = [row["loss"] for row in numbers.rows if "loss" in row]
        peak = max(values[len(values) // 2 :])
        if peak < PEAK_LOSS * losses[0]:
            return None
        course = f"went from {losses[0]:.4g} to {losses[1]:.4g}, but jumped to {peak:.4g} in the second half,"
    # A gradient shrinks about as its loss does: a change beyond that comes from the size of the weights.
    rate, change = numbers.setup.learning_rate, norms[1] / norms[0] / (losses[1] / losses[0])
    if SHRUNK_GRADIENT <= change <= GROWN_GRADIENT:
        return None
    return Finding(
        "learning rate too high",
        f"The loss {course} while the gradient's norm went from {norms[0]:.2g} to {norms[1]:.2g}: the steps are so "
        f"large that they overshoot.",
        f"Lower learning_rate, now {rate:.3g}, tenfold or more: {rate / 10:.3g}, {rate / 100:.3g}. A longer warmup "
        f"(warmup_ratio) helps where the loss falls first and rises at the peak.",
    )


def _worse(numbers: Numbers) -> Finding | None:
    if numbers.verdict is None or numbers.verdict.word != "worse" or _rate_too_high(numbers) is not None:
        return None
    measured, losses, rate = numbers.verdict.comparison, numbers.ends("loss"), numbers.setup.learning_rate
    course = "" if losses is None else f", while the loss went from {losses[0]:.4g} to {losses[1]:.4g}"
    return Finding(
        "worse than the untrained model",
        f"{measured.metric} went from {measured.baseline:.4f} to {measured.candidate:.4f}{course}.",
        f"Try learning_rate {rate / 10:.3g}, now {rate:.3g}, and fewer epochs: a trained model forgets at large steps. "
        f"If it stays worse, the rows teach something else than the set asks: look at the report's examples, for wrong "
        f"labels, columns that are swapped, false negatives (false_negative_filter).",
    )


def _little_learnt(numbers: Numbers) -> Finding | None:
    losses, gain = numbers.ends("loss"), numbers.gain
    if losses is None or gain is None or numbers.verdict is None or losses[0] <= NO_LOSS:
        return None
    drop = 1 - losses[1] / losses[0]
    # Both must be small: a loss of many easy negatives hardly falls while the ranking improves.
    if drop >= LITTLE_LEARNT or gain >= LITTLE_GAIN or _rate_too_high(numbers) or _worse(numbers):
        return None
    measured, rate = numbers.verdict.comparison, numbers.setup.learning_rate
    return Finding(
        "little learnt",
        f"In {len(numbers.rows):,} steps the loss went from {losses[0]:.4g} to {losses[1]:.4g}, {measured.metric} from "
        f"{measured.baseline:.4f} to {measured.candidate:.4f}.",
        f"Raise learning_rate, now {rate:.3g}, tenfold: {rate * 10:.3g}; train for more epochs; check that trainable "
        f"names what should train. Where it still doesn't move, the rows may hold nothing new, or nothing to learn: "
        f"look at queries beside their positives.",
    )


def _drift(numbers: Numbers) -> Finding | None:
    drift, tolerance = numbers.largest("replay_drift"), DRIFT_TOLERANCE[getattr(torch, numbers.setup.dtype)]
    if drift is None or drift <= DRIFT_SHARE * tolerance:
        return None
    return Finding(
        "replay drift",
        f"The second pass differed from the first by up to {drift:.1e}; from {tolerance:.0e} on the run would stop.",
        "Check whether the model draws random numbers of its own; retain: 1 has no second pass, and bf16: false "
        "rounds less.",
    )


def _repairs(numbers: Numbers) -> Finding | None:
    repairs = sum(row.get("oom_repairs", 0) for row in numbers.rows)
    if not repairs:
        return None
    chunk, keeps_some = numbers.setup.smaller_chunk, numbers.setup.keeps_some
    if chunk is None:
        keys = "retain lower, or gradient_cache_chunk_tokens" if keeps_some else "gradient_cache_chunk_tokens lower"
        advice = f"Set {keys}, now {numbers.setup.chunk_tokens}."
    else:
        advice = (
            f"Start the next run there: gradient_cache_chunk_size: {chunk[0]}, gradient_cache_chunk_tokens: "
            f"{chunk[1]}{', or set retain lower' if keeps_some else ''}."
        )
    return Finding(
        "out of memory",
        f"The step ran out of memory {plural(int(repairs), 'time')} and was done again without kept graphs or in "
        f"smaller chunks.",
        f"{advice}{_ladder(numbers.setup)}",
    )


def _full(numbers: Numbers) -> Finding | None:
    peak = _peak(numbers)
    if peak is None or peak <= FULL_SHARE * numbers.setup.memory_bytes:
        return None
    return Finding(
        "little memory left",
        f"At the peak {bytes_text(peak)} of {bytes_text(numbers.setup.memory_bytes)} were in use.",
        f"Longer rows may not fit: lower {'retain or ' if numbers.setup.keeps_some else ''}"
        f"gradient_cache_chunk_tokens.{_ladder(numbers.setup)}",
    )


def _ladder(setup: Setup) -> str:
    """Return what the plan would do for memory, as the end of an advice."""
    return f" By the plan, in this order: {'; '.join(setup.oom_ladder)}." if setup.oom_ladder else ""


def _data(numbers: Numbers) -> Finding | None:
    share, setup = numbers.share("data_seconds"), numbers.setup
    if not numbers.are_timed or numbers.split is None or share <= DATA_SHARE:
        return None
    # A share of a step of milliseconds is no reason to start processes.
    step_seconds = numbers.split.step_seconds
    if share * step_seconds * len(numbers.settled) < LEAST_WAIT_SECONDS:
        return None
    if setup.num_workers < setup.num_cores:
        advice = f"Raise num_workers, now {setup.num_workers}, towards the {plural(setup.num_cores, 'core')} there are."
    else:
        advice = "All cores make batches already: store smaller pictures or shorter texts, or use a faster disk."
    seconds = f"{seconds_text(share * step_seconds)} of {seconds_text(step_seconds)}"
    return Finding(
        "waiting for data",
        f"{percent_text(share)} of a step ({seconds}) was spent waiting for its batch.",
        advice,
    )


def _communication(numbers: Numbers) -> Finding | None:
    share = numbers.share("reduce_seconds")
    if not numbers.are_timed or share <= COMMUNICATION_SHARE:
        return None
    return Finding(
        "communication",
        f"{percent_text(share)} of a step went into adding up gradients over {numbers.setup.world_size} processes.",
        "Larger global_batch_size: one reduction serves more rows, whatever the batch. use_lora or trainable: fewer "
        "gradients. With sharding, fsdp_mode: fast reduces once in a step.",
    )


def _uneven(numbers: Numbers) -> Finding | None:
    share, tokens = numbers.share("wait_seconds"), numbers.mean("token_imbalance") or 1.0
    if not numbers.are_timed or share <= WAIT_SHARE:
        return None
    slowest = [int(row["slowest_rank"]) for row in numbers.settled if "slowest_rank" in row]
    # Uneven tokens slow another rank in each step; a slow device is the same rank again and again.
    often = max(set(slowest), key=slowest.count) if slowest else None
    encode = numbers.mean("encode_imbalance") or 1.0
    sentence = (
        f"{percent_text(share)} of a step was spent waiting for the slowest process; the slowest encoded for "
        f"{encode:.2f} times the mean and had up to {tokens:.2f} times the mean tokens."
    )
    if tokens > TOKEN_IMBALANCE:
        advice = (
            "The rows are spread unevenly: with few long rows for each process a larger global_batch_size evens out."
        )
    else:
        who = "" if often is None else f", most often of process {often},"
        advice = (
            f"The tokens are even, so the device{who} is slower: look for other programs on it, heat or a power limit."
        )
    return Finding("uneven processes", sentence, advice)


def _utilisation(numbers: Numbers) -> Finding | None:
    busy, setup = numbers.mean("device_utilisation"), numbers.setup
    if setup.device != "cuda" or not numbers.are_timed:
        return None
    if busy is None and not setup.can_measure_utilisation:
        return Finding(
            "GPU utilisation",
            "It was not measured: a package is missing.",
            f"pip install {NVML_PACKAGE} measures it.",
        )
    if busy is None or busy >= LEAST_UTILISATION:
        return None
    # One cause at a time: larger chunks don't help a GPU that waits for something else.
    if numbers.share("data_seconds") > DATA_SHARE:
        advice = "It waits for data first of all: see there."
    elif numbers.share("wait_seconds") + numbers.share("reduce_seconds") > COMMUNICATION_SHARE:
        advice = "It waits for the other processes first of all: see there."
    else:
        advice = (
            f"Its calls are too small to fill it: raise gradient_cache_chunk_tokens, now {setup.chunk_tokens}, and "
            f"gradient_cache_chunk_size, now {setup.chunk_rows}."
        )
    return Finding("GPU utilisation", f"The GPU ran a kernel in {percent_text(busy)} of the time.", advice)


def _padding(numbers: Numbers) -> Finding | None:
    ratio = numbers.mean("padding_ratio")
    if ratio is None or ratio <= PADDING_RATIO:
        return None
    return Finding(
        "padding",
        f"{ratio:.2f} tokens were computed for each real one.",
        f"Smaller chunks hold rows of more equal lengths: lower gradient_cache_chunk_tokens, now "
        f"{numbers.setup.chunk_tokens}. Larger batches give more rows to choose from.",
    )


def _headroom(numbers: Numbers) -> Finding | None:
    peak, setup, chunks = _peak(numbers), numbers.setup, numbers.mean("num_chunks") or 1.0
    # Where a step ran out of memory once, the peak is that of the smaller chunks: it says nothing of room.
    encodes_twice = not setup.keeps_all and chunks > 1 and not any(row.get("oom_repairs") for row in numbers.rows)
    if setup.device == "cpu" or peak is None or not encodes_twice or peak >= FREE_SHARE * setup.memory_bytes:
        return None
    return Finding(
        "memory to spare",
        f"At the peak {bytes_text(peak)} of {bytes_text(setup.memory_bytes)} were in use, and rows were encoded twice.",
        "Raise retain: each kept graph saves its second forward, up to a quarter of the time of the encoder.",
    )


def _peak(numbers: Numbers) -> float | None:
    """Return the most memory that any rank had in use."""
    peaks = [numbers.largest("peak_memory_bytes"), numbers.largest("largest_rank_memory_bytes")]
    return max((peak for peak in peaks if peak is not None), default=None)


RULES: tuple[Callable[[Numbers], Finding | None], ...] = (
    _skipped,
    lambda numbers: diagnose_start(numbers.rows),
    _idle,
    _rate_too_high,
    _worse,
    _little_learnt,
    _drift,
    _repairs,
    _full,
    _data,
    _communication,
    _uneven,
    _utilisation,
    _padding,
    _headroom,
)
"""In the order in which their findings are shown."""


def diagnosis_lines(rows: Sequence[Mapping[str, float]], findings: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    """Yield the diagnosis as (label, line): where the time went, a part a line, then each finding with its advice."""
    split = split_time(rows)
    if split is not None:
        yield "time of step", f"{seconds_text(split.step_seconds)} on average"
        for part in split.parts:
            yield "", f"{percent_text(part.share):>8}  {part.name}"
    for finding in findings:
        yield from finding_lines(finding)
    if not findings:
        yield "diagnosis", "nothing stands out"


def finding_lines(finding: Finding) -> Iterator[tuple[str, str]]:
    """Yield a finding and its advice as (label, line)."""
    yield "diagnosis", f"{finding.cause}: {finding.sentence}"
    yield "", finding.advice


def performance(rows: Sequence[Mapping[str, float]], setup: Setup, **facts: object) -> dict[str, object]:
    """Return what the training took, as one row of a table of runs.

    Args:
        facts: What comes first, e.g. the model, the strategy and the batch.
    """
    numbers = Numbers(setup, rows)
    row: dict[str, object | None] = {
        **facts,
        "processes": setup.world_size,
        "dtype": setup.dtype,
        "device_memory_bytes": setup.memory_bytes,
        "peak_memory_bytes": _peak(numbers),
        "step_seconds": None if numbers.split is None else numbers.split.step_seconds,
        "samples_per_second": rate(numbers.settled, "samples_per_second"),
        "tokens_per_second": rate(numbers.settled, "tokens_per_second"),
        "scaling_efficiency": numbers.mean("scaling_efficiency"),
        "device_utilisation": numbers.mean("device_utilisation"),
    }
    return {key: value for key, value in row.items() if value is not None}
