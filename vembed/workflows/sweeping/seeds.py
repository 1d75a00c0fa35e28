"""The same configuration trained once per seed: a verdict over seeds and queries, and the model that is best on dev.

Each seed is a trial (trials.py) in a folder of its own below the output folder. Two things vary between trainings: the
seed, and the queries that a set happens to have; the interval of the verdict covers both (evaluation/seeds.py).
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vembed.config.record import dump_config
from vembed.errors import ConfigError, DataError, MachineError
from vembed.evaluation.judge import seeds_verdict, verdict
from vembed.evaluation.results import read_evaluation
from vembed.files import new_folder, replace_text
from vembed.models.names import MODEL_FOLDER
from vembed.pages.charts import BETTER, INK, LARGE_INCHES, SERIES, chart_axes, inline_svg
from vembed.pages.page import Cell, Code, Figure, Note, Page, Section, SideBySide, Table
from vembed.pages.text import capitalised, metric_text, signed_text
from vembed.pages.write import write_page
from vembed.redact import redact
from vembed.text import plural
from vembed.workflows.sweeping.trials import Request, Trial, Trials, best_of, dev_metric, dev_value, run_report

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from markupsafe import Markup

    from vembed.config.schema import Config
    from vembed.evaluation.judge import Comparison, SeedsVerdict
    from vembed.evaluation.results import EvaluationResult
    from vembed.workflows.sweeping.trials import Outcome, Runner

NAME = "seeds"
SCHEMA_VERSION = 1  # raised when a key changes its meaning or goes away; a new key doesn't raise it
PLAN_FILE = "plan.json"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SeedsReport:
    """Several seeds of one configuration, judged together."""

    outcomes: Sequence[Outcome]  # of the seeds that finished
    kept: Outcome  # the one whose model is kept
    sets: Sequence[SetOfSeeds]  # the test sets, or the dev set in their place, then guard sets
    whole: SeedsVerdict  # of the test sets together
    metric: str
    command: str

    @property
    def keeps(self) -> str:
        """Return the seed whose model was kept, and its dev metric."""
        value = f"{self.metric} {dev_value(self.kept, self.metric):.4f}"
        return f"the model in {MODEL_FOLDER}/ is that of {self.kept.trial.name}, the best on the dev set ({value})"


@dataclass(frozen=True)
class SetOfSeeds:
    """One set, on which every seed was evaluated."""

    role: str  # "test", "dev" or "guard"
    pairs: Sequence[tuple[EvaluationResult, EvaluationResult]]  # of each seed before and after training
    judged: SeedsVerdict

    @property
    def name(self) -> str:
        """Return the name of the set."""
        return self.pairs[0][1].task

    @property
    def metric(self) -> str:
        """Return the metric that decides on this set."""
        return self.judged.verdict.comparison.metric

    @property
    def is_forgotten(self) -> bool:
        """Return True for a guard set on which training lost."""
        return self.role == "guard" and self.judged.verdict.word == "worse"

    @property
    def sentence(self) -> str:
        """Return the verdict in one line."""
        sentence = self.judged.verdict.sentence
        return sentence.replace("worse:", "forgets:", 1) if self.is_forgotten else sentence


def train_seeds(config: Config, runner: Runner, steps_of: Callable[[Trial], int], command: str) -> SeedsReport:
    """Train once per seed, each in a folder of its own, and judge them together.

    Args:
        steps_of: Counts the optimizer steps of a training.

    Raises:
        ConfigError: The output folder holds something else.
        DataError: The data of two seeds differ.
        MachineError: Seeds failed, so that fewer than two are left or one is missing.
    """
    assert config.seeds is not None
    folder, metric = Path(config.output_dir), config.metric_for_best_model
    request = Request.of((f"seeds {config.seeds}",), config, {"seed", "seeds"}).go_on(folder, config)
    trials = [Trial(f"seed-{seed}", {"seed": str(seed)}) for seed in config.seeds]
    if not request.steps:  # a seed changes no step count: one plan serves all
        _log.info("planning, to count the steps")
        request = replace(request, steps={"each": steps_of(trials[0])})
        request.write(folder)
    steps = request.steps["each"]
    _log.info("%d seeds, one after another: %s steps in all", len(trials), f"{steps * len(trials):,}")
    train = Trials(folder, runner, metric, len(trials), steps * len(trials)).train
    outcomes = [train(replace(trial, steps=steps)) for trial in trials]
    finished = [outcome for outcome in outcomes if not outcome.error]
    failed = "; ".join(
        f"{outcome.trial.name}: {outcome.error} ({outcome.next_try})" for outcome in outcomes if outcome.error
    )
    if len(finished) < 2:
        raise MachineError(f"{len(finished)} of {len(outcomes)} seeds finished, too few to judge; {failed}")
    report = _judge(finished, metric, command)
    source = report.kept.folder
    try:
        with new_folder(folder / MODEL_FOLDER) as model:
            shutil.copytree(source / MODEL_FOLDER, model, dirs_exist_ok=True)
        replace_text(folder / PLAN_FILE, (source / PLAN_FILE).read_text("utf-8"))
        replace_text(folder / "config.yaml", dump_config(config))
    except OSError as error:
        raise MachineError(f"{folder} can't be written: {error}; free some space, and run again") from error
    write_page(folder, seeds_page(report), name=NAME)
    values = "  ".join(
        f"{outcome.trial.name} {value:.4f}" for outcome, value in zip(report.outcomes, report.whole.finals, strict=True)
    )
    lines = [f"seeds   {values}  (standard deviation {report.whole.spread:.4f})", f"model   {report.keeps}"]
    lines += [f"report  {report.kept.folder.parent / f'{NAME}.html'}"]
    if len(report.sets) > 1:
        lines += [f"{result.role:<5}  {result.name}: {result.sentence}" for result in report.sets]
    lines += [f"caveat  {report.kept.trial.name}: {caveat}" for caveat in report.kept.caveats]
    # The verdict stands last, right above the prompt, with the guard sets that it cost.
    lost = [result.name for result in report.sets if result.is_forgotten]
    lines += [report.whole.verdict.sentence + (f"; forgets on {', '.join(lost)}" if lost else "")]
    for line in lines:
        _log.info("%s", line)
    if failed:  # last: those that finished are judged and written, and the exit code says that one is missing
        raise MachineError(f"{len(finished)} of {len(outcomes)} seeds finished; the verdict covers them. {failed}")
    return report


def _judge(outcomes: Sequence[Outcome], metric: str, command: str) -> SeedsReport:
    """Judge each set over all seeds, and the test sets together.

    Raises:
        DataError: Seeds were evaluated on different queries, or a result can't be read.
    """
    # On the dev set: the test sets judge, and a model that they had chosen would be flattered by them.
    kept = best_of(outcomes, metric)
    assert kept is not None
    by_seed: list[list[tuple[EvaluationResult, EvaluationResult]]] = []
    roles: list[str] = []
    for outcome in outcomes:
        roles = [row["role"] for row in run_report(outcome.folder)["sets"]]
        # The set of the verdict stands in evaluation/ itself, the others in folders by their role and number.
        names = ["" if number == 0 else f"{role}-{number}" for number, role in enumerate(roles)]
        below = [outcome.folder / "evaluation" / name for name in names]
        by_seed.append([(read_evaluation(path / "baseline"), read_evaluation(path / "final")) for path in below])
    sets = []
    try:
        for role, pairs in zip(roles, zip(*by_seed, strict=True), strict=True):
            judged = seeds_verdict([[pair] for pair in pairs], pairs[0][1].deciding(metric))
            sets.append(SetOfSeeds(role, pairs, judged))
    except ValueError as error:
        raise DataError(f"{kept.folder.parent}: the seeds can't be judged together: {error}") from error
    # A mean over sets has a meaning only in one metric: that of the first set, over those that share it.
    tests = [result for result in sets if result.role != "guard"]
    alike = [result for result in tests if result.metric == tests[0].metric]
    whole = tests[0].judged
    if len(alike) > 1:
        by_seed_pairs = [[result.pairs[seed] for result in alike] for seed in range(len(outcomes))]
        whole = seeds_verdict(by_seed_pairs, alike[0].metric)
    return SeedsReport(outcomes, kept, sets, whole, dev_metric(outcomes, metric), command)


def seeds_page(report: SeedsReport) -> Page:
    """Return the page of several seeds."""
    count = len(report.outcomes)
    figure = Figure(
        "Before and after training",
        partial(draw_seeds, report.whole),
        "The metric of each seed before and after training, and the mean after training, around which the interval of "
        "the mean gain is drawn.",
    )
    limits = (
        f"The interval speaks of other seeds and of other queries of the same kind. It is wide where models differ "
        f"from seed to seed: {plural(count, 'seed')} leave {plural(count - 1, 'degree')} of freedom to judge that by."
    )
    return Page(
        kind="One configuration, several seeds",
        title=plural(count, "seed"),
        head=[Note(f"{capitalised(report.whole.verdict.sentence)}."), Note(f"{capitalised(report.keeps)}.")],
        sections=[
            Section("seeds", "Seeds", [SideBySide([figure]), seeds_table(report), Note(limits, muted=True)]),
            Section("method", "Reproduce", [Code(report.command, "Command")]),
        ],
        document=seeds_document(report),
    )


def seeds_table(report: SeedsReport) -> Table:
    """Return each seed on every set with its difference, then their mean and their standard deviation."""

    def cell(comparison: Comparison, scope: str = "") -> Cell:
        text = f"{metric_text(comparison.candidate)} ({signed_text(comparison.difference)})"
        return Cell(text, f"{signed_text(comparison.low)} to {signed_text(comparison.high)}{scope}")

    # A seed alone can say how sure its queries are, not how sure its seed is: that is in the last two rows.
    rows: list[list[str | Cell]] = []
    for seed, outcome in enumerate(report.outcomes):
        dev = metric_text(dev_value(outcome, report.metric))
        cells = [cell(verdict(*result.pairs[seed], result.metric).comparison) for result in report.sets]
        rows.append([outcome.trial.choice["seed"], dev, str(outcome.kept_step), *cells])
    means = [cell(result.judged.verdict.comparison, ", over seeds and queries") for result in report.sets]
    deviations = [metric_text(result.judged.spread, 4) for result in report.sets]
    return Table(
        ["Seed", f"{report.metric} (dev)", "Step", *(f"{result.name} ({result.role})" for result in report.sets)],
        [*rows, ["mean", "", "", *means], ["standard deviation", "", "", *deviations]],
        tones={row: "chosen" for row, outcome in enumerate(report.outcomes) if outcome is report.kept},
        title="Seeds",
        caption=(
            "Each seed: dev metric, the step whose model it kept, and each set after training with its difference; "
            "the intervals of a seed are over queries alone."
        ),
    )


def seeds_document(report: SeedsReport) -> dict[str, Any]:
    """Return the seeds for programs, every number unrounded."""

    def numbers(judged: SeedsVerdict) -> dict[str, Any]:
        comparison = judged.verdict.comparison
        return {
            "word": judged.verdict.word,
            "sentence": judged.verdict.sentence,
            "baseline": comparison.baseline,
            "mean": comparison.candidate,
            "difference": comparison.difference,
            "low": comparison.low,
            "high": comparison.high,
            "standard_deviation": judged.spread,
            "baselines": list(judged.baselines),
            "finals": list(judged.finals),
        }

    return {
        "schema_version": SCHEMA_VERSION,
        "metric": report.metric,
        "seeds": [int(outcome.trial.choice["seed"]) for outcome in report.outcomes],
        "kept": report.kept.trial.name,
        "dev": [dev_value(outcome, report.metric) for outcome in report.outcomes],
        "verdict": numbers(report.whole),
        "sets": [{"role": result.role, "task": result.name, **numbers(result.judged)} for result in report.sets],
        "command": report.command,
    }


def draw_seeds(judged: SeedsVerdict, *, name: str, label: str) -> Markup:
    """Draw each seed before and after training, and the mean gain with its interval beside them."""
    # The interval is that of the gain, so it hangs around the mean after training by its distances.
    comparison = judged.verdict.comparison
    with chart_axes(LARGE_INCHES) as (figure, axes):
        for before, after in zip(judged.baselines, judged.finals, strict=True):
            axes.plot([0, 1], [before, after], color=SERIES, marker="o", markersize=4.0)
        axes.errorbar(
            [1.35],
            [comparison.candidate],
            yerr=[[comparison.difference - comparison.low], [comparison.high - comparison.difference]],
            color=BETTER,
            ecolor=INK,
            marker="o",
            markersize=6.0,
            capsize=4.0,
        )
        axes.set_xticks([0, 1, 1.35], ["before", "after", "mean"])
        axes.set_xlim(-0.2, 1.6)
        axes.set_ylabel(comparison.metric)
        return inline_svg(figure, name=name, label=label)


def refuse_unfit(config: Config, *, launcher: str) -> None:
    """Refuse what several seeds can't be combined with.

    Args:
        launcher: Program that started this process as one of several; empty where none did.

    Raises:
        ConfigError: Several processes were started for one run, or a run is to start anew.
    """
    # A process of a launcher would wait in each seed's run for ranks that train another one.
    if launcher:
        raise ConfigError(
            f"seeds trains one run after another, and {launcher} has started processes for a single one; call run.py "
            f"or vembed train (num_processes says how many processes a run has), or launch once per seed with seed=N "
            f"seeds=null"
        )
    if config.resume != "auto":
        raise ConfigError(
            f"resume {redact(config.resume)}: with seeds, each run continues from its own checkpoint; remove resume, "
            f"delete {config.output_dir} to start anew, or choose another output_dir"
        )
