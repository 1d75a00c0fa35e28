"""Keys of what comes together in a batch."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from vembed.config.fields import LARGEST_COUNT, Count, Section, Share, key, rule

if TYPE_CHECKING:
    from vembed.config.schema import Config


class SamplingKeys(Section):
    """Which rows come together in a batch: a function of seed, epoch and step alone."""

    batch_sampling: Literal["random", "no_duplicates", "classes", "hard"] = key(
        "random",
        "Which rows share a batch. random: any. no_duplicates: no query and no positive comes twice in a batch; a row "
        "that fits in none is left out of the epoch. classes: as many rows of each of some classes. hard: "
        "rows that a model finds alike, the starting one or (hard_refresh) that of the epoch, so that each is a hard "
        "negative of the others.",
    )
    samples_per_class: Annotated[int, Field(ge=2, le=LARGEST_COUNT)] = key(
        4, "Rows of each class in a batch.", unit="rows", acts_with={"batch_sampling": ("classes",)}
    )
    hard_max_similarity: Share = key(
        0.95,
        "Two rows share no batch where their vectors have a higher cosine similarity: they may say the same.",
        acts_with={"batch_sampling": ("hard",)},
    )
    hard_refresh: Literal["once"] | Count = key(
        "once",
        "When hard batches are chosen: once, by the starting model, or before the first epoch and every so many "
        "epochs, each time by the model as it then is.",
        unit="epochs",
        acts_with={"batch_sampling": ("hard",)},
    )


@rule("samples_per_class", "batch_size", "global_batch_size", "batch_sampling")
def _batch_holds_whole_classes(config: "Config") -> str | None:
    """With `batch_sampling: classes` the batch must hold `samples_per_class` rows of two or more classes each."""
    if config.batch_sampling != "classes":
        return None
    name = "batch_size" if config.global_batch_size is None else "global_batch_size"
    size, each = getattr(config, name), config.samples_per_class
    if size == "auto":
        if each & (each - 1) == 0:
            return None
        return f"samples_per_class {each}: batch_size auto is a power of two; set it to one, such as 4, or batch_size"
    if size % each == 0 and size >= 2 * each:
        return None
    fits = max(2, round(size / each)) * each
    return f"samples_per_class {each} doesn't divide {name} {size} into two or more classes; set {name} to {fits}"


@rule("batch_sampling", "label_kind")
def _batches_of_classes_have_classes(config: "Config") -> str | None:
    """`batch_sampling: classes` needs labels that are classes, not scores of pairs."""
    if config.batch_sampling != "classes" or config.label_kind not in {"pair", "grade"}:
        return None
    return f"batch_sampling classes needs labels that are classes; label_kind is {config.label_kind}: set it to class"
