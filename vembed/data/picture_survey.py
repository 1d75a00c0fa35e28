"""Count the texts and pictures of a set: which way it is searched, whether a model reads it, how large pictures are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from vembed.batch import MODALITY_WORDS, content_id, modality_of, modality_words, pictures_in
from vembed.data.images import check_image
from vembed.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from vembed.batch import ImageLimits, Item, Modality, Side
    from vembed.data.judged import RetrievalData

RetrievalMode = Literal["auto", "t2t", "t2i", "i2t", "i2i", "m2i", "m2t"]
"""Items that search, 2, items that are searched: t for texts, i for pictures, m for pictures with a text."""

MODALITIES: Mapping[str, Modality] = {"t": "text", "i": "image", "m": "image+text"}
KINDS = {letter: MODALITY_WORDS[modality][1] for letter, modality in MODALITIES.items()}


@dataclass(slots=True)
class ItemCounts:
    """Items of one set by kind and side; the same item counts each time that it is added."""

    counts: dict[str, dict[Side, int]] = field(
        default_factory=lambda: {kind: {"query": 0, "document": 0} for kind in KINDS.values()}
    )  # kind of `KINDS` -> side -> items

    @classmethod
    def of(cls, task: RetrievalData) -> ItemCounts:
        """Count the queries and documents of a retrieval task."""
        counts = cls()
        counts.add("query", task.queries.values())
        counts.add("document", task.documents.values())
        return counts

    def add(self, side: Side, items: Iterable[Item]) -> None:
        """Count items of one side."""
        # One by one, for sets in memory; of records `RecordCounts` counts modalities without reading an item.
        for item in items:
            self.counts[MODALITY_WORDS[modality_of(item)][1]][side] += 1

    @property
    def num_pictures(self) -> int:
        """Number of items that are a picture, or have one."""
        return sum(sum(counts.values()) for kind, counts in self.counts.items() if kind != KINDS["t"])

    @property
    def has_pictures(self) -> bool:
        """True where an item is a picture, or has one."""
        return any(any(counts.values()) for kind, counts in self.counts.items() if kind != KINDS["t"])

    @property
    def has_texts(self) -> bool:
        """True where an item is a text, or has one."""
        return any(any(counts.values()) for kind, counts in self.counts.items() if kind != KINDS["i"])

    def side_text(self, side: Side) -> str:
        """Return the kinds of items of a side in words, e.g. "pictures", "texts and pictures"."""
        return " and ".join(kind for kind, counts in self.counts.items() if counts[side])

    @property
    def direction(self) -> str:
        """The retrieval direction in words, e.g. "texts search pictures"."""
        return f"{self.side_text('query')} search {self.side_text('document')}"

    @property
    def modalities(self) -> set[Modality]:
        """Modalities of the items."""
        return {modality for modality, (_, kind) in MODALITY_WORDS.items() if any(self.counts[kind].values())}

    def require(self, mode: RetrievalMode, source: str) -> None:
        """Refuse a set that holds anything else than a mode asks for.

        Args:
            mode: The mode; "auto" takes anything.

        Raises:
            DataError: It doesn't hold what the mode asks for.
        """
        if mode == "auto":
            return
        wanted = KINDS[mode[0]], KINDS[mode[2]]
        held = self.side_text("query"), self.side_text("document")
        if held == wanted:
            return
        sides: tuple[Side, ...] = ("query", "document")
        counts = ", ".join(
            f"{by_side[side]:,} {side} {word}"
            for side in sides
            for word, by_side in self.counts.items()
            if by_side[side]
        )
        # The mode that the data would pass; sides of several kinds, and pairs of kinds without a mode, pass auto alone.
        letters = {words: letter for letter, words in KINDS.items()}
        fitting = f"{letters.get(held[0], '')}2{letters.get(held[1], '')}"
        fitting = fitting if fitting in get_args(RetrievalMode) else "auto"
        raise DataError(
            f"retrieval_mode {mode} is for data in which {wanted[0]} search {wanted[1]}, and {source} holds {counts}; "
            f"set retrieval_mode to {fitting} or choose other data"
        )


class PictureSurvey:
    """Sizes of the distinct pictures of a set, (width, height) as stored, from their headers."""

    def __init__(self, limits: ImageLimits) -> None:
        self._limits = limits
        self._sizes: dict[int, tuple[int, int]] = {}

    def add(self, items: Iterable[Item]) -> None:
        """Look at items; texts are passed over."""
        # Headers were read when the rows were checked, but a table keeps no sizes: they are read again.
        for image in pictures_in(items):
            if (identity := content_id(image)) not in self._sizes:
                header = check_image(image, self._limits)
                self._sizes[identity] = header.width, header.height

    @property
    def text(self) -> str:
        """The number of pictures, the smallest, the median and the largest by area, in words."""
        sizes = sorted(self._sizes.values(), key=lambda size: (size[0] * size[1], size))
        if not sizes:
            return "0"
        if sizes[0] == sizes[-1]:
            return f"{len(sizes):,}, all {sizes[0][0]} x {sizes[0][1]} pixels"
        named = {"smallest": sizes[0], "median": sizes[(len(sizes) - 1) // 2], "largest": sizes[-1]}
        words = ", ".join(f"{word} {width} x {height}" for word, (width, height) in named.items())
        return f"{len(sizes):,}; {words} pixels"


def what_is_read(modalities: Collection[Modality]) -> str:
    """Return the items that a model reads and those that it can't: "texts; no pictures"; "" if it reads everything."""
    unread = set(MODALITY_WORDS) - set(modalities)
    if unread > {"image+text"}:  # a model without pictures, or without texts, reads no pictures with a text either
        unread -= {"image+text"}
    return f"{modality_words(modalities)}; no {modality_words(unread)}" if unread else ""


def refuse_unread(model: str, taken: Collection[Modality], sets: Mapping[str, Collection[Modality]]) -> None:
    """Refuse data with items that a model doesn't read.

    Args:
        taken: Modalities that the model reads.
        sets: Modalities of the items of a set, by its name.

    Raises:
        DataError: With the first such set.
    """
    for source, held in sets.items():
        if unread := set(held) - set(taken):
            raise DataError(
                f"model_name: {model} reads {modality_words(taken)}, and {source} holds {modality_words(unread)}: "
                f"choose a model that reads them too (docs/models.md), or leave them out with column_mapping"
            )
