"""A sweep: the configuration of every trial checked, the trials trained, and the best of them reported.

1. Every trial's configuration, files and packages are checked before the first one is trained: a wrong value costs
   no training. The problems of all trials are told at once.
2. The steps of the trials are counted by planning them, each in a process of its own; trials that differ only in keys
   that can't change their steps are planned once. The counts are kept in the folder for the next start.
3. The trials are trained by one of three ways (vembed/workflows/sweeping/methods.py). The dev set chooses.
4. A table goes to the terminal and a page into the folder, and the best runs are compared side by side.
"""

from __future__ import annotations

import logging
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vembed.config.load import load_config, read_overrides
from vembed.config.names import targets
from vembed.distributed.lock import hold_output
from vembed.distributed.signals import StopSignal
from vembed.errors import ConfigError, MachineError, VembedError
from vembed.redact import redact
from vembed.text import show_duration
from vembed.workflows.sweeping.methods import import_optuna, rungs, train_all, train_halving, train_optuna
from vembed.workflows.sweeping.process import GO_ON, PROBE_STEPS, TrainProcess
from vembed.workflows.sweeping.ranking import chosen_lines, rank
from vembed.workflows.sweeping.request import Request
from vembed.workflows.sweeping.space import corners, drawn, grid, parse_tries
from vembed.workflows.sweeping.trials import Trial, Trials, dev_metric, trial_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vembed.config.schema import Config
    from vembed.workflows.sweeping.keys import SweepKeys
    from vembed.workflows.sweeping.ranking import Ranked
    from vembed.workflows.sweeping.space import Tried
    from vembed.workflows.sweeping.trials import Outcome

DECIDES_STEPS = (
    "data",
    "model",
    "batch",
    "epochs",
    "max_steps",
    "drop_last",
    "accumulation",
    "num_processes",
    "sampl",
    "mine",
)
"""Parts of the names of keys that change how many steps a run has; other keys leave them as they are."""

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
    tried = parse_tries(keys.tries)
    if keys.seed is not None and keys.random is None and keys.optuna is None:
        raise ConfigError("--seed has an effect only with --random or --optuna")
    if keys.optuna is not None:
        import_optuna()
        if keys.halving:
            raise ConfigError("--halving and --optuna both say which trials continue; leave one out")
    seed = keys.seed or 0
    if keys.optuna is not None:
        choices = list(corners(tried))  # stand for all that Optuna may suggest
    else:
        choices = grid(tried) if keys.random is None else drawn(tried, keys.random, seed)
    trials = [Trial(trial_name(number, choice, of=len(choices)), choice) for number, choice in enumerate(choices, 1)]
    configs = _load_configs(trials, path, overrides)
    config = configs[trials[0].name]
    _refuse_incomparable(config, {each.key.partition(".")[0] for each in tried})
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
            _print_cost(keys, _counted(trials, process, {}), process)
            return
        with hold_output(folder):
            warmup = {name: each.warmup_steps for name, each in configs.items()}
            request = Request.of(asked, config, _targets(each.key for each in tried)).go_on(folder, config)
            trials = _counted(trials, process, request.steps)
            replace(request, steps={trial.name: trial.steps for trial in trials}).write(folder)
            outcomes = _train(keys, tried, trials, process, folder, warmup, config.metric_for_best_model)
            facts = {} if path is None else {"configuration": redact(str(path))}
            facts["asked"] = redact(" ".join(asked))
            if overrides:
                facts["overrides"] = redact(" ".join(overrides))
            _report(outcomes, folder, config.metric_for_best_model, facts, command)


def _load_configs(trials: Sequence[Trial], path: Path | None, overrides: Sequence[str]) -> dict[str, Config]:
    """Load and check the configuration of each trial, by the trial's name.

    Raises:
        VembedError: A line for each problem of any of them.
    """
    from vembed.training.early import refuse_wrong_inputs
    from vembed.training.trackers import refuse_missing_packages

    both = _targets(each.name for each in read_overrides(overrides).settings) & _targets(trials[0].choice)
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
        lines = dict.fromkeys(line for error in problems for line in str(error).splitlines())
        raise type(problems[0])("\n".join(lines))
    return configs


def _targets(names: Iterable[str]) -> set[str]:
    """Return the keys that names set, without the part of a mapping."""
    return {target for name in names for target in targets(name.partition(".")[0])}


def _refuse_incomparable(config: Config, tried: set[str]) -> None:
    """Refuse a sweep whose trials would have no dev result, or each another dev set."""
    if config.seeds is not None:
        raise ConfigError("seeds: a sweep trains each trial once; try seed=1,2,3, or set seeds=null")
    if config.eval_strategy == "no" and config.test_data_path is not None:
        raise ConfigError("eval_strategy no leaves no dev result to choose by; set it to epoch, or give eval_steps")
    if config.val_data_path is None and tried & {"data", "data_path", "data_split"}:
        raise ConfigError(
            "without val_data_path each trial would hold out other rows of its own data; set val_data_path, so that "
            "all are compared on one dev set"
        )


def _counted(trials: Sequence[Trial], process: TrainProcess, known: Mapping[str, int]) -> list[Trial]:
    """Return the trials with their steps; those that can't differ are planned once.

    Args:
        known: Steps by the trial's name, of an earlier start.
    """
    if all(trial.name in known for trial in trials):
        return [replace(trial, steps=known[trial.name]) for trial in trials]
    _log.info("planning, to count the steps")
    planned: dict[tuple[tuple[str, str], ...], int] = {}
    counted = []
    for trial in trials:
        deciding = tuple(
            (key, value) for key, value in trial.choice.items() if any(part in key for part in DECIDES_STEPS)
        )
        if deciding not in planned:
            planned[deciding] = process.steps(trial)
        counted.append(replace(trial, steps=planned[deciding]))
    return counted


def _amount(keys: SweepKeys, trials: Sequence[Trial]) -> tuple[int, int, str]:
    """Return how many trainings there are, their steps in all, and a line that says so."""
    steps = [trial.steps for trial in trials]
    mean = sum(steps) / len(steps)
    rounds = rungs(len(trials))
    if keys.optuna:
        count, total = keys.optuna, round(keys.optuna * mean)  # which it will suggest isn't known
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


def _print_cost(keys: SweepKeys, trials: Sequence[Trial], process: TrainProcess) -> None:
    """List the trials with their steps, and estimate the time from a short run of the first."""
    _, total, line = _amount(keys, trials)
    for trial in () if keys.optuna else trials:
        print(f"{trial.name}  {trial.steps:,} steps  {trial.values}")
    print(line)
    first = trials[0]
    _log.info("trying %d steps of the first one to estimate the time", min(PROBE_STEPS, first.steps))
    seconds = process.seconds(first)
    print(f"about {show_duration(seconds)} for the first, {show_duration(seconds / first.steps * total)} in all")


def _train(
    keys: SweepKeys,
    tried: Sequence[Tried],
    trials: Sequence[Trial],
    process: TrainProcess,
    folder: Path,
    warmup: Mapping[str, int | None],
    metric: str,
) -> Sequence[Outcome]:
    """Train the trials; those that an earlier start has done are read.

    Args:
        warmup: `warmup_steps` by the trial's name.
    """
    count, total, line = _amount(keys, trials)
    _log.info("%s", line)
    _log.info("the dev set chooses; no test set has a part in it")
    runs = Trials(folder / "trials", process, metric, count, total)
    if keys.optuna is not None:
        steps, seed = round(total / count), keys.seed or 0
        return train_optuna(tried, runs.train, metric, count=count, seed=seed, steps=steps, folder=folder)
    if keys.halving:
        return train_halving(trials, runs.train, metric, lambda trial: warmup[trial.name])
    return train_all(trials, runs.train)


def _report(outcomes: Sequence[Outcome], folder: Path, chosen_by: str, facts: Mapping[str, str], command: str) -> None:
    """Print the table of the trials, write it with a page, and compare the best runs.

    Args:
        chosen_by: The key `metric_for_best_model`.
    """
    from vembed.pages.write import write_page
    from vembed.workflows.sweeping.report import sweep_page, terminal_lines

    metric = dev_metric(outcomes, chosen_by)
    ranked = rank(outcomes, metric)
    has_test = any(outcome.on_test for outcome in outcomes)
    print(*terminal_lines(ranked, metric), sep="\n")
    print(*chosen_lines(ranked, metric, has_test=has_test), sep="\n")
    if not any(row.word in ("best", "shorter") for row in ranked):
        raise MachineError(f"all {len(outcomes)} trials failed; the lines above say how each is tried again")
    write_page(folder, sweep_page(ranked, metric, has_test=has_test, facts=facts, command=command), name="sweep")
    print(f"report: {redact(str(folder / 'sweep.html'))}")
    _compare(ranked, folder / "comparison", chosen_by)


def _compare(ranked: Sequence[Ranked], output: Path, metric: str) -> None:
    """Put the best runs side by side: curves, time and memory, and the queries that each wins and loses."""
    folders = [str(row.outcome.folder) for row in ranked if row.word in ("best", "within noise", "worse")]
    folders = folders[:MOST_COMPARED]
    if len(folders) < 2:
        return
    from vembed.workflows.comparison.compare import compare_runs

    command = redact(shlex.join(["vembed", "compare", *folders, "--output", str(output)]))
    compare_runs(folders, output, metric=metric, command=command)
    what = "the two trials" if len(folders) == len(ranked) == 2 else f"the best {len(folders)} trials"
    print(f"comparison of {what}: {redact(str(output / 'compare.html'))}")
