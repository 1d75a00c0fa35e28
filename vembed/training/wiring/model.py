"""The encoder and the loss of a run, as its configuration describes them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from vembed.errors import ConfigError
from vembed.losses.base import LossCommon
from vembed.losses.registry import loss_facts
from vembed.models.adapters.lora import LoraOptions, add_adapters
from vembed.models.adapters.trainable import freeze
from vembed.models.adapters.trained import base_fingerprint
from vembed.models.huggingface import ModelOptions
from vembed.models.registry import is_builtin, load_encoder
from vembed.training.inputs import RunData, record_texts
from vembed.training.wiring.data import image_limits

if TYPE_CHECKING:
    from vembed.batch import Side
    from vembed.config.schema import Config
    from vembed.losses.base import BatchLoss
    from vembed.models.encoder import Encoder
    from vembed.plan.plan import Plan
    from vembed.training.output import OutputFolder


DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_encoder(config: Config, plan: Plan, output: OutputFolder, data: RunData, *, keep: bool) -> Encoder:
    """Load the encoder, and freeze what doesn't train.

    Args:
        config: What the user said about the model.
        plan: Says whether adapters train, and whether activations are computed again.
        output: Holds an encoder that was built from scratch: resuming needs the tokenizer that it trained.
        data: Its texts train that tokenizer.
        keep: Whether an encoder that is built from scratch is written there.

    Raises:
        ConfigError: There is no such model, or it hasn't the part that is to train.
        MachineError: It can't be reached, or needs what this machine hasn't.
    """
    options = replace(model_options(config), gradient_checkpointing=plan.way.gradient_checkpointing)
    encoder = _load_encoder(options, output, data, keep=keep)
    if plan.way.use_lora:
        add_adapters(encoder, lora_options(config))
    else:
        freeze(encoder, config.trainable)
    encoder.base = base_fingerprint(encoder)
    return encoder


def lora_options(config: Config) -> LoraOptions:
    """Return the adapters that the user asks for."""
    return LoraOptions(
        rank=config.lora_r,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        targets=None if config.lora_target_modules == "auto" else tuple(config.lora_target_modules),
        towers=config.lora_towers,
    )


def model_options(config: Config) -> ModelOptions:
    """Return what the user said about the model."""
    prompts: dict[Side, str] = {}
    if config.query_prompt is not None:
        prompts["query"] = config.query_prompt
    if config.document_prompt is not None:
        prompts["document"] = config.document_prompt
    return ModelOptions(
        name=config.model_name,
        revision=config.model_revision,
        trust_remote_code=config.trust_remote_code,
        allow_pickle=config.allow_pickle,
        dtype=DTYPES[config.torch_dtype],
        attn_implementation=None if config.attn_implementation == "auto" else config.attn_implementation,
        pooling=None if config.pooling_method == "auto" else config.pooling_method,
        max_length=None if config.max_seq_length == "auto" else config.max_seq_length,
        prompts=prompts,
        pad_token=config.pad_token,
        gradient_checkpointing=config.gradient_checkpointing is True,
        image_limits=image_limits(config),
        load_in_4bit=config.load_in_4bit,
    )


def _load_encoder(options: ModelOptions, output: OutputFolder, data: RunData, *, keep: bool) -> Encoder:
    if not is_builtin(options.name):
        return load_encoder(options)
    if keep and output.initial_model.is_dir():
        kept = ModelOptions(
            name=str(output.initial_model),
            dtype=options.dtype,
            gradient_checkpointing=options.gradient_checkpointing,
            image_limits=options.image_limits,
        )
        encoder = load_encoder(kept)
        encoder.name = options.name
        return encoder
    encoder = load_encoder(options, record_texts(data.records))
    if keep:
        encoder.save(output.initial_model)
    return encoder


def build_loss(config: Config, plan: Plan, encoder: Encoder) -> BatchLoss:
    """Make the loss.

    Raises:
        ConfigError: It can't be made with this encoder.
    """
    _refuse_long_prefixes(config, encoder)
    facts = loss_facts(config.loss_type)
    if facts.multi_vector != encoder.multi_vector:
        several, one = ("the loss", "the model") if facts.multi_vector else ("the model", "the loss")
        raise ConfigError(
            f"loss_type: {several} takes several vectors for each row and {one} takes one; choose another loss for "
            f"{config.model_name}, or another model for {config.loss_type}"
        )
    dtype = torch.promote_types(DTYPES[config.torch_dtype], torch.float32)
    common = LossCommon(dtype, encoder.dimension, plan.loss_tile_size)
    return facts.build(config.loss_keys(), common)


def _refuse_long_prefixes(config: Config, encoder: Encoder) -> None:
    if config.mrl_dims is not None and max(config.mrl_dims) > encoder.dimension:
        fitting = sorted({min(dim, encoder.dimension) for dim in config.mrl_dims}, reverse=True)
        raise ConfigError(
            f"mrl_dims: {max(config.mrl_dims)} is more than the {encoder.dimension} dims of {config.model_name}; "
            f"write {fitting}"
        )
