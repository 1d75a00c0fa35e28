"""What the sigmoid loss says of itself."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from vembed.config.fields import key
from vembed.config.keys.loss import MAX_LOGIT_SCALE, CellKeys
from vembed.data.columns import WEIGHT_COLUMN
from vembed.losses.registry import LossFacts

LARGEST_LOG_SCALE = math.log(MAX_LOGIT_SCALE)


class SigmoidKeys(CellKeys):
    """Keys of the sigmoid loss."""

    init_logit_scale: Annotated[float, Field(ge=0, le=LARGEST_LOG_SCALE)] = key(
        2.302585, "Start of the natural log of the factor on similarities, ln 10 as in SigLIP."
    )
    init_logit_bias: Annotated[float, Field(ge=-100, le=100)] = key(
        -10.0, "Start of the bias that is added after the factor."
    )


def _same_factor(temperature: float) -> str:
    scale = min(max(-math.log(temperature), 0.0), LARGEST_LOG_SCALE)
    return f"for the same factor set init_logit_scale to {scale:.4g}, the natural log of 1 / temperature"


FACTS = LossFacts(
    name="sigmoid",
    title="the sigmoid loss",
    summary="the pairwise sigmoid loss of SigLIP, with a learned scale and bias",
    loss="vembed.losses.sigmoid:SigmoidLoss",
    keys=SigmoidKeys,
    columns=(WEIGHT_COLUMN,),
    memory="tiles",
    blocks=lambda keys: (2 + keys.filter_blocks, 0),  # the logits, and their terms before they are summed
    formula="L = 1/Q sum over i, j of log(1 + exp(-y_ij (s S_ij + b)))",
    source='Zhai et al., 2023, "Sigmoid Loss for Language Image Pre-Training"',
    citation="""@inproceedings{zhai2023sigmoid,
  title     = {Sigmoid Loss for Language Image Pre-Training},
  author    = {Zhai, Xiaohua and Mustafa, Basil and Kolesnikov, Alexander and Beyer, Lucas},
  booktitle = {Proceedings of the IEEE/CVF International Conference on Computer Vision},
  year      = {2023}
}""",
    hints={
        "temperature": _same_factor,
        "learn_temperature": "sigmoid always learns its scale",
        "loss_bidirectional": "sigmoid judges each pair once",
    },
)
