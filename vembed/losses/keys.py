"""Keys and facts of our losses: what a configuration and the plan must know of a loss without importing torch.

First the keys that several losses share and the choice of a loss, then a section for each loss. A plugin's loss has
such a section beside it, in its own file (losses/registry.py says what a section states).
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from vembed.data.columns import WEIGHT_COLUMN, ExtraColumn
from vembed.losses import MAX_LOGIT_SCALE, MIN_LOGIT_SCALE
from vembed.losses.registry import Hints, LossSection, Memory
from vembed.plan.memory import LOSS_STRIP_TILES
from vembed.registry import LOSSES
from vembed.section import ANY, Auto, Count, Name, NonNegative, Positive, Rule, Section, Share, key

if TYPE_CHECKING:
    from vembed.config.schema import Config


class TemperatureKeys(Section):
    """Keys of a loss that divides similarities by a temperature."""

    temperature: Positive = key(0.05, "Divisor of the similarities; its start value if learn_temperature is on.")
    learn_temperature: bool = key(False, "Train the temperature as well.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"A learned `temperature` starts between {1 / MAX_LOGIT_SCALE} and {1 / MIN_LOGIT_SCALE}.",
            ("temperature", "learn_temperature"),
            lambda keys: keys.learn_temperature and not MIN_LOGIT_SCALE <= 1 / keys.temperature <= MAX_LOGIT_SCALE,
            f"a learned temperature starts between {1 / MAX_LOGIT_SCALE} and {1 / MIN_LOGIT_SCALE}, "
            "got {temperature}",
        ),
    )


class DirectionKeys(Section):
    """Keys of a loss that asks for the document of a query, and may ask the other way round."""

    loss_bidirectional: bool = key(False, "Average the losses of query -> document and document -> query.")


class MaskKeys(Section):
    """Keys of a loss with in-batch negatives."""

    mask_false_negatives: bool = key(
        True, "Ignore copies of a query's positive among its negatives, matched by id and content."
    )


class FilterKeys(MaskKeys):
    """Keys of a loss that can tell false negatives by their similarity."""

    false_negative_filter: Literal["identity", "threshold", "teacher"] = key(
        "identity",
        "Rule for further false negatives, which are ignored. identity: only mask_false_negatives acts. threshold: "
        "documents more similar to the query, by the model, than its best positive less the margin. teacher: the same "
        "by the teacher's vectors.",
    )
    false_negative_margin: Annotated[float, Field(ge=-1, le=1)] = key(
        0.05,
        "Margin between the best positive's similarity and the limit for false negatives.",
        acts_with={"false_negative_filter": ("threshold", "teacher")},
    )
    false_negative_margin_kind: Literal["relative", "absolute"] = key(
        "relative",
        "Unit of false_negative_margin. relative: a share of the positive's similarity. absolute: a difference from "
        "it.",
        acts_with={"false_negative_filter": ("threshold", "teacher")},
    )

    @property
    def filter_blocks(self) -> int:
        """Blocks of the similarity matrix that the filter takes: what it found, and the teacher's similarities."""
        return {"identity": 0, "threshold": 1, "teacher": 2}[self.false_negative_filter]


class PrefixKeys(Section):
    """Keys of a loss that can train prefixes of the embedding (Matryoshka)."""

    mrl_dims: Annotated[list[Count], Field(min_length=1)] | None = key(
        None,
        "Matryoshka: train these numbers of leading dims, each normalised, instead of the whole vector. Add the whole "
        "dim to train it too.",
        unit="dims",
    )
    mrl_weights: Annotated[list[Positive], Field(min_length=1)] | None = key(
        None,
        "Weight of each of mrl_dims in the mean of their losses. null: equal weights.",
        acts_with={"mrl_dims": ANY},
    )


class TileKeys(Section):
    """Keys of a loss that computes the similarity matrix in blocks."""

    loss_tile_size: Auto | Count = key(
        "auto",
        "Rows and columns of the blocks of the similarity matrix. They change memory and speed; the loss stays the "
        "same.",
        unit="items",
    )


class CellKeys(TileKeys, PrefixKeys, FilterKeys):
    """Keys of losses over the cells of the matrix of similarities."""


class LossChoice(Section):
    """Which loss, and how exactly it is computed."""

    loss_type: Name = key("infonce", "Training loss.")
    added_losses: Mapping[Name, Positive] = key(
        {},
        "Further losses, as name: weight. Each value times its weight is added to loss_type's, and the loss's keys "
        "take effect.",
    )
    loss_precision: Literal["highest", "tf32"] = key(
        "highest",
        "Precision of float32 matrix products in the loss. tf32: faster on CUDA devices from Ampere on, but rounds "
        "each factor by up to 2^-11. At a temperature of 0.02 the gradient errs by 0.1 to 0.3% of its length, the "
        "loss by less than 0.01%. Other devices and the encoder are unaffected.",
    )


class LossKeys(TileKeys, PrefixKeys, MaskKeys, LossChoice):
    """Loss of a run, and keys that most losses share."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "`mrl_dims` must not hold a number twice.",
            ("mrl_dims",),
            lambda config: (
                len(set(config.mrl_dims or [])) < len(config.mrl_dims or [])
                and f"mrl_dims holds a number twice; write {sorted(set(config.mrl_dims), reverse=True)}"
            ),
        ),
        Rule(
            "`mrl_weights` must have as many entries as `mrl_dims`.",
            ("mrl_weights", "mrl_dims"),
            lambda config: (
                config.mrl_weights
                and config.mrl_dims
                and len(config.mrl_weights) != len(config.mrl_dims)
                and f"mrl_weights has {len(config.mrl_weights)} entries, mrl_dims has {len(config.mrl_dims)}; "
                "give one weight for each, or remove mrl_weights to weigh all alike"
            ),
        ),
        Rule(
            "`added_losses` must differ from `loss_type` and take as many vectors per row as it does.",
            ("added_losses", "loss_type"),
            lambda config: _unfit_added_loss(config),
        ),
        Rule(
            "`loss_type` must be a loss that learns from the rows.",
            ("loss_type", "added_losses"),
            lambda config: not LOSSES.load(config.loss_type).takes,
            "{loss_type} alone learns nothing from the rows; choose another loss_type, and set added_losses to "
            "{{{loss_type}: 1}}",
        ),
        Rule(
            "`added_losses` over listed pairs need a `label_kind`, or a teacher, that gives them.",
            ("added_losses", "label_kind", "teacher_model_name"),
            lambda config: _added_loss_without_scores(config),
        ),
    )


def _unfit_added_loss(config: "Config") -> str:
    main = LOSSES.load(config.loss_type)
    for name in config.added_losses:
        if name not in LOSSES or name == config.loss_type:
            others = [loss for loss in LOSSES.names() if loss != config.loss_type]
            reason = "is loss_type itself" if name == config.loss_type else "is no loss"
            return f"added_losses: {name!r} {reason}; name one of {', '.join(others)}"
        if LOSSES.load(name).multi_vector != main.multi_vector:
            return f"added_losses: {name} takes other embeddings than {main.name}: one of them several for each row"
    return ""


def _added_loss_without_scores(config: "Config") -> str:
    if config.label_kind in {"pair", "grade"} or config.teacher_model_name is not None:
        return ""
    for loss in (LOSSES.load(name) for name in config.added_losses if name in LOSSES):
        if loss.takes in (("pairs",), ("lists",)):
            return (
                f"added_losses: {loss.name} learns from listed pairs; set label_kind to grade or pair, or "
                "teacher_model_name"
            )
    return ""


# The losses -----------------------------------------------------------------------------------------------------------


class OurLoss(LossSection):
    """Facts that most of our losses share: they weigh rows, and compute the matrix of similarities in tiles."""

    columns: ClassVar[tuple[ExtraColumn, ...]] = (WEIGHT_COLUMN,)
    memory: ClassVar[Memory] = "tiles"


class SoftmaxKeys(OurLoss, CellKeys, TemperatureKeys, DirectionKeys):
    """Keys of InfoNCE over any negatives."""

    hints: ClassVar[Hints] = {
        "cosent_scale": lambda value: f"for the same factor set temperature to {1 / value:.4g}",
        "init_logit_scale": lambda value: f"for the same factor set temperature to {math.exp(-value):.4g}",
        "use_all_negatives": "only in_batch_hard leaves negatives out",
    }

    @property
    def tile_blocks(self) -> tuple[int, int]:
        """Logits and a block to compute in; one direction alone keeps the logits of a strip of rows instead."""
        keeps_logits = not self.loss_bidirectional and self.mrl_dims is None
        return (1 + self.filter_blocks, LOSS_STRIP_TILES) if keeps_logits else (2 + self.filter_blocks, 0)


Direction = Literal["query_to_document", "document_to_query", "query_to_query", "document_to_document"]
"""A competitor of a query's positive."""


class InfoNCEKeys(SoftmaxKeys):
    """Keys of InfoNCE."""

    loss = "vembed.losses.infonce:InfoNCE"
    name = "infonce"
    title = "the InfoNCE loss"
    summary = "InfoNCE over the documents of the batch"
    formula = "L_i = -log( sum over j in P(i) of exp(l_ij)  /  sum over j in P(i) and N(i) of exp(l_ij) )"
    source = 'van den Oord et al., 2018, "Representation Learning with Contrastive Predictive Coding"'
    citation = """@article{oord2018representation,
  title   = {Representation Learning with Contrastive Predictive Coding},
  author  = {van den Oord, A{\\"a}ron and Li, Yazhe and Vinyals, Oriol},
  journal = {arXiv preprint arXiv:1807.03748},
  year    = {2018}
}"""

    loss_directions: Annotated[list[Direction], Field(min_length=1)] | None = key(
        None,
        "Competitors of a query's positive in one softmax. query_to_document: the documents of the batch, always "
        "included; null means these alone. query_to_query: other queries. document_to_query: the queries that its "
        "positive is compared with. document_to_document: other documents. loss_bidirectional averages two softmaxes "
        "instead.",
    )
    hardness_mode: Literal["none", "in_batch_negatives", "hard_negatives", "all_negatives"] = key(
        "none",
        "Negatives that count more, the more similar they are to the query: those of other rows, its own row's hard "
        "negatives, or all.",
    )
    hardness_strength: NonNegative = key(
        5.0,
        "Exponent: a negative of similarity S counts exp(hardness_strength S) times. LLaVE uses 9, EmbeddingGemma 5.",
        acts_with={"hardness_mode": ("all_negatives", "in_batch_negatives", "hard_negatives")},
    )
    focal_gamma: NonNegative = key(
        0.0,
        "Weigh a query by (1 - p)^focal_gamma, with p the softmax share of its positives, so learned queries count "
        "less. KaLM-Embedding-V2 uses 0.5. 0: equal weights.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "`loss_directions` are one softmax: `query_to_document` among them, without a second or a filter.",
            ("loss_directions", "loss_bidirectional", "false_negative_filter"),
            lambda keys: keys.loss_directions is not None and _wrong_directions(keys),
        ),
    )

    @property
    def tile_blocks(self) -> tuple[int, int]:
        """One softmax over several directions sweeps three matrices, one after the other."""
        return (4, 0) if self.loss_directions else super().tile_blocks

    @property
    def query_copies(self) -> int:
        """Copies of a device's queries: its positives and their gradients, while documents meet documents."""
        return 2 if "document_to_document" in (self.loss_directions or ()) else 0

    @property
    def row_negatives(self) -> str:
        """The setting that learns from the hard negatives of rows alone; empty without."""
        return "hardness_mode hard_negatives" if self.hardness_mode == "hard_negatives" else ""


def _wrong_directions(keys: InfoNCEKeys) -> str:
    directions = keys.loss_directions or []
    if "query_to_document" not in directions or len(set(directions)) < len(directions):
        return "loss_directions names query_to_document, and each direction once"
    if keys.loss_bidirectional:
        return "loss_directions is one softmax, and loss_bidirectional averages two; set one of them"
    if keys.false_negative_filter != "identity":
        return (
            f"false_negative_filter {keys.false_negative_filter} judges queries and documents, and loss_directions "
            "compares more; set false_negative_filter to identity, or remove loss_directions"
        )
    return ""


class SupConKeys(SoftmaxKeys):
    """Keys of the supervised contrastive loss."""

    loss = "vembed.losses.infonce:SupCon"
    name = "supcon"
    title = "the supervised contrastive loss"
    summary = "InfoNCE for each positive separately, for rows of one class"
    takes = ("positives", "classes")
    formula = "L_i = mean over p in P(i) of -log( exp(l_ip)  /  sum over j in P(i) and N(i) of exp(l_ij) )"
    source = 'Khosla et al., 2020, "Supervised Contrastive Learning"'
    citation = """@inproceedings{khosla2020supervised,
  title     = {Supervised Contrastive Learning},
  author    = {Khosla, Prannay and Teterwak, Piotr and Wang, Chen and Sarna, Aaron and Tian, Yonglong and
               Isola, Phillip and Maschinot, Aaron and Liu, Ce and Krishnan, Dilip},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2020}
}"""


class InBatchHardKeys(SoftmaxKeys):
    """Keys of InfoNCE over the hardest negatives."""

    loss = "vembed.losses.in_batch_hard:InBatchHard"
    name = "in_batch_hard"
    title = "the InfoNCE loss over the hardest negatives"
    summary = "InfoNCE over the hard_topk negatives most similar to the query"
    formula = "L_i = -log( sum over j in P(i) of exp(l_ij)  /  sum over j in P(i) and H(i) of exp(l_ij) )"
    source = InfoNCEKeys.source
    citation = InfoNCEKeys.citation

    hard_topk: Count = key(
        8,
        "Number of in-batch negatives per query, the most similar ones; its listed negatives compete too.",
        unit="items",
        acts_with={"use_all_negatives": (False,)},
    )
    use_all_negatives: bool = key(False, "Learn from all negatives, as infonce does.")

    @property
    def tile_blocks(self) -> tuple[int, int]:
        """Logits, their largest, and two blocks to find them in."""
        return super().tile_blocks if self.use_all_negatives else (4 + self.filter_blocks, 0)

    @property
    def numbers_kept(self) -> tuple[int, int]:
        """Numbers kept of each query and document: logits and positions of each prefix, and the slopes of one."""
        if self.use_all_negatives:
            return 0, 0
        of_each = self.hard_topk * (2 * len(self.mrl_dims or [0]) + 4)
        return of_each, of_each if self.loss_bidirectional else 0


class DistillationKeys(InfoNCEKeys):
    """Keys of InfoNCE and of a teacher's similarities beside it."""

    loss = "vembed.losses.distillation:DistillationLoss"
    name = "distillation"
    title = "distillation of a teacher"
    summary = "InfoNCE, and the batch's similarities matched to teacher_model_name"
    reads_teacher = True
    formula = "L = distillation_alpha L_infonce + (1 - distillation_alpha) L_teacher"
    source = 'Hinton et al., 2015, "Distilling the Knowledge in a Neural Network"'
    citation = """@article{hinton2015distilling,
  title   = {Distilling the Knowledge in a Neural Network},
  author  = {Hinton, Geoffrey and Vinyals, Oriol and Dean, Jeff},
  journal = {arXiv preprint arXiv:1503.02531},
  year    = {2015}
}"""

    distillation_alpha: Share = key(0.5, "Share of InfoNCE in the loss; the teacher's term gets the rest.")
    distillation_temperature: Positive = key(
        0.05,
        "Divisor of the similarities of both models.",
        acts_with={"distillation_loss_type": ("kl",)},
    )
    distillation_loss_type: Literal["kl", "mse"] = key(
        "kl",
        "Distance between model and teacher. kl: between their softmax distributions over the documents of the batch. "
        "mse: between the similarities.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "With `distillation_alpha: 0` the keys of InfoNCE have no effect, and with 1 those of the teacher's term.",
            ("distillation_alpha", "loss_type"),
            lambda config: _keys_of_a_term_without_weight(config),
        ),
    )

    @property
    def tile_blocks(self) -> tuple[int, int]:
        """The blocks of InfoNCE, and beside them logits, those of the teacher, and one to compute in."""
        blocks, kept_tiles = super().tile_blocks
        return blocks + 3, kept_tiles


def _keys_of_a_term_without_weight(config: Any) -> str:
    """Name the keys that were set for the term of `distillation` that `distillation_alpha` leaves out."""
    both = {*TileKeys.model_fields, *PrefixKeys.model_fields}
    if config.distillation_alpha == 0:
        names, cure = [name for name in InfoNCEKeys.model_fields if name not in both], "above 0"
    elif config.distillation_alpha == 1:
        names, cure = ["distillation_temperature", "distillation_loss_type"], "below 1"
    else:
        return ""
    others = [loss for loss in config.run_loss().sections if loss is not DistillationKeys]
    elsewhere = {name for loss in others for name in loss.model_fields}  # another loss of the sum reads them
    idle = [
        name
        for name in names
        if name not in elsewhere
        and (value := getattr(config, name)) != DistillationKeys.model_fields[name].get_default()
        and value is not False  # as in `idle_rules`: false asks for nothing
    ]
    if not idle:
        return ""
    return (
        f"{' and '.join(idle)} {'has' if len(idle) == 1 else 'have'} no effect with distillation_alpha "
        f"{config.distillation_alpha:g}; remove {'it' if len(idle) == 1 else 'them'} or set distillation_alpha {cure}"
    )


LARGEST_LOG_SCALE = math.log(MAX_LOGIT_SCALE)


class SigmoidKeys(OurLoss, CellKeys):
    """Keys of the sigmoid loss."""

    loss = "vembed.losses.sigmoid:SigmoidLoss"
    name = "sigmoid"
    title = "the sigmoid loss"
    summary = "pairwise sigmoid loss of SigLIP, with a learned scale and bias"
    formula = "L = 1/Q sum over i, j of log(1 + exp(-y_ij (s S_ij + b)))"
    source = 'Zhai et al., 2023, "Sigmoid Loss for Language Image Pre-Training"'
    citation = """@inproceedings{zhai2023sigmoid,
  title     = {Sigmoid Loss for Language Image Pre-Training},
  author    = {Zhai, Xiaohua and Mustafa, Basil and Kolesnikov, Alexander and Beyer, Lucas},
  booktitle = {Proceedings of the IEEE/CVF International Conference on Computer Vision},
  year      = {2023}
}"""
    hints: ClassVar[Hints] = {
        "temperature": lambda value: (
            f"for the same factor set init_logit_scale to {min(max(-math.log(value), 0.0), LARGEST_LOG_SCALE):.4g}, "
            "the natural log of 1 / temperature"
        ),
        "learn_temperature": "sigmoid always learns its scale",
        "loss_bidirectional": "sigmoid judges each pair once",
    }

    init_logit_scale: Annotated[float, Field(ge=0, le=LARGEST_LOG_SCALE)] = key(
        2.302585, "Start value of the natural log of the factor on similarities; ln 10 as in SigLIP."
    )
    init_logit_bias: Annotated[float, Field(ge=-100, le=100)] = key(
        -10.0, "Start value of the bias, which is added after the factor."
    )

    @property
    def tile_blocks(self) -> tuple[int, int]:
        """The logits, and their terms before they are summed; no logits are kept."""
        return 2 + self.filter_blocks, 0


class CosentKeys(OurLoss, CellKeys):
    """Keys of the CoSENT loss."""

    loss = "vembed.losses.cosent:CosentLoss"
    name = "cosent"
    title = "the CoSENT loss"
    summary = "rank each pair above all pairs of a lower grade, over the whole batch"
    takes = ("positives", "pairs")
    formula = "L = log(1 + sum over pairs a, b with y_a > y_b of exp(cosent_scale (S_b - S_a)))"
    source = 'Su, 2022, "CoSENT (I): a more effective sentence vector scheme than Sentence-BERT"'
    citation = """@misc{su2022cosent,
  title        = {CoSENT (I): A more effective sentence vector scheme than Sentence-BERT},
  author       = {Su, Jianlin},
  year         = {2022},
  howpublished = {\\url{https://kexue.fm/archives/8847}},
  note         = {in Chinese}
}"""
    hints: ClassVar[Hints] = {
        "temperature": lambda value: f"for the same factor set cosent_scale to {1 / value:.4g}",
        "loss_bidirectional": "cosent compares pairs, which have no direction",
    }

    cosent_scale: Positive = key(20.0, "Factor on differences of similarities, like 1 / temperature.")

    @property
    def tile_blocks(self) -> tuple[int, int]:
        """The logits, and their exponentials; no logits are kept."""
        return 2 + self.filter_blocks, 0


class AngleKeys(OurLoss, TileKeys, PrefixKeys):
    """Keys of the AnglE loss."""

    loss = "vembed.losses.cosent:AngleLoss"
    name = "angle"
    title = "the AnglE loss"
    summary = "CoSENT over angles in the complex plane, for graded pairs"
    takes = ("pairs",)
    memory = "pairs"
    formula = (
        "L = log(1 + sum over pairs a, b with y_a > y_b of exp(angle_scale (A_b - A_a))), "
        "A the absolute sum of both parts of x conj(y)"
    )
    source = 'Li & Li, 2024, "AoE: Angle-optimized Embeddings for Semantic Textual Similarity"'
    citation = """@inproceedings{li2024aoe,
  title     = {{AoE}: Angle-optimized Embeddings for Semantic Textual Similarity},
  author    = {Li, Xianming and Li, Jing},
  booktitle = {Proceedings of the 62nd Annual Meeting of the Association for Computational Linguistics},
  year      = {2024}
}"""
    hints: ClassVar[Hints] = {
        "temperature": lambda value: f"for the same factor set angle_scale to {1 / value:.4g}",
        "cosent_scale": lambda value: f"for the same factor set angle_scale to {value:.4g}",
    }

    angle_scale: Positive = key(20.0, "Factor on differences of the angles' similarities, like 1 / temperature.")


class TripletKeys(OurLoss, CellKeys):
    """Keys of the triplet loss."""

    loss = "vembed.losses.triplet:TripletLoss"
    name = "triplet"
    title = "the triplet loss"
    summary = "push each negative farther from the query than its positive, by a margin"
    formula = "L = mean over i, p in P(i), j in N(i) of max(0, triplet_margin - S_ip + S_ij)"
    source = 'Hermans et al., 2017, "In Defense of the Triplet Loss for Person Re-Identification"'
    citation = """@article{hermans2017defense,
  title   = {In Defense of the Triplet Loss for Person Re-Identification},
  author  = {Hermans, Alexander and Beyer, Lucas and Leibe, Bastian},
  journal = {arXiv preprint arXiv:1703.07737},
  year    = {2017}
}"""
    hints: ClassVar[Hints] = {
        "temperature": "triplet compares similarities as they are: set triplet_margin",
        "loss_bidirectional": "triplet asks in one direction, from queries to documents",
    }

    triplet_margin: Annotated[float, Field(gt=0, le=2)] = key(
        0.2, "Margin in cosine distance by which a negative must be farther than the positive; 0.2 as in VSE++."
    )
    triplet_negatives: Literal["all", "hardest", "listed"] = key(
        "all",
        "Negatives of a query. all: every document of the batch, averaged over the triplets within the margin. "
        "hardest: the most similar document. listed: the hard negatives of its own row, averaged over all triplets. "
        "Rows without any add nothing.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "`triplet_negatives: listed` needs `false_negative_filter: identity`.",
            ("false_negative_filter", "triplet_negatives"),
            lambda keys: keys.triplet_negatives == "listed" and keys.false_negative_filter != "identity",
            "false_negative_filter {false_negative_filter} chooses among the documents of the batch, and "
            "triplet_negatives listed learns from those that the rows name; set triplet_negatives to all or hardest",
        ),
    )

    @property
    def tile_blocks(self) -> tuple[int, int]:
        """The logits, the excess of some pairs and the violations; of triplets of cells, rows of both sides."""
        if self.triplet_negatives == "all":
            return 3 + self.filter_blocks, 0
        # Rows of one block of cells live until those of the next are made. Listed negatives are found without a tile.
        logits = 1 if self.triplet_negatives == "hardest" else 0
        return logits + 4 + self.filter_blocks, 0

    @property
    def row_negatives(self) -> str:
        """The setting that learns from the hard negatives of rows alone; empty without."""
        return "triplet_negatives listed" if self.triplet_negatives == "listed" else ""


class CosineMseKeys(OurLoss, TileKeys, PrefixKeys):
    """Keys of the squared error of cosines."""

    loss = "vembed.losses.listed:CosineMseLoss"
    name = "cosine_mse"
    title = "the squared error of cosines"
    summary = "squared error of each graded pair's cosine to its grade"
    takes = ("pairs",)
    score_bounds = (-1, 1)
    memory = "pairs"
    formula = "L = mean over graded pairs a of (S_a - y_a)^2"
    source = 'Reimers & Gurevych, 2019, "Sentence-BERT: Sentence Embeddings using Siamese BERT-Networks"'
    citation = """@inproceedings{reimers2019sentence,
  title     = {Sentence-{BERT}: Sentence Embeddings using Siamese {BERT}-Networks},
  author    = {Reimers, Nils and Gurevych, Iryna},
  booktitle = {Proceedings of the 2019 Conference on Empirical Methods in Natural Language Processing},
  year      = {2019}
}"""


class MarginMseKeys(OurLoss, TileKeys, PrefixKeys):
    """Keys of the squared error of margins."""

    loss = "vembed.losses.listed:MarginMseLoss"
    name = "margin_mse"
    title = "the squared error of margins"
    summary = "match a teacher's score margins between positives and a row's other documents"
    takes = ("lists",)
    memory = "pairs"
    formula = "L = mean over i, p, n of (margin_mse_scale (S_ip - S_in) - (y_ip - y_in))^2"
    source = (
        'Hofstätter et al., 2020, "Improving Efficient Neural Ranking Models with Cross-Architecture Knowledge '
        'Distillation"'
    )
    citation = """@article{hofstaetter2020improving,
  title   = {Improving Efficient Neural Ranking Models with Cross-Architecture Knowledge Distillation},
  author  = {Hofst{\\"a}tter, Sebastian and Althammer, Sophia and Schr{\\"o}der, Michael and Sertkan, Mete and
             Hanbury, Allan},
  journal = {arXiv preprint arXiv:2010.02666},
  year    = {2020}
}"""

    margin_mse_scale: Positive = key(
        1.0,
        "Factor that brings cosines into the range of the scores; about 10 for a cross-encoder.",
    )

    @property
    def row_negatives(self) -> str:
        """The loss itself: without a row's negatives there is no margin."""
        return "loss_type margin_mse"


class KlKeys(OurLoss, TileKeys, PrefixKeys):
    """Keys of the divergence from a teacher's scores."""

    loss = "vembed.losses.listed:KlLoss"
    name = "kl"
    title = "the divergence from a teacher's scores"
    summary = "match a teacher's softmax over a row's own documents"
    takes = ("lists",)
    memory = "pairs"
    formula = (
        "L = max(1, kl_temperature)^2 mean over i of KL(softmax(y_i / kl_teacher_temperature) || "
        "softmax(S_i / kl_temperature)), over the row's own documents"
    )
    source = 'Lin et al., 2020, "Distilling Dense Representations for Ranking using Tightly-Coupled Teachers"'
    citation = """@article{lin2020distilling,
  title   = {Distilling Dense Representations for Ranking using Tightly-Coupled Teachers},
  author  = {Lin, Sheng-Chieh and Yang, Jheng-Hong and Lin, Jimmy},
  journal = {arXiv preprint arXiv:2010.11386},
  year    = {2020}
}"""
    hints: ClassVar[Hints] = {
        "temperature": lambda value: f"for the same temperature set kl_temperature to {value:.4g}"
    }

    kl_temperature: Positive = key(0.05, "Divisor of the similarities of a row's documents.")
    kl_teacher_temperature: Positive | None = key(
        None,
        "Divisor of the scores of a row's documents. null: kl_temperature for the cosines of an encoder as teacher; 1 "
        "for scores of a cross-encoder or of the data.",
    )


class SpreadOutKeys(OurLoss, TileKeys, PrefixKeys):
    """Keys of the spread-out regulariser."""

    loss = "vembed.losses.spread_out:SpreadOutLoss"
    name = "spread_out"
    title = "the spread-out regulariser"
    summary = "spread queries, and documents, like random directions; only in added_losses"
    columns = ()
    takes = ()
    memory = "gram"
    formula = (
        "L = mean over both sides of spread_out_mean M1^2 + spread_out_second_moment max(0, M2 - 1/E), "
        "M1 and M2 the mean and the mean square of <x, y> over different rows"
    )
    source = 'Zhang et al., 2017, "Learning Spread-out Local Feature Descriptors"'
    citation = """@inproceedings{zhang2017learning,
  title     = {Learning Spread-out Local Feature Descriptors},
  author    = {Zhang, Xu and Yu, Felix X. and Kumar, Sanjiv and Chang, Shih-Fu},
  booktitle = {Proceedings of the IEEE International Conference on Computer Vision},
  year      = {2017}
}"""

    spread_out_mean: NonNegative = key(1.0, "Weight of the squared mean similarity of different rows.")
    spread_out_second_moment: NonNegative = key(
        1.0, "Weight of the mean squared similarity above 1 / dim, the value of random directions."
    )


class ColbertKeys(OurLoss, TileKeys, MaskKeys, TemperatureKeys, DirectionKeys):
    """Keys of InfoNCE over MaxSim."""

    loss = "vembed.losses.colbert:ColbertLoss"
    name = "colbert"
    title = "the ColBERT loss"
    summary = "InfoNCE over MaxSim, for models with several vectors per row"
    multi_vector = True
    formula = "S_ij = mean over vectors v of q_i of max over vectors w of d_j of <v, w>; " + InfoNCEKeys.formula
    source = 'Khattab & Zaharia, 2020, "ColBERT: Efficient and Effective Passage Search"'
    citation = """@inproceedings{khattab2020colbert,
  title     = {ColBERT: Efficient and Effective Passage Search via Contextualized Late Interaction over BERT},
  author    = {Khattab, Omar and Zaharia, Matei},
  booktitle = {Proceedings of the 43rd International ACM SIGIR Conference},
  year      = {2020}
}"""
    hints: ClassVar[Hints] = {
        **InfoNCEKeys.hints,
        "mrl_dims": "vectors of late interaction are short; choose their dimension itself",
    }

    maxsim_sum: bool = key(
        False,
        "Score by ColBERT's sum over the query's vectors; its papers use no temperature, so set temperature: 1 to "
        "match. false: divide the sum by their number, so one temperature suits queries of any length.",
    )
