"""`vembed merge MODEL MODEL ... --output DIR`: one model of several, its weights given or chosen on sets."""

from __future__ import annotations

import difflib
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from vembed.distributed.signals import StopSignal
from vembed.entrypoints.command import command_line, held_output, quiet_libraries, run_command
from vembed.entrypoints.options import ModelOptions, check, parse_words
from vembed.errors import ConfigError, ExitCode
from vembed.evaluation.keys import metrics_that_choose
from vembed.files import clean_beside, home_path
from vembed.pages.write import refuse_foreign_report
from vembed.section import Count, option, word

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


WEIGHT_NOISE = 1e-6
"""By which the sum of weights that were written with a few digits may differ from 1."""

REPORT_KEYS = ("chosen", "guards", "points")
"""Keys of report.json that tell the report of a merge from others."""


class MergeOptions(ModelOptions):
    """Merge models that were trained from the same base: mixing some of the old weights back in helps a tuned model to
    keep its earlier abilities. Give the weights, or sets to choose them on.
    """  # noqa: D205 - the sentence that --help prints

    headings: ClassVar = {"when weights are chosen": ("guard", "split", "guard_split", "metric", "steps", "batch_size")}

    method: Literal["linear", "slerp"] = option("linear", "how weights are mixed; default: linear")
    weights: list[float] | None = option(None, "weight of each model; their sum is 1", metavar="W", one_of="weights!")
    data: list[str] | None = option(None, "dev sets to choose the weights on", metavar="SET", one_of="weights!")
    guard: list[str] = option([], "sets on which the merged model must stay as good as the first", metavar="SET")
    split: str | None = option(None, "split of the sets of --data; default: their validation split", metavar="SPLIT")
    guard_split: str | None = option(None, "split of the sets of --guard; default: that of --split", metavar="SPLIT")
    metric: str = option("ndcg@10", "metric to choose by; default: ndcg@10", metavar="M")
    steps: Annotated[int, Field(ge=1)] = option(10, "try weights in steps of 1/N; default: 10", metavar="N")
    batch_size: Count = option(256, "largest number of items per encoder call", metavar="N")
    overwrite: bool = option(False, "replace the model that DIR holds")

    models: list[str] = word("MODEL", "hub id, local folder, or output of a run; put the one to preserve first")
    output: Path = option(..., "folder to write; must be empty", metavar="DIR")

    @property
    def targets(self) -> list[str]:
        """Sets to win on; none where the weights are given."""
        return self.data or []

    @property
    def sets(self) -> list[tuple[str, str | None]]:
        """Path and split of each set: those to win on, then those to keep."""
        guard_split = self.split if self.guard_split is None else self.guard_split
        return [*((path, self.split) for path in self.targets), *((path, guard_split) for path in self.guard)]


OPTIONS = MergeOptions


def main(arguments: Sequence[str], *, program: str) -> int:
    """Merge models into one."""
    given = parse_words(MergeOptions, arguments, program=program)
    command = command_line(program, arguments)
    return run_command(partial(_run, given, arguments, command))


def _run(given: Mapping[str, Any], words: Sequence[str], command: str) -> int:
    options = check(MergeOptions, given)
    _refuse(options)
    output = home_path(options.output)
    if options.weights is None:
        refuse_foreign_report(output.with_name(f"{output.name}-report"), REPORT_KEYS)
    work = output.with_name(f".{output.name}.merging")  # keeps the evaluations of the choice until the model is written

    def clean() -> None:
        clean_beside(output.resolve())
        shutil.rmtree(work, ignore_errors=True)

    with held_output(output, words, overwrite=options.overwrite, clean=clean) as is_finished:
        if is_finished:
            return ExitCode.OK
        # Behind the lock: a command that is refused, or has nothing left to do, imports no torch.
        import torch

        from vembed.distributed.runtime import start_runtime
        from vembed.models.export import refuse_taken
        from vembed.models.names import locate_model
        from vembed.plugins.merge.merge import merge_models

        quiet_libraries()
        refuse_taken(output, overwrite=options.overwrite, source=None)
        models = [options.model_keys(locate_model(name)[0]) for name in options.models]
        device = start_runtime(deterministic=False).device
        with StopSignal(advice="evaluations that are done are kept, and the same command continues") as stop:
            dtype = torch.bfloat16 if options.bf16 else None
            merge_models(
                options, models, output, work, device=device, autocast_dtype=dtype, command=command, poll=stop.poll
            )
    return ExitCode.OK


def _refuse(options: MergeOptions) -> None:
    """Refuse what can't be done, before torch is imported, which takes seconds."""
    if len(options.models) < 2:
        raise ConfigError("vembed merge takes at least two models; put the one to preserve first")
    if options.weights is not None:
        if options.guard:
            raise ConfigError("--guard chooses weights, and --weights gives them: leave one out")
        if len(options.weights) != len(options.models):
            raise ConfigError(f"--weights names {len(options.weights)} weights for {len(options.models)} models")
        if min(options.weights) < 0 or not abs(sum(options.weights) - 1) <= WEIGHT_NOISE:
            raise ConfigError("--weights must be at least 0 and add up to 1, such as 0.4 0.6")
    known = metrics_that_choose()
    if options.metric not in known:
        close = difflib.get_close_matches(options.metric, known, n=1, cutoff=0.0)
        raise ConfigError(f"--metric: there is no {options.metric!r}; did you mean {close[0]}?")

    from vembed.data.judged import find_split
    from vembed.data.keys import SPLIT_NAMES
    from vembed.data.read import DataSource

    for path, split in options.sets:
        DataSource(path, "validation", split=split, user_names=("--data or --guard", "--split")).refuse_missing()
    for path in options.targets if options.split is None else ():
        if DataSource(path, "validation").kind != "beir":
            continue
        # A BEIR folder whose only split is its test split would serve without a word.
        split, _ = find_split(home_path(path), None, "validation", "--split")
        if split not in SPLIT_NAMES["validation"]:
            raise ConfigError(
                f"{path} has no validation split; it has: {split}. Choosing the weights on it would flatter them; to "
                f"do so all the same: --split {split}"
            )
