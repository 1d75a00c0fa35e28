"""Which column of a row is the query, which the positive: names, aliases and the user's `column_mapping`.

A shape is the tuple of a row's column names. Each shape is resolved once, so that a million rows of one shape cost one
resolution and a million look-ups.

`image` is the positive picture of a text query. Beside a picture `text` is that query where no other column is; in all
other rows it is the positive. A row that fills both `query` and `query_image` has one query that is both.

Beside our columns a loss may ask for columns of its own, of numbers: `ExtraColumn`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal, NamedTuple

from vembed.data.column_guesses import guess
from vembed.errors import ConfigError, DataError
from vembed.text import NEAR, cut

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

COLUMNS: dict[str, tuple[str, ...]] = {
    "query": ("anchor", "caption", "sentence1", "question"),
    "positive": ("pos", "text", "passage", "document", "sentence2", "answer", "positive_passages"),
    "negatives": ("negative", "neg", "hard_negatives", "negative_passages"),
    "query_image": ("anchor_image",),
    "positive_image": ("image", "image_path"),
    "negative_images": ("negative_image",),
    "label": ("score",),
    "title": (),
}
"""Our column names, each with its other names; `negative_1`, `negative_2`, ... together stand for `negatives`."""

_TITLE = "title"
"""The one column that needs more than its name to be read: see `column_guesses`."""

_PICTURE_OF = {"query": "query_image", "positive": "positive_image"}
PROVENANCE = "mined"
"""What `vembed mine` says of a row's negatives: for people and reports; readers pass over it without a word."""

NUMBERED_NEGATIVE = re.compile(r"negative_(\d+)", re.ASCII)
MOST_BLANKS = 6
"""Columns without a known name up to which a message shows a mapping of them to be filled in."""

MAX_SHAPES = 10_000
"""Shapes and ignored names kept: bounds the memory that a file with random column names can take."""


@dataclass(frozen=True, slots=True)
class ExtraColumn:
    """A column of numbers that a loss asks for: read with the rows, checked, and given to the loss batch by batch.

    The loss states it in its `columns` and finds the numbers in `BatchStructure.columns[name]`, one for each query. It
    may take one of our other names, such as `score`, but none of our own.

    Raises:
        ConfigError: The name is one of our own columns.
    """

    name: str  # of the column in the data; `column_mapping: {theirs: NAME}` serves data that call it otherwise
    meaning: str  # what the number says, for messages and docs: "how much the row counts"
    required: bool = True  # whether a row without it is refused
    kind: Literal["int", "float"] = "float"
    least: float | None = None
    most: float | None = None
    default: float = 0.0  # of a row without it, where it isn't required
    aliases: tuple[str, ...] = ()  # other names that it goes by

    def __post_init__(self) -> None:
        for name in (self.name, *self.aliases):
            if name in COLUMNS or NUMBERED_NEGATIVE.fullmatch(name):
                raise ConfigError(f"a loss can't ask for the column {name!r}: rows have one already; call it otherwise")

    def takes(self, number: float) -> bool:
        """Return whether a number is finite, whole where it must be, and within the bounds."""
        if not math.isfinite(number) or (self.kind == "int" and not (number == int(number) and abs(number) < 2**63)):
            return False
        return (self.least is None or number >= self.least) and (self.most is None or number <= self.most)

    def typed(self, number: float) -> int | float:
        """Return a number as the column holds it."""
        return int(number) if self.kind == "int" else float(number)

    @property
    def expected(self) -> str:
        """What a cell must hold, e.g. "a number from 0 to 1"."""
        bounds = {
            (True, True): f" from {self.least} to {self.most}",
            (True, False): f" of at least {self.least}",
            (False, True): f" of at most {self.most}",
        }
        noun = "a whole number" if self.kind == "int" else "a number"
        return noun + bounds.get((self.least is not None, self.most is not None), "")


WEIGHT_COLUMN = ExtraColumn("weight", "how much the row counts", required=False, default=1.0, least=0.0)
"""What a loss asks for that weighs rows: one without a weight counts once."""


@dataclass(frozen=True, slots=True)
class LossNeeds:
    """Requirements of a loss on the rows that it learns from."""

    name: str  # what `loss_type` calls it
    columns: tuple[ExtraColumn, ...] = ()
    takes: tuple[str, ...] = ("positives",)  # of "positives", "classes", "pairs", "lists"
    score_bounds: tuple[float, float] = (-math.inf, math.inf)  # the least and the most that it takes as a pair's score
    of_source: tuple[LossNeeds, ...] = ()  # where each source has a loss of its own: those of each

    def for_source(self, number: int) -> LossNeeds:
        """Return those on the rows of a source; columns of other sources' losses are read where the rows have them."""
        if not self.of_source:
            return self
        needs = self.of_source[number]
        known = {column.name for column in needs.columns}
        others = (replace(column, required=False) for column in self.columns if column.name not in known)
        return replace(needs, columns=(*needs.columns, *others))

    def taking(self, *more: str) -> LossNeeds:
        """Return the same for a loss that takes more, from every source."""
        of_source = tuple(needs.taking(*more) for needs in self.of_source)
        return replace(self, takes=tuple(dict.fromkeys((*self.takes, *more))), of_source=of_source)


class RowShape(NamedTuple):
    """The source columns of one shape of row; None where the shape has none."""

    query: str | None  # with `query_image`, the query is both in one
    positive: str | None
    negatives: tuple[str, ...]  # `negative_2` before `negative_10`
    label: str | None
    query_image: str | None = None
    positive_image: str | None = None
    negative_images: str | None = None
    title: str | None = None  # of the positive, which must be a text
    extra: tuple[tuple[ExtraColumn, str | None], ...] = ()  # what the loss asked for, and the column that holds it

    @property
    def sources(self) -> frozenset[str | None]:
        """All columns that are read."""
        pictures = (self.query_image, self.positive_image, self.negative_images)
        extra = (source for _, source in self.extra)
        return frozenset({self.query, self.positive, self.title, self.label, *self.negatives, *pictures, *extra})


class ColumnsRead(NamedTuple):
    """Which columns of a source were read as what; empty where the form of the source fixes them."""

    used: Mapping[str, Sequence[str]] = {}  # our column -> those of the data
    guessed: Sequence[str] = ()  # of those, the ones that are neither named nor mapped so
    ignored: Sequence[str] = ()
    tables: Sequence[str] = ()  # how cells were told apart, where the suffix of a file doesn't say it

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that name what was taken by its name, what was ignored, and how cells were told apart."""
        taken = f"Taken by {'its name' if len(self.guessed) == 1 else 'their names'}: {listing(self.guessed)}."
        ignored = f"Ignored columns: {listing(self.ignored)}."
        told = f"Tables: {'; '.join(self.tables)}."
        said = ((taken, self.guessed), (ignored, self.ignored), (told, self.tables))
        return tuple(sentence for sentence, there in said if there)


class ColumnResolver:
    """Resolve the shapes of one data source.

    Args:
        column_mapping: Source column -> our name or one of its aliases, None to drop the column; several may be
            negatives.

    Raises:
        ConfigError: The mapping names a target that records don't have, or one target twice.
    """

    def __init__(self, column_mapping: Mapping[str, str | None], extra: Sequence[ExtraColumn] = ()) -> None:
        self._extra = {column.name: column for column in extra}
        names = COLUMNS | {each.name: each.aliases for each in extra}
        self._canonical = {alias: name for name, aliases in names.items() for alias in (name, *aliases)}
        self._mapping = dict(column_mapping)
        self._check_targets()
        self._shapes: dict[tuple[str, ...], RowShape] = {}
        self._seen: dict[str, None] = {}  # an ordered set
        self._used: dict[str, dict[str, None]] = {}  # our column -> ordered set of those that were read as it
        self._guessed: dict[str, None] = {}
        self._ignored: dict[str, None] = {}
        self.tables: dict[str, None] = {}  # set by whoever reads tables

    @property
    def seen(self) -> tuple[str, ...]:
        """Every column name met so far, in order."""
        return tuple(self._seen)

    def shape(self, names: tuple[str, ...], *, where: str) -> RowShape:
        """Return which of a row's columns is what.

        Args:
            where: `file:line` of the row, for the error.

        Raises:
            DataError: Two columns stand for one, or it is not clear what a picture is for.
        """
        shape = self._shapes.get(names)
        if shape is None:
            if len(self._shapes) >= MAX_SHAPES:
                self._shapes.clear()
            shape = self._shapes[names] = self._resolve(names, where=where)
        return shape

    def wanted(self, names: Sequence[str], *, where: str) -> list[str]:
        """Return the columns that a columnar source need read, and remember the others as seen or ignored."""
        used = self.shape(tuple(names), where=where).sources
        return [name for name in names if name in used]

    def check_mapping(self, source: str, *, trains: bool = True) -> None:
        """Refuse a mapping of a column that no row had; to be called after the last row.

        Args:
            source: What was read, for the error.
            trains: Whether the rows are trained on; of others, columns to drop and those for the loss may be missing.

        Raises:
            DataError: A mapped column was never seen.
        """
        for name, target in self._mapping.items():
            may_miss = not trains and (target is None or self._canonical.get(target) in self._extra)
            if name not in self._seen and not may_miss:
                msg = (
                    f"column_mapping names {name!r}, but no row of {source} has that column"
                    f"{closest(name, self._seen)}; columns: {listing(self._seen)}"
                )
                raise DataError(msg)

    def read(self) -> ColumnsRead:
        """Return what every column met so far was read as."""
        used = {ours: tuple(sources) for ours, sources in self._used.items()}
        ignored = [name for name in self._ignored if not any(name in sources for sources in used.values())]
        return ColumnsRead(used, tuple(self._guessed), tuple(ignored), tuple(self.tables))

    def missing(self, column: str, names: Iterable[str]) -> str:
        """Return why a row without a column is refused, and how to name its columns.

        A name that is near is taken for a misspelling; of other columns without a known name a mapping is shown whose
        blanks the user fills in.

        Args:
            column: Our name of the missing column, or that of one that the loss asks for.
        """
        names = [name for name in names if name not in self._mapping]
        unnamed = [name for name in names if not self._is_named(name)]
        lacking = [column, *(other for other in self._unseen() if other != column and column in _PICTURE_OF)]
        aliases = {each: self._extra[each].aliases if each in self._extra else COLUMNS[each] for each in lacking}
        near = {name: each for each in lacking if (name := _nearest_of(unnamed, (each, *aliases[each])))}
        mapping = near
        if len(near) < len(lacking) and len(unnamed) <= MOST_BLANKS:
            mapping = {name: near.get(name, "____") for name in unnamed}
        entries = f"column_mapping: {{{', '.join(f'{cut(name)}: {target}' for name, target in mapping.items())}}}"
        picture = f", nor {_PICTURE_OF[column]}" if column in _PICTURE_OF else ""
        others = f" (nor any of {', '.join(aliases[column])}{picture})" if aliases[column] else ""
        reason = f"missing{others}{''.join(f', and so is {other!r}' for other in lacking[1:])}"
        if not mapping:
            fix = ""
        elif "____" in mapping.values():
            fix = (
                f"; say which is {' and which '.join(each for each in lacking if each not in near.values())}: {entries}"
            )
        else:
            fix = f"; if {' and '.join(map(repr, near))} {'is' if len(near) == 1 else 'are'} meant: {entries}"
        return f"{reason}; the row has {listing(names)}{fix}"

    def _unseen(self) -> list[str]:
        """Return which of the two columns that every row needs no row had, neither as a text nor as a picture."""
        return [column for column, picture in _PICTURE_OF.items() if not {column, picture} & self._used.keys()]

    def _resolve(self, names: tuple[str, ...], *, where: str) -> RowShape:
        targets = {name: self._mapping.get(name, name) for name in names}
        free = [name for name in names if name not in self._mapping and not self._is_named(name)]
        named = {
            self._canonical[target]
            for name, target in targets.items()
            if target in self._canonical and name not in free
        }
        # A source whose rows named their negatives keeps to it: a guess would mix two kinds of columns row by row.
        before = {column for column, sources in self._used.items() if not {*sources} & {*self._guessed}}
        guessed = guess(targets, named | (before & {"negatives", "negative_images"}), free, where)
        targets |= dict.fromkeys(free) | guessed
        found: dict[str, list[str]] = {column: [] for column in (*COLUMNS, *self._extra)}
        numbered: list[tuple[int, str]] = []
        text_is_query = self._text_is_query(targets)
        for name, target in targets.items():
            number = NUMBERED_NEGATIVE.fullmatch(target or "")
            if target is None or name == PROVENANCE:
                continue
            if number:
                numbered.append((int(number[1]), name))
            elif target == "text" and text_is_query:
                found["query"].append(name)
            elif target in self._canonical:
                found[self._canonical[target]].append(name)
            elif target == "images":
                raise DataError(_images_message(name, where))
        image = next((name for name, target in targets.items() if target == "image"), None)
        if image is not None and not found["query"]:
            raise DataError(_image_message(image, where))
        self._check_rivals(found, [name for _, name in sorted(numbered)], {*self._mapping, *guessed}, where)
        found["negatives"] = sorted(found["negatives"], key=self._place) or [name for _, name in sorted(numbered)]
        self._remember(names, found, guessed, [name for name in free if name not in guessed])
        single = {column: sources[0] if sources else None for column, sources in found.items()}
        if single[_TITLE] and not single["positive"]:
            raise DataError(
                f"{where}: column {single[_TITLE]!r} is the title of a positive, and the row has no text as one"
            )
        return RowShape(
            query=single["query"],
            positive=single["positive"],
            negatives=tuple(found["negatives"]),
            label=single["label"],
            query_image=single["query_image"],
            positive_image=single["positive_image"],
            negative_images=single["negative_images"],
            title=single[_TITLE],
            extra=tuple((column, single[name]) for name, column in self._extra.items()),
        )

    def _is_named(self, name: str) -> bool:
        """Return whether a column's own name says what it is."""
        known = (*self._canonical, "images", PROVENANCE)
        return (name in known and name not in {_TITLE} - {*self._extra}) or NUMBERED_NEGATIVE.fullmatch(
            name
        ) is not None

    def _place(self, name: str) -> tuple[int, list[tuple[str, int]]]:
        """Return what orders columns of one kind: the user's mapping, then names with their numbers."""
        mapped = list(self._mapping)
        parts = [(word, int(digits or 0)) for word, digits in re.findall(r"(\D+)([0-9]{0,9})", name)]
        return (mapped.index(name) if name in mapped else len(mapped), parts)

    def _text_is_query(self, targets: Mapping[str, str | None]) -> bool:
        """Return whether `text` names the caption of a positive picture."""
        columns = {self._canonical.get(target) for target in targets.values() if target is not None}
        return "positive_image" in columns and not columns & {"query", "query_image"}

    def _check_rivals(
        self, found: Mapping[str, list[str]], numbered: list[str], chosen: Collection[str], where: str
    ) -> None:
        """Refuse two columns for one, but for negatives that the user or a guess calls so."""
        for column, sources in found.items():
            rivals = sources + numbered * (column == "negatives" and bool(sources))
            if len(rivals) > 1 and not (column == "negatives" and {*rivals} <= {*chosen}):
                raise DataError(self._rivals_message(column, rivals, where))

    def _remember(
        self, names: Iterable[str], found: Mapping[str, Iterable[str]], guessed: Iterable[str], ignored: Iterable[str]
    ) -> None:
        used = [(self._used.setdefault(column, {}), sources) for column, sources in found.items() if sources]
        for known, new in ((self._seen, names), (self._guessed, guessed), (self._ignored, ignored), *used):
            if len(known) < MAX_SHAPES:
                known.update(dict.fromkeys(new))

    def _rivals_message(self, column: str, rivals: Sequence[str], where: str) -> str:
        mapped = [
            f"{name!r} (mapped to {self._mapping[name]!r})" if name in self._mapping else repr(name) for name in rivals
        ]
        both = (
            f", or take both with column_mapping: {{negatives: [{', '.join(rivals)}]}}" if column == "negatives" else ""
        )
        return (
            f"{where}: columns {' and '.join(mapped[:2])} both stand for {column!r}: keep one, and drop the other with "
            f"column_mapping: {{{rivals[-1]}: null}}{both}"
        )

    def _check_targets(self) -> None:
        taken: dict[str, str] = {}
        for source, target in self._mapping.items():
            if target is None:
                continue
            if target not in self._canonical and not NUMBERED_NEGATIVE.fullmatch(target):
                msg = (
                    f"column_mapping: {{{source}: {target}}}: records have no column {target!r}"
                    f"{closest(target, self._canonical)}; they have {', '.join((*COLUMNS, *self._extra))} and "
                    "negative_1, negative_2, ...; null drops a column"
                )
                raise ConfigError(msg)
            name = self._canonical.get(target, target)
            if name in taken and name != "negatives":
                msg = f"column_mapping sends both {taken[name]!r} and {source!r} to {name!r}: keep one of them"
                raise ConfigError(msg)
            taken[name] = source


def closest(name: str, names: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the nearest of some names, or an empty string."""
    near = get_close_matches(name, list(names), n=1, cutoff=NEAR)
    return f" (did you mean {near[0]!r}?)" if near else ""


def listing(names: Iterable[str], limit: int = 20) -> str:
    """Return names for a sentence, the first `limit` of them, or "none"."""
    names = list(names)
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return (", ".join(cut(name, 40) or "one without a name" for name in names[:limit]) or "none") + more


def _nearest_of(names: Sequence[str], wanted: Sequence[str]) -> str | None:
    return next((near[0] for target in wanted if (near := get_close_matches(target, names, n=1, cutoff=NEAR))), None)


def _image_message(name: str, where: str) -> str:
    return (
        f"{where}: column {name!r} is the positive picture of a text query, and there is no column query, caption or "
        f"text: say what it is with column_mapping: {{{name}: query_image}} or {{{name}: positive_image}}, or drop it "
        "with null"
    )


def _images_message(name: str, where: str) -> str:
    return (
        f"{where}: column {name!r} holds images, and a row has one query_image or positive_image, and negative_images: "
        f"say what it is with column_mapping: {{{name}: negative_images}}, or drop it with {{{name}: null}}"
    )
