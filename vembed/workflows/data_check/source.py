"""A data set as a check sees it: its valid rows, what is wrong with the others, and a few facts of every item.

Memory beside the rows, which lie on disk: 53 bytes for each distinct item, 8 for each place where one stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from vembed.batch import Composed, Image
from vembed.data.check import AllProblems
from vembed.data.near import BANDS, normalised, sketches
from vembed.data.table import BLOCK_ROWS
from vembed.errors import DataError
from vembed.pages.text import clip
from vembed.workflows.data_check.scripts import num_words, script_of
from vembed.workflows.data_check.spoilt import traces_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import Item
    from vembed.data.read import DataSource
    from vembed.data.table import ItemColumn, RecordTable

SHOWN_CHARACTERS = 160
"""Of a text in an example."""

SHOWN_PARTS = 2
"""Of a picture's path: more wouldn't fit beside a text."""


@dataclass(frozen=True, eq=False)
class ItemFacts:
    """What is known of each item of a table, by its number. Shape legend: I items, B bands."""

    words_I: NDArray[np.int32]  # 0 of a picture
    scripts_I: NDArray[np.int8]  # place in `SCRIPTS`, -1 of a picture
    traces_I: NDArray[np.uint8]  # bits of `TRACES`, 0 of a picture
    normal_I: NDArray[np.int64]  # hash of the normalised text, in this process; of pictures that of their content
    bands_BI: NDArray[np.uint32]  # sketches of texts

    @property
    def is_text(self) -> NDArray[np.bool_]:
        """Which items are texts without a picture."""
        return self.scripts_I >= 0


@dataclass(frozen=True, eq=False)
class Source:
    """A data set that has been read."""

    name: str  # for people
    table: RecordTable
    notes: tuple[str, ...]  # of reading it
    problems: AllProblems

    @classmethod
    def read(cls, data: DataSource, folder: Path, name: str = "") -> Source:
        """Read a data set, however many of its rows are broken.

        Args:
            folder: Gets the rows; it is empty.
            name: What to call it; by default as the path.

        Raises:
            VembedError: As `DataSource.records`, where no row can be read.
        """
        problems = AllProblems()
        try:
            loaded = data.records(problems, folder)
        except DataError as error:
            if not problems.count:
                raise
            raise DataError(f"{error}\n{problems.listing(data.path)}") from error
        notes = tuple(note for note in loaded.notes if note not in problems.notes())
        return cls(name or data.path, loaded.table, notes, problems)

    def numbers(self, column: ItemColumn) -> NDArray[np.int64]:
        """Return the distinct items of a column, as numbers in the table's items."""
        return np.unique(self.table.numbers(column)[1])

    @cached_property
    def queries(self) -> NDArray[np.int64]:
        """The distinct items that ask."""
        return self.numbers("query")

    @cached_property
    def positives(self) -> NDArray[np.int64]:
        """The distinct items that answer."""
        return self.numbers("positives")

    @cached_property
    def documents(self) -> NDArray[np.int64]:
        """The distinct items that are found, negatives among them."""
        return np.union1d(self.positives, self.numbers("negatives"))

    @cached_property
    def facts(self) -> ItemFacts:
        """What is known of each item, from one walk over all of them."""
        items = self.table.items
        count = len(items)
        facts = ItemFacts(
            np.zeros(count, np.int32),
            np.full(count, -1, np.int8),
            np.zeros(count, np.uint8),
            items.ids.copy(),
            np.zeros((BANDS, count), np.uint32),
        )
        for start in range(0, count, BLOCK_ROWS):
            block = items.at(np.arange(start, min(start + BLOCK_ROWS, count)))
            texts = [(start + place, item) for place, item in enumerate(block) if isinstance(item, str)]
            if not texts:
                continue
            own = np.array([place for place, _ in texts])
            normal = [normalised(text) for _, text in texts]
            facts.words_I[own] = [num_words(text) for _, text in texts]
            facts.scripts_I[own] = [script_of(text) for _, text in texts]
            facts.traces_I[own] = [traces_of(text) for _, text in texts]
            facts.normal_I[own] = [hash(text) for text in normal]
            facts.bands_BI[:, own] = sketches(normal)
        return facts

    def normal_texts(self, numbers: NDArray[np.int64]) -> Callable[[NDArray[np.int64]], list[str]]:
        """Return what gives the normalised texts at some places among items that are texts."""
        return lambda places: [normalised(str(item)) for item in self.table.items.at(numbers[places])]

    def first_rows(self, column: ItemColumn, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first row that holds each item in a column."""
        rows, held = self.table.numbers(column)
        return np.array([rows[np.argmax(held == number)] for number in numbers.tolist()], dtype=np.int64)

    def places(self, numbers: NDArray[np.int64]) -> list[str]:
        """Return `file:line` of the first row that holds each item, in whichever column."""
        columns: tuple[ItemColumn, ...] = ("query", "positives", "negatives")
        held = [self.table.numbers(column) for column in columns]
        rows = [min(int(at[np.argmax(own == n)]) for at, own in held if (own == n).any()) for n in numbers.tolist()]
        return self.locations(np.array(rows, dtype=np.int64))

    def locations(self, rows: NDArray[np.int64]) -> list[str]:
        """Return `file:line` of some rows."""
        return [record.location for record in self.table.take(rows)]

    def said(self, numbers: NDArray[np.int64]) -> list[str]:
        """Return what some items say, short enough for an example."""
        return [said(item) for item in self.table.items.at(numbers)]


def said(item: Item) -> str:
    """Return a text cut for an example, or the paths of pictures and the text beside them."""
    if isinstance(item, Image):
        return _picture(item)
    text = item.text if isinstance(item, Composed) else item
    paths = [_picture(image) for image in item.images] if isinstance(item, Composed) else []
    return " ".join([*paths, clip(text, SHOWN_CHARACTERS).short]).strip()


def _picture(image: Image) -> str:
    """Return the end of a picture's path."""
    parts = image.path.split("/")
    return f"[{'…/' * (len(parts) > SHOWN_PARTS)}{'/'.join(parts[-SHOWN_PARTS:])}]"
