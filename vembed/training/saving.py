"""Checkpoints of a run: what is saved, how a run goes on from it, and how a model is written from it.

1. `RunState` and `RunCheckpoints`: the counters of a run, saved and restored with weights, loss and optimizer.
2. `gather_encoder` and `write_saved_model`: the model of a run or of a checkpoint, whole, in the format of models.

Processes that hold whole copies save once; of what they share out each saves its part. Whatever was saved can be loaded
by any number of processes, whole or in parts: stamp.py says whether it may be.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from pydantic import ValidationError

from vembed.checkpoint.format import InvalidCheckpointError, step_name, steps_in
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
from vembed.redact import MASK, lacks_secret
from vembed.training.model import load_configured
from vembed.training.output import OutputFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from torch import Tensor, nn

    from vembed.checkpoint.format import JSON
    from vembed.checkpoint.tensors import LoadedCheckpoint, Saved
    from vembed.distributed.ranks import Ranks
    from vembed.losses.base import BatchLoss
    from vembed.models.encoder import Encoder
    from vembed.training.optimizer import Optimizer

PARTS = ("model", "loss", "optimizer")

MODEL_MARGIN = 1.1
"""The room that a model's folder is given, for each byte of its weights: tokenizer and settings come with them."""


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
            checkpoint: Of this run, as stamp.py found.

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
