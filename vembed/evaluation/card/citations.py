"""The papers behind the methods of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.losses.registry import loss_section
from vembed.registry import LOSSES

if TYPE_CHECKING:
    from collections.abc import Sequence

PAPERS = {
    "matryoshka": {
        "title": "Matryoshka representations",
        "bibtex": """@inproceedings{kusupati2022matryoshka,
  title     = {Matryoshka Representation Learning},
  author    = {Kusupati, Aditya and Bhatt, Gantavya and Rege, Aniket and Wallingford, Matthew and Sinha, Aditya and
               Ramanujan, Vivek and Howard-Snyder, William and Chen, Kaifeng and Kakade, Sham and Jain, Prateek and
               Farhadi, Ali},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2022}
}""",
    },
    "gradient caching": {
        "title": "gradient caching",
        "bibtex": """@inproceedings{gao2021scaling,
  title     = {Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup},
  author    = {Gao, Luyu and Zhang, Yunyi and Han, Jiawei and Callan, Jamie},
  booktitle = {Proceedings of the 6th Workshop on Representation Learning for NLP (RepL4NLP-2021)},
  year      = {2021}
}""",
    },
    "lora": {
        "title": "LoRA",
        "bibtex": """@inproceedings{hu2022lora,
  title     = {{LoRA}: Low-Rank Adaptation of Large Language Models},
  author    = {Hu, Edward J. and Shen, Yelong and Wallis, Phillip and Allen-Zhu, Zeyuan and Li, Yuanzhi and
               Wang, Shean and Wang, Lu and Chen, Weizhu},
  booktitle = {International Conference on Learning Representations},
  year      = {2022}
}""",
    },
}
"""Method -> its name in a sentence, and the paper that it is from as BibTeX; losses state their own."""


def papers(methods: Sequence[str]) -> list[dict[str, str]]:
    """Return the papers of methods and losses, of those that have one."""
    losses = {name: loss_section(name) for name in methods if name in LOSSES}
    known = PAPERS | {name: {"title": loss.title, "bibtex": loss.citation} for name, loss in losses.items()}
    return [known[name] for name in methods if known.get(name, {}).get("bibtex")]
