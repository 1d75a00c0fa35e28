"""The plan of a run: sizes in, decisions out, and what a resumed run takes back from its checkpoint."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from vembed.config.schema import default_of
from vembed.data.picture_survey import ItemCounts, refuse_unread
from vembed.distributed.runtime import start_runtime
from vembed.json_text import fit
from vembed.models.hub import DTYPES
from vembed.models.keys import model_names, renamed
from vembed.models.load import load_skeleton
from vembed.models.measure import ProfileTarget
from vembed.models.names import locate, scratch_rate
from vembed.models.profile import profile_model
from vembed.plan.devices import Devices, cpu_cores
from vembed.plan.plan import Plan, compute_dtype, make_plan
from vembed.plan.problem import DataSize, Mode, Strategy
from vembed.plan.strategy import DECIDING_KEYS
from vembed.training.data import measures_both_directions
from vembed.training.model import teacher_dimension
from vembed.training.refresh import documents_per_query, mining_notes

if TYPE_CHECKING:
    from vembed.checkpoint.tensors import LoadedCheckpoint
    from vembed.config.schema import Config
    from vembed.data.run_data import RunData
    from vembed.distributed.runtime import Runtime
    from vembed.plan.devices import Machine
    from vembed.plan.memory import ModelSize


_Count = Annotated[int, Field(gt=0)]
_Share = Annotated[float, Field(ge=0, le=1)]

PLAN_READ_BACK: dict[str, Any] = {
    "global_batch_size": _Count,
    "gradient_accumulation_steps": _Count,
    "learning_rate": float,
    "steps": int,
    "steps_per_epoch": _Count,
    "warmup_steps": int,
    "gradient_cache_chunk_size": _Count,
    "gradient_cache_chunk_tokens": _Count,
    "retain": _Share,
    "retain_tokens": int | None,
    "packing": bool,
    "dtype": Literal["float64", "float32", "bfloat16", "float16"],
    "compile": bool,
    "loss_tile_size": _Count,
    "use_lora": bool,
    "gradient_checkpointing": bool,
}
"""Decisions that a resumed run takes from its checkpoint, and what they are: they change what is trained or its
rounding, or the machine may differ."""

SHARDING_READ_BACK: dict[str, Any] = {
    "strategy": Strategy,
    "gradient_cache": bool,
    "mode": Mode | None,
    "sharding_factor": _Count,
    "cpu_offload": bool,
}
"""The same, as long as there are as many processes as before."""

ADAPTERS_FROM = 1_000_000_000
"""Parameters from which adapters are measured although nobody asked for them: a smaller model can do without."""

LOW_RATE = 0.05
"""Share of the learning rate that fits a model from random weights up to which a run is told that it hardly learns."""

SAMPLE_RECORDS = 256
"""Records whose tokens are counted where the model has no limit of length."""


def build_plan(config: Config, runtime: Runtime, data: RunData) -> Plan:
    """Decide what the configuration left open, before the encoder is built.

    The first rank does, for the smallest memory of all and in what all compute fast, so that unequal machines agree.
    """
    # What fits the smallest memory fits all. A type that one machine is slow at would hold up the others at every step.
    machines = runtime.ranks.gather_objects(runtime.machine)
    least = min(machines, key=lambda machine: machine.memory_bytes)
    machine = replace(
        runtime.machine,
        memory_bytes=least.memory_bytes,
        taken_bytes=least.taken_bytes,
        fast_bf16=all(machine.fast_bf16 for machine in machines),
    )
    runtime = replace(runtime, machine=machine)
    return runtime.ranks.from_first(lambda: _build_plan(config, runtime, data))


def _build_plan(config: Config, runtime: Runtime, data: RunData) -> Plan:
    model = measured_model(config, runtime.machine)
    counts, items = data.counts, data.counts.items
    tasks = [data.dev, data.test, *data.further.values()]
    sets = {task.name: ItemCounts.of(task).modalities for task in tasks if task is not None}
    refuse_unread(config.model_name, model.modalities, {" and ".join(data.sources): items.modalities, **sets})

    # Keys and towers that the training data never reach.
    idle: list[str] = []
    if not items.has_pictures:
        asked = {"image_augmentation": config.image_augmentation != "none", "image_flip": config.image_flip}
        idle += [
            f"{name} has no effect: the training data hold no pictures." for name, is_set in asked.items() if is_set
        ]
    reached = {"texts": items.has_texts, "pictures": items.has_pictures, "all": True}
    idle += [
        f"the {tower.name} tower ({tower.num_parameters:,} parameters) stays as it was loaded: the training data hold "
        f"no {tower.items}."
        for tower in model.towers
        if not reached[tower.items]
    ]

    size = DataSize(
        num_records=counts.num_records,
        documents_per_query=documents_per_query(config, counts),
        pictures_per_record=items.num_pictures / counts.num_records,
        picture_bytes=model.picture_bytes,
        teacher_dimension=teacher_dimension(config),
        record_tokens=_record_tokens(config, model, data),
        notes=(
            *(note for name in model_names(config) if (note := locate(name).note) is not None),
            *_scratch_notes(config),
            *data.notes,
            *idle,
            *_direction_notes(config, data),
            *mining_notes(config, data),
        ),
    )
    return make_plan(config, runtime.machine, model, size, devices=_devices(runtime))


def _record_tokens(config: Config, model: ModelSize, data: RunData) -> tuple[float, ...]:
    """Return the tokens of sampled records with their documents, where the model has no limit of length.

    None are counted where there are pictures, or where the model can't be built without its weights.
    """
    if model.max_length is not None or model.estimated or data.counts.items.has_pictures:
        return ()
    # Evenly spaced rows: files are often sorted by length or source, and the first rows would stand for neither.
    rows = np.unique(np.linspace(0, len(data.records) - 1, SAMPLE_RECORDS).astype(np.int64))
    records = [(record.query, [*record.positives, *record.negatives]) for record in data.records.take(rows)]
    texts = [str(text) for query, documents in records for text in (query, *documents)]
    encoder, num_documents = load_skeleton(config, texts=texts), documents_per_query(config, data.counts)
    return tuple(
        float(encoder.featurize([query], "query").lengths[0])
        + num_documents * float(encoder.featurize(documents, "document").lengths.mean())
        for query, documents in records
        if documents
    )


def measured_model(config: Config, machine: Machine, *, name: str | None = None) -> ModelSize:
    """Measure the model without its weights, with its adapters where the plan may want them.

    Args:
        name: Another model or a file with its shape, to be measured in its place.
    """
    keys = config if name is None else renamed(config, name)
    dtype, _ = compute_dtype(config, config.torch_dtype, machine)
    target = ProfileTarget(machine.device, DTYPES[dtype] if dtype in ("bfloat16", "float16") else None)
    size = profile_model(keys, target, trainable=config.trainable)
    # Adapters change what trains, and so memory: where the plan may choose them, the model is measured with them.
    may_adapt = config.use_lora == "auto" and config.trainable == "all" and size.num_parameters >= ADAPTERS_FROM
    if config.use_lora is True or may_adapt:
        return profile_model(keys, target, trainable=config.trainable, lora=config)
    return size


def plan_elsewhere(config: Config, devices: Devices | None, *, shape: str | None, num_records: int) -> Plan:
    """Plan a run without its data, and perhaps for other devices or without its model.

    Args:
        devices: What it would be spread over; None is this machine.
        shape: File with the shape of the model, read in place of the model.
        num_records: Records that the data are taken to have.
    """
    if devices is None:
        runtime = start_runtime(deterministic=False, num_processes=config.num_processes, plans_only=True)
        machine, devices = runtime.machine, _devices(runtime)
    else:
        machine = devices.machine(max(1, cpu_cores() // devices.per_node))  # which the processes of a machine share
    model = measured_model(config, machine, name=shape)
    shows = any(tower.items == "pictures" for tower in model.towers)
    assumed = "one query and one picture" if shows else "one query and one document"
    size = DataSize(
        num_records=num_records,
        documents_per_query=1.0,
        pictures_per_record=float(shows),
        picture_bytes=model.picture_bytes,
        teacher_dimension=teacher_dimension(config),
        notes=(f"no data were read: {num_records:,} records of {assumed} each are assumed, and this machine's cores",),
    )
    return make_plan(config, machine, model, size, devices=devices)


def _devices(runtime: Runtime) -> Devices:
    """Return all devices of the run; a process that only plans stands for those of its machine."""
    # Rounded up: srun may start unequal numbers of processes on its machines.
    nodes = math.ceil(runtime.world_size / runtime.local_world_size)
    return Devices.of(runtime.machine, runtime.world_size, nodes)


def _direction_notes(config: Config, data: RunData) -> list[str]:
    """Say that the verdict's set is measured in both directions, and why."""
    task = data.test or data.dev
    if task is None or not measures_both_directions(config, data):
        return []
    why = "it crosses from texts to pictures" if config.eval_both_directions == "auto" else "eval_both_directions"
    turned = task.reversed()
    sizes = f"{len(turned.queries)} queries, {len(turned.documents)} documents"
    return [f"{task.name} is also measured in reverse, before and after training ({why}): {turned.direction}, {sizes}."]


def _scratch_notes(config: Config) -> list[str]:
    """Say that a learning rate is far too low for a model that starts from random weights."""
    rates = [rate for name in model_names(config) if (rate := scratch_rate(name)) is not None]
    if not rates or config.learning_rate > LOW_RATE * min(rates):
        return []
    named = " + ".join(model_names(config))
    note = (
        f"learning_rate {config.learning_rate:g} is one for trained models; {named} starts from random weights and "
        f"hardly learns with it: try {min(rates):g} and more epochs, as vembed init writes them"
    )
    return [note]


def check_decisions(checkpoint: LoadedCheckpoint) -> None:
    """Refuse a checkpoint whose decisions are none.

    Raises:
        ValueError: Names the first that is of another type.
    """
    saved: Any = checkpoint.stamp["plan"]
    for name, kind in {**PLAN_READ_BACK, **SHARDING_READ_BACK}.items():
        if name in saved:
            fit(kind, saved[name], where=f"manifest.json: stamp['plan'][{name!r}]")


def as_begun(config: Config, checkpoint: LoadedCheckpoint) -> Config:
    """Return the configuration that a resumed run is planned by: what trains is as the checkpoint's run had chosen.

    Adapters beside a frozen base, or all weights: `auto` may choose otherwise on other hardware, and memory and
    strategy would be weighed for weights that this run doesn't train.
    """
    saved: Any = checkpoint.stamp["plan"]
    if config.use_lora != "auto" or "use_lora" not in saved:
        return config
    return config.model_copy(update={"use_lora": saved["use_lora"]})


def read_back(plan: Plan, checkpoint: LoadedCheckpoint, config: Config) -> Plan:
    """Return the plan with the decisions that the checkpoint's run had taken.

    What is sharded, and how, is decided anew where the number of processes or a key that decides it has changed.
    """
    saved, settings = checkpoint.stamp["plan"], checkpoint.stamp["config"]
    assert isinstance(saved, dict)
    assert isinstance(settings, dict)
    # Checkpoints of earlier versions lack the decisions that came later: those are taken anew.
    decided: dict[str, Any] = {name: saved[name] for name in PLAN_READ_BACK if name in saved}
    unchanged = all(settings.get(name, default_of(name)) == getattr(config, name) for name in DECIDING_KEYS)
    if unchanged and saved.get("world_size") == plan.world_size:
        decided |= {name: saved[name] for name in SHARDING_READ_BACK if name in saved}
    # The global batch is what is trained; a rank's share of it follows from the ranks there are now.
    if "global_batch_size" in decided:
        decided["batch_size"] = math.ceil(decided["global_batch_size"] / plan.world_size)
    reasons = (*plan.reasons, f"resumed from step {checkpoint.step}: {', '.join(decided)} are the checkpoint's")
    return plan.with_decisions({**decided, "reasons": reasons})
