"""What the divergence from a teacher's scores says of itself."""

from __future__ import annotations

from vembed.config.fields import Positive, key
from vembed.config.keys.loss import PrefixKeys, TileKeys
from vembed.data.columns import WEIGHT_COLUMN
from vembed.losses.registry import LossFacts


class KlKeys(TileKeys, PrefixKeys):
    """Keys of the divergence from a teacher's scores."""

    kl_temperature: Positive = key(0.05, "Similarities of a row's documents are divided by it.")
    kl_teacher_temperature: Positive | None = key(
        None,
        "The scores of a row's documents are divided by it; null is kl_temperature for the cosines of an encoder as "
        "teacher, and 1 for a cross-encoder's scores and those of the data.",
    )


FACTS = LossFacts(
    name="kl",
    title="the divergence from a teacher's scores",
    summary="the shares of a row's own documents as a teacher's scores say",
    loss="vembed.losses.kl:KlLoss",
    keys=KlKeys,
    columns=(WEIGHT_COLUMN,),
    takes=("lists",),
    memory="pairs",
    formula="L = max(1, kl_temperature)^2 mean over i of KL(softmax(y_i / kl_teacher_temperature) || "
    "softmax(S_i / kl_temperature)), over the row's own documents",
    source='Lin et al., 2020, "Distilling Dense Representations for Ranking using Tightly-Coupled Teachers"',
    citation="""@article{lin2020distilling,
  title   = {Distilling Dense Representations for Ranking using Tightly-Coupled Teachers},
  author  = {Lin, Sheng-Chieh and Yang, Jheng-Hong and Lin, Jimmy},
  journal = {arXiv preprint arXiv:2010.11386},
  year    = {2020}
}""",
    hints={"temperature": lambda value: f"for the same temperature set kl_temperature to {value:.4g}"},
)
