"""Every loss with every value of its keys, as few rows as hold them all, and a batch that has what each learns from."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from vembed.config.schema import config_class
from vembed.losses.base import LossCommon
from vembed.losses.registry import RunLoss

if TYPE_CHECKING:
    from vembed.losses.base import BatchLoss, BatchStructure

COLD = {"temperature": 0.1, "learn_temperature": True}
SHARP = {"temperature": 0.012, "learn_temperature": True}  # logits too large to be exponentiated without a maximum
BOTH = {"loss_bidirectional": True}
CUT = {"mrl_dims": [16, 4], "mrl_weights": [2, 1]}
OPEN = {"mask_false_negatives": False}
NEAR = {
    "false_negative_filter": "threshold",
    "false_negative_margin": 0.1,
    "false_negative_margin_kind": "absolute",
}
TAUGHT = {
    "false_negative_filter": "teacher",
    "false_negative_margin": 0.2,
}
DIRECTIONS = ["query_to_document", "query_to_query", "document_to_query", "document_to_document"]

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "one direction": ("infonce", COLD),
    "both directions": ("infonce", COLD | BOTH),
    "one direction, sharp": ("infonce", SHARP),
    "both directions, sharp": ("infonce", SHARP | BOTH | CUT),
    "prefixes": ("infonce", COLD | BOTH | CUT),
    "harder": ("infonce", COLD | BOTH | CUT | {"hardness_mode": "all_negatives", "hardness_strength": 3}),
    "harder of others": ("infonce", OPEN | {"hardness_mode": "in_batch_negatives", "focal_gamma": 0.5}),
    "harder of its own": ("infonce", NEAR | {"hardness_mode": "hard_negatives"}),
    "taught": ("infonce", TAUGHT | COLD),
    "all directions": ("infonce", COLD | CUT | {"loss_directions": DIRECTIONS}),
    "all directions, whole": ("infonce", COLD | {"loss_directions": DIRECTIONS}),
    "queries too": ("infonce", OPEN | {"loss_directions": DIRECTIONS[:2]}),
    "columns too": ("infonce", {"loss_directions": DIRECTIONS[::2], "focal_gamma": 0.5}),
    "documents too": ("infonce", {"loss_directions": DIRECTIONS[::3], "hardness_mode": "all_negatives"}),
    "supcon": ("supcon", OPEN),
    "supcon, near": ("supcon", COLD | BOTH | CUT | NEAR),
    "supcon, taught": ("supcon", TAUGHT),
    "hardest": ("in_batch_hard", COLD | BOTH | CUT | {"hard_topk": 3}),
    "hardest, sharp": ("in_batch_hard", SHARP | BOTH | {"hard_topk": 2}),
    "hardest, near": ("in_batch_hard", NEAR | {"hard_topk": 2}),
    "hardest, taught": ("in_batch_hard", TAUGHT | {"hard_topk": 2}),
    "hardest of all": ("in_batch_hard", OPEN | {"use_all_negatives": True}),
    "sigmoid": ("sigmoid", OPEN | {"init_logit_scale": 2, "init_logit_bias": -3}),
    "sigmoid with prefixes": ("sigmoid", CUT | NEAR),
    "sigmoid, taught": ("sigmoid", TAUGHT),
    "triplet": ("triplet", CUT | OPEN),
    "triplet, near": ("triplet", NEAR),
    "triplet, taught": ("triplet", TAUGHT),
    "hardest triplet": ("triplet", {"triplet_negatives": "hardest"}),
    "hardest triplet, taught": (
        "triplet",
        TAUGHT | CUT | {"triplet_negatives": "hardest", "triplet_margin": 0.3, "false_negative_margin": 0.5},
    ),
    "listed triplet": ("triplet", CUT | {"triplet_negatives": "listed"}),
    "cosent": ("cosent", CUT | OPEN),
    "cosent, near": ("cosent", NEAR | {"cosent_scale": 5}),
    "cosent, taught": ("cosent", TAUGHT),
    "listed cosent": ("cosent", CUT),
    "listed angles": ("angle", {}),
    "listed angles with prefixes": ("angle", CUT | {"angle_scale": 5}),
    "listed cosines": ("cosine_mse", {}),
    "listed cosines with prefixes": ("cosine_mse", CUT),
    "listed margins": ("margin_mse", CUT),
    "listed margins, large": ("margin_mse", {"margin_mse_scale": 3}),
    "listed shares": ("kl", CUT),
    "listed shares, hot": ("kl", {"kl_temperature": 2, "kl_teacher_temperature": 0.5}),
    "distillation": (
        "distillation",
        COLD | BOTH | CUT | {"distillation_alpha": 0.3, "distillation_temperature": 0.5, "hardness_strength": 3}
        | {"hardness_mode": "all_negatives"},
    ),
    "distillation, hot": ("distillation", TAUGHT | {"distillation_temperature": 2, "hardness_mode": "hard_negatives"}),
    "distillation of cosines": ("distillation", NEAR | {"distillation_loss_type": "mse", "focal_gamma": 0.5}),
    "distillation in all directions": (
        "distillation",
        OPEN | {"loss_directions": DIRECTIONS, "hardness_mode": "in_batch_negatives"},
    ),
    "listed sum": ("infonce", COLD | {"added_losses": {"spread_out": 0.3, "cosine_mse": 2.0}}),
    "spread out": ("spread_out", {}),
    "spread out with prefixes": ("spread_out", CUT | {"spread_out_mean": 0.5, "spread_out_second_moment": 2}),
}  # fmt: skip

LATE: dict[str, tuple[str, dict[str, Any]]] = {
    "colbert": ("colbert", COLD),
    "colbert in both directions": ("colbert", COLD | BOTH | {"maxsim_sum": True}),
    "colbert, sharp": ("colbert", SHARP | BOTH),
    "colbert, unmasked": ("colbert", OPEN),
}
"""Of encoders with several vectors for each row."""


def build(kind: str | tuple[str, dict[str, Any]], tile_size: int, dimension: int = 16) -> BatchLoss:
    """Make a loss as a run does, in float64: of a row by its name, or of a loss by name and keys."""
    name, values = (KINDS | LATE)[kind] if isinstance(kind, str) else kind
    keys = keys_of(values)
    return RunLoss.chosen(name, keys.added_losses).build(keys, LossCommon(torch.float64, dimension, tile_size))


def keys_of(values: dict[str, Any]) -> SimpleNamespace:
    """Return the keys of a configuration, with values of some and the defaults of the others."""
    return SimpleNamespace(**{key: info.get_default() for key, info in config_class().model_fields.items()} | values)


def structure_for(kind: str, structure: BatchStructure) -> BatchStructure:
    """Return a batch with weights of rows, second positives, a teacher's vectors, and scores where the kind asks."""
    draw = torch.Generator().manual_seed(1)
    num_queries, num_documents = structure.num_queries, structure.num_documents
    weights_Q = torch.rand(num_queries, generator=draw, dtype=torch.float64) * 3
    weights_Q[2:3] = 0
    teacher_NT = torch.randn(num_queries + num_documents, 3, generator=draw)
    teacher_NT = torch.nn.functional.normalize(teacher_NT, dim=1)
    positives_P2, negatives_P2, listed = structure.positives_P2, structure.negatives_P2, None
    if negatives_P2 is not None:
        second = negatives_P2[::4]
        kept = [row for row in negatives_P2.tolist() if row not in second.tolist()]
        positives_P2, negatives_P2 = torch.cat([positives_P2, second]), torch.tensor(kept).reshape(-1, 2)
        positives_P2 = positives_P2.unique(dim=0)
    if kind.startswith("listed") and kind != "listed triplet":
        rows = torch.arange(num_queries)
        pairs = [torch.stack([rows, (rows + step) % num_documents], dim=1) for step in range(3)]
        pairs[1:] = [rows_P2[rows != num_queries - 2] for rows_P2 in pairs[1:]]  # one row has less to list
        listed = torch.cat([positives_P2, *pairs]).unique(dim=0)
    return replace(
        structure,
        positives_P2=positives_P2,
        negatives_P2=negatives_P2,
        weights_Q=weights_Q,
        teacher_Q=teacher_NT[:num_queries],
        teacher_D=teacher_NT[num_queries:],
        listed_P2=listed,
        listed_scores_P=None
        if listed is None
        else torch.linspace(-1, 1, len(listed), dtype=torch.float64).mul(7).sin(),
    )
