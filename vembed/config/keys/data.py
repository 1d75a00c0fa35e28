"""Keys of the data."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

from vembed.config.fields import ANY, LARGEST_COUNT, Auto, Count, Name, key, rule
from vembed.config.keys.sources import LISTED_NEGATIVES, SourceKeys, loss_names
from vembed.files import as_one_path
from vembed.registry import LOSSES

if TYPE_CHECKING:
    from vembed.config.schema import Config

ColumnName = Literal[
    "query", "positive", "negatives", "query_image", "positive_image", "negative_images", "label", "title"
]
"""The columns that a row may have under our names."""

Paths = Annotated[list[Name], Field(min_length=1)]
"""Several paths; all that is read of them is read the same way."""

LabelKind = Literal["auto", "class", "pair", "grade"]
"""What a label says: the row's class, whether the pair belongs together (1 or 0), or how close it is."""


def _one_path(value: object) -> object:
    """Return a list of paths as one."""
    is_list = isinstance(value, list) and value and all(isinstance(path, str) and path.strip() for path in value)
    return as_one_path(value) if is_list and isinstance(value, list) else value


def _one_dev_set(value: object) -> object:
    """Refuse a list where one set chooses."""
    if isinstance(value, list):
        raise ValueError(
            "one set chooses the best checkpoint; name the others in test_data_path, for a verdict on each, or in "
            "guard_data, on which the model should lose nothing"
        )
    return value


class DataKeys(SourceKeys):
    """Where the rows come from and what happens to broken ones."""

    data_path: Annotated[Name | None, BeforeValidator(_one_path)] = key(
        None,
        "Training data: file, folder, pattern or a list of those, [a.jsonl, b.jsonl]; hub id, `builtin:SET`, or a "
        "published set as `flickr30k:FOLDER`.",
    )
    val_data_path: Annotated[Name | None, BeforeValidator(_one_dev_set)] = key(
        None, "Data that chooses the best checkpoint; null holds out a part of the training data."
    )
    val_fraction: Auto | Annotated[float, Field(gt=0, le=0.5)] = key(
        "auto",
        "Share of the training rows that is held out to choose the best checkpoint, where val_data_path is null. auto: "
        "5%, at least 100 rows where that is at most a fifth, at most 1,000. No text or picture is a query or a "
        "positive on both sides; documents of training rows fill what the held-out queries search up to 1,000.",
        acts_with={"val_data_path": (None,)},
    )
    test_data_path: Name | Paths | None = key(
        None,
        "Data of the verdict, never used to choose anything. Of several sets each gets a verdict, and so does their "
        "mean, which is the run's; the report shows the first in detail.",
    )
    guard_data: Name | Paths | None = key(
        None,
        "Sets on which the model should lose nothing: evaluated before and after training, each with a line in the "
        "verdict that says whether the model forgets. As test_data_path.",
    )
    data_split: Name | None = key(None, "Split of data_path; null is its training split.", acts_with={"data_path": ANY})
    val_data_split: Name | None = key(
        None, "Split of val_data_path; null is its validation split.", acts_with={"val_data_path": ANY}
    )
    test_data_split: Name | None = key(
        None, "Split of test_data_path; null is its test split.", acts_with={"test_data_path": ANY}
    )
    guard_data_split: Name | None = key(
        None, "Split of guard_data; null is its test split.", acts_with={"guard_data": ANY}
    )
    column_mapping: Annotated[Mapping[Name, ColumnName | None], LISTED_NEGATIVES] = key(
        {},
        "Column of the data -> our column (query, positive, negatives, query_image, positive_image, negative_images, "
        "label, title), or null to ignore it. Several columns may be negatives: {negatives: [bad_1, bad_2]} says it of "
        "all of them. A title is put before the text of the positive.",
    )
    label_kind: LabelKind = key(
        "auto",
        "What a number in the column label or score says. class: rows of one number are positives of each other. pair: "
        "1, query and document belong together, or 0, they don't. grade: how close they are, higher is closer; or a "
        "list, one number for each positive and then each negative of the row. The last two need a loss that takes "
        "listed pairs. auto takes texts, and whole numbers beside a picture, as classes, and refuses numbers beside "
        "two texts, be they written as texts or not.",
    )
    image_root: Name | None = key(
        None, "Folder that paths of pictures in the data start from and stay in; null is the data file's own folder."
    )
    max_image_pixels: Count = key(
        89_478_485, "A picture whose header says more is refused before it is decoded.", unit="pixels"
    )
    image_augmentation: Literal["none", "light", "strong"] = key(
        "none",
        "Change training pictures at random, anew in each epoch. light: a window of 80 to 100% of the area, up to "
        "4% over the edge. strong: 60 to 120%, up to 8% over the edge, turned by up to 15 degrees; brightness and "
        "contrast x 0.7 to 1.3, saturation x 0.5 to 1.5, hue turned by up to 18 degrees; 10% become grey and 20% are "
        "blurred, by up to 1% of the side.",
    )
    image_flip: bool = key(
        False,
        "Mirror half of the training pictures, left to right, with any image_augmentation: for products and other "
        "things that have no left and right; not where captions say left or right, nor where pictures show writing.",
    )
    retrieval_mode: Literal["auto", "t2t", "t2i", "i2t", "i2i", "m2i", "m2t"] = key(
        "auto",
        "What searches what, t for texts, i for pictures and m for pictures with a text (t2i: texts search pictures); "
        "data of another kind are refused; auto takes what the data hold.",
    )
    num_workers: Auto | Annotated[int, Field(ge=0, le=LARGEST_COUNT)] = key(
        "auto",
        "Data workers per process, which decode and tokenize the batches of coming steps; with 0 the training process "
        "does it. auto: the cores that training leaves free, at most 8; none on a CPU that trains on texts alone. No "
        "result depends on it.",
        unit="processes",
        on_resume="harmless",
    )
    prefetch_factor: Auto | Count = key(
        "auto",
        "Batches that each data worker makes ahead; auto: 2, or 1 where they would take much of the memory.",
        unit="batches",
        on_resume="harmless",
    )
    skip_invalid_records: bool = key(False, "Drop and count rows that can't be used, instead of stopping.")
    max_invalid_records: Count = key(
        100,
        "With skip_invalid_records: more broken rows than this stop the run.",
        unit="rows",
        acts_with={"skip_invalid_records": (True,)},
    )
    drop_last: bool = key(False, "Drop the last, smaller batch of each epoch.")


def listed(paths: str | list[str] | None) -> list[str]:
    """Return the value of a key that names one path, several or none."""
    return [paths] if isinstance(paths, str) else list(paths or ())


@rule("test_data_path", "guard_data")
def _sets_differ(config: "Config") -> str | None:
    """`test_data_path` and `guard_data` must not name a set twice."""
    for name, paths in (("test_data_path", listed(config.test_data_path)), ("guard_data", listed(config.guard_data))):
        for place, path in enumerate(paths):
            if path in paths[:place]:
                return f"{name} lists {path} twice; name it once"
    return None


@rule("label_kind", "loss_type", "added_losses", "data")
def _scores_have_a_loss(config: "Config") -> str | None:
    """`label_kind: pair` and `grade` need a loss that takes listed pairs."""
    if config.label_kind not in {"pair", "grade"} or takes_pairs(*loss_names(config)):
        return None
    taking = [name for name in LOSSES.names() if takes_pairs(name)]
    return (
        f"label_kind {config.label_kind} gives pairs a score, and loss_type {config.loss_type} doesn't take listed "
        f"pairs; set loss_type to {' or '.join(taking)}, or leave the column out with label_kind: auto and "
        "column_mapping: {label: null}"
    )


def takes_pairs(*losses: str) -> bool:
    """Return whether one of some losses takes listed pairs with scores."""
    return any({"pairs", "lists"} & set(LOSSES.load(name).takes) for name in losses if name in LOSSES)
