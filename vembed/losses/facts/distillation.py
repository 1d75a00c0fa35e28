"""What distillation over the batch says of itself."""

from __future__ import annotations

from typing import Literal

from vembed.config.fields import Positive, Share, key
from vembed.data.columns import WEIGHT_COLUMN
from vembed.losses.facts.infonce import FACTS as INFONCE
from vembed.losses.facts.infonce import InfoNCEKeys
from vembed.losses.registry import LossFacts


class DistillationKeys(InfoNCEKeys):
    """Keys of InfoNCE and of a teacher's similarities beside it."""

    distillation_alpha: Share = key(0.5, "Share of InfoNCE in the loss; the rest is the teacher's.")
    distillation_temperature: Positive = key(
        0.05,
        "The similarities of both models are divided by it.",
        acts_with={"distillation_loss_type": ("kl",)},
    )
    distillation_loss_type: Literal["kl", "mse"] = key(
        "kl",
        "How far the model is from the teacher: kl, of the shares that a query gives the documents of the batch; mse, "
        "of the similarities themselves.",
    )


def _blocks(keys: DistillationKeys) -> tuple[int, int]:
    """Return the blocks of InfoNCE, and beside them logits, those of the teacher, and one to compute in."""
    count, strip = INFONCE.blocks(keys)
    return count + 3, strip


FACTS = LossFacts(
    name="distillation",
    title="distillation of a teacher",
    summary="InfoNCE, and similarities of the batch as those of teacher_model_name",
    loss="vembed.losses.distillation:DistillationLoss",
    keys=DistillationKeys,
    columns=(WEIGHT_COLUMN,),
    memory="tiles",
    blocks=_blocks,
    listed=INFONCE.listed,
    reads_teacher=lambda _: True,
    reads_negatives=INFONCE.reads_negatives,
    formula="L = distillation_alpha L_infonce + (1 - distillation_alpha) L_teacher",
    source='Hinton et al., 2015, "Distilling the Knowledge in a Neural Network"',
    citation="""@article{hinton2015distilling,
  title   = {Distilling the Knowledge in a Neural Network},
  author  = {Hinton, Geoffrey and Vinyals, Oriol and Dean, Jeff},
  journal = {arXiv preprint arXiv:1503.02531},
  year    = {2015}
}""",
)
