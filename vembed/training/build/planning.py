"""The plan of a run: sizes in, decisions out, and what a resumed run takes back from its checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vembed.models.pictures import picture_bytes
from vembed.models.profile import model_size
from vembed.plan.plan import DataSize, Plan, make_plan
from vembed.training.build.data import measures_both_directions
from vembed.training.build.model import DTYPES

if TYPE_CHECKING:
    from vembed.checkpoint.format import LoadedCheckpoint
    from vembed.config.schema import Config
    from vembed.data.sampler import GlobalSampler
    from vembed.distributed.runtime import Runtime
    from vembed.models.encoder import Encoder
    from vembed.training.inputs import RunData


PLAN_READ_BACK = ("gradient_cache_chunk_size", "gradient_cache_chunk_tokens", "retain", "dtype", "loss_tile_size")
"""Decisions that a resumed run takes from its checkpoint: they change rounding, or the machine may differ."""


def build_plan(config: Config, runtime: Runtime, data: RunData, encoder: Encoder, sampler: GlobalSampler) -> Plan:
    """Decide what the configuration left open."""
    compute_dtype = DTYPES[config.torch_dtype]
    counts = data.counts
    size = DataSize(
        num_records=counts.num_records,
        steps_per_epoch=sampler.steps_per_epoch,
        documents_per_query=counts.num_documents / counts.num_records,
        pictures_per_record=counts.items.num_pictures / counts.num_records,
        picture_bytes=picture_bytes(encoder),
        notes=(*data.notes, *sampler.notes, *_idle_augmentation(config, data), *_direction_notes(config, data)),
    )
    return make_plan(config, runtime.machine, model_size(encoder, compute_dtype=compute_dtype), size)


def _direction_notes(config: Config, data: RunData) -> list[str]:
    """Say that the verdict's set is measured in both directions, and why."""
    task = data.test or data.dev
    if task is None or not measures_both_directions(config, data):
        return []
    why = "it crosses from texts to pictures" if config.eval_both_directions == "auto" else "eval_both_directions"
    turned = task.reversed()
    sizes = f"{len(turned.queries)} queries, {len(turned.documents)} documents"
    return [f"{task.name} is also measured in reverse, before and after training ({why}): {turned.direction}, {sizes}."]


def _idle_augmentation(config: Config, data: RunData) -> list[str]:
    """Say that changing pictures changes nothing where there are none."""
    if data.counts.items.has_pictures:
        return []
    idle = {"image_augmentation": config.image_augmentation != "none", "image_flip": config.image_flip}
    return [f"{name} has no effect: the training data hold no pictures." for name, is_set in idle.items() if is_set]


def read_back(plan: Plan, checkpoint: LoadedCheckpoint) -> Plan:
    """Return the plan with the decisions that the checkpoint's run had taken."""
    saved = checkpoint.stamp["plan"]
    assert isinstance(saved, dict)
    decided: dict[str, Any] = {name: saved[name] for name in PLAN_READ_BACK if name in saved}
    reasons = (*plan.reasons, f"resumed from step {checkpoint.step}: {', '.join(PLAN_READ_BACK)} are the checkpoint's")
    return replace(plan, **decided, reasons=reasons)
