"""Which column of a row is the query, which the positive: names, aliases and the user's `column_mapping`.

A shape is the tuple of a row's column names. Each shape is resolved once, so that a million rows of one shape cost one
resolution and a million look-ups.

`image` is the positive picture of a text query. Beside a picture `text` is that query where no other column is; in all
other rows it is the positive. A row that fills both `query` and `query_image` has one query that is both.

A column without a name of ours may be recognised by how data sets tend to call it (`_guessed`). A guess never takes the
place of a column that is named or mapped, and the plan tells each one.

Beside our columns a loss may ask for columns of its own, of numbers: `ExtraColumn`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple

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
"""The one column that needs more than its name to be read: what else the row has decides whether it is the query."""

_PICTURE_OF = {"query": "query_image", "positive": "positive_image"}
PROVENANCE = "mined"
"""Column in which `vembed mine` tells where a row's negatives come from: for people; readers pass over it silently."""

PICTURE_FILES = ("file_name", "filename", "filepath", "file_path", "path")
"""Names of the path of a picture, as in metadata.csv of an image folder."""

TITLED = frozenset({"text", "passage", "document"})
"""Names of a document that a title belongs to, as in BEIR: the title beside an answer may be that of the question."""

_NEGATIVE = re.compile(
    "((hard_)?neg(ative)?s?|(bad|wrong)(?=_))"
    "(_?(text|passage|document|doc|answer|sentence|context|response)s?)?"
    r"(_?\d+|_[a-z])?"
)
"""Names of hard negatives; a column with another word after the prefix may hold a score, a vote or a reason."""

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
        """The cell in words, e.g. "a number from 0 to 1"."""
        bounds = {
            (True, True): f" from {self.least} to {self.most}",
            (True, False): f" of at least {self.least}",
            (False, True): f" of at most {self.most}",
        }
        noun = "a whole number" if self.kind == "int" else "a number"
        return noun + bounds.get((self.least is not None, self.most is not None), "")


WEIGHT_COLUMN = ExtraColumn("weight", "how much the row counts", required=False, default=1.0, least=0.0)
"""Column of a loss that weighs rows: one without a weight counts once."""


@dataclass(frozen=True, slots=True)
class LossNeeds:
    """Requirements of a loss on the rows that it learns from."""

    name: str  # what `loss_type` calls it
    columns: tuple[ExtraColumn, ...] = ()
    takes: tuple[str, ...] = ("positives",)  # of "positives", "classes", "pairs", "lists"
    score_bounds: tuple[float, float] = (-math.inf, math.inf)  # the least and the most that it takes as a pair's score
    of_source: tuple[LossNeeds, ...] = ()  # where each source has a loss of its own: those of each

    def reason_for(self, column: ExtraColumn) -> str:
        """Return in words why rows need a column."""
        return f"loss_type {self.name} needs it: {column.meaning}"

    def for_source(self, number: int) -> LossNeeds:
        """Return those on the rows of a source; columns of other sources' losses are read where the rows have them."""
        if not self.of_source:
            return self
        needs = self.of_source[number]
        own = {column.name: column for column in needs.columns}
        # In one order for all sources, as their tables are joined.
        columns = (own.get(column.name, replace(column, required=False)) for column in self.columns)
        return replace(needs, columns=tuple(columns))

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
    """The columns of a source by what they were read as; empty where the form of the source fixes them."""

    used: Mapping[str, Sequence[str]] = {}  # our column -> those of the data
    guessed: Sequence[str] = ()  # of those, the ones that are neither named nor mapped so
    ignored: Sequence[str] = ()
    tables: Sequence[str] = ()  # how cells were told apart, where the suffix of a file doesn't say it

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that name what was taken by its name, what was ignored, and how cells were told apart."""
        taken = f"Taken by {'its name' if len(self.guessed) == 1 else 'their names'}: {listing(self.guessed)}."
        ignored = f"Ignored columns: {listing(self.ignored)}."
        tables = f"Tables: {'; '.join(self.tables)}."
        sentences = ((taken, self.guessed), (ignored, self.ignored), (tables, self.tables))
        return tuple(sentence for sentence, names in sentences if names)

    @property
    def text(self) -> str:
        """Every column in a line: "question as query, positive, bad_1, bad_2 as negatives (by their names)"."""
        parts = []
        for ours, theirs in self.used.items():
            part = listing(theirs) if [*theirs] == [ours] else f"{listing(theirs)} as {ours}"
            part = f"{listing(theirs)} put before the positive" if ours == _TITLE else part
            guessed = [name for name in theirs if name in self.guessed]
            some = f"{listing(guessed)} " if len(guessed) < len(theirs) else ""
            by_name = "by its name" if len(guessed) == 1 else "by their names"
            parts.append(f"{part} ({some}{by_name})" if guessed else part)
        ignored = [f"ignored: {listing(self.ignored)}"] if self.ignored else []
        return "; ".join([", ".join(parts)] * bool(parts) + ignored + [*self.tables])


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
        names = COLUMNS | {column.name: column.aliases for column in extra}
        self._canonical = {alias: name for name, aliases in names.items() for alias in (name, *aliases)}
        self._mapping = dict(column_mapping)
        taken: dict[str, str] = {}
        for source, target in self._mapping.items():
            if target is None:
                continue
            if target not in self._canonical and not NUMBERED_NEGATIVE.fullmatch(target):
                raise ConfigError(
                    f"column_mapping: {{{source}: {target}}}: records have no column {target!r}"
                    f"{closest(target, self._canonical)}; they have {', '.join((*COLUMNS, *self._extra))} and "
                    "negative_1, negative_2, ...; null drops a column"
                )
            name = self._canonical.get(target, target)
            if name in taken and name != "negatives":
                raise ConfigError(
                    f"column_mapping sends both {taken[name]!r} and {source!r} to {name!r}: keep one of them"
                )
            taken[name] = source
        self._shapes: dict[tuple[str, ...], RowShape] = {}
        self._seen: dict[str, None] = {}  # an ordered set
        self._used: dict[str, dict[str, None]] = {}  # our column -> ordered set of those that were read as it
        self._guessed: dict[str, None] = {}
        self._ignored: dict[str, None] = {}
        self._tables: dict[str, None] = {}  # ordered set of how cells were told apart

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
            # Random column names would fill memory; an honest file has a handful of shapes.
            if len(self._shapes) >= MAX_SHAPES:
                self._shapes.clear()
            shape = self._shapes[names] = self._resolve(names, where=where)
        return shape

    def wanted(self, names: Sequence[str], *, where: str) -> list[str]:
        """Return the columns that a columnar source need read, and remember the others as seen or ignored."""
        used = self.shape(tuple(names), where=where).sources
        return [name for name in names if name in used]

    def check_mapping(self, source: str, *, trains: bool) -> None:
        """Refuse a mapping of a column that no row had; to be called after the last row.

        Args:
            source: What was read, for the error.
            trains: Whether the rows are trained on; of others, columns to drop and those for the loss may be missing.

        Raises:
            DataError: A mapped column was never seen.
        """
        if not self._seen:
            return  # no row could be read, which the log of invalid rows says; or all are records without columns
        for name, target in self._mapping.items():
            # In a dev or test set, a column to drop, or one that only the training loss reads, need not be there.
            may_miss = not trains and (target is None or self._canonical.get(target) in self._extra)
            if name not in self._seen and not may_miss:
                msg = (
                    f"column_mapping names {name!r}, but no row of {source} has that column"
                    f"{closest(name, self._seen)}; columns: {listing(self._seen)}"
                )
                raise DataError(msg)

    def note_table(self, words: str) -> None:
        """Note how the cells of a table were told apart, where the suffix of its file doesn't say it."""
        self._tables[words] = None

    def summary(self) -> ColumnsRead:
        """Return what every column met so far was read as."""
        used = {ours: tuple(sources) for ours, sources in self._used.items()}
        ignored = [name for name in self._ignored if not any(name in sources for sources in used.values())]
        return ColumnsRead(used, tuple(self._guessed), tuple(ignored), tuple(self._tables))

    def missing(self, column: str, names: Iterable[str]) -> str:
        """Return why a row without a column is refused, and how to name its columns.

        A name that is near is taken for a misspelling; of other columns without a known name a mapping is shown whose
        blanks the user fills in.

        Args:
            column: Our name of the missing column, or that of one that the loss asks for.
        """
        names = [name for name in names if name not in self._mapping]
        unnamed = [name for name in names if not self._is_named(name)]
        lacking = [column]
        if column in _PICTURE_OF:
            # Of query and positive, which every row needs, the other may be missing as well: one mapping cures both.
            unseen = (other for other, picture in _PICTURE_OF.items() if not {other, picture} & self._used.keys())
            lacking += [other for other in unseen if other != column]
        aliases = {ours: self._extra[ours].aliases if ours in self._extra else COLUMNS[ours] for ours in lacking}
        near: dict[str, str] = {}  # name of the row -> the column that it is a misspelling of
        for ours in lacking:
            matches = (get_close_matches(name, unnamed, n=1, cutoff=NEAR) for name in (ours, *aliases[ours]))
            near |= {match[0]: ours for match in islice(filter(None, matches), 1)}
        mapping = near
        if len(near) < len(lacking) and len(unnamed) <= MOST_BLANKS:
            mapping = {name: near.get(name, "____") for name in unnamed}
        entries = f"column_mapping: {{{', '.join(f'{cut(name)}: {target}' for name, target in mapping.items())}}}"
        picture = f", {_PICTURE_OF[column]}" if column in _PICTURE_OF else ""
        others = f" (also looked for {', '.join(aliases[column])}{picture})" if aliases[column] else ""
        reason = f"missing{others}{''.join(f', and so is {other!r}' for other in lacking[1:])}"
        if not mapping:
            fix = ""
        elif "____" in mapping.values():
            fix = (
                f"; say which is {' and which '.join(ours for ours in lacking if ours not in near.values())}: {entries}"
            )
        else:
            fix = f"; if {' and '.join(map(repr, near))} {'is' if len(near) == 1 else 'are'} meant: {entries}"
        return f"{reason}; the row has {listing(names)}{fix}"

    def _resolve(self, names: tuple[str, ...], *, where: str) -> RowShape:
        """Resolve a shape that was not met before, and remember its columns for notes and errors."""
        # 1. Columns that are mapped or go by a name of ours; of the free ones, guesses.
        targets = {name: self._mapping.get(name, name) for name in names}
        free = [name for name in names if name not in self._mapping and not self._is_named(name)]
        named = {
            self._canonical[target]
            for name, target in targets.items()
            if target in self._canonical and name not in free
        }
        # A source whose rows named their negatives keeps to it: a guess would mix two kinds of columns row by row.
        before = {column for column, sources in self._used.items() if not {*sources} & {*self._guessed}}
        guessed = _guessed(targets, named | (before & {"negatives", "negative_images"}), free, where)
        targets |= dict.fromkeys(free) | guessed

        # 2. The columns of the row under our names.
        columns = {self._canonical.get(target) for target in targets.values() if target is not None}
        text_is_query = "positive_image" in columns and not columns & {"query", "query_image"}  # a caption, then
        sources: dict[str, list[str]] = {column: [] for column in (*COLUMNS, *self._extra)}
        numbered: list[tuple[int, str]] = []
        image = None
        for name, target in targets.items():
            number = NUMBERED_NEGATIVE.fullmatch(target or "")
            if target == "image" and image is None:
                image = name
            if target is None or name == PROVENANCE:
                continue
            if number:
                numbered.append((int(number[1]), name))
            elif target == "text" and text_is_query:
                sources["query"].append(name)
            elif target in self._canonical:
                sources[self._canonical[target]].append(name)
            elif target == "images":
                raise DataError(
                    f"{where}: column {name!r} holds images, and a row has one query_image or positive_image, and "
                    f"negative_images: say what it is with column_mapping: {{{name}: negative_images}}, or drop it "
                    f"with {{{name}: null}}"
                )
        if image is not None and not sources["query"]:
            raise DataError(
                f"{where}: column {image!r} is the positive picture of a text query, and there is no column query, "
                f"caption or text: say what it is with column_mapping: {{{image}: query_image}} or {{{image}: "
                "positive_image}, or drop it with null"
            )
        self._check_rivals(sources, [name for _, name in sorted(numbered)], {*self._mapping, *guessed}, where)

        # Several columns of negatives stand in the order of the user's mapping, then of their names with the numbers in
        # them: `bad_2` before `bad_10`.
        mapped = list(self._mapping)

        def rank(name: str) -> tuple[int, list[tuple[str, int]]]:
            parts = [(word, int(digits or 0)) for word, digits in re.findall(r"(\D+)([0-9]{0,9})", name)]
            return (mapped.index(name) if name in mapped else len(mapped), parts)

        sources["negatives"] = sorted(sources["negatives"], key=rank) or [name for _, name in sorted(numbered)]

        # 3. What notes and errors say of the whole source: each list is bounded, as names may be random.
        ignored = [name for name in free if name not in guessed]
        used = [(self._used.setdefault(column, {}), taken) for column, taken in sources.items() if taken]
        for known, new in ((self._seen, names), (self._guessed, guessed), (self._ignored, ignored), *used):
            if len(known) < MAX_SHAPES:
                known.update(dict.fromkeys(new))
        single = {column: taken[0] if taken else None for column, taken in sources.items()}
        if single[_TITLE] and not single["positive"]:
            raise DataError(
                f"{where}: column {single[_TITLE]!r} is the title of a positive, and the row has no text as one"
            )
        return RowShape(
            query=single["query"],
            positive=single["positive"],
            negatives=tuple(sources["negatives"]),
            label=single["label"],
            query_image=single["query_image"],
            positive_image=single["positive_image"],
            negative_images=single["negative_images"],
            title=single[_TITLE],
            extra=tuple((column, single[name]) for name, column in self._extra.items()),
        )

    def _is_named(self, name: str) -> bool:
        """Return whether a column's name alone says what it is."""
        if name == _TITLE and _TITLE not in self._extra:
            return False
        known = (*self._canonical, "images", PROVENANCE)
        return name in known or NUMBERED_NEGATIVE.fullmatch(name) is not None

    def _check_rivals(
        self, sources: Mapping[str, list[str]], numbered: list[str], chosen: Collection[str], where: str
    ) -> None:
        """Refuse two columns for one, but for negatives that the user or a guess calls so."""
        for column, taken in sources.items():
            rivals = taken + numbered * (column == "negatives" and bool(taken))
            if len(rivals) < 2 or (column == "negatives" and {*rivals} <= {*chosen}):
                continue
            shown = [
                f"{name!r} (mapped to {self._mapping[name]!r})" if name in self._mapping else repr(name)
                for name in rivals
            ]
            both = f", or take both with column_mapping: {{negatives: [{', '.join(rivals)}]}}"
            raise DataError(
                f"{where}: columns {' and '.join(shown[:2])} both mean {column!r}: keep one, and drop the other "
                f"with column_mapping: {{{rivals[-1]}: null}}{both if column == 'negatives' else ''}"
            )


def _guessed(
    targets: Mapping[str, str | None], columns: Collection[str], free: Collection[str], where: str
) -> dict[str, str]:
    """Return column -> our name for it, of the columns that nobody named.

    Args:
        targets: Every column of a row -> what it is by its name or by the user's mapping, None where it is dropped.
        columns: Our columns that the row has by name.
        free: The columns that have no name of ours and aren't mapped.
        where: `file:line`, for the error.

    Raises:
        DataError: Two columns may be the picture.
    """
    # Negatives first: what the row names as such leaves nothing to guess.
    guesses: dict[str, str] = {}
    if not {"negatives", "negative_images"} & {*columns}:
        guesses = {name: "negatives" for name in free if looks_like_negative(name)}
    asked = {target for target in targets.values() if target is not None}
    has_picture = bool({"positive_image", "query_image"} & {*columns})
    is_titled = "title" in free and "title" not in asked - {"title"}
    # A caption, or what will be one beside a picture, with nothing yet that it could search.
    lacks_picture = ("query" in columns and "positive" not in columns) or (
        "query" not in columns and ("text" in asked if "positive" in columns else is_titled)
    )
    files = [name for name in free if name in PICTURE_FILES]
    if files and lacks_picture and not has_picture:
        if len(files) > 1:
            raise DataError(
                f"{where}: columns {files[0]!r} and {files[1]!r} may both name the picture: say which with "
                f"column_mapping: {{{files[0]}: positive_image}}"
            )
        guesses[files[0]] = "image"
        has_picture = True
    if is_titled and has_picture and not {"query", "query_image"} & {*columns} and "text" not in asked:
        guesses["title"] = "query"
    elif is_titled and not has_picture and asked & TITLED:
        guesses["title"] = "title"
    return guesses


def looks_like_negative(name: str) -> bool:
    """Return whether a column seems to hold a text that is no answer, by its name."""
    return _NEGATIVE.fullmatch(name) is not None


def closest(name: str, names: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the nearest of some names, or an empty string."""
    near = get_close_matches(name, list(names), n=1, cutoff=NEAR)
    return f" (did you mean {near[0]!r}?)" if near else ""


def listing(names: Iterable[str], limit: int = 20) -> str:
    """Return names for a sentence, the first `limit` of them, or "none"."""
    names = list(names)
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return (", ".join(cut(name, 40) or "one without a name" for name in names[:limit]) or "none") + more
