"""Keys of the loss."""

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from vembed.config.fields import Auto, Count, Positive, key, rule
from vembed.config.keys.section import Section

if TYPE_CHECKING:
    from vembed.config.schema import Config


LARGEST_LOGIT_SCALE = math.log(100)
"""Natural log of the largest factor on similarities: beyond it training diverges."""


class LossKeys(Section):
    """What is minimised."""

    loss_type: Literal["infonce", "sigmoid"] = key(
        "infonce",
        "The loss: InfoNCE over the documents of the batch, or the pairwise sigmoid loss of SigLIP with a learned "
        "scale and bias.",
    )
    temperature: Positive = key(0.05, "Similarities are divided by it; its start value with learn_temperature.")
    learn_temperature: bool = key(False, "Train the temperature as well.")
    loss_bidirectional: bool = key(False, "Average the losses of query -> document and document -> query.")
    mask_false_negatives: bool = key(
        True, "A copy of a query's positive in the batch is no negative (by id and content)."
    )
    init_logit_scale: Annotated[float, Field(ge=0, le=LARGEST_LOGIT_SCALE)] = key(
        2.302585, "With loss_type sigmoid: start of the natural log of the factor on similarities, ln 10 as in SigLIP."
    )
    init_logit_bias: Annotated[float, Field(ge=-100, le=100)] = key(
        -10.0, "With loss_type sigmoid: start of the bias that is added after the factor."
    )
    mrl_dims: Annotated[list[Count], Field(min_length=1)] | None = key(
        None,
        "Matryoshka: train these numbers of leading dims, each normalised, instead of the whole vector; list the whole "
        "dim to train it as well.",
        unit="dims",
    )
    mrl_weights: Annotated[list[Positive], Field(min_length=1)] | None = key(
        None, "Weight of each of mrl_dims in the mean of their losses; null weighs all alike."
    )
    loss_tile_size: Auto | Count = key(
        "auto",
        "Rows and columns of the blocks in which the similarity matrix is computed; it changes memory and speed, not "
        "the loss.",
        unit="items",
    )


@rule("temperature", "loss_type")
def _temperature_acts(config: "Config") -> str | None:
    """`temperature` other than its default needs `loss_type: infonce`."""
    if config.loss_type == "infonce" or config.temperature == LossKeys.default("temperature"):
        return None
    scale = min(max(-math.log(config.temperature), 0.0), LARGEST_LOGIT_SCALE)
    return (
        f"temperature has no effect with loss_type sigmoid, which learns a scale from init_logit_scale; "
        f"remove temperature and set init_logit_scale to {scale:.4g}, the natural log of 1 / temperature"
    )


@rule("learn_temperature", "loss_type")
def _learned_temperature_acts(config: "Config") -> str | None:
    """`learn_temperature: true` needs `loss_type: infonce`."""
    if config.loss_type == "infonce" or not config.learn_temperature:
        return None
    return "learn_temperature has no effect with loss_type sigmoid, which always learns its scale; remove it"


@rule("loss_bidirectional", "loss_type")
def _directions_act(config: "Config") -> str | None:
    """`loss_bidirectional: true` needs `loss_type: infonce`."""
    if config.loss_type == "infonce" or not config.loss_bidirectional:
        return None
    return "loss_bidirectional has no effect with loss_type sigmoid, which judges each pair once; remove it"


@rule("init_logit_scale", "loss_type")
def _logit_scale_acts(config: "Config") -> str | None:
    """`init_logit_scale` other than its default needs `loss_type: sigmoid`."""
    if config.loss_type == "sigmoid" or config.init_logit_scale == LossKeys.default("init_logit_scale"):
        return None
    return (
        f"init_logit_scale has no effect with loss_type infonce, which divides by temperature; set temperature to "
        f"{math.exp(-config.init_logit_scale):.4g} instead, or loss_type to sigmoid"
    )


@rule("init_logit_bias", "loss_type")
def _logit_bias_acts(config: "Config") -> str | None:
    """`init_logit_bias` other than its default needs `loss_type: sigmoid`."""
    if config.loss_type == "sigmoid" or config.init_logit_bias == LossKeys.default("init_logit_bias"):
        return None
    return "init_logit_bias has no effect with loss_type infonce; remove it or set loss_type to sigmoid"


@rule("mrl_dims")
def _prefixes_differ(config: "Config") -> str | None:
    """`mrl_dims` must not hold a number twice."""
    if config.mrl_dims is None or len(set(config.mrl_dims)) == len(config.mrl_dims):
        return None
    return f"mrl_dims holds a number twice; write {sorted(set(config.mrl_dims), reverse=True)}"


@rule("mrl_weights", "mrl_dims")
def _prefixes_have_weights(config: "Config") -> str | None:
    """`mrl_weights` needs `mrl_dims` of the same length."""
    if config.mrl_weights is None:
        return None
    if config.mrl_dims is None:
        return "mrl_weights weighs mrl_dims, which is not set; set mrl_dims or remove mrl_weights"
    if len(config.mrl_weights) == len(config.mrl_dims):
        return None
    return (
        f"mrl_weights has {len(config.mrl_weights)} entries for the {len(config.mrl_dims)} of mrl_dims; give one "
        "weight for each, or remove mrl_weights to weigh all alike"
    )
