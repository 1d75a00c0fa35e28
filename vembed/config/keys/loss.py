"""Keys of the loss: which one, and what several losses share. Keys of one loss alone stand beside that loss."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from vembed.config.fields import ANY, Auto, BrokenRules, Count, Name, Positive, Section, key, rule
from vembed.registry import LOSSES

if TYPE_CHECKING:
    from vembed.config.schema import Config

MIN_LOGIT_SCALE = 1.0
"""Lower bound of a learned logit scale: a temperature over 1 flattens cosine similarities to nothing."""

MAX_LOGIT_SCALE = 100.0
"""Upper bound of a learned logit scale, as in CLIP: below a temperature of 0.01 training diverges."""


class TemperatureKeys(Section):
    """Keys of a loss that divides similarities by a temperature."""

    temperature: Positive = key(0.05, "Similarities are divided by it; its start value with learn_temperature.")
    learn_temperature: bool = key(False, "Train the temperature as well.")

    @model_validator(mode="after")
    def _a_learned_temperature_starts_in_its_bounds(self) -> Self:
        if self.learn_temperature and not 1 / MAX_LOGIT_SCALE <= self.temperature <= 1 / MIN_LOGIT_SCALE:
            sentence = (
                f"a learned temperature starts between {1 / MAX_LOGIT_SCALE} and {1 / MIN_LOGIT_SCALE}, "
                f"got {self.temperature}"
            )
            raise BrokenRules([(("temperature", "learn_temperature"), sentence)])
        return self


class DirectionKeys(Section):
    """Keys of a loss that asks for the document of a query, and may ask the other way round."""

    loss_bidirectional: bool = key(False, "Average the losses of query -> document and document -> query.")


class MaskKeys(Section):
    """Keys of a loss with in-batch negatives."""

    mask_false_negatives: bool = key(
        True, "A copy of a query's positive in the batch is no negative (by id and content)."
    )


class FilterKeys(MaskKeys):
    """Keys of a loss that can tell false negatives by their similarity."""

    false_negative_filter: Literal["identity", "threshold", "teacher"] = key(
        "identity",
        "What else makes a document no negative of a query. identity: nothing beside mask_false_negatives. threshold: "
        "the model finds it more similar to the query than the query's best positive, less the margin. teacher: the "
        "teacher's vectors do.",
    )
    false_negative_margin: Annotated[float, Field(ge=-1, le=1)] = key(
        0.05,
        "How far below the positive's similarity a document is already too similar.",
        acts_with={"false_negative_filter": ("threshold", "teacher")},
    )
    false_negative_margin_kind: Literal["relative", "absolute"] = key(
        "relative",
        "relative: false_negative_margin is a share of the positive's similarity. absolute: it is subtracted.",
        acts_with={"false_negative_filter": ("threshold", "teacher")},
    )

    @property
    def filter_blocks(self) -> int:
        """Blocks of the similarity matrix that the filter takes: what it found, and the teacher's similarities."""
        return {"identity": 0, "threshold": 1, "teacher": 2}[self.false_negative_filter]


def filters_by_teacher(keys: object) -> bool:
    """Return whether a teacher tells a loss of these keys its false negatives."""
    return getattr(keys, "false_negative_filter", None) == "teacher"


class PrefixKeys(Section):
    """Keys of a loss that can train prefixes of the embedding (Matryoshka)."""

    mrl_dims: Annotated[list[Count], Field(min_length=1)] | None = key(
        None,
        "Matryoshka: train these numbers of leading dims, each normalised, instead of the whole vector; list the whole "
        "dim to train it as well.",
        unit="dims",
    )
    mrl_weights: Annotated[list[Positive], Field(min_length=1)] | None = key(
        None,
        "Weight of each of mrl_dims in the mean of their losses; null weighs all alike.",
        acts_with={"mrl_dims": ANY},
    )


class TileKeys(Section):
    """Keys of a loss that computes the similarity matrix in blocks."""

    loss_tile_size: Auto | Count = key(
        "auto",
        "Rows and columns of the blocks in which the similarity matrix is computed; it changes memory and speed, not "
        "the loss.",
        unit="items",
    )


class LossChoice(Section):
    """Which loss, and how exactly it is computed."""

    loss_type: Name = key("infonce", "The loss.")
    added_losses: Mapping[Name, Positive] = key(
        {},
        "Further losses, name -> weight: each one's value times its weight is added to that of loss_type, and "
        "its keys act.",
    )
    loss_precision: Literal["highest", "tf32"] = key(
        "highest",
        "How exactly the loss multiplies float32 matrices. tf32 is faster on CUDA devices from Ampere on and rounds "
        "each factor by up to 2^-11: at a temperature of 0.02 the gradient errs by 0.1 to 0.3% of its length, the loss "
        "by less than 0.01%. Nothing changes on other devices, nor for the encoder.",
    )


class CellKeys(TileKeys, PrefixKeys, FilterKeys):
    """Keys of losses over the cells of the matrix of similarities."""


class LossKeys(TileKeys, PrefixKeys, MaskKeys, LossChoice):
    """What is minimised."""


@rule("mrl_dims")
def _prefixes_differ(config: "Config") -> str | None:
    """`mrl_dims` must not hold a number twice."""
    if config.mrl_dims is None or len(set(config.mrl_dims)) == len(config.mrl_dims):
        return None
    return f"mrl_dims holds a number twice; write {sorted(set(config.mrl_dims), reverse=True)}"


@rule("mrl_weights", "mrl_dims")
def _prefixes_have_weights(config: "Config") -> str | None:
    """`mrl_weights` must be as many as `mrl_dims`."""
    if config.mrl_weights is None or config.mrl_dims is None or len(config.mrl_weights) == len(config.mrl_dims):
        return None
    return (
        f"mrl_weights has {len(config.mrl_weights)} entries for the {len(config.mrl_dims)} of mrl_dims; give one "
        "weight for each, or remove mrl_weights to weigh all alike"
    )


@rule("added_losses", "loss_type")
def _added_losses_fit(config: "Config") -> str | None:
    """`added_losses` must hold losses other than `loss_type`, which take as many vectors of a row as it does."""
    main = LOSSES.load(config.loss_type)
    for name in config.added_losses:
        if name not in LOSSES or name == config.loss_type:
            others = [each for each in LOSSES.names() if each != config.loss_type]
            found = "is loss_type itself" if name == config.loss_type else "is no loss"
            return f"added_losses: {name!r} {found}; name one of {', '.join(others)}"
        if LOSSES.load(name).multi_vector != main.multi_vector:
            return f"added_losses: {name} takes other embeddings than {main.name}: one of them several for each row"
    return None


@rule("loss_type", "added_losses")
def _the_loss_learns_from_rows(config: "Config") -> str | None:
    """`loss_type` must be a loss that learns from what the rows say."""
    if LOSSES.load(config.loss_type).takes:
        return None
    name = config.loss_type
    return f"{name} alone learns nothing from the rows; choose another loss_type, and set added_losses to {{{name}: 1}}"


@rule("added_losses", "label_kind", "teacher_model_name")
def _added_losses_have_scores(config: "Config") -> str | None:
    """`added_losses` over listed pairs need a `label_kind`, or a teacher, that gives them."""
    known = [LOSSES.load(name) for name in config.added_losses if name in LOSSES]
    found = [facts.name for facts in known if facts.takes in (("pairs",), ("lists",))]
    if not found or config.label_kind in {"pair", "grade"} or config.teacher_model_name is not None:
        return None
    return f"added_losses: {found[0]} learns from listed pairs; set label_kind to grade or pair, or teacher_model_name"
