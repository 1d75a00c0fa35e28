"""Facts of losses, the loss of a run, and `register_loss`. No torch here: a configuration is checked from these facts.

A loss states everything about itself in one place, the class of its keys (`LossSection`): its name, the columns that it
reads, the memory that it takes. The sections of our own losses stand in losses/keys.py, that of a plugin beside its
loss. A run has one loss, a weighted sum of several, or one for each source of its data (`RunLoss`).
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias, TypeVar, get_args

from vembed.data.columns import ExtraColumn, LossNeeds
from vembed.errors import ConfigError
from vembed.plan.memory import LOSS_STRIP_TILES
from vembed.registry import LOSSES
from vembed.section import Section

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.losses.base import BatchLoss, LossCommon

Supervision = Literal["positives", "classes", "pairs", "lists"]
"""Supervision that a loss learns from: positives among the documents of the batch, classes, listed pairs with scores,
or several such pairs of one row."""

Memory = Literal["matrix", "tiles", "pairs", "tokens", "gram"]
"""Numbers that a loss holds at once: the whole similarity matrix, tiles of it, values of listed pairs, the similarities
of all vectors of rows with several, or the products of all dims with each other."""

ANY_SCORE = (-math.inf, math.inf)
"""Bounds of the scores of pairs where a loss takes any."""

Hints: TypeAlias = Mapping[str, "str | Callable[[Any], str]"]
"""Key of another loss -> advice for a user who set it here, or a function from its value to that."""

AnyLoss = TypeVar("AnyLoss", bound="type[BatchLoss]")


class LossSection(Section):
    """Keys of one loss, and its facts.

    Facts that hold for every configuration are class attributes, those that depend on the values of keys properties.
    """

    loss: ClassVar[Any] = ""  # "module:class", imported when the loss is built; of a plugin the class itself
    name: ClassVar[str] = ""  # what `loss_type` calls it
    title: ClassVar[str] = ""  # in a sentence: "the InfoNCE loss"
    summary: ClassVar[str] = ""  # for the reference, after "NAME: "
    columns: ClassVar[tuple[ExtraColumn, ...]] = ()  # of the data, beside our own
    takes: ClassVar[tuple[Supervision, ...]] = ("positives",)
    score_bounds: ClassVar[tuple[float, float]] = ANY_SCORE  # the least and the most that it takes as a pair's score
    memory: ClassVar[Memory] = "matrix"
    reads_teacher: ClassVar[bool] = False  # `BatchStructure.teacher_Q` and `teacher_D`, whatever its keys
    multi_vector: ClassVar[bool] = False  # rows have several vectors
    formula: ClassVar[str] = ""  # plain text
    source: ClassVar[str] = ""  # paper, as in a list of references
    citation: ClassVar[str] = ""  # the same as BibTeX, for the model card
    hints: ClassVar[Hints] = {}

    @property
    def tile_blocks(self) -> tuple[int, int]:
        """With memory "tiles": blocks of a tile's size that live at once, and tiles of logits kept beside them."""
        return 2, LOSS_STRIP_TILES

    @property
    def numbers_kept(self) -> tuple[int, int]:
        """With memory "tiles": numbers kept for each query of a device, and for each document of all devices."""
        return 0, 0

    @property
    def query_copies(self) -> int:
        """With memory "tiles": copies of the embeddings of a device's queries that live at once."""
        return 0

    @property
    def row_negatives(self) -> str:
        """The setting, "KEY VALUE", that learns from the hard negatives of rows alone; empty without."""
        return ""

    @classmethod
    def of(cls, config: Any) -> Self:
        """Take the keys of the loss out of a configuration, which has those of all losses."""
        return cls.model_validate({name: getattr(config, name) for name in cls.model_fields})

    @classmethod
    def hint(cls, key: str, value: object) -> str:
        """Return advice for a user who set a key of another loss; empty where nothing is alike."""
        advice = cls.hints.get(key, "")
        return advice(value) if callable(advice) else advice

    @classmethod
    def loss_class(cls) -> type[BatchLoss]:
        """Return the loss's class; one of our own is imported now, with torch."""
        if not isinstance(cls.loss, str):
            plugin: type[BatchLoss] = cls.loss
            return plugin
        # A name until now: checking a configuration must not import torch, which takes seconds.
        module, name = cls.loss.split(":")
        ours: type[BatchLoss] = getattr(importlib.import_module(module), name)
        return ours

    def build(self, common: LossCommon) -> BatchLoss:
        """Make the loss from its keys."""
        loss: BatchLoss = self.loss_class().from_keys(self, common)
        return loss


def loss_section(name: str) -> type[LossSection]:
    """Return the section of a loss by its `loss_type`.

    Raises:
        ConfigError: There is none of that name.
    """
    section: type[LossSection] = LOSSES.load(name)
    return section


def filters_by_teacher(keys: object) -> bool:
    """Tell whether a teacher names the false negatives of a loss with these keys."""
    return getattr(keys, "false_negative_filter", None) == "teacher"


@dataclass(frozen=True, slots=True)
class RunLoss:
    """The loss of a run: one, a weighted sum of several, or one of these for each source of the data."""

    terms: tuple[tuple[type[LossSection], float], ...] = ()  # of the sum, each with its weight; a single loss has one
    of_source: tuple[RunLoss, ...] = ()  # that of each source, in place of `terms`

    @classmethod
    def chosen(cls, loss_type: str, added: Mapping[str, float], of_sources: Sequence[str | None] = ()) -> RunLoss:
        """Return the loss that a configuration chooses.

        Args:
            added: Further losses of the sum, with their weights.
            of_sources: The loss of each source; None stands for the sum.

        Raises:
            ConfigError: There is no loss of a name.
        """
        # Sources without a loss of their own share the sum; where all end up with one loss, batches may mix them.
        main = cls(tuple((loss_section(name), weight) for name, weight in {loss_type: 1.0, **added}.items()))
        losses = tuple(main if name is None else cls(((loss_section(name), 1.0),)) for name in of_sources)
        if all(name is None for name in of_sources):
            return main
        return losses[0] if len(set(losses)) == 1 else cls(of_source=losses)

    @property
    def several(self) -> tuple[RunLoss, ...]:
        """The different losses of the sources; empty where all rows have one."""
        return tuple(dict.fromkeys(self.of_source))

    @property
    def sections(self) -> tuple[type[LossSection], ...]:
        """The section of every loss that acts, once."""
        return tuple(dict.fromkeys(section for loss in self.several or (self,) for section, _ in loss.terms))

    @property
    def name(self) -> str:
        """The names of its losses: "infonce + spread_out", "infonce or cosent"."""
        if self.of_source:
            return " or ".join(loss.name for loss in self.several)
        return " + ".join(section.name for section, _ in self.terms)

    @property
    def score_bounds(self) -> tuple[float, float]:
        """The least and the most that all of its losses take as the score of a pair."""
        bounds = [section.score_bounds for section in self.sections]
        return max(low for low, _ in bounds), min(high for _, high in bounds)

    @property
    def multi_vector(self) -> bool:
        """True where rows have several vectors; losses of one run agree on that."""
        return self.sections[0].multi_vector

    def needs(self) -> LossNeeds:
        """Return what it asks of the rows that it learns from."""
        columns = {column.name: column for section in self.sections for column in section.columns}
        return LossNeeds(
            name=self.name,
            columns=tuple(columns.values()),
            takes=tuple(dict.fromkeys(what for section in self.sections for what in section.takes)),
            score_bounds=self.score_bounds,
            of_source=tuple(loss.needs() for loss in self.of_source),
        )

    def reads_teacher(self, config: Any) -> bool:
        """Tell whether one of its losses reads a teacher's vectors."""
        return filters_by_teacher(config) or any(section.reads_teacher for section in self.sections)

    def row_negatives(self, config: Any) -> str:
        """Return the first setting, "KEY VALUE", that learns from the hard negatives of rows alone; empty without."""
        return next(filter(None, (section.of(config).row_negatives for section in self.sections)), "")

    def for_source(self, number: int) -> RunLoss:
        """Return the loss of the rows of a source."""
        return self.of_source[number] if self.of_source else self

    def build(self, config: Any, common: LossCommon) -> BatchLoss:
        """Make the loss from the keys of a configuration."""
        if different := self.several:
            from vembed.losses.combined import SourceLosses  # brings torch

            losses = [loss.build(config, common) for loss in different]
            return SourceLosses(losses, [different.index(loss) for loss in self.of_source])
        built = [(weight, section.of(config).build(common)) for section, weight in self.terms]
        if len(built) == 1:
            return built[0][1]
        from vembed.losses.combined import SumLoss

        return SumLoss(built)


def register_loss(loss: AnyLoss) -> AnyLoss:
    """Make a loss available as `loss_type`; usable as a decorator or a call.

    Args:
        loss: A `ContrastiveLoss`, `StreamedLoss` or `MultiVectorLoss` whose class attribute `keys` is a `LossSection`
            with its keys and facts: a `name`, and where they apply `columns`, `takes`, `formula`, `source`,
            `citation`. What it leaves out follows from the loss: `summary` is the first line of its docstring,
            `multi_vector` and `memory` are those of the class that it is derived from.

    Raises:
        ConfigError: The name is taken, or a fact is missing or not what it must be.
    """
    from vembed.losses.base import BatchLoss  # brings torch, which a plugin has imported already
    from vembed.losses.streamed import StreamedLoss

    where = f"{loss.__module__}.{loss.__qualname__}"
    if not issubclass(loss, BatchLoss):
        raise ConfigError(f"{where} is no loss; derive it from ContrastiveLoss, StreamedLoss or MultiVectorLoss")
    if inspect.isabstract(loss):
        raise ConfigError(f"{where} lacks {', '.join(sorted(loss.__abstractmethods__))}")
    section = getattr(loss, "keys", None)
    if not (isinstance(section, type) and issubclass(section, LossSection)):
        raise ConfigError(
            f"{where}: keys must be a LossSection, a class of its keys and facts (vembed.losses.registry.LossSection)"
        )
    if not section.name:
        raise ConfigError(f'{where} has no name; give its keys one for loss_type, such as name = "margin"')
    for fact in ("columns", "takes"):
        if not isinstance(values := getattr(section, fact), tuple):  # one in brackets alone: ("pairs") is a text
            raise ConfigError(f"{where}: {fact} must be a tuple, got {values!r}; with one entry it ends with a comma")
    for fact, allowed in (("memory", get_args(Memory)), ("takes", get_args(Supervision))):
        values = getattr(section, fact)
        if not set([values] if isinstance(values, str) else values) <= set(allowed):
            raise ConfigError(f"{where}: {fact} must be of {', '.join(allowed)}, got {values!r}")
    # Keys of all losses stand in one configuration, where most of them don't act.
    for name, info in section.model_fields.items():
        if info.is_required():
            raise ConfigError(f"{where}: key {name} has no default; runs with other losses need one")
        if not isinstance(info.json_schema_extra, dict) or not info.description:
            raise ConfigError(f"{where}: key {name} is not made by key(default, meaning)")
    # Before the section is changed: where the name is taken, it may be the section of the loss that has it.
    LOSSES.register(section.name, section, module=loss.__module__)
    # What the class says already isn't asked a second time; `memory` alone may be stated by a class between.
    section.loss = loss
    section.multi_vector = loss.multi_vector
    if not any("memory" in vars(part) for part in section.__mro__ if part is not LossSection):
        section.memory = "tokens" if loss.multi_vector else "tiles" if issubclass(loss, StreamedLoss) else "matrix"
    section.title = section.title or f"the {section.name} loss"
    section.summary = section.summary or (inspect.getdoc(loss) or "").partition("\n")[0].rstrip(".")
    return loss
