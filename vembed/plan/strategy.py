"""Choose among the ways of training: a prior by size and devices, kept when it fits; else the next that does.

1. The prior is the row of the decision matrix by parameters and devices.
2. What the user set by a key limits the ways; the rest is judged by its predicted bytes.
3. The first way that fits, in the order of the ladder, from the prior on. A faster one is shown, not taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from vembed.errors import ConfigError
from vembed.plan.cost_model import weigh
from vembed.plan.problem import MODES, all_ways
from vembed.text import show_bytes, show_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.config.schema import Config
    from vembed.plan.cost_model import Candidate
    from vembed.plan.problem import PlanningProblem, Strategy, Way

LORA_FROM = 8_000_000_000
"""Parameters from which a sharded model trains adapters, where `use_lora` is auto."""

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

MOST_STEPS_SAID = 6

CACHE_FROM = 1_000_000_000
"""Parameters over which gradient checkpointing brings gradient caching with it, where that is auto."""


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


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, among what, and why."""

    chosen: Candidate
    candidates: tuple[Candidate, ...]  # all that were weighed
    reasons: tuple[str, ...]  # one plain sentence each


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


def choose(problem: PlanningProblem) -> Choice:
    """Weigh every way of training and choose one.

    Raises:
        ConfigError: A key asks for what these devices or this model can't do.
    """
    _check_factor(problem)
    row = prior(problem.model.num_parameters, problem.devices.count)
    candidates = tuple(weigh(problem, way) for way in all_ways(problem))
    wished = [each for each in candidates if _as_wished(problem, each.way)]
    if not wished:
        raise ConfigError(
            f"no way to train has all of {_set_keys(problem.config)} with torch_dtype {problem.config.torch_dtype} on "
            f"{problem.devices.count} devices; set one of them to auto"
        )
    free = _unasked(problem, candidates, row)
    chosen = _first_fitting(problem, wished, row)
    fits = chosen is not None
    if chosen is None:
        chosen = min(wished, key=lambda each: each.bytes_per_device.total)
    plain = next((each for each in candidates if str(each.way) == "single"), chosen)
    reasons = [_headline(problem, row, chosen, plain), *_warnings(problem, chosen, free, fits=fits)]
    usual = [each for each in candidates if each in wished or each.way.sharding_factor in (1, problem.devices.count)]
    faster = _faster(usual, chosen)
    if faster is not None:
        ruled_out = faster not in wished and bool(_set_keys(problem.config))
        why = f"ruled out by {_set_keys(problem.config)}" if ruled_out else "it isn't taken unless keys ask for it"
        reasons.append(
            f"{faster.way} fits as well and is about {faster.relative_speed / chosen.relative_speed:.2g} times as fast "
            f"by rough figures; {why}"
        )
    return Choice(chosen, candidates, (*reasons, *_steps_down(problem, row, wished, chosen)))


def _unasked(problem: PlanningProblem, candidates: Sequence[Candidate], row: MatrixRow) -> Candidate | None:
    """Return what the numbers alone would choose."""
    plain = replace(problem, config=problem.config.model_copy(update=dict.fromkeys(DECIDING_KEYS, "auto")))
    whole = [each for each in candidates if each.way.sharding_factor in (1, problem.devices.count)]
    return _first_fitting(plain, whole, row)


def _check_factor(problem: PlanningProblem) -> None:
    factor, count = problem.config.sharding_factor, problem.devices.count
    if factor == "auto" or (factor <= count and count % factor == 0):
        return
    if count == 1:
        return  # nothing is sharded on one device, which the plan says
    divisors = [each for each in range(1, count + 1) if count % each == 0]
    nearest = min(divisors, key=lambda each: abs(each - int(factor)))
    raise ConfigError(f"sharding_factor {factor} doesn't divide {count} devices; set it to {nearest}, or to auto")


def _as_wished(problem: PlanningProblem, way: Way) -> bool:
    """Return whether a way keeps what the user set."""
    config, alone = problem.config, problem.devices.count == 1
    wishes: list[tuple[object, object]] = [
        (config.use_lora, way.use_lora),
        (config.gradient_checkpointing if problem.model.checkpointable else "auto", way.gradient_checkpointing),
    ]
    if not alone:
        factor = problem.devices.count if config.sharding_factor == "auto" else config.sharding_factor
        wishes += [
            (config.use_fsdp, way.mode is not None),
            (config.cpu_offload if way.mode is not None else "auto", way.cpu_offload),
            (config.fsdp_mode if way.mode is not None else "auto", way.mode),
            (factor if way.mode is not None or config.sharding_factor != "auto" else "auto", way.sharding_factor),
        ]
        if config.fsdp_mode != "auto" or config.cpu_offload is True:
            wishes.append((True, way.mode is not None))
    if way.mode is None:
        wishes.append((_caching(problem), way.gradient_cache))
    return all(wish in ("auto", what) for wish, what in wishes)


def _caching(problem: PlanningProblem) -> str | bool:
    """Return whether a replicated run must or must not cache gradients; auto leaves it to memory."""
    config = problem.config
    if config.use_gradient_cache != "auto":
        return config.use_gradient_cache
    if config.retain != "auto" and config.retain < 1:
        return True
    large = problem.model.num_parameters > CACHE_FROM
    return True if large and config.gradient_checkpointing is True else "auto"


def _rung(problem: PlanningProblem, way: Way) -> int | None:
    """Return a way's place in the ladder; None for what is only taken when a key asks for it."""
    config, alone = problem.config, problem.devices.count == 1
    unasked_checkpointing = way.gradient_checkpointing and config.gradient_checkpointing == "auto"
    unasked_lora = way.use_lora and config.use_lora == "auto"
    if unasked_lora and config.trainable != "all":
        return None  # who names the part that trains has decided
    if way.mode is None:
        if unasked_checkpointing and not way.gradient_cache:
            return None
        if unasked_lora:
            return 400 + 10 * way.gradient_cache + unasked_checkpointing if alone else None
        return 100 * way.gradient_cache + 100 * unasked_checkpointing
    if way.cpu_offload:
        return 500 + way.use_lora
    if not way.use_lora and config.use_lora == "auto" and _adapts_when_sharded(problem):
        return None
    first = 400 if way.use_lora and config.use_lora == "auto" else 300
    return first + 10 * unasked_checkpointing + (0 if way.mode is None else MODES.index(way.mode))


def _adapts_when_sharded(problem: PlanningProblem) -> bool:
    config, model = problem.config, problem.model
    return model.adapted is not None and model.num_parameters >= LORA_FROM and config.trainable == "all"


_FIRST_RUNG = {"single": 0, "ddp": 0, "ddp_gradcache": 100, "fsdp_lora": 300}


def _first_fitting(problem: PlanningProblem, candidates: Sequence[Candidate], row: MatrixRow) -> Candidate | None:
    """Return the first candidate of the ladder that fits, from the prior on; before it where nothing later does."""
    found = [
        (rung, place)
        for place, each in enumerate(candidates)
        if each.fits and (rung := _rung(problem, each.way)) is not None
    ]
    later = [each for each in found if each[0] >= _FIRST_RUNG[row.strategy]] or found
    return candidates[min(later)[1]] if later else None


def _headline(problem: PlanningProblem, row: MatrixRow, chosen: Candidate, plain: Candidate) -> str:
    count = problem.devices.count
    if count == 1 and chosen.way.gradient_cache and not plain.fits:
        need = show_bytes(plain.bytes_per_device.total)
        return f"single: one process on one device; without caching it would need {need}"
    if count == 1:
        return "single: one process on one device"
    size = f"{show_count(problem.model.num_parameters)} parameters on {problem.devices.count} devices"
    other = "" if row.alternative is None else f", else {row.alternative}"
    return f"{chosen.way}: {size}; the decision matrix says {row.strategy}{other}"


def _steps_down(problem: PlanningProblem, row: MatrixRow, wished: Sequence[Candidate], chosen: Candidate) -> list[str]:
    """Say which rungs before the chosen one don't fit; on one device only where the chosen one costs something."""
    end = _rung(problem, chosen.way)
    if problem.devices.count == 1 and end is not None and end <= _FIRST_RUNG["ddp_gradcache"]:
        return []
    said: dict[str, Candidate] = {}
    for each in wished:
        rung = _rung(problem, each.way)
        if rung is not None and _FIRST_RUNG[row.strategy] <= rung and (end is None or rung < end):
            said.setdefault(str(each.way), each)
    said = dict(list(said.items())[:MOST_STEPS_SAID])
    return [_too_large(problem, name, each) for name, each in said.items()]


def _too_large(problem: PlanningProblem, name: str, candidate: Candidate) -> str:
    sizes, limit = candidate.bytes_per_device, problem.limit_bytes(candidate.way)
    if sizes.total <= limit:
        return (
            f"{name} would keep all graphs of the batch: {show_bytes(sizes.activations)} of activations, more of the "
            f"spare memory than an estimate may take"
        )
    return (
        f"{name} doesn't fit: {show_bytes(sizes.total)} predicted, at most {show_bytes(limit)} of "
        f"{show_bytes(problem.devices.memory_bytes)} with reserve"
    )


def _warnings(problem: PlanningProblem, chosen: Candidate, free: Candidate | None, *, fits: bool) -> list[str]:
    """Say where the numbers speak against what the user set."""
    config, way = problem.config, chosen.way
    said = []
    if not fits:
        said.append(f"no way that the keys allow fits; {way} needs least")
    if free is not None and not fits:
        said.append(f"by the numbers {free.way} would fit; the keys that are set rule it out")
    elif free is not None and free.way.strategy != way.strategy:
        said.append(f"{_set_keys(config)}: as set; the numbers alone would give {free.way}")
    if problem.devices.count == 1:
        idle = {
            "use_fsdp true": config.use_fsdp is True,
            f"sharding_factor {config.sharding_factor}": config.sharding_factor not in ("auto", 1),
            f"fsdp_mode {config.fsdp_mode}": config.fsdp_mode != "auto",
            "cpu_offload true": config.cpu_offload is True,
        }
        said += [
            f"{name} has no effect: one process has nothing to shard over" for name, given in idle.items() if given
        ]
    if way.use_lora and config.use_lora == "auto":
        said.append("use_lora: adapters train beside a frozen base; use_lora false keeps full fine-tuning")
    if way.gradient_checkpointing and config.gradient_checkpointing == "auto":
        said.append("gradient_checkpointing: on, as a step wouldn't fit without; false rules it out")
    if (
        way.mode is None
        and config.use_gradient_cache == "auto"
        and _caching(problem) is True
        and config.retain == "auto"
    ):
        said.append("use_gradient_cache: on, as it is with gradient checkpointing above 1B parameters")
    if not problem.model.checkpointable and config.gradient_checkpointing is True:
        said.append("gradient_checkpointing true has no effect: this model computes nothing again")
    return said


def _set_keys(config: Config) -> str:
    given = {name: getattr(config, name) for name in DECIDING_KEYS if getattr(config, name) != "auto"}
    return ", ".join(f"{name} {str(value).lower()}" for name, value in given.items())


def _faster(candidates: Sequence[Candidate], chosen: Candidate) -> Candidate | None:
    """Return the fastest that fits and trains the same weights, if it is clearly faster."""
    same = [each for each in candidates if each.fits and each.way.use_lora == chosen.way.use_lora]
    fastest = max(same, key=lambda each: each.relative_speed, default=chosen)
    return fastest if fastest.relative_speed > 1.05 * chosen.relative_speed else None
