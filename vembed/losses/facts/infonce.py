"""What InfoNCE says of itself."""

from __future__ import annotations

import math
from typing import Literal

from vembed.config.fields import NonNegative, key
from vembed.config.keys.loss import DirectionKeys, FilterKeys, PrefixKeys, TemperatureKeys, TileKeys
from vembed.data.columns import WEIGHT_COLUMN
from vembed.losses.registry import LossFacts
from vembed.plan.memory import LOSS_STRIP_TILES


class SoftmaxKeys(TileKeys, PrefixKeys, FilterKeys, TemperatureKeys, DirectionKeys):
    """Keys of InfoNCE over any negatives."""


class InfoNCEKeys(SoftmaxKeys):
    """Keys of InfoNCE."""

    hardness_mode: Literal["none", "in_batch_negatives", "hard_negatives", "all_negatives"] = key(
        "none",
        "Which negatives count more for a query, the more similar they are: those of other rows, the hard negatives of "
        "its own row, or all.",
    )
    hardness_strength: NonNegative = key(
        5.0,
        "A negative of similarity S counts exp(hardness_strength S) times; 9 as in LLaVE, 5 as in EmbeddingGemma.",
        acts_with={"hardness_mode": ("all_negatives", "in_batch_negatives", "hard_negatives")},
    )
    focal_gamma: NonNegative = key(
        0.0,
        "Weigh a query by (1 - p)^focal_gamma, p being the softmax's share of its positives: what is learned counts "
        "less. 0.5 as in KaLM-Embedding-V2; 0 weighs all alike.",
    )


def softmax_blocks(keys: SoftmaxKeys) -> tuple[int, int]:
    """Return the logits' block and one to compute in; one direction alone has a strip in the place of the former."""
    is_one_sweep = not keys.loss_bidirectional and keys.mrl_dims is None
    return (1 + keys.filter_blocks, LOSS_STRIP_TILES) if is_one_sweep else (2 + keys.filter_blocks, 0)


FACTS = LossFacts(
    name="infonce",
    title="the InfoNCE loss",
    summary="InfoNCE over the documents of the batch",
    loss="vembed.losses.infonce:InfoNCE",
    keys=InfoNCEKeys,
    columns=(WEIGHT_COLUMN,),
    memory="tiles",
    blocks=softmax_blocks,
    formula="L_i = -log( sum over j in P(i) of exp(l_ij)  /  sum over j in P(i) and N(i) of exp(l_ij) )",
    source='van den Oord et al., 2018, "Representation Learning with Contrastive Predictive Coding"',
    citation="""@article{oord2018representation,
  title   = {Representation Learning with Contrastive Predictive Coding},
  author  = {van den Oord, A{\\"a}ron and Li, Yazhe and Vinyals, Oriol},
  journal = {arXiv preprint arXiv:1807.03748},
  year    = {2018}
}""",
    hints={
        "cosent_scale": lambda value: f"for the same factor set temperature to {1 / value:.4g}",
        "init_logit_scale": lambda value: f"for the same factor set temperature to {math.exp(-value):.4g}",
        "use_all_negatives": "infonce always learns from all of them",
    },
)
