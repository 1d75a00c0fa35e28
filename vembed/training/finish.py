"""The end of a run: export the kept model, evaluate it, judge it against the untrained one, report it."""

from __future__ import annotations

import errno
import logging
import platform
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch

import vembed
from vembed.distributed.shards import is_shared
from vembed.errors import MachineError
from vembed.evaluation.diagnosis import diagnose, diagnosis_lines, performance, setup_of
from vembed.evaluation.judge import Verdict, caveats, headline, overall, recall_sum, verdict, worse_than_untrained
from vembed.evaluation.next_steps import next_commands
from vembed.evaluation.report.inputs import Reverse, RunReport
from vembed.evaluation.results import deciding_metric
from vembed.files import new_folder, replace_text, share_permissions
from vembed.models.adapters import has_adapters, merge_adapters, narrowed_bytes, save_trained
from vembed.models.exportable import writable_forms
from vembed.plan.devices import cpu_cores
from vembed.redact import redact
from vembed.text import show_bytes
from vembed.training.data import image_limits
from vembed.training.progress import LABEL_COLUMNS
from vembed.training.refresh import hard_batch_facts, mining_facts
from vembed.training.saving import gather_encoder, model_bytes
from vembed.training.trackers import read_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from vembed.evaluation.judge import SetOutcome
    from vembed.evaluation.report.vectors import Geometry
    from vembed.evaluation.results import EvaluationResult
    from vembed.models.encoder import Encoder
    from vembed.training.run import Run

_log = logging.getLogger(__name__)

PACKAGES = ("torch", "transformers", "accelerate", "numpy", "faiss-cpu", "datasets")
"""Packages whose versions decide a result, beside our own: equal on all ranks, and named in the report."""


@dataclass(frozen=True, slots=True, repr=False)
class RunResult:
    """Verdict and results of a finished run."""

    verdict: Verdict  # whether the model got better, in the mean over several test sets
    baseline: EvaluationResult  # the model before training
    final: EvaluationResult
    bm25: EvaluationResult | None  # BM25 on the same set, if asked for
    output: Path
    reverse: Reverse | None = None  # baseline and kept model with documents that search queries, where that is measured
    last: EvaluationResult | None = None  # the model of the last step, where another one is kept
    sets: tuple[SetOutcome, ...] = ()  # of each test set, that of baseline and final first, and each guard set
    caveats: tuple[str, ...] = ()  # what takes from the verdict's worth: queries that were trained on, a dev set

    @property
    def metric(self) -> str:
        """The metric that decides, as the results of the first set name it."""
        return (self.sets[0].verdict if self.sets else self.verdict).comparison.metric

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.output}: {self.verdict.sentence}>"


def finish_run(run: Run, baseline: EvaluationResult) -> RunResult:
    """Export the best model, evaluate it, judge it, report it; all ranks call it and get the same result."""
    state, evaluations, encoder, ranks = run.state, run.evaluations, run.encoder, run.ranks

    # 1. Where a better model than that of the last step is kept, the last one is measured while it is still in memory.
    with run.clock.evaluating():
        keeps_another = state.best_metric is not None and state.best_step != state.step
        last = evaluations.last(state.step) if keeps_another and run.checkpoints.manager.best() is not None else None

    # 2. Export the kept weights, put together on the first rank where they are sharded.
    kept_step = state.step
    if state.best_metric is not None:
        # The encoder still has the weights of the last step, which may have found no room for a checkpoint.
        loaded = None if state.best_step == state.step else run.checkpoints.load_best()
        kept_step = state.step if loaded is None else loaded
        if kept_step == state.best_step:
            _log.info("%-*s  step %d, the best on the dev set", LABEL_COLUMNS, "kept", kept_step)
        else:
            _log.warning(
                "step %d was the best, but has no whole checkpoint; step %d is kept", state.best_step, kept_step
            )
    whole = gather_encoder(encoder, ranks, run.fresh_encoder)
    ranks.from_first(lambda: _export(run, whole, kept_step))

    # 3. Evaluate what was written, not what was trained: with merged adapters, rounded once as in the files.
    if has_adapters(encoder) and not any(map(is_shared, encoder.parameters())):
        merge_adapters(encoder)
        if narrowed_bytes(encoder):  # merged in memory, adapters were added to weights that were rounded already
            if whole is not None:
                written = dict(whole.named_parameters())
                with torch.no_grad():
                    for name, parameter in encoder.named_parameters():
                        parameter.copy_(written[name])
            ranks.copy_from_first(encoder.parameters())
    with run.clock.evaluating():
        final, bm25, further = evaluations.final(), evaluations.bm25(), evaluations.outcomes()
    baseline_reversed = evaluations.baseline_reversed()

    # 4. Judge and report, on the first rank alone.
    def conclude() -> RunResult:
        on_dev = run.data.hashes.get("test") in (None, run.data.hashes.get("dev"))
        sets = (evaluations.verdict_outcome(baseline, final.forward), *further)
        reverse = None
        if baseline_reversed is not None and final.reverse is not None:
            reverse = Reverse(
                task=evaluations.verdict_task.reversed(),
                verdict=verdict(baseline_reversed, final.reverse, evaluations.metric),
                baseline=baseline_reversed,
                final=final.reverse,
                last=None if last is None else last.reverse,
            )
        result = RunResult(
            verdict=overall(sets),
            baseline=baseline,
            final=final.forward,
            bm25=bm25,
            output=run.output.path,
            reverse=reverse,
            last=None if last is None else last.forward,
            sets=sets,
            caveats=caveats(sets, num_choices=sum(step > 0 for step, _ in state.evaluations) if on_dev else 0),
        )
        _publish(run, result, final.geometry, kept_step)
        return result

    return ranks.from_first(conclude)


def _export(run: Run, encoder: Encoder | None, kept_step: int) -> None:
    """Write model/, whole or not at all; where the disk is full, older checkpoints make room for it.

    Two checkpoints always stay: the newest whole one and the one that the model is of. Until the model is written they
    are all that there is of the run, and a run that continues from them gives the same model once there is room.
    """
    assert encoder is not None, "the first rank has the whole model"
    output, checkpoints = run.output, run.checkpoints.manager
    # Each round frees one checkpoint, until the model fits or only the last two are left.
    while True:
        try:
            with new_folder(output.model) as folder:
                save_trained(encoder, folder, output.adapter)
            share_permissions(output.adapter)
            return
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            removed = checkpoints.make_room(kept_step) if is_full else None
            if removed is None:
                whole = checkpoints.whole_ones()
                again = f"the same command continues from there: {whole}" if whole else "no checkpoint is whole"
                raise MachineError(
                    f"{output.model} can't be written: {error}. It takes about {show_bytes(model_bytes(encoder))}: "
                    f"free some space, and run again; {again}"
                ) from error
            _log.warning("%s is removed: the model found no room beside it (%s)", removed, error)


def _publish(run: Run, result: RunResult, geometry: Geometry | None, kept_step: int) -> None:
    """Write the report and the model's card, and log the last lines, the verdict last of all."""
    from vembed.evaluation.report.run_report import write_report  # with drawings: not for --plan

    rows = read_rows(run.output.path / "metrics.jsonl")
    more_facts = (*mining_facts(run.output.mining), *hard_batch_facts(run.output.hard_vectors))
    data_facts = replace(run.data, more_facts=more_facts).facts()
    # The model is written by now. Whatever fails from here on is told, and takes nothing from it.
    environment = {  # what a reader needs to judge the numbers
        **package_versions(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": run.runtime.machine.device_name,
        "cpu cores": str(cpu_cores()),
        "processes": str(run.plan.world_size),
        "dtype": run.plan.dtype,
    }
    with _failure_logged("the report"):
        report = _report(run, result, rows, kept_step, data_facts=data_facts, environment=environment)
        write_report(run.output.path / "report", replace(report, geometry=geometry))
    with _failure_logged("the model card"):
        _write_card(run, data_facts, environment)

    def line(label: str, text: object) -> None:
        _log.info("%-*s  %s", LABEL_COLUMNS, label, text)

    line("model", run.output.model)
    line("report", run.output.path / "report" / "report.html")
    for number, command in enumerate(next_commands(run.output.path, run.keys)):
        line("" if number else "next", command)
    line("time", run.clock.total(rows))
    if result.reverse is not None:
        line("reversed", f"{result.reverse.task.direction}: {result.reverse.verdict.sentence}")
        before, after = (
            recall_sum(result.baseline, result.reverse.baseline),
            recall_sum(result.final, result.reverse.final),
        )
        if before and after:  # None where one of them lacks a cut-off
            line("rsum", f"{before.value:.1f} -> {after.value:.1f} of 600")
    for outcome in result.sets if len(result.sets) > 1 else ():
        line(outcome.role, outcome.line)
    if run.evaluations.test is not None and (
        lost := worse_than_untrained(run.state.evaluations, _dev_metric(run), kept_step)
    ):
        _log.warning("%s", lost)
    for caveat in result.caveats:
        line("caveat", caveat)
    _log.info("%s", headline(result.verdict, result.sets))


def _report(
    run: Run,
    result: RunResult,
    rows: Sequence[Mapping[str, float]],
    kept_step: int,
    *,
    data_facts: list[tuple[str, str]],
    environment: Mapping[str, str],
) -> RunReport:
    """Put the report together, and log what the numbers of the steps say about the run."""
    plan, machine, state, evaluations = run.plan, run.runtime.machine, run.state, run.evaluations
    limits = state.step_limits  # of a run that ran out of memory
    smaller = None if limits is None or limits.rows == plan.chunks.rows else (limits.rows, limits.tokens)
    setup = setup_of(plan, machine, rows, skipped_steps=state.skipped_steps, smaller_chunk=smaller)
    findings = diagnose(rows, setup, result.sets[0].verdict)
    for label, text in diagnosis_lines(rows, findings):
        _log.info("%-*s  %s", LABEL_COLUMNS, label, text)
    training_setup = {
        "model": redact(run.encoder.name),
        "strategy": " ".join(filter(None, (plan.way.strategy, plan.way.mode))),
        "device": machine.device_name,
        "global_batch_size": plan.batch.total,
        "gradient_accumulation_steps": plan.batch.accumulated,
    }
    return RunReport(
        title=redact(run.output.path.name),
        verdict=result.sets[0].verdict,
        sets=result.sets,
        caveats=result.caveats,
        task=evaluations.verdict_task,
        baseline=result.baseline,
        final=result.final,
        bm25=result.bm25,
        last=result.last,
        reverse=result.reverse,
        kept_step=kept_step,
        last_step=state.step,
        steps=read_rows(run.output.path / "metrics.jsonl", keeps_nan=True),  # the curves count what wasn't finite
        evaluations=state.evaluations,
        plan=plan.to_json(),
        config=run.keys,
        environment=environment,
        data_facts=[*data_facts, *_training_facts(run, rows)],
        data_hashes=run.data.hashes,
        command=run.command,
        image_limits=image_limits(run.config),
        dev_task=evaluations.dev.name if evaluations.dev is not None and evaluations.test is not None else "",
        dev_metric=_dev_metric(run),
        findings=findings,
        performance=performance(rows, setup, **training_setup),
    )


@contextmanager
def _failure_logged(what: str) -> Iterator[None]:
    """Log why something can't be written within the block: the run must not look lost, as its model is saved."""
    try:
        yield
    except (MachineError, OSError) as error:
        _log.error("%s could not be written; the model is complete: %s", what, error)
    except Exception:  # noqa: BLE001 - whatever it is; the log has the traceback
        _log.error("%s could not be written; the model is complete\n%s", what, traceback.format_exc())


def _write_card(run: Run, data_facts: Sequence[tuple[str, str]], environment: Mapping[str, str]) -> None:
    """Write the README.md beside the model, as `vembed export` would.

    Args:
        data_facts: (label, value) of the data; like `environment`, used where the report could not be written.
    """
    from vembed.evaluation.card import CARD_FILE, render_card  # with huggingface_hub: not for --plan
    from vembed.evaluation.card_facts import CardFacts, gather_run, model_facts, read_report, written_with

    output, encoder = run.output, run.encoder
    facts, versions = read_report(output.path)
    told = gather_run(output.path, config=run.keys, data_facts=facts or data_facts, environment=versions or environment)
    model = model_facts(encoder, writable_forms(encoder)[0])
    card = CardFacts(title=told.name, folder=output.model.name, model=model, run=told, versions=written_with())
    replace_text(output.model / CARD_FILE, render_card(card))
    share_permissions(output.model)


def _dev_metric(run: Run) -> str:
    """Return the metric that chose the checkpoint: a dev set of another kind than the test set has one of its own."""
    metric, evaluations = run.evaluations.metric, run.state.evaluations
    return deciding_metric(evaluations[-1][1], metric) if evaluations else metric


def _training_facts(run: Run, rows: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """Return (label, value) of what training met in the data, counted over all steps."""
    is_filtered = run.keys.get("false_negative_filter", "identity") != "identity"
    more = "; those that false_negative_filter leaves out aren't counted" if is_filtered else ""
    masked = [int(row["masked_negatives"]) for row in rows if "masked_negatives" in row]
    pairs = f"none: mask_false_negatives is false{more}"
    if masked:
        pairs = f"{sum(masked):,} (query, document) pairs in {len(masked):,} steps{more}"
    return [
        ("over-long training texts cut", f"{run.state.num_truncated:,}"),
        ("false negatives masked", pairs),
        ("steps skipped for numbers that aren't finite", f"{run.state.skipped_steps:,}"),
    ]


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide a result."""
    others = {package: version(package) for package in PACKAGES}
    return {"python": platform.python_version(), "vembed": vembed.__version__, **others}
