"""Ways through a space: every trial in full, the better half of shorter ones, or what Optuna suggests next.

Each way is a pure function of the space, the seed and the outcomes, in their order. A sweep that was stopped walks it
again from the start, finds what is done, and ends in the same table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from vembed.registry import import_extra
from vembed.workflows.sweeping.space import Range
from vembed.workflows.sweeping.trials import Outcome, Trial, dev_value, trial_name

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vembed.workflows.sweeping.space import Tried

Train: TypeAlias = Callable[[Trial], Outcome]

OPTUNA_FILE = "optuna.journal"


def train_all(trials: Sequence[Trial], train: Train) -> list[Outcome]:
    """Train every trial in full."""
    return [train(trial) for trial in trials]


def rungs(count: int) -> list[tuple[int, float]]:
    """Return how many trials each round of a halving trains, and with which part of their steps.

    The last round has two trials and all steps; a round before has twice as many trials, and half of the steps.
    """
    sizes = [count]
    while sizes[-1] > 2:
        sizes.append(math.ceil(sizes[-1] / 2))
    return [(size, 0.5 ** (len(sizes) - 1 - place)) for place, size in enumerate(sizes)]


def shorter(trial: Trial, share: float, warmup_steps: int | None) -> Trial:
    """Return a trial with a part of its steps, in which its whole schedule runs: warmup and decay shrink with it.

    Args:
        warmup_steps: Those of the whole training, where they are given in steps and not as a ratio.
    """
    if share == 1.0:
        return trial
    steps = math.ceil(trial.steps * share)
    overrides = {**trial.overrides, "max_steps": str(steps)}
    if warmup_steps is not None:
        overrides["warmup_steps"] = str(min(math.ceil(warmup_steps * share), steps - 1))
    return replace(trial, name=f"{trial.name}_{steps}-steps", overrides=overrides, steps=steps)


def train_halving(
    trials: Sequence[Trial], train: Train, metric: str, warmup_of: Callable[[Trial], int | None]
) -> list[Outcome]:
    """Train all with a part of their steps, then the better half anew with twice as many, until two have all steps.

    Args:
        warmup_of: Returns the warmup of a trial, where it is given in steps.

    Returns:
        The last outcome of each trial, those that came furthest first.

    Source:
        Successive halving (Jamieson & Talwalkar, AISTATS 2016).
    """
    left = list(trials)
    found: list[Outcome] = []
    rounds = rungs(len(left))
    for place, (_, share) in enumerate(rounds):
        ended = [(trial, train(shorter(trial, share, warmup_of(trial)))) for trial in left]
        finished = [each for each in ended if each[1].dev is not None]
        finished.sort(key=lambda each: -dev_value(each[1], metric))  # stable: of equals the first stays
        size = rounds[place + 1][0] if place + 1 < len(rounds) else 0
        left = [trial for trial, _ in finished[:size]]
        found = [outcome for trial, outcome in ended if trial not in left] + found
    return found


def train_optuna(
    tried: Sequence[Tried], train: Train, metric: str, *, count: int, seed: int, steps: int, folder: Path
) -> list[Outcome]:
    """Train trials whose values Optuna suggests, by a tree-structured Parzen estimator, from what came of those before.

    The sampler of a trial is seeded by its number, so that a suggestion depends on the outcomes before it alone. The
    study is kept in the folder, without secrets, for Optuna's own tools.

    Args:
        steps: Of a trial, as far as they are known before its values are.

    Raises:
        ConfigError: Optuna isn't installed.
    """
    optuna = import_optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    journal = folder / OPTUNA_FILE
    journal.unlink(missing_ok=True)
    backend = optuna.storages.journal.JournalFileBackend(str(journal))
    study = optuna.create_study(storage=optuna.storages.JournalStorage(backend), direction="maximize")
    distributions = {each.key: _distribution(optuna, each) for each in tried}
    found = []
    for number in range(1, count + 1):
        study.sampler = optuna.samplers.TPESampler(seed=seed + number)
        asked = study.ask(distributions)
        choice = {each.key: _text(each, asked.params[each.key]) for each in tried}
        outcome = train(Trial(trial_name(number, choice, of=count), choice, steps=steps))
        found.append(outcome)
        if outcome.dev is None:
            study.tell(asked, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(asked, dev_value(outcome, metric))
    return found


def import_optuna() -> Any:
    """Return the package.

    Raises:
        ConfigError: It isn't installed.
    """
    return import_extra("optuna", "optuna", "--optuna")


def _distribution(optuna: Any, tried: Tried) -> Any:
    values = tried.values
    if not isinstance(values, Range):
        return optuna.distributions.CategoricalDistribution(list(_listed(tried)))
    if values.whole:
        return optuna.distributions.IntDistribution(int(values.low), int(values.high), log=values.is_log)
    return optuna.distributions.FloatDistribution(values.low, values.high, log=values.is_log)


def _text(tried: Tried, value: Any) -> str:
    return tried.values.text(value) if isinstance(tried.values, Range) else _listed(tried)[value]


def _listed(tried: Tried) -> dict[str, str]:
    """Return what the study keeps of each listed value, and the value: a secret stays out, and its place tells it."""
    kept = [Trial("", {tried.key: value}).shown[tried.key] for value in tried.ends]
    places = enumerate(zip(kept, tried.ends, strict=True), start=1)
    return {name if name == value else f"{name} ({place})": value for place, (name, value) in places}
