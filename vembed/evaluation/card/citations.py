"""The papers behind the methods of a run."""

from __future__ import annotations

PAPERS = {
    "infonce": {
        "title": "the InfoNCE loss",
        "bibtex": """@article{oord2018representation,
  title   = {Representation Learning with Contrastive Predictive Coding},
  author  = {van den Oord, A{\\"a}ron and Li, Yazhe and Vinyals, Oriol},
  journal = {arXiv preprint arXiv:1807.03748},
  year    = {2018}
}""",
    },
    "sigmoid": {
        "title": "the sigmoid loss",
        "bibtex": """@inproceedings{zhai2023sigmoid,
  title     = {Sigmoid Loss for Language Image Pre-Training},
  author    = {Zhai, Xiaohua and Mustafa, Basil and Kolesnikov, Alexander and Beyer, Lucas},
  booktitle = {Proceedings of the IEEE/CVF International Conference on Computer Vision},
  year      = {2023}
}""",
    },
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
"""Method -> its name in a sentence, and the paper that it is from as BibTeX."""
