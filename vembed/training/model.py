"""The encoder and the loss of a run, as its configuration describes them."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from vembed.data.run_data import RunData, record_texts
from vembed.distributed.starting_weights import Outline, receive
from vembed.errors import ConfigError, MachineError, NonFiniteError, VembedError
from vembed.files import new_folder
from vembed.losses.base import LossCommon
from vembed.models.adapters import add_adapters, base_fingerprint, freeze
from vembed.models.hub import DTYPES, save_background
from vembed.models.keys import ModelKeys, renamed
from vembed.models.load import is_from_scratch, load_encoder, load_skeleton
from vembed.models.profile import CANNOT_RUN
from vembed.models.st_library import CrossEncoder
from vembed.training.data import image_limits
from vembed.vectors.keys import teacher_gives_scores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from vembed.config.schema import Config
    from vembed.distributed.ranks import Ranks
    from vembed.distributed.runtime import Runtime
    from vembed.losses.base import BatchLoss
    from vembed.models.encoder import Encoder
    from vembed.plan.plan import Plan
    from vembed.training.output import OutputFolder

_log = logging.getLogger(__name__)


def build_alike(build: Callable[[bool], Encoder], ranks: Ranks) -> Encoder:
    """Build the encoder with its weights on the first rank, and on the others without, as far as its class can.

    The first rank builds first: of a model from scratch it leaves the tokenizer that the others read.

    Args:
        build: Builds it, with weights or without.

    Raises:
        VembedError: The first rank's was raised; a weight may be NaN or infinite.
    """
    built: list[Encoder] = []

    def build_first() -> tuple[Outline, str | None, str]:
        encoder = build(True)
        refuse_nonfinite_weights(encoder)
        built.append(encoder)
        return Outline.of(encoder), encoder.trained.base, encoder.trained.words

    outline, base, words = ranks.from_first(build_first)
    reason = ""
    if built:
        encoder = built[0]
    else:
        try:
            encoder = build(False)
            reason = outline.fit(encoder)
        except (*CANNOT_RUN, VembedError) as error:
            reason = str(error)
        if reason:  # it can't be built without weights, or not as the first rank's is
            encoder = build(True)
    # Counted by the first rank, before a head without weights was left out. The others would count without it, and
    # know vectors that are stored for this model by another name.
    encoder.trained = replace(encoder.trained, base=base, words=words)
    reasons = {text for text in ranks.gather_objects(reason) if text}
    if reasons:
        _log.info("every process loads the weights by itself: %s", "; ".join(sorted(reasons)))
    return encoder


def start_alike(encoder: Encoder, runtime: Runtime, *, with_buffers: bool) -> None:
    """Bring an encoder to its device with the weights of the first rank.

    Args:
        with_buffers: Whether its buffers are the first rank's too; they are wherever a rank has none of its own.
    """
    # Some ranks may have weights and others none, and all must send and receive the same tensors in the same order.
    is_empty = any(tensor.is_meta for tensor in (*encoder.parameters(), *encoder.buffers()))
    if not is_empty:
        encoder.to(runtime.device)  # which puts other tensors in the place of buffers
    tensors: list[Tensor] = list(encoder.parameters())
    if runtime.ranks.any(is_empty, runtime.device) or with_buffers:
        tensors += encoder.buffers()
    receive(tensors, runtime.ranks, runtime.device)


def refuse_batch_norm(encoder: Encoder) -> None:
    """Refuse statistics over a chunk, which no replay makes those of the batch.

    Raises:
        ConfigError: The encoder has batch normalisation.
    """
    if not encoder.mixes_rows():
        return
    if encoder.freeze_batch_norm:
        way_in = "it has no statistics of its own that freeze_batch_norm could keep"
    else:
        way_in = "or freeze_batch_norm: true, which keeps the statistics of the model's files"
    raise ConfigError(
        f"{encoder.name} has batch normalisation, whose statistics depend on the chunk: gradient caching can't "
        f"compute its gradients. Set use_gradient_cache: false, {way_in}; or use a model with another normalisation"
    )


def refuse_nonfinite_weights(encoder: Encoder) -> None:
    """Refuse weights that are broken before training.

    Raises:
        NonFiniteError: A weight is NaN or infinite.
    """
    bad = [name for name, parameter in encoder.named_parameters() if not parameter.isfinite().all()]
    if bad:
        raise NonFiniteError(f"{encoder.name}: {len(bad)} weights are NaN or infinite as loaded, the first is {bad[0]}")


def build_encoder(
    config: Config, plan: Plan, output: OutputFolder, data: RunData, *, keep: bool, with_weights: bool = True
) -> Encoder:
    """Load the encoder, and freeze what doesn't train.

    Args:
        plan: Says whether adapters train, whether activations are computed again, and whether rows lie end to end.
        output: Holds an encoder that was built from scratch: resuming needs the tokenizer that it trained.
        keep: Whether an encoder that is built from scratch is written there.
        with_weights: Without them its parameters are made on the meta device, as far as its class can.

    Raises:
        ConfigError: There is no such model, or it hasn't the part that is to train.
        MachineError: It can't be reached, or needs what this machine hasn't.
    """
    # The plan has decided what the configuration may leave at auto.
    keys = config.model_copy(update={"gradient_checkpointing": plan.way.gradient_checkpointing})
    encoder = _load_encoder(keys, output, data, keep=keep) if with_weights else _load_empty(keys, output, keep=keep)
    if plan.way.use_lora:
        add_adapters(encoder, config)
    else:
        freeze(encoder, config.trainable)
    if plan.packing:
        encoder.pack()
    if with_weights:
        encoder.trained = replace(encoder.trained, base=base_fingerprint(encoder))
    return encoder


def load_configured(config: Config, texts: Iterable[str] = ()) -> Encoder:
    """Load the encoder that a configuration names, all of it trainable yet."""
    return load_encoder(config, texts, image_limits=image_limits(config), load_in_4bit=config.load_in_4bit)


def _load_encoder(config: Config, output: OutputFolder, data: RunData, *, keep: bool) -> Encoder:
    if not is_from_scratch(config):
        return load_configured(config)
    if not keep or not output.initial_model.is_dir():
        encoder = load_configured(config, record_texts(data.records))
        if keep:
            try:
                with new_folder(output.initial_model) as temporary:
                    encoder.save(temporary)
                    save_background(encoder, temporary)
            except OSError as error:
                fix = "Free some space, or choose another output_dir"
                raise MachineError(
                    f"{output.initial_model} can't be written: {error.strerror or error}. {fix}"
                ) from error
    if keep:  # read back even where it was just written, so that a run that is resumed leaves the same files
        encoder = load_configured(renamed(config, str(output.initial_model)))
        encoder.name = config.model_name
    torch.manual_seed(config.seed)  # adapters are drawn alike, whether the model was made just now or read back
    return encoder


def _load_empty(config: Config, output: OutputFolder, *, keep: bool) -> Encoder:
    """Build the encoder without its weights.

    Raises:
        MachineError: It can't be known without them.
    """
    name = config.model_name
    if config.load_in_4bit:
        raise MachineError(f"{name} is quantised to 4 bits while it is loaded")
    if config.trust_remote_code:
        raise MachineError(f"{name} has code of its own")
    if is_from_scratch(config):
        if not keep or not output.initial_model.is_dir():
            raise MachineError(f"{name} is made from scratch, and this process sees no copy of it")
        config = renamed(config, str(output.initial_model))
    encoder = load_encoder(config, image_limits=image_limits(config), with_weights=False)
    encoder.name = name
    return encoder


def teacher_keys(config: Config, name: str, revision: str | None = None) -> ModelKeys:
    """Return the name of a model that a run asks, and how it is loaded."""
    return ModelKeys(
        model_name=name,
        model_revision=revision,
        allow_pickle=config.allow_pickle,
        torch_dtype="bfloat16" if config.torch_dtype == "bfloat16" else "float32",
    )


def teacher_dimension(config: Config) -> int:
    """Return the dims of the teacher's vectors that the loss reads; 0 where it reads none, or a model has none.

    Raises:
        ConfigError: There is no such model.
        MachineError: It can't be reached.
    """
    if config.teacher_model_name is None or not config.run_loss().reads_teacher(config):
        return 0
    keys = teacher_keys(config, config.teacher_model_name, config.teacher_revision)
    return 0 if CrossEncoder.is_meant(keys) else load_skeleton(keys).dimension


def build_loss(config: Config, plan: Plan, encoder: Encoder) -> BatchLoss:
    """Make the loss.

    Raises:
        ConfigError: It can't be made with this encoder.
    """
    if config.mrl_dims is not None and max(config.mrl_dims) > encoder.dimension:
        fitting = sorted({min(dim, encoder.dimension) for dim in config.mrl_dims}, reverse=True)
        raise ConfigError(
            f"mrl_dims: {max(config.mrl_dims)} is more than the {encoder.dimension} dims of {config.model_name}; "
            f"write {fitting}"
        )
    loss = config.run_loss()
    if loss.multi_vector != encoder.multi_vector:
        taken, given = ("several vectors", "one") if loss.multi_vector else ("one vector", "several")
        raise ConfigError(
            f"loss_type {loss.name} takes {taken} for each row and {config.model_name} gives {given}; choose "
            f"another loss or another model"
        )
    # A loss computes in float32 at least: log-sum-exp over thousands of documents is lost in bfloat16's 8 bits.
    dtype = torch.promote_types(DTYPES[config.torch_dtype], torch.float32)
    # An encoder as teacher scores the documents of rows by cosines; a cross-encoder has scores of its own.
    gives_cosines = (
        config.teacher_model_name is not None
        and teacher_gives_scores(config)
        and not CrossEncoder.is_meant(teacher_keys(config, config.teacher_model_name, config.teacher_revision))
    )
    return loss.build(config, LossCommon(dtype, encoder.dimension, plan.loss_tile_size, gives_cosines))
