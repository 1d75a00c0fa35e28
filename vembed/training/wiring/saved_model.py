"""A checkpoint of a run as a model: what was saved, by however many processes, in the encoder that it is of."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import ValidationError

from vembed.checkpoint.format import InvalidCheckpointError, step_name, steps_in
from vembed.checkpoint.manager import CheckpointManager
from vembed.config.schema import Config
from vembed.errors import ConfigError
from vembed.models.adapters.lora import add_adapters
from vembed.models.adapters.trainable import freeze
from vembed.models.adapters.trained import base_fingerprint, save_trained
from vembed.models.keys import ModelKeys, renamed
from vembed.models.load import is_from_scratch
from vembed.redact import MASK, lacks_secret
from vembed.training.output import OutputFolder
from vembed.training.saving import check_shape, load_module
from vembed.training.wiring.model import load_configured

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.models.encoder import Encoder


def write_saved_model(run: Path, step: int, folder: Path) -> Path:
    """Write the model of a checkpoint, whole and with its adapters merged.

    Weights that several processes saved in parts are put together one at a time; no process group is needed.

    Args:
        folder: Where to; must exist.

    Raises:
        ConfigError: The run has no such checkpoint, or the model that training started from is no longer the same.
        InvalidCheckpointError: The checkpoint is broken.
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
    encoder = _encoder(output, config, use_lora=bool(plan.get("use_lora")))
    if loaded.stamp.get("base") != encoder.trained.base:
        raise ConfigError(
            f"{path} holds only what was trained, and {encoder.name} is no longer the model that it was trained "
            f"beside; bring that one back, with its model_revision"
        )
    load_module(encoder, loaded.tensors["model"])
    save_trained(encoder, folder / "model", folder / "adapter")
    return folder / "model"


def _encoder(output: OutputFolder, config: Config, *, use_lora: bool) -> Encoder:
    """Build the encoder that a run trained, on the CPU and as it was before training."""
    lacking = [name for name in ModelKeys.model_fields if lacks_secret(getattr(config, name))]
    if lacking:
        raise ConfigError(
            f"a checkpoint keeps no secrets, and {', '.join(lacking)} had one (now {MASK}); take the run's own model/, "
            f"which is whole"
        )
    if is_from_scratch(config):
        config = renamed(config, str(output.initial_model))
    encoder = load_configured(config)
    if use_lora:
        add_adapters(encoder, config)
    else:
        freeze(encoder, config.trainable)
    encoder.trained = replace(encoder.trained, base=base_fingerprint(encoder))
    return encoder
