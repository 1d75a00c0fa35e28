"""Choose among the ways of training: a prior by size and devices, kept when it fits; else the next that does.

1. The prior is the row of the decision matrix by parameters and devices.
2. What the user set by a key limits the ways; the rest is judged by its predicted bytes.
3. The first way that fits, in the order of the ladder, from the prior on. A faster one is shown, not taken.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from vembed.errors import ConfigError
from vembed.plan.cost import weigh
from vembed.plan.problem import MODES, VALUE_BYTES, Strategy, Way
from vembed.text import show_bytes, show_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vembed.config.schema import Config
    from vembed.plan.cost import Candidate
    from vembed.plan.problem import PlanningProblem

LORA_FROM = 8_000_000_000
"""Parameters from which a sharded model trains adapters, where `use_lora` is auto."""

CACHE_FROM = 1_000_000_000
"""Parameters over which gradient checkpointing brings gradient caching with it, where that is auto."""

DECIDING_KEYS = (
    "use_gradient_cache",
    "gradient_checkpointing",
    "retain",
    "use_fsdp",
    "sharding_factor",
    "fsdp_mode",
    "use_lora",
    "cpu_offload",
)
"""Keys that say how to train. What they leave `auto` is decided here."""

CLEARLY_FASTER = 1.05
"""So many times the speed of the chosen way, and another is named: less is within the error of rough figures."""

MOST_STEPS_SAID = 6
"""Rungs that don't fit and are named, on the way to the chosen one."""


class MatrixRow(NamedTuple):
    """A row of the decision matrix."""

    from_parameters: float  # its models have at least so many parameters
    below: float  # and fewer than this
    least_devices: int  # devices from which it is meant; more do no harm
    strategy: Strategy
    alternative: str | None  # what it names beside


MATRIX = (
    MatrixRow(0, 500e6, 1, "single", None),
    MatrixRow(500e6, 2e9, 2, "ddp", None),
    MatrixRow(2e9, 8e9, 4, "ddp_gradcache", "fsdp when memory is tight"),
    MatrixRow(8e9, 50e9, 8, "fsdp_lora", "ddp_gradcache, which is slower"),
    MatrixRow(50e9, float("inf"), 16, "fsdp_lora", None),
)


def prior(num_parameters: int, num_devices: int) -> MatrixRow:
    """Return the row of the decision matrix for a model on so many devices.

    Lower bounds are inclusive. Where the model's own row asks for more devices than there are, the nearest row by
    parameters that they suffice for is taken; on several devices a model of the first row is replicated.
    """
    rows = [row for row in MATRIX if row.least_devices <= num_devices and (row.least_devices > 1) == (num_devices > 1)]

    def distance(row: MatrixRow) -> float:
        if row.from_parameters <= num_parameters < row.below:
            return -1.0
        return min(abs(num_parameters - row.from_parameters), abs(num_parameters - row.below))

    return min(rows, key=distance)


def all_ways(problem: PlanningProblem) -> Iterator[Way]:
    """Yield every way that the devices and the model allow, the plainest first."""
    can_adapt = problem.model.adapted is not None or problem.config.use_lora is True
    lora = (False, True) if can_adapt else (False,)
    recompute = (False, True) if problem.model.checkpointable else (False,)
    count = problem.devices.count
    for use_lora in lora:
        for checkpointed in recompute:
            for cached in (False, True):
                strategy: Strategy = "single" if count == 1 else "ddp_gradcache" if cached else "ddp"
                yield Way(strategy, cached, checkpointed, use_lora)
    if problem.config.load_in_4bit:
        return  # weights of 4 bits can't be sharded
    for factor in (divisor for divisor in range(count, 1, -1) if count % divisor == 0):
        for use_lora in lora:
            sharded: Strategy = "fsdp_lora" if use_lora else "fsdp"
            # Sharded gradients are added up in the type of the weights, chunk by chunk: half precision would lose them.
            modes = MODES if use_lora or problem.model.bytes_per_value >= VALUE_BYTES["float32"] else MODES[:-1]
            for checkpointed in recompute:
                for mode in modes:
                    yield Way(sharded, True, checkpointed, use_lora, mode, factor)
            offloaded = modes[-1] if problem.config.fsdp_mode == "auto" else problem.config.fsdp_mode
            for checkpointed in recompute if offloaded in modes else ():
                yield Way(sharded, True, checkpointed, use_lora, offloaded, factor, cpu_offload=True)


def choose(problem: PlanningProblem) -> tuple[Candidate, tuple[Candidate, ...], tuple[str, ...]]:
    """Weigh every way of training; return the chosen one, all of them, and the reasons, a plain sentence each.

    Raises:
        ConfigError: A key asks for what these devices or this model can't do.
    """
    config, count = problem.config, problem.devices.count
    factor = config.sharding_factor
    # On one device nothing is sharded, which the plan says: any factor is fine there.
    if factor != "auto" and count > 1 and (factor > count or count % factor):
        divisors = [divisor for divisor in range(1, count + 1) if count % divisor == 0]
        nearest = min(divisors, key=lambda divisor: abs(divisor - int(factor)))
        raise ConfigError(f"sharding_factor {factor} doesn't divide {count} devices; set it to {nearest}, or to auto")
    row = prior(problem.model.num_parameters, count)
    candidates = tuple(weigh(problem, way) for way in all_ways(problem))
    wished = [candidate for candidate in candidates if _as_wished(problem, candidate.way)]
    if not wished:
        raise ConfigError(
            f"no way to train has all of {_set_keys(config)} with torch_dtype {config.torch_dtype} on {count} devices; "
            f"set one of them to auto"
        )
    chosen = _first_fitting(problem, wished, row)
    fits = chosen is not None
    if chosen is None:
        chosen = min(wished, key=lambda candidate: candidate.bytes_per_device.total)

    # What the numbers alone would choose. Sharding in groups is only taken when a key asks for it.
    unset = replace(problem, config=config.model_copy(update=dict.fromkeys(DECIDING_KEYS, "auto")))
    whole = [candidate for candidate in candidates if candidate.way.sharding_factor in (1, count)]
    free = _first_fitting(unset, whole, row)
    if count == 1:
        headline = "single: one process on one device"
        plain = next((candidate for candidate in candidates if str(candidate.way) == "single"), chosen)
        if chosen.way.gradient_cache and not plain.fits:
            headline += f"; without caching it would need {show_bytes(plain.bytes_per_device.total)}"
    else:
        size = f"{show_count(problem.model.num_parameters)} parameters on {count} devices"
        other = "" if row.alternative is None else f", else {row.alternative}"
        headline = f"{chosen.way}: {size}; the decision matrix says {row.strategy}{other}"
    reasons = [headline, *_warnings(problem, chosen, free, fits=fits)]

    # The fastest that fits and trains the same weights.
    usual = [candidate for candidate in candidates if candidate in wished or candidate in whole]
    same = [candidate for candidate in usual if candidate.fits and candidate.way.use_lora == chosen.way.use_lora]
    fastest = max(same, key=lambda candidate: candidate.relative_speed, default=chosen)
    if fastest.relative_speed > CLEARLY_FASTER * chosen.relative_speed:
        ruled_out = fastest not in wished and bool(_set_keys(config))
        why = f"ruled out by {_set_keys(config)}" if ruled_out else "it isn't taken unless keys ask for it"
        reasons.append(
            f"{fastest.way} fits as well and is about {fastest.relative_speed / chosen.relative_speed:.2g} times as "
            f"fast by rough figures; {why}"
        )
    return chosen, candidates, (*reasons, *_steps_down(problem, row, wished, chosen))


def _as_wished(problem: PlanningProblem, way: Way) -> bool:
    """Return whether a way keeps what the user set."""
    config = problem.config
    wishes: list[tuple[object, object]] = [
        (config.use_lora, way.use_lora),
        (config.gradient_checkpointing if problem.model.checkpointable else "auto", way.gradient_checkpointing),
    ]
    if problem.devices.count > 1:
        factor = problem.devices.count if config.sharding_factor == "auto" else config.sharding_factor
        wishes += [
            (config.use_fsdp, way.mode is not None),
            (config.cpu_offload if way.mode is not None else "auto", way.cpu_offload),
            (config.fsdp_mode if way.mode is not None else "auto", way.mode),
            (factor if way.mode is not None or config.sharding_factor != "auto" else "auto", way.sharding_factor),
        ]
        if config.fsdp_mode != "auto" or config.cpu_offload is True:  # either asks for sharding
            wishes.append((True, way.mode is not None))
    if way.mode is None:
        wishes.append((_caching(problem), way.gradient_cache))
    return all(wish in ("auto", value) for wish, value in wishes)


def _caching(problem: PlanningProblem) -> str | bool:
    """Return whether a replicated run must or must not cache gradients; auto leaves it to memory."""
    config = problem.config
    if config.use_gradient_cache != "auto":
        return config.use_gradient_cache
    if config.retain != "auto" and config.retain < 1:
        return True
    large = problem.model.num_parameters > CACHE_FROM
    return True if large and config.gradient_checkpointing is True else "auto"


# The ladder -----------------------------------------------------------------------------------------------------------


def _rung(problem: PlanningProblem, way: Way) -> int | None:
    """Return a way's rung of the ladder; None for what is only taken when a key asks for it.

    0 replicated, 100 with caching, 200 with checkpointing too; 300 fast, 301 lean, 302 sharded, and 310 to 312 with
    checkpointing; 400 and on the same with LoRA that nobody asked for, or LoRA on one device; 500 offload.
    """
    config, model = problem.config, problem.model
    unasked_checkpointing = way.gradient_checkpointing and config.gradient_checkpointing == "auto"
    unasked_lora = way.use_lora and config.use_lora == "auto"
    if unasked_lora and config.trainable != "all":
        return None  # who names the part that trains has decided
    if way.mode is None:
        if unasked_checkpointing and not way.gradient_cache:
            return None
        if unasked_lora:
            return 400 + 10 * way.gradient_cache + unasked_checkpointing if problem.devices.count == 1 else None
        return 100 * way.gradient_cache + 100 * unasked_checkpointing
    if way.cpu_offload:
        return 500 + way.use_lora
    # From LORA_FROM on sharding means adapters, unless a key speaks against them.
    adapts = model.adapted is not None and model.num_parameters >= LORA_FROM and config.trainable == "all"
    if not way.use_lora and config.use_lora == "auto" and adapts:
        return None
    return (400 if unasked_lora else 300) + 10 * unasked_checkpointing + MODES.index(way.mode)


_FIRST_RUNG = {"single": 0, "ddp": 0, "ddp_gradcache": 100, "fsdp_lora": 300}
"""Rung on which the ladder begins, by the strategy of the matrix."""


def _first_fitting(problem: PlanningProblem, candidates: Sequence[Candidate], row: MatrixRow) -> Candidate | None:
    """Return the first candidate of the ladder that fits, from the prior on; before it where nothing later does."""
    fitting = [
        (rung, number)
        for number, candidate in enumerate(candidates)
        if candidate.fits and (rung := _rung(problem, candidate.way)) is not None
    ]
    later = [(rung, number) for rung, number in fitting if rung >= _FIRST_RUNG[row.strategy]] or fitting
    return candidates[min(later)[1]] if later else None


def _steps_down(problem: PlanningProblem, row: MatrixRow, wished: Sequence[Candidate], chosen: Candidate) -> list[str]:
    """Say which rungs before the chosen one don't fit; on one device only where the chosen one costs something."""
    end = _rung(problem, chosen.way)
    if problem.devices.count == 1 and end is not None and end <= _FIRST_RUNG["ddp_gradcache"]:
        return []
    passed: dict[str, Candidate] = {}  # the first candidate of each name: groups of shards have one name
    for candidate in wished:
        rung = _rung(problem, candidate.way)
        if rung is not None and _FIRST_RUNG[row.strategy] <= rung and (end is None or rung < end):
            passed.setdefault(str(candidate.way), candidate)
    sentences = []
    for name, candidate in list(passed.items())[:MOST_STEPS_SAID]:
        sizes, limit = candidate.bytes_per_device, problem.limit_bytes(candidate.way)
        if sizes.total <= limit:
            sentences.append(
                f"{name} would keep all graphs of the batch: {show_bytes(sizes.activations)} of activations, more of "
                f"the spare memory than an estimate may take"
            )
        else:
            sentences.append(
                f"{name} doesn't fit: {show_bytes(sizes.total)} predicted, at most {show_bytes(limit)} of "
                f"{show_bytes(problem.devices.memory_bytes)} with reserve"
            )
    return sentences


# Reasons --------------------------------------------------------------------------------------------------------------


def _warnings(problem: PlanningProblem, chosen: Candidate, free: Candidate | None, *, fits: bool) -> list[str]:
    """Say where the numbers speak against what the user set, and what a set key doesn't do."""
    config, way = problem.config, chosen.way
    sentences = []
    if not fits:
        sentences.append(f"no way that the keys allow fits; {way} needs least")
    if free is not None and not fits:
        sentences.append(f"by the numbers {free.way} would fit; the keys that are set rule it out")
    elif free is not None and free.way.strategy != way.strategy:
        sentences.append(f"{_set_keys(config)}: as set; the numbers alone would give {free.way}")
    if problem.devices.count == 1:
        idle = {
            "use_fsdp true": config.use_fsdp is True,
            f"sharding_factor {config.sharding_factor}": config.sharding_factor not in ("auto", 1),
            f"fsdp_mode {config.fsdp_mode}": config.fsdp_mode != "auto",
            "cpu_offload true": config.cpu_offload is True,
        }
        sentences += [
            f"{name} has no effect: one process has nothing to shard over" for name, is_set in idle.items() if is_set
        ]
    if way.use_lora and config.use_lora == "auto":
        sentences.append("use_lora: adapters train beside a frozen base; use_lora false keeps full fine-tuning")
    if way.gradient_checkpointing and config.gradient_checkpointing == "auto":
        sentences.append("gradient_checkpointing: on, as a step wouldn't fit without; false rules it out")
    open_caching = config.use_gradient_cache == "auto" and config.retain == "auto"
    if way.mode is None and open_caching and _caching(problem) is True:
        sentences.append("use_gradient_cache: on, as it is with gradient checkpointing above 1B parameters")
    if not problem.model.checkpointable and config.gradient_checkpointing is True:
        sentences.append("gradient_checkpointing true has no effect: this model computes nothing again")
    return sentences


def _set_keys(config: Config) -> str:
    values = {name: getattr(config, name) for name in DECIDING_KEYS}
    return ", ".join(f"{name} {str(value).lower()}" for name, value in values.items() if value != "auto")
