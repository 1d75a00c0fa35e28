"""The same configuration trained once per seed: a verdict over seeds and queries, and the model that is best on dev."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vembed.config.record import dump_config
from vembed.errors import ConfigError, DataError, MachineError
from vembed.evaluation.pages import write_report
from vembed.evaluation.seeds import seeds_verdict
from vembed.evaluation.significance import verdict
from vembed.evaluation.store import read_evaluation
from vembed.files import new_folder, replace_text
from vembed.models.names import MODEL_FOLDER
from vembed.pages.page import Cell, Table
from vembed.pages.text import metric_text, signed_text
from vembed.redact import redact
from vembed.sweeping.request import Request
from vembed.sweeping.trials import Trial, Trials, best_of, dev_metric, dev_value, run_report
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from markupsafe import Markup

    from vembed.config.schema import Config
    from vembed.evaluation.result import EvaluationResult
    from vembed.evaluation.seeds import SeedsVerdict
    from vembed.sweeping.trials import Outcome, Runner

TEMPLATE = Path(__file__).parent / "templates" / "seeds"
NAME = "seeds"
SCHEMA_VERSION = 1  # raised when a key changes its meaning or goes away; a new key doesn't raise it
PLAN_FILE = "plan.json"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SeedsReport:
    """What several seeds came to."""

    outcomes: Sequence[Outcome]  # of the seeds that finished
    kept: Outcome  # the one whose model is kept
    sets: Sequence[SetOfSeeds]  # the test sets, or the dev set in their place, then guard sets
    whole: SeedsVerdict  # of the test sets together
    metric: str
    command: str

    @property
    def keeps(self) -> str:
        """Which model was kept, and why."""
        value = f"{self.metric} {dev_value(self.kept, self.metric):.4f}"
        return f"the model in {MODEL_FOLDER}/ is that of {self.kept.trial.name}, the best on the dev set ({value})"

    @property
    def limits(self) -> str:
        """What the interval doesn't say."""
        count = len(self.outcomes)
        return (
            f"The interval speaks of other seeds and of other queries of the same kind. It is wide where models "
            f"differ from seed to seed: {plural(count, 'seed')} leave {plural(count - 1, 'degree')} of freedom to "
            f"judge that by."
        )


@dataclass(frozen=True)
class SetOfSeeds:
    """One set as every seed was evaluated on it."""

    role: str  # "test", "dev" or "guard"
    pairs: Sequence[tuple[EvaluationResult, EvaluationResult]]  # of each seed before and after training
    found: SeedsVerdict

    @property
    def metric(self) -> str:
        """What decides on this set."""
        return self.found.verdict.comparison.metric


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
    if not request.steps:
        _log.info("planning, to count the steps")
        request = replace(request, steps={"each": steps_of(trials[0])})
        request.write(folder)
    steps = request.steps["each"]
    _log.info("%d seeds, one after another: %s steps in all", len(trials), f"{steps * len(trials):,}")
    runs = Trials(folder, runner, metric, len(trials), steps * len(trials))
    outcomes = [runs.train(replace(trial, steps=steps)) for trial in trials]
    finished = [each for each in outcomes if not each.error]
    failed = "; ".join(f"{each.trial.name}: {each.error} ({each.next_try})" for each in outcomes if each.error)
    if len(finished) < 2:
        raise MachineError(f"{len(finished)} of {len(outcomes)} seeds finished, too few to judge; {failed}")
    report = _judge(finished, metric, command)
    _write(folder, report, config)
    for line in _lines(report):
        _log.info("%s", line)
    if failed:
        raise MachineError(f"{len(finished)} of {len(outcomes)} seeds finished, and the verdict is of those; {failed}")
    return report


def _judge(outcomes: Sequence[Outcome], metric: str, command: str) -> SeedsReport:
    kept = best_of(outcomes, metric)
    assert kept is not None
    by_seed = [_results(each.folder) for each in outcomes]
    sets = []
    try:
        for place, (role, _) in enumerate(by_seed[0]):
            pairs = [results[place][1] for results in by_seed]
            found = seeds_verdict([[pair] for pair in pairs], pairs[0][1].deciding(metric))
            sets.append(SetOfSeeds(role, pairs, found))
    except ValueError as error:
        raise DataError(f"{kept.folder.parent}: the seeds can't be judged together: {error}") from error
    judged = [each for each in sets if each.role != "guard"]
    whole = judged[0].found
    alike = [each for each in judged if each.metric == judged[0].metric]
    if len(alike) > 1:
        whole = seeds_verdict([[each.pairs[seed] for each in alike] for seed in range(len(outcomes))], alike[0].metric)
    return SeedsReport(outcomes, kept, sets, whole, dev_metric(outcomes, metric), command)


def _results(folder: Path) -> list[tuple[str, tuple[EvaluationResult, EvaluationResult]]]:
    """Return the role of each set of a run, with its results before and after training."""
    found = []
    for place, each in enumerate(run_report(folder)["sets"]):
        own = folder / "evaluation" / ("" if place == 0 else f"{each['role']}-{place}")
        found.append((each["role"], (read_evaluation(own / "baseline"), read_evaluation(own / "final"))))
    return found


def _write(folder: Path, report: SeedsReport, config: Config) -> None:
    """Leave the kept model with its plan, the configuration, and the page."""
    source = report.kept.folder
    try:
        with new_folder(folder / MODEL_FOLDER) as model:
            shutil.copytree(source / MODEL_FOLDER, model, dirs_exist_ok=True)
        replace_text(folder / PLAN_FILE, (source / PLAN_FILE).read_text("utf-8"))
        replace_text(folder / "config.yaml", dump_config(config))
    except OSError as error:
        raise MachineError(f"{folder} can't be written: {error}; free some space, and run again") from error
    drawings = {"drawing": partial(_draw, report)}
    write_report(folder, TEMPLATE, _document(report), _shared(report), drawings, name=NAME)


def _lines(report: SeedsReport) -> list[str]:
    """Return what ends the command."""
    found = report.whole
    values = "  ".join(
        f"{each.trial.name} {value:.4f}" for each, value in zip(report.outcomes, found.finals, strict=True)
    )
    lines = [f"seeds   {values}  (standard deviation {found.spread:.4f})", f"model   {report.keeps}"]
    lines += [f"report  {report.kept.folder.parent / f'{NAME}.html'}"]
    if len(report.sets) > 1:
        lines += [f"{each.role:<5}  {each.pairs[0][1].task}: {_sentence(each)}" for each in report.sets]
    lost = [each.pairs[0][1].task for each in report.sets if _forgets(each)]
    return [*lines, f"{found.verdict.sentence}; forgets on {', '.join(lost)}" if lost else found.verdict.sentence]


def _forgets(each: SetOfSeeds) -> bool:
    return each.role == "guard" and each.found.verdict.word == "worse"


def _sentence(each: SetOfSeeds) -> str:
    sentence = each.found.verdict.sentence
    return sentence.replace("worse:", "forgets:", 1) if _forgets(each) else sentence


def _document(report: SeedsReport) -> dict[str, Any]:
    """Return the report for programs, every number unrounded."""

    def numbers(found: SeedsVerdict) -> dict[str, Any]:
        comparison = found.verdict.comparison
        return {
            "word": found.verdict.word,
            "sentence": found.verdict.sentence,
            "baseline": comparison.baseline,
            "mean": comparison.candidate,
            "difference": comparison.difference,
            "low": comparison.low,
            "high": comparison.high,
            "standard_deviation": found.spread,
            "baselines": list(found.baselines),
            "finals": list(found.finals),
        }

    return {
        "schema_version": SCHEMA_VERSION,
        "metric": report.metric,
        "seeds": [int(each.trial.choice["seed"]) for each in report.outcomes],
        "kept": report.kept.trial.name,
        "dev": [dev_value(each, report.metric) for each in report.outcomes],
        "verdict": numbers(report.whole),
        "sets": [{"role": each.role, "task": each.pairs[0][1].task, **numbers(each.found)} for each in report.sets],
        "command": report.command,
    }


def _shared(report: SeedsReport) -> dict[str, Any]:
    """Return what the page and the Markdown file both tell."""
    heads = ["Seed", f"{report.metric} (dev)", "Step"]
    heads += [f"{each.pairs[0][1].task} ({each.role})" for each in report.sets]
    rows: list[list[str | Cell]] = []
    for place, outcome in enumerate(report.outcomes):
        cells = []
        for each in report.sets:
            one = verdict(*each.pairs[place], each.metric).comparison
            bounds = f"{signed_text(one.low)} to {signed_text(one.high)}"
            cells.append(Cell(f"{metric_text(one.candidate)} ({signed_text(one.difference)})", bounds))
        dev = metric_text(dev_value(outcome, report.metric))
        rows.append([outcome.trial.choice["seed"], dev, str(outcome.kept_step), *cells])
    means: list[str | Cell] = ["mean", "", ""]
    for each in report.sets:
        all_seeds = each.found.verdict.comparison
        bounds = f"{signed_text(all_seeds.low)} to {signed_text(all_seeds.high)}, over seeds and queries"
        means.append(Cell(f"{metric_text(all_seeds.candidate)} ({signed_text(all_seeds.difference)})", bounds))
    deviations: list[str | Cell] = ["standard deviation", "", ""]
    deviations += [metric_text(each.found.spread, 4) for each in report.sets]
    tones = {place: "chosen" for place, each in enumerate(report.outcomes) if each is report.kept}
    return {
        "title": plural(len(report.outcomes), "seed"),
        "sentence": report.whole.verdict.sentence,
        "keeps": report.keeps,
        "limits": report.limits,
        "seeds": Table(heads, [*rows, means, deviations], tones=tones),
        "command": report.command,
    }


def _draw(report: SeedsReport) -> Markup:
    """Draw each seed before and after training, and the mean gain with its interval beside them."""
    from vembed.pages.charts import BETTER, CURVE_INCHES, INK, SERIES, chart_axes, inline_svg

    found = report.whole
    comparison = found.verdict.comparison
    with chart_axes(CURVE_INCHES) as (figure, axes):
        for before, after in zip(found.baselines, found.finals, strict=True):
            axes.plot([0, 1], [before, after], color=SERIES, marker="o", markersize=4.0)
        reach = [[comparison.difference - comparison.low], [comparison.high - comparison.difference]]
        axes.errorbar(
            [1.35],
            [comparison.candidate],
            yerr=reach,
            color=BETTER,
            ecolor=INK,
            marker="o",
            markersize=6.0,
            capsize=4.0,
        )
        axes.set_xticks([0, 1, 1.35], ["before", "after", "mean"])
        axes.set_xlim(-0.2, 1.6)
        axes.set_ylabel(comparison.metric)
        label = (
            "The metric of each seed before and after training, and the mean after training, around which the interval "
            "of the mean gain is drawn."
        )
        return inline_svg(figure, name="seeds", label=label)


def refuse_unfit(config: Config, *, launcher: str) -> None:
    """Refuse what several seeds can't be combined with.

    Args:
        launcher: Who started this process as one of several; empty where nobody did.

    Raises:
        ConfigError: Several processes were started for one run, or a run is to start anew.
    """
    if launcher:
        raise ConfigError(
            f"seeds trains one run after another, and {launcher} has started processes for a single one; call run.py "
            f"or vembed train (num_processes says how many processes a run has), or launch once per seed with seed=N "
            f"seeds=null"
        )
    if config.resume != "auto":
        raise ConfigError(
            f"resume {redact(config.resume)}: each of several seeds continues by itself; delete {config.output_dir} to "
            f"start anew, or choose another output_dir"
        )
