"""Checkpoints of a run: their content, the disk that they need, and the ways back out of them.

1. `RunState` and `RunCheckpoints`: the counters of a run, saved and restored with weights, loss and optimizer.
2. `refuse_other_run`: what must agree before a run continues from a checkpoint.
3. `DiskNeeds`: the bytes that a run will write, told in the plan and refused before the first step.
4. `gather_encoder` and `write_saved_model`: the model of a run or of a checkpoint, whole, in the format of models.

Processes that hold whole copies save once; of what they share out each saves its part. Whatever was saved can be loaded
by any number of processes, whole or in parts: whether it may be is the user's word (`resume_elastic`), since the
arithmetic then adds up in another order.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

from pydantic import ValidationError

from vembed.checkpoint.format import DISK_MARGIN, InvalidCheckpointError, free_disk_bytes, step_name, steps_in
from vembed.checkpoint.manager import CheckpointManager
from vembed.checkpoint.optimizer_state import check_packed
from vembed.checkpoint.tensors import load_into
from vembed.config.schema import Config
from vembed.distributed.shards import full_tensors, is_shared, reshard
from vembed.distributed.watchdog import LastWords
from vembed.errors import ConfigError, MachineError
from vembed.files import disk_error
from vembed.gradcache.memory import StepLimits  # noqa: TC001 - the shape that a state is read as
from vembed.json_text import fit
from vembed.models.adapters import add_adapters, base_fingerprint, changing_names, freeze, narrowed_bytes, save_trained
from vembed.models.keys import ModelKeys, renamed
from vembed.models.load import is_from_scratch
from vembed.models.names import is_builtin
from vembed.redact import MASK, lacks_secret
from vembed.text import show_bytes
from vembed.training.model import load_configured
from vembed.training.output import OutputFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from torch import Tensor, nn

    from vembed.checkpoint.format import JSON
    from vembed.checkpoint.keys import OutputKeys
    from vembed.checkpoint.tensors import LoadedCheckpoint, Saved
    from vembed.distributed.ranks import Ranks
    from vembed.losses.base import BatchLoss
    from vembed.models.encoder import Encoder
    from vembed.plan.plan import Plan
    from vembed.training.optimizer import Optimizer

PARTS = ("model", "loss", "optimizer")

ELASTIC_KEYS = ("strategy", "mode", "sharding_factor", "world_size")
"""Keys of how the work is spread: other values give the same sums, added up in another order."""

LATER_KEYS = ("teacher",)
"""Parts of a run's identity that its checkpoints once didn't have; one without says nothing of them."""

MODEL_MARGIN = 1.1
"""The room that a model's folder is given, for each byte of its weights: tokenizer and settings come with them."""

ROW_BYTES = 600
"""Approximate size of a step's row in metrics.jsonl."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RunState:
    """The counters of a run.

    Randomness isn't among them: order, dropout and initialisation are functions of (seed, step), so there is no
    generator to restore.
    """

    step: int = 0  # optimizer steps done; skipped ones count
    # Best dev metric of a trained model so far, None before the first one. The untrained model doesn't count: a run
    # that only makes it worse must say so, and not hand it back.
    best_metric: float | None = None
    best_step: int = 0  # step that it was reached at
    stale_evaluations: int = 0  # evaluations since then
    evaluated_step: int = -1  # step of the last evaluation: a run that was stopped in one does it again
    skipped_steps: int = 0  # steps whose numbers weren't finite
    num_truncated: int = 0  # over-long texts that training has cut
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)  # (step, dev metrics), in order
    # what the engine's next step may hold in memory; None where memory never ran out
    step_limits: StepLimits | None = None
    stopped: str | None = None  # why a callback ended the training
    learning_rate: float | None = None  # set by a callback, in place of the schedule's

    def record(self, metrics: Mapping[str, float], metric: str) -> bool:
        """Take in an evaluation of the present step.

        Args:
            metric: The one that decides; higher is better. A tie keeps the earlier step.

        Returns:
            Whether the present weights are the best trained ones so far.
        """
        self.evaluated_step = self.step
        self.evaluations.append((self.step, dict(metrics)))
        if self.step == 0:
            return False
        if self.best_metric is None or metrics[metric] > self.best_metric:
            self.best_metric, self.best_step, self.stale_evaluations = metrics[metric], self.step, 0
            return True
        self.stale_evaluations += 1
        return False

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return what `to_json` wrote.

        Raises:
            KeyError: It lacks the evaluations.
            ValueError: A value is of another type.
        """
        return fit(cls, {**content, "evaluations": content["evaluations"]}, where="state.json: run")


@dataclass(frozen=True, slots=True)
class RunCheckpoints:
    """Saves and restores a run: the encoder's weights, the loss's parameters and the optimizer's state."""

    manager: CheckpointManager
    encoder: Encoder
    loss: BatchLoss
    optimizer: Optimizer
    stamp: Mapping[str, JSON]  # all that a checkpoint says of its run
    words: LastWords = field(default_factory=LastWords)  # hears of what was saved

    def save(self, state: RunState, *, best: bool, is_last: bool = False) -> Path | None:
        """Save the present step. A disk that refuses is warned of by the manager, and training continues.

        Args:
            is_last: Whether the model is written next: the checkpoint must leave room for it.

        Returns:
            The checkpoint's folder; None where the disk refused it.
        """
        tensors, packed = self.optimizer.state()
        parts = {"model": module_tensors(self.encoder), "loss": module_tensors(self.loss), "optimizer": tensors}
        content: dict[str, Any] = {"run": state.to_json(), "updater": packed}
        reserved = int(MODEL_MARGIN * model_bytes(self.encoder)) if is_last else None
        saved = self.manager.save(
            state.step, tensors=parts, state=content, stamp=self.stamp, best=best, reserved=reserved
        )
        self.words.checkpoint = saved or self.words.checkpoint
        return saved

    def restore(self, checkpoint: LoadedCheckpoint) -> RunState:
        """Go on from a checkpoint.

        Args:
            checkpoint: Of this run, as `refuse_other_run` found.

        Returns:
            Where the run stood.

        Raises:
            ConfigError: It holds another model or the state of another optimizer.
        """
        load_module(self.encoder, checkpoint.tensors["model"])
        load_module(self.loss, checkpoint.tensors["loss"])
        packed = checkpoint.state["updater"]
        run = checkpoint.state["run"]
        assert isinstance(packed, dict)
        assert isinstance(run, dict)
        self.optimizer.restore(checkpoint.tensors["optimizer"], packed)
        return RunState.from_json(run)

    def load_best(self) -> int | None:
        """Put the best checkpoint's weights into the encoder; return its step, or None when there is none."""
        loaded = self.manager.load_best(required=["model"])
        if loaded is None:
            return None
        load_module(self.encoder, loaded.tensors["model"])
        return loaded.step


# Tensors --------------------------------------------------------------------------------------------------------------


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, tied ones once; of an encoder what training changes."""
    reshard(module)  # an evaluation leaves whole weights in place of the shards
    persistent = module.state_dict(keep_vars=True)
    changing = changing_names(module)
    seen: set[int] = set()
    tensors = {}
    for name, tensor in persistent.items():
        if id(tensor) not in seen and (changing is None or name in changing):
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return what tensors take in a file; of a sharded one all parts."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def model_bytes(encoder: Encoder) -> int:
    """Return what an encoder's folder takes, but for its tokenizer: each tensor once, however often it is used."""
    held = bytes_of({id(tensor): tensor for tensor in encoder.state_dict(keep_vars=True).values()}.values())
    return held + narrowed_bytes(encoder)


def load_module(module: nn.Module, tensors: Mapping[str, Saved]) -> None:
    """Put saved tensors into a module; of what it shares with other processes each takes its part.

    Raises:
        ConfigError: When they are another module's.
    """
    present = module_tensors(module)
    differing = sorted(
        name for name in present.keys() | tensors.keys()
        if name not in present or name not in tensors or tuple(present[name].shape) != tuple(tensors[name].shape)
    )  # fmt: skip
    if differing:
        raise ConfigError(
            f"the checkpoint holds another model: {len(differing)} tensors differ, the first is {differing[0]}"
        )
    for name, tensor in present.items():
        load_into(tensor, tensors[name])


# Checkpoints of other runs --------------------------------------------------------------------------------------------


def check_shape(checkpoint: LoadedCheckpoint) -> None:
    """Refuse a checkpoint whose stamp and state aren't what a run saves.

    Raises:
        ValueError: Names what is wrong.
        KeyError: A part of the state is missing.
    """
    fit(dict[str, Any], checkpoint.stamp.get("config"), where="manifest.json: stamp['config']")
    fit(dict[str, Any], checkpoint.stamp.get("plan"), where="manifest.json: stamp['plan']")
    if "run" not in checkpoint.state or "updater" not in checkpoint.state:
        return  # only the model is wanted
    step = RunState.from_json(fit(dict[str, Any], checkpoint.state["run"], where="state.json: run")).step
    if step != checkpoint.step:
        raise ValueError(f"state.json: it is of step {step}")
    updater = fit(dict[str, dict[str, Any]], checkpoint.state["updater"], where="state.json: updater")
    check_packed(updater["optimizer"])
    fit(dict[str, float], updater["scaler"], where="state.json: updater['scaler']")


def refuse_other_run(checkpoint: LoadedCheckpoint, identity: Mapping[str, JSON], *, elastic: bool) -> None:
    """Refuse a checkpoint of another run, or of the same one spread otherwise where that isn't wanted.

    Args:
        checkpoint: What is to be gone on from.
        identity: What the present run is made of.
        elastic: Whether the work may be spread in another way; that is told.

    Raises:
        ConfigError: The message shows each difference.
    """
    identity = {key: value for key, value in identity.items() if key in checkpoint.stamp or key not in LATER_KEYS}
    saved = {key: value for key, value in checkpoint.stamp.items() if key in identity}
    differences = stamp_differences(saved, identity)
    spread = [difference for key, difference in differences.items() if key in ELASTIC_KEYS]
    if len(spread) < len(differences):
        raise ConfigError(
            f"{checkpoint.path} belongs to another run:{_listed(differences.values())}\nResume with the "
            f"same settings, choose another output_dir, or start anew with resume=never overwrite_output_dir=true"
        )
    if spread and not elastic:
        raise ConfigError(
            f"{checkpoint.path} was saved with other processes or another strategy:{_listed(spread)}\nSet "
            f"resume_elastic=true to continue: the global batches stay the same, the numbers agree to rounding and no "
            f"longer bit for bit. Or resume with the settings above that saved it"
        )
    for line in spread:
        _log.info("resume_elastic: %s", line)


def stamp_differences(saved: Mapping[str, JSON], current: Mapping[str, JSON]) -> dict[str, str]:
    """Compare the stamp of a checkpoint with that of the present run.

    Args:
        saved: The checkpoint's, as it came back from JSON.
        current: The run's own; a tuple equals the list that JSON makes of it.

    Returns:
        Dotted key -> a sentence with both values, in the order of the checkpoint's keys, then the keys that only the
        run has. Numbers are equal by value (1 and 1.0), a bool only to a bool.
    """
    before, now = dict(_flat(saved)), dict(_flat(json.loads(json.dumps(current))))
    return {
        key: f"{key}: {_shown(before, key)} in the checkpoint, {_shown(now, key)} in this run"
        for key in before | now
        if key not in before
        or key not in now
        or before[key] != now[key]
        or isinstance(before[key], bool) != isinstance(now[key], bool)  # True is not 1
    }


def _flat(stamp: Mapping[str, JSON], prefix: str = "") -> Iterator[tuple[str, JSON]]:
    """Yield dotted keys and their values; an empty mapping is a value."""
    for key, value in stamp.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(stamp: Mapping[str, JSON], key: str) -> str:
    return json.dumps(stamp[key]) if key in stamp else "(absent)"


def _listed(differences: Iterable[str]) -> str:
    return "".join(f"\n  {difference}" for difference in differences)


# Disk -----------------------------------------------------------------------------------------------------------------


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


# The model of a run, and of a checkpoint ------------------------------------------------------------------------------


def gather_encoder(encoder: Encoder, ranks: Ranks, fresh: Callable[[], Encoder]) -> Encoder | None:
    """Return an encoder with all of its weights on the first rank, to be written as a model; None on the others.

    All ranks must call it. Weights travel one tensor at a time; only the first rank ever holds all of them, in the
    memory of the host. Frozen ones are those of the model's files, whatever they are rounded to in training.

    Args:
        encoder: Sharded over the ranks; one that isn't, and has its frozen weights as the files do, is returned as it
            is.
        ranks: Who shares it.
        fresh: Builds the same encoder, not sharded, on the CPU; called on the first rank alone.

    Raises:
        VembedError: `fresh` failed, or found another model than training began with; all ranks raise it.
    """
    # An encoder that is whole and exact is its own export: nothing is copied.
    reshard(encoder)
    if not any(map(is_shared, encoder.parameters())) and not narrowed_bytes(encoder):
        return encoder if ranks.is_first else None
    # Read anew for what never changed; then only what trains travels, tensor by tensor. All ranks take part in each
    # gathering, and the first keeps the result.
    changing = changing_names(encoder)
    whole = ranks.together(lambda: _same_base(fresh(), encoder) if ranks.is_first else None)
    places = {} if whole is None else whole.state_dict(keep_vars=True)
    for name, tensor in full_tensors(encoder, ranks):
        if tensor is not None and (changing is None or name in changing):
            load_into(places[name], tensor)
    return whole


def _same_base(fresh: Encoder, encoder: Encoder) -> Encoder:
    """Return an encoder that was read again, once it is the one whose frozen weights the trained one has."""
    if fresh.trained.base != encoder.trained.base:
        raise ConfigError(
            f"{encoder.name} is no longer the model that training began with, and model/ would mix the two; put it "
            f"back, and the same command writes model/ from the last checkpoint"
        )
    return fresh


def write_saved_model(run: Path, step: int, folder: Path) -> Path:
    """Write the model of a checkpoint, whole and with its adapters merged.

    Weights that several processes saved in parts are put together one at a time; no process group is needed.

    Args:
        folder: Where to.

    Raises:
        ConfigError: The run has no such checkpoint, or the model that training started from is no longer the same.
        InvalidCheckpointError: The checkpoint is broken.
        MachineError: The disk refuses.
    """
    output = OutputFolder(run)
    path = output.checkpoints / step_name(step)
    if not path.is_dir():
        there = ", ".join(map(str, steps_in(output.checkpoints))) or "none"
        raise ConfigError(f"{run} has no checkpoint of step {step}; it has: {there}")
    loaded = CheckpointManager(output.checkpoints).load(path, required=["model"], check=check_shape)
    assert loaded is not None
    plan = loaded.stamp["plan"]
    assert isinstance(plan, dict)
    try:
        config = Config.model_validate(loaded.stamp["config"])
    except ValidationError as error:
        raise InvalidCheckpointError(f"{path}: its configuration is none of this version ({error})") from error
    lacking = [name for name in ModelKeys.model_fields if lacks_secret(getattr(config, name))]
    if lacking:
        raise ConfigError(
            f"a checkpoint keeps no secrets, and {', '.join(lacking)} had one (now {MASK}); take the run's own model/, "
            f"which is whole"
        )
    if is_from_scratch(config):
        config = renamed(config, str(output.initial_model))
    # As training began: the same parts frozen and the same adapters, so that names and shapes fit the checkpoint.
    encoder = load_configured(config)
    if plan.get("use_lora"):
        add_adapters(encoder, config)
    else:
        freeze(encoder, config.trainable)
    encoder.trained = replace(encoder.trained, base=base_fingerprint(encoder))
    if loaded.stamp.get("base") != encoder.trained.base:
        raise ConfigError(
            f"{path} holds only what was trained, and {encoder.name} is no longer the model that it was trained "
            f"beside; bring that one back, with its model_revision"
        )
    load_module(encoder, loaded.tensors["model"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_trained(encoder, folder / "model", folder / "adapter")
    except Exception as error:
        refused = error if isinstance(error, OSError) else disk_error(error)
        if refused is None:
            raise
        raise MachineError(
            f"{folder}: the model of step {step} can't be written: {refused}. Free some space, or choose another folder"
        ) from error
    return folder / "model"
