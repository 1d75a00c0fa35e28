"""A sweep: the configuration of every trial checked, the trials trained, and the best of them reported.

1. Every trial's configuration, files and packages are checked before the first one is trained: a wrong value costs
   no training. The problems of all trials are told at once.
2. The steps of the trials are counted by planning them, each in a process of its own; trials that differ only in keys
   that can't change their steps are planned once. The counts are kept in the folder for the next start.
3. All trials are trained in full, or the better half of shorter ones again (`train_halving`), or those that Optuna
   suggests (`train_optuna`). The dev set chooses.
4. A table goes to the terminal and a page into the folder, and the best runs are compared side by side.

Each way is a pure function of the space, the seed and the outcomes, in their order. A sweep that was stopped walks it
again from the start, reads what is done, and ends in the same table.
"""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from vembed.config.load import load_config, read_overrides
from vembed.config.schema import SECTIONS, Config, config_class
from vembed.distributed.lock import hold_output
from vembed.distributed.signals import StopSignal
from vembed.errors import ConfigError, MachineError, VembedError
from vembed.redact import redact
from vembed.registry import import_extra
from vembed.text import show_duration
from vembed.workflows.sweeping.process import GO_ON, PROBE_STEPS, TrainProcess
from vembed.workflows.sweeping.space import Range, corners, drawn, grid, parse_tries
from vembed.workflows.sweeping.trials import (
    Outcome,
    Request,
    Trial,
    Trials,
    dev_metric,
    dev_value,
    trial_name,
    tried_keys,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.workflows.sweeping.keys import SweepKeys
    from vembed.workflows.sweeping.space import Space

Train: TypeAlias = Callable[[Trial], Outcome]

OPTUNA_FILE = "optuna.journal"

LEAVE_STEPS = ("Adapters", "Optimisation", "Evaluation", "Output")
"""Sections of the configuration whose keys leave the number of steps as it is, but for those of SET_STEPS."""

SET_STEPS = frozenset({"epochs", "max_steps"})

MOST_COMPARED = 6
"""Trials of the comparison at the end; more curves than that can't be told apart."""

_log = logging.getLogger(__name__)


def run_sweep(keys: SweepKeys, path: Path | None, overrides: Sequence[str], command: str) -> None:
    """Train a configuration with several values of some keys, and print and write which are best.

    Args:
        path: The configuration; None where the overrides say everything.
        command: As it was typed, for the page.

    Raises:
        VembedError: A line for each problem of the options or of a trial's configuration; or all trials failed.
    """
    space = parse_tries(keys.tries)
    if keys.seed is not None and keys.random is None and keys.optuna is None:
        raise ConfigError("--seed has an effect only with --random or --optuna")
    seed = keys.seed or 0
    if keys.optuna is not None:
        import_optuna()
        if keys.halving:
            raise ConfigError("--halving and --optuna both say which trials continue; leave one out")
        choices = list(corners(space))  # stand for all that Optuna may suggest
    else:
        choices = grid(space) if keys.random is None else drawn(space, keys.random, seed)
    trials = [Trial(trial_name(number, choice, of=len(choices)), choice) for number, choice in enumerate(choices, 1)]
    configs = _checked_configs(trials, path, overrides)
    config = configs[trials[0].name]
    metric = config.metric_for_best_model
    way = f"--random {keys.random}" if keys.random else f"--optuna {keys.optuna}" if keys.optuna else ""
    asked = (
        *(f"--try {text}" for text in keys.tries),
        *((way, f"--seed {seed}") if way else ()),
        *(("--halving",) if keys.halving else ()),
    )
    folder = (Path(f"{config.output_dir}-sweep") if keys.output is None else keys.output).expanduser()
    with StopSignal(advice=GO_ON) as stop:
        process = TrainProcess(path, overrides, stop.poll)
        if keys.dry_run:
            trials = _counted(trials, process, configs, {})
            _, total, line = _amount(keys, trials)
            for trial in () if keys.optuna else trials:
                print(f"{trial.name}  {trial.steps:,} steps  {trial.values}")
            print(line)
            # One short run of the first trial stands for all: the others are taken to need as long for a step.
            first = trials[0]
            _log.info("trying %d steps of the first one to estimate the time", min(PROBE_STEPS, first.steps))
            seconds = process.seconds(first)
            in_all = show_duration(seconds / first.steps * total)
            print(f"about {show_duration(seconds)} for the first, {in_all} in all")
            return
        with hold_output(folder):
            request = Request.of(asked, config, tried_keys(space)).go_on(folder, config)
            trials = _counted(trials, process, configs, request.steps)
            replace(request, steps={trial.name: trial.steps for trial in trials}).write(folder)
            count, total, line = _amount(keys, trials)
            _log.info("%s", line)
            _log.info("the dev set chooses; no test set has a part in it")
            train = Trials(folder / "trials", process, metric, count, total).train
            if keys.optuna is not None:
                steps = round(total / count)
                outcomes = train_optuna(space, train, metric, count=count, seed=seed, steps=steps, folder=folder)
            elif keys.halving:
                outcomes = train_halving(trials, train, metric, lambda trial: configs[trial.name].warmup_steps)
            else:
                outcomes = [train(trial) for trial in trials]
            facts = {} if path is None else {"configuration": redact(str(path))}
            facts["asked"] = redact(" ".join(asked))
            if overrides:
                facts["overrides"] = redact(" ".join(overrides))
            _report(outcomes, folder, metric, facts, command)


def _checked_configs(trials: Sequence[Trial], path: Path | None, overrides: Sequence[str]) -> dict[str, Config]:
    """Load and check the configuration of each trial, by the trial's name.

    Raises:
        VembedError: A line for each problem of any of them, or their results couldn't be compared.
    """
    from vembed.training.early import refuse_wrong_inputs
    from vembed.training.trackers import refuse_missing_packages

    tried = tried_keys(trials[0].choice)
    both = tried_keys(setting.name for setting in read_overrides(overrides).settings) & tried
    if both:
        raise ConfigError(f"{', '.join(sorted(both))}: given by --config_override and tried; leave one out")
    configs: dict[str, Config] = {}
    problems: list[VembedError] = []
    for trial in trials:
        values = [f"{key}={value}" for key, value in trial.choice.items()]
        try:
            configs[trial.name] = config = load_config(path, [*overrides, *values]).config
            refuse_wrong_inputs(config)
            refuse_missing_packages(config.report_to)
        except VembedError as error:
            problems.append(error)
    if problems:
        # Most problems are of all trials alike, and stand there once.
        lines = dict.fromkeys(line for error in problems for line in str(error).splitlines())
        raise type(problems[0])("\n".join(lines))
    config = configs[trials[0].name]
    if config.seeds is not None:
        raise ConfigError("seeds: a sweep trains each trial once; try seed=1,2,3, or set seeds=null")
    if config.eval_strategy == "no" and config.test_data_path is not None:
        raise ConfigError("eval_strategy no leaves no dev result to choose by; set it to epoch, or give eval_steps")
    if config.val_data_path is None and tried & {"data_path", "data_split"}:
        raise ConfigError(
            "without val_data_path each trial would hold out other rows of its own data; set val_data_path, so that "
            "all are compared on one dev set"
        )
    return configs


def _counted(
    trials: Sequence[Trial], process: TrainProcess, configs: Mapping[str, Config], known: Mapping[str, int]
) -> list[Trial]:
    """Return the trials with their steps; those that can't differ are planned once.

    Args:
        configs: Of each trial, by its name.
        known: Steps by the trial's name, of an earlier start.
    """
    if all(trial.name in known for trial in trials):
        return [replace(trial, steps=known[trial.name]) for trial in trials]
    _log.info("planning, to count the steps")
    leaving = config_class().model_fields.keys() - Config.model_fields.keys()  # those of one loss, as temperature is
    leaving |= {name for title in LEAVE_STEPS for name in SECTIONS[title].model_fields} - SET_STEPS
    planned: dict[tuple[tuple[str, str], ...], int] = {}
    counted = []
    for trial in trials:
        # A plan takes seconds, as it reads the data: a grid over rates and temperatures needs one. Where the batch is
        # what memory holds, any key may change it.
        is_auto = configs[trial.name].batch_size == "auto"
        deciding = tuple((key, value) for key, value in trial.choice.items() if is_auto or tried_keys([key]) - leaving)
        if deciding not in planned:
            planned[deciding] = process.steps(trial)
        counted.append(replace(trial, steps=planned[deciding]))
    return counted


def _amount(keys: SweepKeys, trials: Sequence[Trial]) -> tuple[int, int, str]:
    """Return how many trainings there are, their steps in all, and a line that says so."""
    # By the mean: which trials reach the later rounds, and what Optuna will suggest, isn't known yet.
    steps = [trial.steps for trial in trials]
    mean = sum(steps) / len(steps)
    rounds = rungs(len(trials))
    if keys.optuna:
        count, total = keys.optuna, round(keys.optuna * mean)
    elif keys.halving:
        count = sum(size for size, _ in rounds)
        total = round(sum(size * share * mean for size, share in rounds))
    else:
        count, total = len(trials), sum(steps)
    line = f"{count} trials, {total:,} steps in all"
    if keys.halving:
        listed = ", then ".join(f"{size} with {share:.3g} of their steps" for size, share in rounds)
        line += f": {listed}; each round trains anew, with its schedule fitted to its steps"
    return count, total, line


def _report(outcomes: Sequence[Outcome], folder: Path, chosen_by: str, facts: Mapping[str, str], command: str) -> None:
    """Print the table of the trials, write it with a page, and compare the best runs.

    Args:
        chosen_by: The key `metric_for_best_model`.
    """
    from vembed.pages.write import write_page
    from vembed.workflows.sweeping.report import IN_FULL, chosen_lines, rank, sweep_page, terminal_lines

    metric = dev_metric(outcomes, chosen_by)
    ranked = rank(outcomes, metric)
    has_test = any(outcome.on_test for outcome in outcomes)
    print(*terminal_lines(ranked, metric), sep="\n")
    print(*chosen_lines(ranked, metric, has_test=has_test), sep="\n")
    # The lines stand there first, as they say what each trial failed of.
    if not any(row.word in ("best", "shorter") for row in ranked):
        raise MachineError(f"all {len(outcomes)} trials failed; the lines above say how each is tried again")
    write_page(folder, sweep_page(ranked, metric, has_test=has_test, facts=facts, command=command), name="sweep")
    print(f"report: {redact(str(folder / 'sweep.html'))}")
    folders = [str(row.outcome.folder) for row in ranked if row.word in IN_FULL][:MOST_COMPARED]
    if len(folders) < 2:
        return
    from vembed.workflows.comparison.compare import compare_runs

    # The best runs side by side: curves, time and memory, and the queries that each wins and loses.
    output = folder / "comparison"
    again = redact(shlex.join(["vembed", "compare", *folders, "--output", str(output)]))
    compare_runs(folders, output, command=again)
    what = "the two trials" if len(folders) == len(ranked) == 2 else f"the best {len(folders)} trials"
    print(f"comparison of {what}: {redact(str(output / 'compare.html'))}")


def rungs(count: int) -> list[tuple[int, float]]:
    """Return how many trials each round of a halving trains, and with which part of their steps.

    The last round has two trials and all steps; a round before has twice as many trials, and half of the steps.
    """
    # From the last round back: 2 trials with all steps, 4 with a half, 8 with a quarter. Rounds cost about the same.
    sizes = [count]
    while sizes[-1] > 2:
        sizes.append(math.ceil(sizes[-1] / 2))
    return [(size, 0.5 ** (len(sizes) - 1 - number)) for number, size in enumerate(sizes)]


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
        # At least one step without warmup: the configuration refuses more.
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
    remaining = list(trials)
    outcomes: list[Outcome] = []
    rounds = rungs(len(remaining))
    for number, (_, share) in enumerate(rounds):
        ended = [(trial, train(shorter(trial, share, warmup_of(trial)))) for trial in remaining]
        finished = [(trial, outcome) for trial, outcome in ended if outcome.dev is not None]
        finished.sort(key=lambda row: -dev_value(row[1], metric))  # stable: of equals the first stays
        size = rounds[number + 1][0] if number + 1 < len(rounds) else 0
        remaining = [trial for trial, _ in finished[:size]]
        # Those that leave now came further than all that left before.
        outcomes = [outcome for trial, outcome in ended if trial not in remaining] + outcomes
    return outcomes


def train_optuna(
    space: Space, train: Train, metric: str, *, count: int, seed: int, steps: int, folder: Path
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
    # Written anew by every start: the outcomes that are read give the same suggestions again, in the same order.
    journal = folder / OPTUNA_FILE
    journal.unlink(missing_ok=True)
    backend = optuna.storages.journal.JournalFileBackend(str(journal))
    study = optuna.create_study(storage=optuna.storages.JournalStorage(backend), direction="maximize")
    distributions = {}
    for key, values in space.items():
        if not isinstance(values, Range):
            distributions[key] = optuna.distributions.CategoricalDistribution(list(_kept_values(key, values)))
        elif values.whole:
            low, high = int(values.low), int(values.high)
            distributions[key] = optuna.distributions.IntDistribution(low, high, log=values.is_log)
        else:
            distributions[key] = optuna.distributions.FloatDistribution(values.low, values.high, log=values.is_log)
    outcomes = []
    for number in range(1, count + 1):
        # A sampler's own random state would be lost with the process.
        study.sampler = optuna.samplers.TPESampler(seed=seed + number)
        asked = study.ask(distributions)
        choice = {}
        for key, values in space.items():
            value = asked.params[key]
            choice[key] = values.text(value) if isinstance(values, Range) else _kept_values(key, values)[value]
        outcome = train(Trial(trial_name(number, choice, of=count), choice, steps=steps))
        outcomes.append(outcome)
        if outcome.dev is None:
            study.tell(asked, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(asked, dev_value(outcome, metric))
    return outcomes


def import_optuna() -> Any:
    """Return the package.

    Raises:
        ConfigError: It isn't installed.
    """
    return import_extra("optuna", "optuna", "--optuna")


def _kept_values(key: str, values: Sequence[str]) -> dict[str, str]:
    """Return listed values by the text that the study keeps: of one with a secret its shown text and its number."""
    shown = [Trial("", {key: value}).shown[key] for value in values]
    numbered = enumerate(zip(shown, values, strict=True), start=1)
    return {text if text == value else f"{text} ({number})": value for number, (text, value) in numbered}
