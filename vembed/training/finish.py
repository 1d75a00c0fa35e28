"""The end of a run: the kept model is exported and evaluated, and a verdict and a report are left."""

from __future__ import annotations

import errno
import logging
import platform
import traceback
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch

from vembed.data.images import ImageLimits
from vembed.distributed.shards import is_shared
from vembed.errors import MachineError
from vembed.evaluation.directions import Directions, recall_sums
from vembed.evaluation.report.data import Reverse, RunReport
from vembed.evaluation.sets import SetOutcome, headline, overall, worse_than_untrained
from vembed.evaluation.significance import Verdict, verdict
from vembed.files import new_folder, share_permissions
from vembed.models.adapters.lora import has_adapters, merge_adapters
from vembed.models.adapters.trained import narrowed_bytes, save_trained
from vembed.plan.hardware import cpu_cores
from vembed.redact import redact
from vembed.text import show_bytes
from vembed.training.diagnosis import diagnose, diagnosis_lines, performance, setup_of
from vembed.training.next_steps import next_commands
from vembed.training.progress import LABEL_COLUMNS
from vembed.training.saving import gather_encoder, model_bytes
from vembed.training.trackers.jsonl import read_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from vembed.checkpoint.manager import CheckpointManager
    from vembed.distributed.ranks import Ranks
    from vembed.evaluation.report.geometry import Geometry
    from vembed.evaluation.result import EvaluationResult
    from vembed.evaluation.sets import SetRole
    from vembed.models.encoder import Encoder
    from vembed.plan.hardware import Machine
    from vembed.plan.plan import Plan
    from vembed.training.evaluations import Evaluations
    from vembed.training.inputs import RunData
    from vembed.training.output import OutputFolder
    from vembed.training.progress import RunClock
    from vembed.training.saving import RunCheckpoints
    from vembed.training.state import RunState

_log = logging.getLogger(__name__)

PACKAGES = ("vembed", "torch", "transformers", "accelerate", "numpy", "faiss-cpu", "datasets")


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

    @property
    def metric(self) -> str:
        """The metric that decides, as the results of the first set name it."""
        return (self.sets[0].verdict if self.sets else self.verdict).comparison.metric

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.output}: {self.verdict.sentence}>"


@dataclass(frozen=True, slots=True)
class FinishParts:
    """What the end of a run works with."""

    output: OutputFolder
    evaluations: Evaluations
    checkpoints: RunCheckpoints
    # builds the encoder as training began with it, where weights are gathered from all ranks
    fresh: Callable[[], Encoder]
    ranks: Ranks  # who takes part; the first one writes
    plan: Plan
    config: Mapping[str, object]  # key -> value, for the report
    data: RunData  # what it was trained and judged on, for the report
    max_image_pixels: int  # of a picture that may be decoded for the report
    machine: Machine
    command: str  # the command that repeats the run
    clock: RunClock


def finish_run(parts: FinishParts, state: RunState, baseline: EvaluationResult) -> RunResult:
    """Export the best model, evaluate it, judge it, report it."""
    with parts.clock.evaluating():
        last = _last(parts, state)
    kept = _load_kept(parts, state)
    whole = gather_encoder(parts.checkpoints.encoder, parts.ranks, parts.fresh)
    parts.ranks.from_first(lambda: _export(whole, parts.output, parts.checkpoints.manager, kept))
    encoder = parts.checkpoints.encoder
    if has_adapters(encoder) and not any(map(is_shared, encoder.parameters())):
        merge_adapters(encoder)  # as the first rank just did: all of them evaluate what was written
        if narrowed_bytes(encoder):
            _round_as_written(encoder, whole, parts.ranks)
    with parts.clock.evaluating():
        final, bm25, further = parts.evaluations.final(), parts.evaluations.bm25(), parts.evaluations.outcomes()
    reversed_baseline = parts.evaluations.baseline_reversed()

    def conclude() -> RunResult:
        role: SetRole = "dev" if parts.evaluations.test is None else "test"
        sets = (SetOutcome.of(role, baseline, final.forward, parts.evaluations.metric), *further)
        result = RunResult(
            verdict=overall(sets),
            baseline=baseline,
            final=final.forward,
            bm25=bm25,
            output=parts.output.path,
            reverse=_reverse(parts.evaluations, reversed_baseline, final, last),
            last=None if last is None else last.forward,
            sets=sets,
        )
        _publish(parts, state, result, kept_step=kept, geometry=final.geometry)
        return result

    return parts.ranks.from_first(conclude)


@torch.no_grad()
def _round_as_written(encoder: Encoder, written: Encoder | None, ranks: Ranks) -> None:
    """Take the weights of model/, rounded once: merged in memory, adapters were added to weights rounded already."""
    if written is not None:
        sums = dict(written.named_parameters())
        for name, parameter in encoder.named_parameters():
            parameter.copy_(sums[name])
    ranks.copy_from_first(encoder.parameters())


def _load_kept(parts: FinishParts, state: RunState) -> int:
    """Put the weights that are kept into the encoder and return their step."""
    if state.best_metric is None:
        return state.step
    # The encoder still has those of the last step, which may have found no room for a checkpoint.
    loaded = None if state.best_step == state.step else parts.checkpoints.load_best()
    kept = state.step if loaded is None else loaded
    if kept == state.best_step:
        _log.info("%-*s  step %d, the best on the dev set", LABEL_COLUMNS, "kept", kept)
    else:
        _log.warning("step %d was the best, but has no whole checkpoint; step %d is kept", state.best_step, kept)
    return kept


def _export(encoder: Encoder | None, output: OutputFolder, checkpoints: CheckpointManager, kept: int) -> None:
    """Write the model, whole or not at all; where the disk is full, older checkpoints make room for it.

    The newest whole checkpoint stays in any case, and the one that the model is of: until the model is written, they
    are all that there is of the run, and a run that continues from them gives the same model once there is room.
    """
    assert encoder is not None
    while True:
        try:
            with new_folder(output.model) as folder:
                save_trained(encoder, folder, output.adapter)
            share_permissions(output.adapter)
            return
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            removed = checkpoints.make_room(kept) if is_full else None
            if removed is None:
                whole = checkpoints.whole_ones()
                again = f"the same command continues from there: {whole}" if whole else "no checkpoint is whole"
                raise MachineError(
                    f"{output.model} can't be written: {error}. It takes about {show_bytes(model_bytes(encoder))}: "
                    f"free some space, and run again; {again}"
                ) from error
            _log.warning("%s is removed: the model found no room beside it (%s)", removed, error)


def _publish(
    parts: FinishParts, state: RunState, result: RunResult, *, kept_step: int, geometry: Geometry | None
) -> None:
    """Write the report and the model's card, and log the verdict."""
    _write_report(parts, lambda: replace(_report(parts, state, result, kept_step=kept_step), geometry=geometry))
    from vembed.training.card import write_model_card  # with huggingface_hub, and drawings above: not for --plan

    write_model_card(
        parts.output,
        parts.checkpoints.encoder,
        config=parts.config,
        data_facts=parts.data.facts(),
        environment=environment(parts.machine.device_name, parts.plan),
    )
    rows = read_rows(parts.output.path / "metrics.jsonl")
    for label, line in _last_lines(parts, result, rows):
        _log.info("%-*s  %s", LABEL_COLUMNS, label, line)
    if parts.evaluations.test is not None and (
        lost := worse_than_untrained(state.evaluations, parts.evaluations.metric, kept_step)
    ):
        _log.warning("%s", lost)
    _log.info("%s", headline(result.verdict, result.sets))


def _last_lines(
    parts: FinishParts, result: RunResult, rows: Sequence[Mapping[str, float]]
) -> Iterator[tuple[str, object]]:
    """Yield what the log ends with before the verdict, by label."""
    yield "model", parts.output.model
    yield "report", parts.output.path / "report" / "report.html"
    for number, command in enumerate(next_commands(parts.output.path, parts.config)):
        yield "" if number else "next", command
    yield "time", parts.clock.total(rows)
    if result.reverse is not None:
        yield "reversed", f"{result.reverse.task.direction}: {result.reverse.verdict.sentence}"
        before = Directions(result.baseline, result.reverse.baseline)
        if sums := recall_sums(before, Directions(result.final, result.reverse.final)):
            yield "rsum", f"{sums[0].value:.1f} -> {sums[1].value:.1f} of 600"
    for outcome in result.sets if len(result.sets) > 1 else ():
        yield outcome.role, outcome.line


def _last(parts: FinishParts, state: RunState) -> Directions | None:
    """Evaluate the model of the last step, which the encoder still is, where the best one is another."""
    is_another = state.best_metric is not None and state.best_step != state.step
    return parts.evaluations.last(state.step) if is_another and parts.checkpoints.manager.best() is not None else None


def _reverse(
    evaluations: Evaluations, baseline: EvaluationResult | None, final: Directions, last: Directions | None
) -> Reverse | None:
    """Return the comparison in the reversed direction, where it is measured."""
    if baseline is None or final.reverse is None:
        return None
    return Reverse(
        task=evaluations.verdict_task.reversed(),
        verdict=verdict(baseline, final.reverse, evaluations.metric),
        baseline=baseline,
        final=final.reverse,
        last=None if last is None else last.reverse,
    )


def _training_facts(
    state: RunState, rows: Sequence[Mapping[str, float]], config: Mapping[str, object]
) -> list[tuple[str, str]]:
    """Return (label, value) of what training met in the data, counted over all steps."""
    facts = [("over-long training texts cut", f"{state.num_truncated:,}")]
    is_filtered = config.get("false_negative_filter", "identity") != "identity"
    more = "; those that false_negative_filter leaves out aren't counted" if is_filtered else ""
    masked = [int(row["masked_negatives"]) for row in rows if "masked_negatives" in row]
    if masked:
        facts.append(
            ("false negatives masked", f"{sum(masked):,} (query, document) pairs in {len(masked):,} steps{more}")
        )
    else:
        facts.append(("false negatives masked", f"none: mask_false_negatives is false{more}"))
    facts.append(("steps skipped for numbers that aren't finite", f"{state.skipped_steps:,}"))
    return facts


def _write_report(parts: FinishParts, report: Callable[[], RunReport]) -> None:
    """Write the report. The model is saved by now: a report that fails must not make the run look lost."""
    from vembed.evaluation.report.write import write_report

    try:
        write_report(parts.output.path / "report", report())
    except OSError as error:
        _log.error("the report could not be written; the model is complete: %s", error)
    except Exception:  # noqa: BLE001 - whatever it is, the model stands; the log has the traceback
        _log.error("the report could not be written; the model is complete\n%s", traceback.format_exc())


def _report(parts: FinishParts, state: RunState, result: RunResult, *, kept_step: int) -> RunReport:
    """Put the report together, with what the numbers of the training say."""
    dev = parts.evaluations.dev
    rows = read_rows(parts.output.path / "metrics.jsonl")
    setup = setup_of(parts.plan, parts.machine, state, rows)
    findings = diagnose(rows, setup)
    for label, line in diagnosis_lines(rows, findings):
        _log.info("%-*s  %s", LABEL_COLUMNS, label, line)
    facts = {
        "model": redact(parts.checkpoints.encoder.name),
        "strategy": " ".join(filter(None, (parts.plan.way.strategy, parts.plan.way.mode))),
        "device": parts.machine.device_name,
        "global_batch_size": parts.plan.batch.total,
        "gradient_accumulation_steps": parts.plan.batch.accumulated,
    }
    return RunReport(
        title=redact(parts.output.path.name),
        verdict=result.sets[0].verdict,
        overall=result.verdict,
        sets=result.sets,
        task=parts.evaluations.verdict_task,
        baseline=result.baseline,
        final=result.final,
        bm25=result.bm25,
        last=result.last,
        reverse=result.reverse,
        kept_step=kept_step,
        last_step=state.step,
        steps=rows,
        evaluations=state.evaluations,
        plan=parts.plan.to_json(),
        config=parts.config,
        environment=environment(parts.machine.device_name, parts.plan),
        data_facts=[*parts.data.facts(), *_training_facts(state, rows, parts.config)],
        data_hashes=parts.data.hashes,
        command=parts.command,
        image_limits=ImageLimits(max_pixels=parts.max_image_pixels),
        dev_task=dev.name if dev is not None and parts.evaluations.test is not None else "",
        findings=findings,
        performance=performance(rows, setup, **facts),
    )


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide a result."""
    return {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}}


def environment(device_name: str, plan: Plan) -> dict[str, str]:
    """Return what a reader needs to judge the numbers: versions, machine, precision."""
    return {
        **package_versions(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": device_name,
        "cpu cores": str(cpu_cores()),
        "processes": str(plan.world_size),
        "dtype": plan.dtype,
    }
