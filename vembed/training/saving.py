"""Checkpoints of a run: what goes in, and what must agree before it comes out again.

Processes that hold whole copies save once; of what they share out each saves its part. Whatever was saved can be loaded
by any number of processes, whole or in parts: whether it may be is the user's word (`resume_elastic`), since the
arithmetic then adds up in another order.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vembed.checkpoint.optimizer_state import check_packed
from vembed.checkpoint.tensors import load_into
from vembed.distributed.shards import full_tensors, is_shared, reshard
from vembed.distributed.watchdog import LastWords
from vembed.errors import ConfigError
from vembed.json_text import fit
from vembed.models.adapters.trained import changing_names, narrowed_bytes
from vembed.training.state import RunState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from torch import Tensor, nn

    from vembed.checkpoint.format import JSON
    from vembed.checkpoint.manager import CheckpointManager
    from vembed.checkpoint.tensors import LoadedCheckpoint, Saved
    from vembed.distributed.ranks import Ranks
    from vembed.losses.base import BatchLoss
    from vembed.models.encoder import Encoder
    from vembed.training.optimizer import Optimizer

PARTS = ("model", "loss", "optimizer")

ELASTIC_KEYS = ("strategy", "mode", "sharding_factor", "world_size")
"""How the work is spread: another way computes the same, in another order of adding up."""

LATER_KEYS = ("teacher",)
"""Parts of a run's identity that its checkpoints once didn't have; one without says nothing of them."""

MODEL_MARGIN = 1.1
"""The room that a model's folder is given, for each byte of its weights: tokenizer and settings come with them."""

_log = logging.getLogger(__name__)


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
    own = module_tensors(module)
    if own.keys() != tensors.keys() or any(tuple(own[name].shape) != tuple(tensors[name].shape) for name in own):
        differing = sorted(
            name for name in own.keys() | tensors.keys()
            if name not in own or name not in tensors or tuple(own[name].shape) != tuple(tensors[name].shape)
        )  # fmt: skip
        raise ConfigError(
            f"the checkpoint holds another model: {len(differing)} tensors differ, the first is {differing[0]}"
        )
    for name, tensor in own.items():
        load_into(tensor, tensors[name])


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
    reshard(encoder)
    if not any(map(is_shared, encoder.parameters())) and not narrowed_bytes(encoder):
        return encoder if ranks.is_first else None
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
            f"{checkpoint.path} belongs to another run:{_listed(differences.values())}\nResume with what it was "
            f"made of, choose another output_dir, or start anew with resume=never overwrite_output_dir=true"
        )
    if spread and not elastic:
        raise ConfigError(
            f"{checkpoint.path} was saved by a run whose work was spread otherwise:{_listed(spread)}\nSet "
            f"resume_elastic=true to continue: the global batches stay the same, the numbers agree to rounding and no "
            f"longer bit for bit. Or resume as it was saved"
        )
    for each in spread:
        _log.info("resume_elastic: %s", each)


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
        if key not in before or key not in now or not _same(before[key], now[key])
    }


def _flat(stamp: Mapping[str, JSON], prefix: str = "") -> Iterator[tuple[str, JSON]]:
    """Yield dotted keys and their values; an empty mapping is a value."""
    for key, value in stamp.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _same(left: JSON, right: JSON) -> bool:
    """Return whether two JSON values are equal, telling True from 1."""
    return left == right and isinstance(left, bool) == isinstance(right, bool)


def _shown(stamp: Mapping[str, JSON], key: str) -> str:
    return json.dumps(stamp[key]) if key in stamp else "(absent)"


def _listed(differences: Iterable[str]) -> str:
    return "".join(f"\n  {difference}" for difference in differences)
