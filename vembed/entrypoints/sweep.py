"""`vembed sweep CONFIG --try key=a,b ...`: train a configuration with several values, and say which are best."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vembed.config.load import load_config, read_overrides
from vembed.config.names import targets
from vembed.entrypoints.command import add_config_arguments, command_line, config_path, quiet_libraries, run_command
from vembed.errors import ConfigError, ExitCode, MachineError, VembedError
from vembed.output_lock import hold_output
from vembed.redact import redact
from vembed.sweeping.methods import import_optuna, rungs, train_all, train_halving, train_optuna
from vembed.sweeping.process import GO_ON, TrainProcess
from vembed.sweeping.ranking import chosen_lines, rank
from vembed.sweeping.request import Request
from vembed.sweeping.space import corners, drawn, grid, parse_tries
from vembed.sweeping.trials import Trial, Trials, dev_metric, trial_name
from vembed.text import show_duration
from vembed.training.guards import StopSignal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vembed.config.schema import Config
    from vembed.sweeping.ranking import Ranked
    from vembed.sweeping.space import Choice, Tried
    from vembed.sweeping.trials import Outcome

DESCRIPTION = (
    "Train a configuration with several values of some keys, and choose the best by the dev set. Each trial is a run "
    "in DIR/trials. The same command continues a sweep that was stopped."
)

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


def parse_arguments(arguments: Sequence[str], *, program: str) -> argparse.Namespace:
    """Parse the command line of a sweep."""
    parser = argparse.ArgumentParser(prog=program, description=DESCRIPTION)
    add_config_arguments(parser)
    parser.add_argument(
        "--try",
        dest="tries",
        nargs="+",
        action="extend",
        required=True,
        metavar="KEY=A,B",
        help="values to try: learning_rate=1e-5,2e-5, or a range to draw from: learning_rate=1e-6..1e-4",
    )
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--random", type=int, metavar="N", help="draw N random combinations; default: try all")
    way.add_argument(
        "--optuna", type=int, metavar="N", help="try N combinations that Optuna suggests, one after another"
    )
    parser.add_argument(
        "--halving",
        action="store_true",
        help="train all trials for part of the steps, then the better half again for twice as many, until two are left",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="seed of --random and --optuna; default: 0")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder of the sweep; default: OUTPUT_DIR-sweep")
    parser.add_argument("--dry-run", action="store_true", help="list the trials with their steps and time, and stop")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str], *, program: str) -> int:
    """Train with several values of some keys, and choose by the dev set."""
    parsed = parse_arguments(arguments, program=program)
    command = command_line(program, arguments)
    return run_command(lambda: _run(parsed, command))


@dataclass(frozen=True, slots=True)
class _Sweep:
    """A sweep that was checked."""

    tried: Sequence[Tried]
    trials: Sequence[Trial]  # with Optuna those that stand for all that it may suggest
    configs: Mapping[str, Config]  # by the name of the trial
    asked: tuple[str, ...]
    folder: Path

    @property
    def config(self) -> Config:
        """That of the first trial."""
        return self.configs[self.trials[0].name]


def _run(parsed: argparse.Namespace, command: str) -> int:
    sweep = _checked(parsed)
    with StopSignal(advice=GO_ON) as stop:
        process = TrainProcess(config_path(parsed), parsed.config_override, stop.poll)
        if parsed.dry_run:
            _dry_run(parsed, sweep, process)
            return ExitCode.OK
        with hold_output(sweep.folder):
            return _train(parsed, sweep, process, command)


def _checked(parsed: argparse.Namespace) -> _Sweep:
    """Check the request and the configuration of every trial, before anything is trained.

    Raises:
        VembedError: A line for each problem.
    """
    tried = parse_tries(parsed.tries)
    for name in ("random", "optuna"):
        if (count := getattr(parsed, name)) is not None and count < 1:
            raise ConfigError(f"--{name} must be at least 1, got {count}")
    if parsed.seed is not None and parsed.seed < 0:
        raise ConfigError(f"--seed must be at least 0, got {parsed.seed}")
    if parsed.seed is not None and parsed.random is None and parsed.optuna is None:
        raise ConfigError("--seed has an effect only with --random or --optuna")
    parsed.seed = parsed.seed or 0
    if parsed.optuna is not None:
        import_optuna()
        if parsed.halving:
            raise ConfigError("--halving and --optuna both say which trials continue; leave one out")
    choices = _choices(parsed, tried)
    trials = [Trial(trial_name(number, choice, of=len(choices)), choice) for number, choice in enumerate(choices, 1)]
    configs = _configs(parsed, trials)
    config = configs[trials[0].name]
    _refuse_incomparable(config, {each.key.partition(".")[0] for each in tried})
    way = f"--random {parsed.random}" if parsed.random else f"--optuna {parsed.optuna}" if parsed.optuna else ""
    asked = [f"--try {each}" for each in parsed.tries]
    asked += [way, f"--seed {parsed.seed}"] if way else []
    asked += ["--halving"] if parsed.halving else []
    folder = parsed.output if parsed.output is not None else Path(f"{config.output_dir}-sweep")
    return _Sweep(tried, trials, configs, tuple(asked), folder.expanduser())


def _choices(parsed: argparse.Namespace, tried: Sequence[Tried]) -> list[Choice]:
    if parsed.optuna is not None:
        return list(corners(tried))
    return grid(tried) if parsed.random is None else drawn(tried, parsed.random, parsed.seed)


def _configs(parsed: argparse.Namespace, trials: Sequence[Trial]) -> dict[str, Config]:
    """Load the configuration of each trial.

    Raises:
        VembedError: A line for each problem of any of them.
    """
    from vembed.training.early import refuse_wrong_inputs
    from vembed.training.trackers import refuse_missing_packages

    overridden = read_overrides(parsed.config_override).settings
    both = _targets(each.name for each in overridden) & _targets(trials[0].choice)
    if both:
        raise ConfigError(f"{', '.join(sorted(both))}: given by --config_override and tried; leave one out")
    configs, problems = {}, []
    for trial in trials:
        values = [f"{key}={value}" for key, value in trial.choice.items()]
        try:
            configs[trial.name] = config = load_config(config_path(parsed), [*parsed.config_override, *values]).config
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


def _dry_run(parsed: argparse.Namespace, sweep: _Sweep, process: TrainProcess) -> None:
    """List the trials with their steps, and estimate the time from a short run of the first."""
    trials = _counted(sweep.trials, process, {})
    count, total = _amount(parsed, trials)
    for trial in () if parsed.optuna else trials:
        print(f"{trial.name}  {trial.steps:,} steps  {trial.values}")
    print(_amount_line(parsed, count, total, trials))
    _log.info("trying %d steps of the first one to estimate the time", min(3, trials[0].steps))
    each = process.seconds(trials[0])
    print(f"about {show_duration(each)} for the first, {show_duration(each / trials[0].steps * total)} in all")


def _counted(trials: Sequence[Trial], process: TrainProcess, known: Mapping[str, int]) -> list[Trial]:
    """Return the trials with their steps; those that can't differ are planned once."""
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


def _amount(parsed: argparse.Namespace, trials: Sequence[Trial]) -> tuple[int, int]:
    """Return how many trainings there are, and their steps in all."""
    steps = [trial.steps for trial in trials]
    mean = sum(steps) / len(steps)
    if parsed.optuna:
        return parsed.optuna, round(parsed.optuna * mean)
    if not parsed.halving:
        return len(trials), sum(steps)
    rounds = rungs(len(trials))
    return sum(size for size, _ in rounds), round(sum(size * share * mean for size, share in rounds))


def _amount_line(parsed: argparse.Namespace, count: int, total: int, trials: Sequence[Trial]) -> str:
    line = f"{count} trials, {total:,} steps in all"
    if parsed.halving:
        rounds = ", then ".join(f"{size} with {share:.3g} of their steps" for size, share in rungs(len(trials)))
        line += f": {rounds}; each round trains anew, with its schedule fitted to its steps"
    return line


def _train(parsed: argparse.Namespace, sweep: _Sweep, process: TrainProcess, command: str) -> int:
    config, metric = sweep.config, sweep.config.metric_for_best_model
    request = Request.of(sweep.asked, config, _targets(each.key for each in sweep.tried))
    request = request.go_on(sweep.folder, config)
    trials = _counted(sweep.trials, process, request.steps)
    request = replace(request, steps={trial.name: trial.steps for trial in trials})
    request.write(sweep.folder)
    count, total = _amount(parsed, trials)
    _log.info("%s", _amount_line(parsed, count, total, trials))
    _log.info("the dev set chooses; no test set has a part in it")
    runs = Trials(sweep.folder / "trials", process, metric, count, total)
    if parsed.optuna is not None:
        mean = round(total / count)
        outcomes = train_optuna(
            sweep.tried, runs.train, metric, count=count, seed=parsed.seed, steps=mean, folder=sweep.folder
        )
    elif parsed.halving:
        warmup = {trial.name: sweep.configs[trial.name].warmup_steps for trial in trials}
        outcomes = train_halving(trials, runs.train, metric, lambda trial: warmup[trial.name])
    else:
        outcomes = train_all(trials, runs.train)
    return _report(parsed, sweep, outcomes, command)


def _report(parsed: argparse.Namespace, sweep: _Sweep, outcomes: Sequence[Outcome], command: str) -> int:
    """Print the table, and write it with a page."""
    from vembed.pages.write import write_page
    from vembed.sweeping.report import sweep_page, terminal_lines

    metric = dev_metric(outcomes, sweep.config.metric_for_best_model)
    ranked = rank(outcomes, metric)
    has_test = any(each.on_test for each in outcomes)
    print(*terminal_lines(ranked, metric), sep="\n")
    print(*chosen_lines(ranked, metric, has_test=has_test), sep="\n")
    facts = {} if config_path(parsed) is None else {"configuration": redact(str(config_path(parsed)))}
    facts["asked"] = redact(" ".join(sweep.asked))
    if parsed.config_override:
        facts["overrides"] = redact(" ".join(parsed.config_override))
    if any(each.word in ("best", "shorter") for each in ranked):
        page = sweep_page(ranked, metric, has_test=has_test, facts=facts, command=command)
        write_page(sweep.folder, page, name="sweep")
        print(f"report: {redact(str(sweep.folder / 'sweep.html'))}")
        _compare(sweep, ranked)
        return ExitCode.OK
    raise MachineError(f"all {len(outcomes)} trials failed; the lines above say how each is tried again")


def _compare(sweep: _Sweep, ranked: Sequence[Ranked]) -> None:
    """Put the best runs side by side: curves, time and memory, and the queries that each wins and loses."""
    folders = [str(each.outcome.folder) for each in ranked if each.word in ("best", "within noise", "worse")]
    folders = folders[:MOST_COMPARED]
    if len(folders) < 2:
        return
    from vembed.comparison.compare import compare_runs

    quiet_libraries()
    output = sweep.folder / "comparison"
    command = command_line("vembed compare", [*folders, "--output", str(output)])
    compare_runs(folders, output, metric=sweep.config.metric_for_best_model, command=command)
    what = "the two trials" if len(folders) == len(ranked) == 2 else f"the best {len(folders)} trials"
    print(f"comparison of {what}: {redact(str(output / 'compare.html'))}")
