"""The bytes that a run will write: told in the plan, and refused before the first step where they don't fit."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from vembed.checkpoint.format import DISK_MARGIN, free_disk_bytes, step_name, steps_in
from vembed.errors import MachineError
from vembed.models.names import is_builtin
from vembed.text import show_bytes
from vembed.training.saving import bytes_of, model_bytes, module_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from vembed.checkpoint.keys import OutputKeys
    from vembed.models.encoder import Encoder
    from vembed.plan.plan import Plan
    from vembed.training.output import OutputFolder

ROW_BYTES = 600
"""Approximate size of a step's row in metrics.jsonl."""


@dataclass(frozen=True, slots=True)
class DiskNeeds:
    """Bytes that a run writes at most, and bytes that it can't do without."""

    checkpoint: int  # one of them
    num_certain: int  # checkpoints that stand together in any case, the one being written with them
    num_possible: int  # where an older one is the best, and with saves by the clock
    model: int
    initial: int  # of a model from scratch, as long as it isn't written
    embeddings: int  # of frozen towers and of a teacher, kept in the output folder
    metrics: int
    standing: int = 0  # of all that, what the folder holds already

    @classmethod
    def of(
        cls, encoder: Encoder, loss: nn.Module, plan: Plan, keys: OutputKeys, output: OutputFolder, *, embeddings: int
    ) -> DiskNeeds:
        """Count, from the tensors and from when the run saves."""
        trained = (parameter for parameter in chain(encoder.parameters(), loss.parameters()) if parameter.requires_grad)
        weights = bytes_of((*module_tensors(encoder).values(), *module_tensors(loss).values()))
        total, every = plan.steps.total, plan.steps.eval_every
        # Steps at which a save is certain; those by the clock and those of a new best can only be bounded.
        by_epochs = [plan.steps.per_epoch] if keys.save_strategy == "epoch" else []
        spans = [*([] if keys.save_steps is None else [keys.save_steps]), *by_epochs, total]  # the last step is saved
        num_certain = len(
            {step for span in spans for step in range(span, total + 1, span)[: keys.save_total_limit + 1]}
        )
        num_possible = total if keys.save_minutes is not None else num_certain + (total // every if every else 0)
        kept = keys.save_total_limit
        return cls(
            checkpoint=weights + 2 * bytes_of(trained),  # AdamW has two moments
            num_certain=min(num_certain, kept + 1),
            num_possible=min(num_possible, kept + 1 + (every is not None)),
            model=model_bytes(encoder),
            initial=model_bytes(encoder) if is_builtin(encoder.name) and not output.initial_model.is_dir() else 0,
            embeddings=embeddings,
            metrics=total * ROW_BYTES,
            standing=sum(
                path.stat().st_size
                for step in steps_in(output.checkpoints)
                for path in (output.checkpoints / step_name(step)).glob("*")  # none in a file or a link to nothing
                if path.is_file()
            ),
        )

    def total(self, num_checkpoints: int) -> int:
        """Return the bytes of a run with so many checkpoints together; a save asks for more than it writes."""
        checkpoints = int((num_checkpoints - 1 + DISK_MARGIN) * self.checkpoint)
        return max(0, checkpoints - self.standing) + self.model + self.initial + self.embeddings + self.metrics

    def line(self, free: int) -> str:
        """Say in one line what the run writes."""
        several = "checkpoint" if self.num_possible == 1 else "checkpoints together"
        parts = [f"{self.num_possible} {several} of {show_bytes(self.checkpoint)}", f"model/ {show_bytes(self.model)}"]
        if self.initial:
            parts.append(f"initial_model/ {show_bytes(self.initial)}")
        if self.embeddings:
            parts.append(f"stored embeddings {show_bytes(self.embeddings)}")
        if self.standing:
            parts.append(f"{show_bytes(self.standing)} of it are there")
        needed = show_bytes(self.total(self.num_possible))
        return f"writes up to {needed} ({', '.join(parts)}), {show_bytes(free)} free"

    def refuse_small(self, free: int, output: Path, keys: OutputKeys, *, may_adapt: bool) -> None:
        """Refuse a disk that can't hold what the run writes in any case.

        Raises:
            MachineError: With the numbers and the ways out.
        """
        needed = self.total(self.num_certain)
        if needed <= free:
            return
        ways = ["free some space", "set output_dir to a folder on another disk"]
        if self.num_certain > 3:
            ways.append(f"lower save_total_limit from {keys.save_total_limit}")
        if self.num_certain > 1:
            fewer = "raise save_steps, or leave it out" if keys.save_steps else "leave save_strategy epoch out"
            ways.append(f"{fewer}: then only the last step is saved")
        if may_adapt:
            ways.append("use_lora: true, with which a checkpoint holds the adapters alone")
        raise MachineError(
            f"output_dir {output}: the run writes at least {show_bytes(needed)} ({self.num_certain} x "
            f"{show_bytes(self.checkpoint)} for checkpoints, a fifth of one to spare, {show_bytes(self.model)} for "
            f"model/), and its disk has {show_bytes(free)} free. Nothing was trained. Ways out: {'; '.join(ways)}"
        )


def free_bytes(folder: Path) -> int:
    """Return the bytes that can be written where a folder lies, or will lie."""
    folders = (folder.absolute(), *folder.absolute().parents)
    return free_disk_bytes(next(existing for existing in folders if existing.exists()))
