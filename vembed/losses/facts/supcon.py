"""What the supervised contrastive loss says of itself."""

from __future__ import annotations

from vembed.data.columns import WEIGHT_COLUMN
from vembed.losses.facts.infonce import FACTS as INFONCE
from vembed.losses.facts.infonce import SoftmaxKeys, softmax_blocks
from vembed.losses.registry import LossFacts

FACTS = LossFacts(
    name="supcon",
    title="the supervised contrastive loss",
    summary="InfoNCE of each positive by itself, for rows of one class",
    loss="vembed.losses.infonce:SupCon",
    keys=SoftmaxKeys,
    columns=(WEIGHT_COLUMN,),
    takes=("positives", "classes"),
    memory="tiles",
    blocks=softmax_blocks,
    formula="L_i = mean over p in P(i) of -log( exp(l_ip)  /  sum over j in P(i) and N(i) of exp(l_ij) )",
    source='Khosla et al., 2020, "Supervised Contrastive Learning"',
    citation="""@inproceedings{khosla2020supervised,
  title     = {Supervised Contrastive Learning},
  author    = {Khosla, Prannay and Teterwak, Piotr and Wang, Chen and Sarna, Aaron and Tian, Yonglong and
               Isola, Phillip and Maschinot, Aaron and Liu, Ce and Krishnan, Dilip},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2020}
}""",
    hints=INFONCE.hints,
)
