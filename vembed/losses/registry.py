"""Facts of losses, and `register_loss`. No torch here: a configuration is checked from these facts."""

from __future__ import annotations

import importlib
import inspect
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from vembed.errors import ConfigError
from vembed.plan.memory import LOSS_STRIP_TILES
from vembed.registry import LOSSES
from vembed.section import Section

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    from vembed.data.columns import ExtraColumn
    from vembed.losses.base import BatchLoss, LossCommon
    from vembed.losses.keys import LossSection

Supervision = Literal["positives", "classes", "pairs", "lists"]
"""What a loss learns from: positives among the documents of the batch, classes, listed pairs with scores, or several
such pairs of one row."""

Memory = Literal["matrix", "tiles", "pairs", "tokens", "gram"]
"""What a loss holds at once: the whole similarity matrix, tiles of it, values of listed pairs, the similarities of all
vectors of rows with several, or the products of all dims with each other."""


ANY_SCORE = (-math.inf, math.inf)
"""Bounds of the scores of pairs where a loss takes any."""

Hints: TypeAlias = "Mapping[str, str | Callable[[Any], str]]"
"""Key of another loss -> advice for a user who set it here, or a function from its value to that."""

AnyLoss = TypeVar("AnyLoss", bound="type[BatchLoss]")


def filters_by_teacher(keys: object) -> bool:
    """Return whether a teacher tells a loss of these keys its false negatives."""
    return getattr(keys, "false_negative_filter", None) == "teacher"


@dataclass(frozen=True, slots=True, eq=False)
class LossFacts:
    """What the other rooms must know of a loss before it is built."""

    name: str  # what `loss_type` calls it
    loss: str | type[BatchLoss]  # the class, or "module:class" of our own, which is imported when it is built
    keys: type[Section]
    title: str = ""  # in a sentence: "the InfoNCE loss"
    summary: str = ""  # for the reference, after "NAME: "
    columns: tuple[ExtraColumn, ...] = ()  # of the data, beside our own
    takes: tuple[Supervision, ...] = ("positives",)
    score_bounds: tuple[float, float] = ANY_SCORE  # the least and the most that it takes as the score of a pair
    memory: Memory = "matrix"
    # With memory "tiles", by its keys: the blocks that live at once, and at most those of a strip of rows beside them.
    blocks: Callable[[Any], tuple[int, int]] = lambda _: (2, LOSS_STRIP_TILES)
    # With memory "tiles", by its keys: numbers that live on for each query of a device, and for each document of all.
    listed: Callable[[Any], tuple[int, int]] = lambda _: (0, 0)
    # By its keys, alone or among all others: whether it reads a teacher's vectors (`BatchStructure.teacher_Q`).
    reads_teacher: Callable[[Any], bool] = filters_by_teacher
    # By its keys, alone or among all others: "KEY VALUE" that learns from the hard negatives of rows alone, or nothing.
    reads_negatives: Callable[[Any], str] = lambda _: ""
    # With memory "tiles", by its keys: copies of the embeddings of a device's queries that live at once.
    copies: Callable[[Any], int] = lambda _: 0
    multi_vector: bool = False
    formula: str = ""  # plain text
    source: str = ""  # paper, as in a list of references
    citation: str = ""  # the same as BibTeX, for the model card
    # Key of another loss -> what a user who set it may want here, or a function from its value to that.
    hints: Mapping[str, str | Callable[[Any], str]] = field(default_factory=dict)

    parts: tuple[tuple[LossFacts, float], ...] = ()  # of a sum of losses: each with its weight
    of_source: tuple[LossFacts, ...] = ()  # of a loss for each source: that of each

    def with_added(self, added: Mapping[str, float]) -> LossFacts:
        """Return the facts of the sum of this loss and others, by `loss_type` with their weights."""
        if not added:
            return self
        parts = ((self, 1.0), *((loss_facts(name), weight) for name, weight in added.items()))
        together = _together([facts for facts, _ in parts], " + ")
        return replace(together, loss="vembed.losses.sum:SumLoss", parts=parts)

    def with_sources(self, names: Sequence[str | None]) -> LossFacts:
        """Return the facts of a loss for each source, by `loss_type`; None has this one."""
        if not any(names):
            return self
        each = tuple(self if name is None else loss_facts(name) for name in names)
        if len(set(each)) == 1:
            return each[0]
        return replace(_together(list(dict.fromkeys(each)), " or "), of_source=each)

    def for_source(self, number: int) -> LossFacts:
        """Return the facts of a source's loss; it reads what columns the others ask for where the rows have them."""
        if not self.of_source:
            return self
        own = self.of_source[number]
        known = {column.name for column in own.columns}
        others = (replace(column, required=False) for column in self.columns if column.name not in known)
        return replace(own, columns=(*own.columns, *others))

    def keys_in(self, config: Any) -> Any:
        """Return the section of a configuration that has the loss's keys; of several losses those of each."""
        if several := self.several:
            return tuple(facts.keys_in(config) for facts in several)
        return self.keys.model_validate({name: getattr(config, name) for name in self.keys.model_fields})

    @property
    def several(self) -> tuple[LossFacts, ...]:
        """The facts of the losses that this one is made of: the parts of a sum, or the different ones of sources."""
        return tuple(facts for facts, _ in self.parts) or tuple(dict.fromkeys(self.of_source))

    @property
    def alone(self) -> tuple[LossFacts, ...]:
        """The facts of each loss that this one is made of in the end, or these."""
        return tuple(dict.fromkeys(each for facts in self.several for each in facts.alone)) or (self,)

    def hint(self, key: str, value: object) -> str:
        """Return what a user who set a key of another loss may want here; empty where nothing is alike."""
        found = self.hints.get(key, "")
        return found(value) if callable(found) else found

    def build(self, keys: Any, common: LossCommon) -> BatchLoss:
        """Make the loss from its keys, as `keys_in` gives them."""
        if self.parts:
            from vembed.losses.sum import SumLoss  # brings torch

            built = zip(self.parts, keys, strict=True)
            return SumLoss([(weight, facts.build(each, common)) for (facts, weight), each in built])
        if different := self.several:
            from vembed.losses.by_source import SourceLosses

            losses = [facts.build(each, common) for facts, each in zip(different, keys, strict=True)]
            return SourceLosses(losses, [different.index(facts) for facts in self.of_source])
        loss: BatchLoss = self.loss_class().from_keys(keys, common)
        return loss

    def loss_class(self) -> type[BatchLoss]:
        """Return the loss's class; one of our own is imported now, with torch."""
        if not isinstance(self.loss, str):
            return self.loss
        module, name = self.loss.split(":")
        found: type[BatchLoss] = getattr(importlib.import_module(module), name)
        return found


def _together(every: Sequence[LossFacts], between: str) -> LossFacts:
    """Return what several losses ask for together."""
    return LossFacts(
        name=between.join(facts.name for facts in every),
        loss="",
        keys=Section,
        title=" and ".join(facts.title for facts in every),
        columns=tuple({column.name: column for facts in every for column in facts.columns}.values()),
        takes=tuple(dict.fromkeys(what for facts in every for what in facts.takes)),
        score_bounds=(max(facts.score_bounds[0] for facts in every), min(facts.score_bounds[1] for facts in every)),
        reads_teacher=lambda config: any(facts.reads_teacher(config) for facts in every),
        reads_negatives=lambda config: next(filter(None, (facts.reads_negatives(config) for facts in every)), ""),
        multi_vector=every[0].multi_vector,
    )


def loss_facts(name: str) -> LossFacts:
    """Return the facts of a loss by its `loss_type`.

    Raises:
        ConfigError: There is none of that name.
    """
    facts: LossFacts = LOSSES.load(name)
    return facts


def register_loss(loss: AnyLoss) -> AnyLoss:
    """Make a loss available as `loss_type`; usable as a decorator or a call.

    Args:
        loss: A `ContrastiveLoss`, `StreamedLoss` or `MultiVectorLoss` whose class attributes are its facts: `name`, and
            where they apply `keys`, `columns`, `takes`, `memory`, `formula`, `source`, `citation`.

    Raises:
        ConfigError: The name is taken, or a fact is missing or not what it must be.
    """
    LOSSES.register(str(getattr(loss, "name", "")), _facts_of(loss), module=loss.__module__)
    return loss


def _facts_of(loss: type[BatchLoss]) -> LossFacts:
    """Return what a loss class says of itself."""
    from vembed.losses.base import BatchLoss  # brings torch, which a plugin has imported already

    where = f"{loss.__module__}.{loss.__qualname__}"
    if not issubclass(loss, BatchLoss):
        raise ConfigError(f"{where} is no loss; derive it from ContrastiveLoss, StreamedLoss or MultiVectorLoss")
    if not hasattr(loss, "name"):
        raise ConfigError(f'{where} has no name; give it one for loss_type, such as name = "margin"')
    if inspect.isabstract(loss):
        raise ConfigError(f"{where} lacks {', '.join(sorted(loss.__abstractmethods__))}")
    for fact, allowed in (("memory", get_args(Memory)), ("takes", get_args(Supervision))):
        given = getattr(loss, fact)
        if not set([given] if isinstance(given, str) else given) <= set(allowed):
            raise ConfigError(f"{where}: {fact} must be of {', '.join(allowed)}, got {given!r}")
    if not (isinstance(loss.keys, type) and issubclass(loss.keys, Section)):
        raise ConfigError(f"{where}: keys must be a Section, a class of keys (vembed.section)")
    for name, info in loss.keys.model_fields.items():
        if info.is_required():
            raise ConfigError(f"{where}: key {name} has no default; runs with other losses need one")
        if not isinstance(info.json_schema_extra, dict) or not info.description:
            raise ConfigError(f"{where}: key {name} is not made by key(default, meaning)")
    summary = loss.summary or (inspect.getdoc(loss) or "").partition("\n")[0].rstrip(".")
    title = loss.title or f"the {loss.name} loss"
    return _facts(loss, loss.name, loss, loss.keys, title, summary)


def declare(section: type[LossSection]) -> LossFacts:
    """Return the facts of one of our own losses, from its section of keys."""
    return _facts(section, section.name, section.loss, section, section.title, section.summary)


def _facts(
    owner: type[LossSection | BatchLoss],
    name: str,
    loss: str | type[BatchLoss],
    keys: type[Section],
    title: str,
    summary: str,
) -> LossFacts:
    """Return facts from class attributes, and from the properties of the keys where values decide them."""

    def property_of(config: Any, attribute: str, default: Any) -> Any:
        section = config
        if not isinstance(config, keys):  # the keys among all others of a configuration
            section = keys.model_validate({field: getattr(config, field) for field in keys.model_fields})
        return getattr(section, attribute, default)

    always_reads_teacher = owner.reads_teacher
    return LossFacts(
        name=name,
        loss=loss,
        keys=keys,
        title=title,
        summary=summary,
        columns=tuple(owner.columns),
        takes=tuple(owner.takes),
        score_bounds=owner.score_bounds,
        memory=owner.memory,
        multi_vector=owner.multi_vector,
        formula=owner.formula,
        source=owner.source,
        citation=owner.citation,
        blocks=lambda config: property_of(config, "tile_blocks", (2, LOSS_STRIP_TILES)),
        listed=lambda config: property_of(config, "numbers_kept", (0, 0)),
        copies=lambda config: property_of(config, "query_copies", 0),
        reads_negatives=lambda config: property_of(config, "row_negatives", ""),
        reads_teacher=lambda config: always_reads_teacher or filters_by_teacher(config),
        hints=getattr(keys, "hints", {}),
    )
