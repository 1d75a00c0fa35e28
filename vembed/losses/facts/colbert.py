"""What the late-interaction loss says of itself."""

from __future__ import annotations

from vembed.config.fields import key
from vembed.config.keys.loss import DirectionKeys, MaskKeys, TemperatureKeys, TileKeys
from vembed.data.columns import WEIGHT_COLUMN
from vembed.losses.facts.infonce import FACTS as INFONCE
from vembed.losses.registry import LossFacts
from vembed.plan.memory import LOSS_STRIP_TILES


class ColbertKeys(TileKeys, MaskKeys, TemperatureKeys, DirectionKeys):
    """Keys of InfoNCE over MaxSim."""

    maxsim_sum: bool = key(
        False,
        "Score by ColBERT's sum over the query's vectors (its papers have no temperature, which is temperature: 1). "
        "false divides it by their number, so that one temperature suits queries of any length.",
    )


FACTS = LossFacts(
    name="colbert",
    title="the ColBERT loss",
    summary="InfoNCE over MaxSim, for models with several vectors for each row",
    loss="vembed.losses.colbert:ColbertLoss",
    keys=ColbertKeys,
    columns=(WEIGHT_COLUMN,),
    memory="tiles",
    blocks=lambda _: (2, LOSS_STRIP_TILES),  # products and slopes; winners of a strip
    multi_vector=True,
    formula="S_ij = mean over vectors v of q_i of max over vectors w of d_j of <v, w>; " + INFONCE.formula,
    source='Khattab & Zaharia, 2020, "ColBERT: Efficient and Effective Passage Search"',
    citation="""@inproceedings{khattab2020colbert,
  title     = {ColBERT: Efficient and Effective Passage Search via Contextualized Late Interaction over BERT},
  author    = {Khattab, Omar and Zaharia, Matei},
  booktitle = {Proceedings of the 43rd International ACM SIGIR Conference},
  year      = {2020}
}""",
    hints={**INFONCE.hints, "mrl_dims": "vectors of late interaction are short; choose their dimension itself"},
)
