"""Rows as training would see them: which column is what, each text with its prompt and tokens, each picture's size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.batch import Composed, pictures_in
from vembed.data.columns import listing
from vembed.data.images import check_image
from vembed.data.sources import load_records
from vembed.pages.text import clip, one_line
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vembed.batch import ImageLimits, Item, Side
    from vembed.data.splits import SourceOptions
    from vembed.data.table import Record
    from vembed.models.encoder import Encoder

SHOWN_CHARACTERS = 400


def shown_rows(path: str, options: SourceOptions, count: int, encoder: Encoder | None) -> Iterator[str]:
    """Yield lines that show the first rows of a data set.

    Args:
        encoder: Adds prompts and tokens; None shows the bare texts.

    Raises:
        VembedError: As `load_records`.
    """
    loaded = load_records(path, options)
    yield f"{path}: {plural(len(loaded.table), 'row')}, {plural(len(loaded.table.items), 'distinct item')}"
    columns = [
        f"{ours:<15} column {listing(theirs)}{' (by name)' if {*theirs} <= {*loaded.columns.guessed} else ''}"
        for ours, theirs in loaded.columns.used.items()
    ]
    yield from (f"  {line}" for line in (*columns, *loaded.notes))
    for record in loaded.table.take(range(min(count, len(loaded.table)))):
        usual = {column.name: column.default for column in options.loss.columns} if options.loss else {}
        yield from ("", *_row(record, encoder, options.image_limits, usual))


def _row(record: Record, encoder: Encoder | None, limits: ImageLimits, usual: Mapping[str, float]) -> Iterator[str]:
    """Yield the lines of a row; numbers that are as usual are left out."""
    yield record.location
    count, documents = len(record.positives), len(record.positives) + len(record.negatives)
    grades = [f"  grade {score:g}" for score in record.scores] or [""] * documents
    parts: tuple[tuple[str, Side, Sequence[Item], Sequence[str]], ...] = (
        ("query", "query", (record.query,), ("",)),
        ("positive", "document", record.positives, grades[:count]),
        ("negative", "document", record.negatives, grades[count:]),
    )
    for name, side, items, words in parts:
        for item, grade in zip(items, words, strict=True):
            yield f"  {name:<9} {_item(item, side, encoder, limits)}{grade}"
    if record.label is not None:
        yield f"  {'class':<9} {one_line(clip(str(record.label), SHOWN_CHARACTERS).short)}"
    for column, number in record.columns.items():
        if number != usual.get(column):
            yield f"  {column:<9} {number:g}"


def _item(item: Item, side: Side, encoder: Encoder | None, limits: ImageLimits) -> str:
    """Return the pictures of an item with their formats and sizes, and its text with the prompt and its tokens."""
    words = []
    for image in pictures_in([item]):
        header = check_image(image, limits)
        words.append(f"[{image.path}, {header.format} {header.width} x {header.height}]")
    text = item if isinstance(item, str) else item.text if isinstance(item, Composed) else ""
    prompt = encoder.prompts.get(side, "") if encoder is not None and isinstance(item, str) else ""
    # Prompt and tokens are of items that are texts: beside a picture a model has a template of its own.
    if text:
        words.append(clip(f"{prompt}{text}", SHOWN_CHARACTERS).short)
    if encoder is not None and isinstance(item, str):
        features = encoder.featurize([item], side)
        cut = ", cut" if features.num_truncated else ""
        words.append(f" ({plural(int(features.lengths[0]), 'token')}{cut})")
    return " ".join(words)
