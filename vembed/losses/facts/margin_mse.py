"""What the squared error of margins says of itself."""

from __future__ import annotations

from vembed.config.fields import Positive, key
from vembed.config.keys.loss import PrefixKeys, TileKeys
from vembed.data.columns import WEIGHT_COLUMN
from vembed.losses.registry import LossFacts


class MarginMseKeys(TileKeys, PrefixKeys):
    """Keys of the squared error of margins."""

    margin_mse_scale: Positive = key(
        1.0,
        "Factor on similarities, which brings cosines into the range of the scores; 10 or so for a cross-encoder's.",
    )


FACTS = LossFacts(
    name="margin_mse",
    title="the squared error of margins",
    summary="positives as much ahead of the row's other documents as a teacher's scores say",
    loss="vembed.losses.margin_mse:MarginMseLoss",
    keys=MarginMseKeys,
    columns=(WEIGHT_COLUMN,),
    takes=("lists",),
    reads_negatives=lambda _: "loss_type margin_mse",
    memory="pairs",
    formula="L = mean over i, p, n of (margin_mse_scale (S_ip - S_in) - (y_ip - y_in))^2",
    source='Hofstätter et al., 2020, "Improving Efficient Neural Ranking Models with Cross-Architecture Knowledge '
    'Distillation"',
    citation="""@article{hofstaetter2020improving,
  title   = {Improving Efficient Neural Ranking Models with Cross-Architecture Knowledge Distillation},
  author  = {Hofst{\\"a}tter, Sebastian and Althammer, Sophia and Schr{\\"o}der, Michael and Sertkan, Mete and
             Hanbury, Allan},
  journal = {arXiv preprint arXiv:2010.02666},
  year    = {2020}
}""",
)
