"""Keys of the data: where rows come from, what becomes of broken ones, and which of them share a batch.

Also the split that a role reads of a set which has several.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from vembed.data.columns import closest
from vembed.errors import DataError
from vembed.files import as_one_path
from vembed.registry import LOSSES
from vembed.section import ANY, LARGEST_COUNT, Auto, Count, Name, Positive, Rule, Section, Share, Text, key
from vembed.text import one_of

if TYPE_CHECKING:
    from vembed.config.schema import Config

ColumnName = Literal[
    "query", "positive", "negatives", "query_image", "positive_image", "negative_images", "label", "title"
]
"""Columns that a row may have, under our names."""

LabelKind = Literal["auto", "class", "pair", "grade"]
"""Meaning of a label: the row's class, whether the pair belongs together (1 or 0), or how close it is."""

Role: TypeAlias = Literal["train", "validation", "test", "guard"]
"""Purpose of a set in a run."""

BUILTIN_PREFIX = "builtin:"
"""Beginning of a path that names a set which code makes."""

SPLIT_NAMES: dict[Role, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("dev", "val", "validation"),
    "test": ("test",),
    "guard": ("test",),
}
"""Names that a role's split goes by, the preferred one first."""

PATH_KEYS: dict[Role, str] = {
    "train": "data_path",
    "validation": "val_data_path",
    "test": "test_data_path",
    "guard": "guard_data",
}
SPLIT_KEYS: dict[Role, str] = {
    "train": "data_split",
    "validation": "val_data_split",
    "test": "test_data_split",
    "guard": "guard_data_split",
}
"""The config keys of each role, for error messages."""

Paths = Annotated[list[Name], Field(min_length=1)]


def _negatives_one_by_one(mapping: object) -> object:
    """Return a column mapping with a list of columns under `negatives` as one entry for each column."""
    listed = mapping.get("negatives") if isinstance(mapping, Mapping) else None
    if not isinstance(mapping, Mapping) or not isinstance(listed, list):
        return mapping
    if not listed or not all(isinstance(column, str) and column.strip() for column in listed):
        return mapping  # the type of the key refuses it
    others = {column: target for column, target in mapping.items() if column != "negatives"}
    if twice := [column for column in listed if column in others]:
        raise ValueError(f"names {twice[0]} twice: under negatives and by itself")
    return others | dict.fromkeys(listed, "negatives")


LISTED_NEGATIVES = BeforeValidator(_negatives_one_by_one)


def _one_path(value: object) -> object:
    """Return a list of paths as the one text that stands for them."""
    is_list = isinstance(value, list) and value and all(isinstance(path, str) and path.strip() for path in value)
    return as_one_path(value) if is_list and isinstance(value, list) else value


def _one_dev_set(value: object) -> object:
    if isinstance(value, list):
        raise ValueError(
            "one set chooses the best checkpoint; name the others in test_data_path, for a verdict on each, or in "
            "guard_data, on which the model should lose nothing"
        )
    if isinstance(value, str) and value.lower() == "none":
        raise ValueError(
            "name a set, or leave it out: then rows of data_path are held out. To train without a dev set, set "
            "eval_strategy to no and name a test_data_path; the last checkpoint is the result"
        )
    return value


class Source(Section):
    """One entry of `data`."""

    path: Annotated[Name, BeforeValidator(_one_path)] = key(..., "As data_path.")
    split: Name | None = key(None, "As data_split.")
    weight: Positive = key(1.0, "Factor on how often its rows come.")
    loss: Name | None = key(None, "Loss for batches of these rows. null: loss_type, with added_losses.")
    query_prompt: Text | None = key(None, "Text before each query of these rows in training. null: the run's.")
    document_prompt: Text | None = key(None, "Text before each document of these rows in training. null: the run's.")
    column_mapping: Annotated[Mapping[Name, Name | None] | None, LISTED_NEGATIVES] = key(
        None, "As column_mapping. null: the run's."
    )

    @property
    def prompts(self) -> dict[Literal["query", "document"], str]:
        """Prompt of each side that has one of its own."""
        prompts: dict[Literal["query", "document"], Any] = {
            "query": self.query_prompt,
            "document": self.document_prompt,
        }
        return {side: prompt for side, prompt in prompts.items() if prompt is not None}


class SourceKeys(Section):
    """Several sources that are trained on together."""

    data: Annotated[list[Source], Field(min_length=1)] | None = key(
        None,
        "Several sources of training data instead of data_path. Each entry needs a path; the rest is optional. split, "
        "column_mapping: as data_split and column_mapping. weight: factor on how often its rows come, 1 by default. "
        "loss: replaces loss_type for its batches; needs source_batches: single. query_prompt, document_prompt: put "
        "before its texts in training. An epoch has as many rows as all sources together. Rows of a source that comes "
        "less often wait for later epochs. Classes of different sources differ.",
    )
    source_batches: Literal["mixed", "single"] = key(
        "mixed", "Sources of a batch. mixed: all of them. single: one per batch.", acts_with={"data": ANY}
    )
    source_temperature: Positive = key(
        1.0,
        "Balance of sources: their shares of an epoch are weight x rows^(1 / source_temperature). Above 1, small "
        "sources come more often.",
        acts_with={"data": ANY},
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "A `loss` in `data` must learn from the rows and take as many vectors per row as `loss_type`; it needs "
            "`source_batches: single`.",
            ("data", "loss_type", "source_batches"),
            lambda config: _wrong_loss_of_source(config),
        ),
        Rule(
            "`added_losses` has no effect if every source has its own `loss`.",
            ("data", "added_losses"),
            lambda config: config.added_losses and config.data and all(losses_of_sources(config)),
            "added_losses has no effect: every source of data has a loss of its own; remove one of them",
        ),
        Rule(
            "`data` can't be combined with `data_path`.",
            ("data", "data_path"),
            lambda config: config.data is not None and config.data_path is not None,
            "data lists the sources in place of data_path; remove one of them",
        ),
    )


class DataKeys(SourceKeys):
    """Data to train, validate and test on, and the handling of broken rows."""

    data_path: Annotated[Name | None, BeforeValidator(_one_path)] = key(
        None,
        "Training data: a file, folder, pattern or list of them ([a.jsonl, b.jsonl]), a hub id, `builtin:SET`, or a "
        "published set such as `flickr30k:FOLDER`.",
    )
    val_data_path: Annotated[Name | None, BeforeValidator(_one_dev_set)] = key(
        None, "Validation data, which chooses the best checkpoint. null: hold out part of the training data."
    )
    val_fraction: Auto | Annotated[float, Field(gt=0, le=0.5)] = key(
        "auto",
        "Share of the training rows held out to choose the best checkpoint, if val_data_path is null. auto: 5%, "
        "raised to 100 rows or a fifth (whichever is fewer), at most 1,000 rows. No text or picture is a query or a "
        "positive on both sides. Held-out queries search at least 1,000 documents, filled up from training rows. If "
        "test_data_path is null too and 472 or more queries are held out, half of them become a test set, used for "
        "the verdict alone.",
        acts_with={"val_data_path": (None,)},
    )
    test_data_path: Name | Paths | None = key(
        None,
        "Test data for the verdict, never used to choose anything. With several sets, each has a verdict, and the "
        "run's verdict is on their mean. The report shows the first set in detail.",
    )
    guard_data: Name | Paths | None = key(
        None,
        "Sets that test for forgetting. Each is evaluated before and after training, and a line of the verdict says "
        "if the model forgets. Takes the same forms as test_data_path.",
    )
    leak: Literal["warn", "drop", "refuse"] = key(
        "warn",
        "Action on training rows that hold a query of val_data_path, test_data_path or guard_data together with a "
        "document relevant to it. warn: plan and verdict report them, and the verdict is repeated without those "
        "queries. drop: leave the rows out. refuse: stop the run while planning. Texts are compared regardless of "
        "case, white space and compatible Unicode forms, pictures by their bytes.",
    )
    data_split: Name | None = key(None, "Split of data_path. null: its training split.", acts_with={"data_path": ANY})
    val_data_split: Name | None = key(
        None, "Split of val_data_path. null: its validation split.", acts_with={"val_data_path": ANY}
    )
    test_data_split: Name | None = key(
        None, "Split of test_data_path. null: its test split.", acts_with={"test_data_path": ANY}
    )
    guard_data_split: Name | None = key(
        None, "Split of guard_data. null: its test split.", acts_with={"guard_data": ANY}
    )
    column_mapping: Annotated[Mapping[Name, ColumnName | None], LISTED_NEGATIVES] = key(
        {},
        "Mapping from columns of your data to query, positive, negatives, query_image, positive_image, "
        "negative_images, label or title; null ignores a column. For several columns of negatives write {negatives: "
        "[bad_1, bad_2]}. A title is put before the text of the positive.",
    )
    label_kind: LabelKind = key(
        "auto",
        "Meaning of a number in the column label or score. class: rows with the same number are positives of each "
        "other. pair: 1 if query and document belong together, 0 if they don't. grade: closeness, higher is closer; a "
        "list has one number for each positive, then for each negative of the row. pair and grade need a loss that "
        "takes listed pairs. auto: texts, and whole numbers beside a picture, are classes; numbers beside two texts "
        "are refused, even if written as texts.",
    )
    image_root: Name | None = key(
        None,
        "Folder from which picture paths in the data start, and which they must not leave. null: the data file's "
        "folder.",
    )
    max_image_pixels: Count = key(
        89_478_485, "Size limit: a picture whose header says more is refused before decoding.", unit="pixels"
    )
    image_augmentation: Literal["none", "light", "strong"] = key(
        "none",
        "Change training pictures at random, anew in each epoch. light: a window of 80 to 100% of the area, up to 4% "
        "beyond the edge. strong: a window of 60 to 120%, up to 8% beyond the edge, rotated by up to 15 degrees. "
        "Brightness and contrast x 0.7 to 1.3, saturation x 0.5 to 1.5, hue turned by up to 18 degrees; 10% turn grey "
        "and 20% are blurred, by up to 1% of the side.",
    )
    image_flip: bool = key(
        False,
        "Mirror half of the training pictures left to right, with any image_augmentation. Good for products and other "
        "things without a left and a right. Leave it off if captions say left or right, or if pictures show writing.",
    )
    retrieval_mode: Literal["auto", "t2t", "t2i", "i2t", "i2i", "m2i", "m2t"] = key(
        "auto",
        "Query type, then document type: t for texts, i for pictures, m for pictures with a text (t2i: texts search "
        "pictures). auto: as in the data. Any other value refuses data of another kind.",
    )
    num_workers: Auto | Annotated[int, Field(ge=0, le=LARGEST_COUNT)] = key(
        "auto",
        "Data workers per process, which decode and tokenize the coming batches. 0: the training process does it. "
        "auto: the cores that training leaves free, at most 8; none if a CPU trains on texts alone. Results don't "
        "depend on it.",
        unit="processes",
        affects="process",
    )
    prefetch_factor: Auto | Count = key(
        "auto",
        "Batches that each data worker prepares ahead. auto: 2, or 1 if they would fill much of the memory.",
        unit="batches",
        affects="process",
    )
    skip_invalid_records: bool = key(False, "Drop and count unusable rows instead of stopping.")
    max_invalid_records: Count = key(
        100,
        "Most broken rows that skip_invalid_records may drop; one more stops the run.",
        unit="rows",
        acts_with={"skip_invalid_records": (True,)},
    )
    drop_last: bool = key(False, "Drop the last batch of an epoch if it is smaller.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "`test_data_path` and `guard_data` must not name a set twice.",
            ("test_data_path", "guard_data"),
            lambda config: next(
                (
                    f"{name} lists {path} twice; name it once"
                    for name in ("test_data_path", "guard_data")
                    for path, count in Counter(listed(getattr(config, name))).items()
                    if count > 1
                ),
                "",
            ),
        ),
        Rule(
            "`label_kind: pair` and `grade` need a loss that takes listed pairs.",
            ("label_kind", "loss_type", "added_losses", "data"),
            lambda config: (
                config.label_kind in {"pair", "grade"}
                and not takes_pairs(*loss_names(config))
                and f"label_kind {config.label_kind} gives pairs a score, and loss_type {config.loss_type} doesn't "
                f"take listed pairs; set loss_type to {one_of(filter(takes_pairs, LOSSES.names()))}, or leave the "
                "column out with label_kind: auto and column_mapping: {label: null}"
            ),
        ),
    )


class SamplingKeys(Section):
    """Choice of the rows in a batch, which depends on seed, epoch and step alone."""

    batch_sampling: Literal["random", "no_duplicates", "classes", "hard"] = key(
        "random",
        "Choice of the rows that share a batch. random: any rows. no_duplicates: no query or positive twice in a "
        "batch; a row that fits in none is left out of the epoch. classes: equally many rows from each of several "
        "classes. hard: rows that a model finds alike, so each is a hard negative of the others. The model is the "
        "starting one, or the epoch's with hard_refresh.",
    )
    samples_per_class: Annotated[int, Field(ge=2, le=LARGEST_COUNT)] = key(
        4, "Rows of each class in a batch.", unit="rows", acts_with={"batch_sampling": ("classes",)}
    )
    hard_max_similarity: Share = key(
        0.95,
        "Highest cosine similarity of two rows in one batch; rows above it may say the same.",
        acts_with={"batch_sampling": ("hard",)},
    )
    hard_refresh: Literal["once"] | Count = key(
        "once",
        "Schedule for choosing hard batches. once: by the starting model. A number: before the first epoch and every "
        "so many epochs, by the current model.",
        unit="epochs",
        acts_with={"batch_sampling": ("hard",)},
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "With `batch_sampling: classes` the batch must hold `samples_per_class` rows of two or more classes each.",
            ("samples_per_class", "batch_size", "global_batch_size", "batch_sampling"),
            lambda config: config.batch_sampling == "classes" and _uneven_classes(config),
        ),
        Rule(
            "`batch_sampling: classes` needs labels that are classes, not scores of pairs.",
            ("batch_sampling", "label_kind"),
            lambda config: config.batch_sampling == "classes" and config.label_kind in {"pair", "grade"},
            "batch_sampling classes needs labels that are classes; label_kind is {label_kind}: set it to class",
        ),
    )


def split_for(available: Collection[str], split: str | None, role: Role) -> str | None:
    """Return the split to read, the user's choice or the role's; None when there is none."""
    # A split that the user names is never replaced by another that the role would take.
    names = SPLIT_NAMES[role] if split is None else (split,)
    return next((name for name in names if name in available), None)


def missing_split(where: object, available: Sequence[str], split: str | None, role: Role, key: str) -> DataError:
    """Return the error for a source that has none of the splits that `split_for` looks for.

    Args:
        key: What the user calls the split.
    """
    names = SPLIT_NAMES[role] if split is None else (split,)
    return DataError(
        f"{where} has no split {one_of(map(repr, names))}{closest(names[0], available)}; it has: "
        f"{', '.join(available)}. Choose one with {key}"
    )


def role_of(split: str) -> Role | None:
    """Return the role that a split's name stands for, or None."""
    return next((role for role, names in SPLIT_NAMES.items() if split in names), None)


def listed(paths: str | list[str] | None) -> list[str]:
    """Return the value of a key that names one path, several or none."""
    return [paths] if isinstance(paths, str) else list(paths or ())


def losses_of_sources(config: "Config") -> tuple[str | None, ...]:
    """Return the `loss` of each entry of `data`; None stands for `loss_type` with `added_losses`."""
    return tuple(source.loss for source in config.data or ())


def loss_names(config: "Config") -> tuple[str, ...]:
    """Return every loss that acts in a run, known or not."""
    of_sources = losses_of_sources(config)
    shared = () if of_sources and all(of_sources) else (config.loss_type, *config.added_losses)
    return tuple(dict.fromkeys((*shared, *(name for name in of_sources if name is not None))))


def takes_pairs(*losses: str) -> bool:
    """Return whether one of some losses takes listed pairs with scores."""
    return any({"pairs", "lists"} & set(LOSSES.load(name).takes) for name in losses if name in LOSSES)


def _wrong_loss_of_source(config: "Config") -> str:
    for number, name in enumerate(losses_of_sources(config)):
        if name is None:
            continue
        if name not in LOSSES or not LOSSES.load(name).takes:
            taken = [loss for loss in LOSSES.names() if LOSSES.load(loss).takes]
            reason = "learns nothing from the rows alone" if name in LOSSES else "is no loss"
            return f"data[{number}].loss: {name!r} {reason}; name one of {', '.join(taken)}"
        if LOSSES.load(name).multi_vector != LOSSES.load(config.loss_type).multi_vector:
            return f"data[{number}].loss: {name} and {config.loss_type} differ: one takes several vectors a row"
        if config.source_batches == "mixed" and len(config.data or ()) > 1:
            return (
                f"data[{number}].loss: a mixed batch holds rows of all sources and has one loss; set source_batches to "
                "single, or leave the loss out"
            )
    return ""


def _uneven_classes(config: "Config") -> str:
    name = "batch_size" if config.global_batch_size is None else "global_batch_size"
    size, rows = getattr(config, name), config.samples_per_class
    if size == "auto":
        if rows & (rows - 1) == 0:
            return ""
        return f"samples_per_class {rows}: batch_size auto is a power of two; set it to one, such as 4, or batch_size"
    if size % rows == 0 and size >= 2 * rows:
        return ""
    fitting = max(2, round(size / rows)) * rows
    return f"samples_per_class {rows} doesn't divide {name} {size} into two or more classes; set {name} to {fitting}"
