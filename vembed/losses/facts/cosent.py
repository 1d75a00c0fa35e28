"""What the CoSENT loss says of itself."""

from __future__ import annotations

from vembed.config.fields import Positive, key
from vembed.config.keys.loss import CellKeys
from vembed.data.columns import WEIGHT_COLUMN
from vembed.losses.registry import LossFacts


class CosentKeys(CellKeys):
    """Keys of the CoSENT loss."""

    cosent_scale: Positive = key(20.0, "Factor on differences of similarities, as 1 / temperature is.")


FACTS = LossFacts(
    name="cosent",
    title="the CoSENT loss",
    summary="every pair more similar than each pair of a lower grade, over the whole batch",
    loss="vembed.losses.cosent:CosentLoss",
    keys=CosentKeys,
    columns=(WEIGHT_COLUMN,),
    takes=("positives", "pairs"),
    memory="tiles",
    blocks=lambda keys: (2 + keys.filter_blocks, 0),  # the logits, and their exponentials
    formula="L = log(1 + sum over pairs a, b with y_a > y_b of exp(cosent_scale (S_b - S_a)))",
    source='Su, 2022, "CoSENT (I): a more effective sentence vector scheme than Sentence-BERT"',
    citation="""@misc{su2022cosent,
  title        = {CoSENT (I): A more effective sentence vector scheme than Sentence-BERT},
  author       = {Su, Jianlin},
  year         = {2022},
  howpublished = {\\url{https://kexue.fm/archives/8847}},
  note         = {in Chinese}
}""",
    hints={
        "temperature": lambda value: f"for the same factor set cosent_scale to {1 / value:.4g}",
        "loss_bidirectional": "cosent compares pairs, which have no direction",
    },
)
