"""A data set that has been read, facts about its texts, and the form of a finding.

Items are named by their numbers in the table, so that a text that stands in many rows is looked at once. Facts come
from one walk over all items, a block at a time. Memory beside the rows, which lie on disk: 54 bytes for each distinct
item, and up to 24 for each pair.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from vembed.batch import Composed, Image
from vembed.data.check import AllProblems
from vembed.data.near import BANDS, normalised, sketches
from vembed.data.table import BLOCK_ROWS
from vembed.errors import DataError
from vembed.pages.text import clip

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import Item
    from vembed.data.read import DataSource
    from vembed.data.table import ItemColumn, RecordTable

Severity: TypeAlias = Literal["error", "warning", "note"]
"""error: training or its verdict would be wrong. warning: worth a look. note: a fact that explains results."""

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

MOST_EXAMPLES = 10
"""Examples of a finding."""

SHOWN_CHARACTERS = 160
"""Characters of a text in an example."""

SHOWN_PARTS = 2
"""Parts at the end of a picture's path in an example: more wouldn't fit beside a text."""

LONG_WORDS = 380
"""English words that fill 512 tokens, where most text encoders cut."""

QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)
MOST_CLASSES = 20
"""Classes in a profile, and grades beyond which ranges are counted instead."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of thing that is wrong or worth knowing, with its count and examples."""

    kind: str  # for programs, such as "leaked_queries"
    severity: Severity
    count: int
    one: str  # after the count of one: "pair that repeats an earlier pair"
    many: str  # after any other count
    advice: str  # why it matters, and what to do
    heads: tuple[str, ...] = ()  # of the examples' columns
    examples: Sequence[tuple[str, ...]] = ()
    of: int = 0  # number of things that were looked at; 0 where a share says nothing

    @property
    def title(self) -> str:
        """Words after the count."""
        return self.one if self.count == 1 else self.many

    @property
    def share(self) -> str:
        """The count as a share, for people."""
        if not self.of:
            return ""
        percent = 100 * self.count / self.of
        return f"{percent:.1f}%" if percent >= 0.1 else "< 0.1%"

    def document(self) -> dict[str, Any]:
        """Return the finding for programs."""
        return {
            "kind": self.kind,
            "severity": self.severity,
            "count": self.count,
            "of": self.of or None,
            "title": self.title,
            "advice": self.advice,
            "examples": [dict(zip(self.heads, example, strict=True)) for example in self.examples],
        }


def spread(count: int, most: int = MOST_EXAMPLES) -> NDArray[np.int64]:
    """Return positions of a few examples from first to last."""
    return np.unique(np.linspace(0, max(0, count - 1), min(count, most)).astype(np.int64))


def alike_text(similarity: float, *, equal: bool) -> str:
    """Return the similarity of two texts in words; 100% says that they are equal."""
    return "100%" if equal else f"{min(99, round(100 * similarity))}%"


@dataclass(frozen=True, eq=False)
class ItemFacts:
    """Facts about each item of a table, by its number. Shape legend: I items, B bands."""

    words_I: NDArray[np.int32]  # 0 of a picture
    scripts_I: NDArray[np.int8]  # index in `SCRIPTS`, -1 of a picture
    traces_I: NDArray[np.uint8]  # bits of `TRACES`, 0 of a picture
    normal_I: NDArray[np.int64]  # hash of the normalised text, in this process; of pictures that of their content
    bands_BI: NDArray[np.uint32]  # sketches of texts

    @property
    def is_text(self) -> NDArray[np.bool_]:
        """True of items that are texts without a picture."""
        return self.scripts_I >= 0


@dataclass(frozen=True, eq=False)
class Pairs:
    """A query and a document of a row each. Shape legend: P pairs."""

    rows_P: NDArray[np.int64]
    queries_P: NDArray[np.int64]  # numbers of items
    documents_P: NDArray[np.int64]

    def keys(self, content_I: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a hash of each pair's contents.

        Multiplied by an odd number, the golden ratio as a fraction of 2^64: (a, b) and (b, a) get different hashes.
        """
        first, second = content_I[self.queries_P], content_I[self.documents_P]
        keys: NDArray[np.int64] = (first * np.int64(-7046029254386353131)) ^ (second + (first >> 17))
        return keys


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
            folder: Empty folder for the rows.
            name: Name for people; by default as the path.

        Raises:
            VembedError: As `DataSource.records`, where no row can be read.
        """
        # Training stops at `max_invalid_records`; a check reads on, and counts every broken row by kind.
        problems = AllProblems()
        try:
            loaded = data.records_with_problems(problems, folder)
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
        """The distinct items that are searched, negatives among them."""
        return np.union1d(self.positives, self.numbers("negatives"))

    @cached_property
    def texts(self) -> NDArray[np.int64]:
        """The distinct queries and documents that are texts without a picture."""
        used = np.union1d(self.queries, self.documents)
        return used[self.facts.is_text[used]]

    @cached_property
    def positive_pairs(self) -> Pairs:
        """All pairs of a query and a positive."""
        return self.pairs("positives")

    def pairs(self, column: Literal["positives", "negatives"]) -> Pairs:
        """Return all pairs of a query and a document of a column."""
        rows, documents = self.table.numbers(column)
        return Pairs(rows, self.table.numbers("query")[1][rows], documents)

    @cached_property
    def facts(self) -> ItemFacts:
        """Facts about each item, from one walk over all of them."""
        items = self.table.items
        count = len(items)
        # Ids of pictures stay in `normal_I`: equal pictures are equal items, and no text is normalised to one.
        facts = ItemFacts(
            np.zeros(count, np.int32),
            np.full(count, -1, np.int8),
            np.zeros(count, np.uint8),
            items.ids.copy(),
            np.zeros((BANDS, count), np.uint32),
        )
        for start in range(0, count, BLOCK_ROWS):
            block = items.at(np.arange(start, min(start + BLOCK_ROWS, count)))
            texts = [(number, item) for number, item in enumerate(block, start) if isinstance(item, str)]
            if not texts:
                continue
            numbers = np.array([number for number, _ in texts])
            normal = [normalised(text) for _, text in texts]
            facts.words_I[numbers] = [num_words(text) for _, text in texts]
            facts.scripts_I[numbers] = [script_of(text) for _, text in texts]
            facts.traces_I[numbers] = [traces_of(text) for _, text in texts]
            # Python's hash of a text takes 64 bits and no time; it differs between processes, and is never stored.
            facts.normal_I[numbers] = [hash(text) for text in normal]
            facts.bands_BI[:, numbers] = sketches(normal)
        return facts

    def normal_texts(self, numbers: NDArray[np.int64]) -> Callable[[NDArray[np.int64]], list[str]]:
        """Return a function from positions among items that are texts to the normalised texts there."""
        return lambda positions: [normalised(str(item)) for item in self.table.items.at(numbers[positions])]

    def first_rows(self, column: ItemColumn, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first row that holds each item in a column: a pass over the column for each of a few examples."""
        rows, held = self.table.numbers(column)
        return np.array([rows[np.argmax(held == number)] for number in numbers.tolist()], dtype=np.int64)

    def places(self, numbers: NDArray[np.int64]) -> list[str]:
        """Return `file:line` of the first row that holds each item, in whichever column."""
        columns: tuple[ItemColumn, ...] = ("query", "positives", "negatives")
        held = [self.table.numbers(column) for column in columns]
        rows = [
            min(int(rows[np.argmax(items == number)]) for rows, items in held if (items == number).any())
            for number in numbers.tolist()
        ]
        return self.locations(np.array(rows, dtype=np.int64))

    def locations(self, rows: NDArray[np.int64]) -> list[str]:
        """Return `file:line` of some rows."""
        return [record.location for record in self.table.take(rows)]

    def shown(self, numbers: NDArray[np.int64]) -> list[str]:
        """Return some items, short enough for an example."""
        return [shown(item) for item in self.table.items.at(numbers)]


def shown(item: Item) -> str:
    """Return a text cut for an example, or the ends of the paths of pictures and the text beside them."""
    images = (item,) if isinstance(item, Image) else item.images if isinstance(item, Composed) else ()
    words = []
    for image in images:
        parts = image.path.split("/")
        words.append(f"[{'…/' * (len(parts) > SHOWN_PARTS)}{'/'.join(parts[-SHOWN_PARTS:])}]")
    if not isinstance(item, Image):
        words.append(clip(item.text if isinstance(item, Composed) else item, SHOWN_CHARACTERS).short)
    return " ".join(words).strip()


@dataclass(frozen=True, eq=False)
class Profile:
    """Lengths, scripts, classes and grades of a data set, by side ("queries", "documents") where they differ."""

    unit: str  # of lengths: "words" or "tokens"
    lengths: Mapping[str, NDArray[np.int32]]  # of each distinct text
    scripts: Mapping[str, Mapping[str, int]]  # texts by script, the most frequent first
    classes: Mapping[str, int]  # rows by class, the largest first
    num_classes: int
    grades: Mapping[str, int]  # pairs by grade, ascending; of many grades by range

    @classmethod
    def of(cls, source: Source, tokens: Mapping[str, NDArray[np.int32]] | None) -> Profile:
        """Return the profile of a data set.

        Args:
            tokens: Lengths in tokens by side, where a model counted them.
        """
        facts = source.facts
        texts = {
            side: numbers[facts.is_text[numbers]]
            for side, numbers in (("queries", source.queries), ("documents", source.documents))
        }
        lengths = {side: facts.words_I[numbers] for side, numbers in texts.items()} if tokens is None else tokens
        scripts = {}
        for side, numbers in texts.items():
            counts = np.bincount(facts.scripts_I[numbers], minlength=len(SCRIPTS)) if len(numbers) else np.zeros(0, int)
            order = [script for script in np.argsort(-counts, kind="stable").tolist() if counts[script]]
            scripts[side] = {SCRIPTS[script]: int(counts[script]) for script in order}
        classes_N, names = source.table.classes
        counts = np.bincount(classes_N[classes_N >= 0], minlength=len(names))
        largest = np.argsort(-counts, kind="stable")[:MOST_CLASSES]
        scores = source.table.listed[1]
        values, num_pairs = np.unique(scores, return_counts=True)
        grades = {f"{value:g}": int(count) for value, count in zip(values, num_pairs, strict=True)}
        if len(values) > MOST_CLASSES:  # real numbers, such as a teacher's scores: ten ranges of equal width
            edges = np.linspace(float(values[0]), float(values[-1]), 11)
            ranges = zip(edges, edges[1:], np.histogram(scores, edges)[0], strict=False)
            grades = {f"{low:.4g} to {high:.4g}": int(count) for low, high, count in ranges}
        return cls(
            "words" if tokens is None else "tokens",
            {side: counts for side, counts in lengths.items() if len(counts)},
            {side: counts for side, counts in scripts.items() if counts},
            {str(names[number]): int(counts[number]) for number in largest.tolist()},
            len(names),
            grades,
        )

    def quantiles(self, side: str) -> list[int]:
        """Return least, 5%, median, 95% and greatest length."""
        return [int(value) for value in np.quantile(self.lengths[side], QUANTILES, method="nearest")]

    def document(self) -> dict[str, Any]:
        """Return the profile for programs."""
        return {
            "lengths": {
                side: {
                    "unit": self.unit,
                    "quantiles": dict(zip(map(str, QUANTILES), self.quantiles(side), strict=True)),
                }
                for side in self.lengths
            },
            "scripts": self.scripts,
            "classes": {"count": self.num_classes, "rows": self.classes},
            "grades": self.grades,
        }


class Trace(NamedTuple):
    """A trace that an export or a wrong encoding leaves in texts."""

    kind: str  # of the finding
    find: Callable[[str], re.Match[str] | None]
    phrase: str  # after "text" or "texts"
    advice: str


_TAGS = "p|br|div|span|a|b|i|u|em|strong|ul|ol|li|table|tr|td|th|h[1-6]|img|script|style|html|body"

TRACES = (
    Trace(
        "html_in_texts",
        re.compile(rf"</?(?:{_TAGS})(?:\s[^<>]*)?/?>", re.IGNORECASE).search,
        "with HTML tags",
        "A model learns the tags as words; take the text out of the HTML.",
    ),
    Trace(
        "entities_in_texts",
        re.compile(r"&(?:amp|lt|gt|quot|apos|nbsp|#[0-9]{1,7}|#x[0-9a-f]{1,6});", re.IGNORECASE).search,
        "with HTML entities",
        "&amp; stands for &, &quot; for a quote: html.unescape of Python puts the characters back.",
    ),
    Trace(  # the bytes of accents, quotes, signs and emoji in UTF-8, read as Latin-1 or Windows-1252
        "mojibake",
        re.compile(
            "[\u00c2\u00c3][\u0080-\u00bf\u0152-\u0192\u2013-\u2122]|\u00e2[\u0080\u20ac]|\u00f0[\u009f\u0178]"
        ).search,
        "read in a wrong encoding",
        "UTF-8 was read as Latin-1 or Windows-1252 somewhere before; export the data anew as UTF-8.",
    ),
    Trace(
        "lost_characters",
        re.compile("\ufffd").search,
        "with U+FFFD in place of a character",
        "The character was lost when the text was decoded; export the data anew in the right encoding.",
    ),
    Trace(
        "missing_values",
        re.compile(r"\s*(?:nan|none|null|n/a|undefined)\s*\Z", re.IGNORECASE).match,
        "in place of a missing value",
        '"NaN", "None" and "null" are what programs write where there is nothing; leave such rows out.',
    ),
)
"""A further trace is an entry here; eight fit into `ItemFacts.traces_I`."""


def traces_of(text: str) -> int:
    """Return the traces that a text has, as one bit for each of `TRACES`."""
    return sum(1 << bit for bit, trace in enumerate(TRACES) if trace.find(text))


NO_LETTERS, OTHER, HAN, KANA = "no letters", "other", "Han", "Japanese"

# Scripts by Unicode block: no guess at the language, which three words of a query don't tell.
_BLOCKS: tuple[tuple[int, str], ...] = (
    (0x0041, "Latin"), (0x0370, "Greek"), (0x0400, "Cyrillic"), (0x0530, "Armenian"), (0x0590, "Hebrew"),
    (0x0600, "Arabic"), (0x0780, OTHER), (0x0900, "Devanagari"), (0x0980, "Bengali"), (0x0A00, "Gurmukhi"),
    (0x0A80, "Gujarati"), (0x0B00, OTHER), (0x0B80, "Tamil"), (0x0C00, "Telugu"), (0x0C80, "Kannada"),
    (0x0D00, "Malayalam"), (0x0D80, "Sinhala"), (0x0E00, "Thai"), (0x0E80, "Lao"), (0x0F00, "Tibetan"),
    (0x1000, "Myanmar"), (0x10A0, "Georgian"), (0x1100, "Hangul"), (0x1200, "Ethiopic"), (0x1380, OTHER),
    (0x1780, "Khmer"), (0x1800, OTHER), (0x1E00, "Latin"), (0x1F00, "Greek"), (0x2000, OTHER), (0x2C60, "Latin"),
    (0x2C80, OTHER), (0x2DE0, "Cyrillic"), (0x2E00, OTHER), (0x2E80, HAN), (0x3040, KANA), (0x3100, HAN),
    (0x3130, "Hangul"), (0x3190, HAN), (0x31F0, KANA), (0x3200, HAN), (0xA000, OTHER), (0xA640, "Cyrillic"),
    (0xA6A0, OTHER), (0xA720, "Latin"), (0xA800, OTHER), (0xAC00, "Hangul"), (0xD7B0, OTHER), (0xF900, HAN),
    (0xFB00, "Latin"), (0xFB13, "Armenian"), (0xFB1D, "Hebrew"), (0xFB50, "Arabic"), (0xFE00, OTHER),
    (0xFE70, "Arabic"), (0xFF00, "Latin"), (0xFF66, KANA), (0xFFA0, "Hangul"), (0xFFE0, OTHER), (0x20000, HAN),
    (0x32000, OTHER),
)  # fmt: skip
_STARTS = [start for start, _ in _BLOCKS]

SCRIPTS: tuple[str, ...] = (*dict.fromkeys(name for _, name in _BLOCKS), NO_LETTERS)

MOST_LETTERS = 200
"""Letters at the start of a text that its script is counted by."""

_ASCII_LETTER = re.compile("[A-Za-z]")
_SPACELESS = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")


def script_of(text: str) -> int:
    """Return the index in `SCRIPTS` of the script of most letters; kanji among kana are Japanese."""
    if text.isascii():
        return SCRIPTS.index("Latin" if _ASCII_LETTER.search(text) else NO_LETTERS)
    letters = islice((character for character in text if character.isalpha()), MOST_LETTERS)
    counts = Counter(_BLOCKS[bisect_right(_STARTS, ord(letter)) - 1][1] for letter in letters)
    if not counts:
        return SCRIPTS.index(NO_LETTERS)
    # Japanese mixes kana with kanji, which Unicode shares with Chinese: any kana tells.
    if KANA in counts:
        counts[KANA] += counts.pop(HAN, 0)
    return SCRIPTS.index(max(counts, key=counts.__getitem__))


def num_words(text: str) -> int:
    """Count words; where scripts put no spaces between words, characters."""
    if text.isascii():
        return len(text.split())
    spaceless = len(_SPACELESS.findall(text))
    return spaceless + len(_SPACELESS.sub(" ", text).split())
