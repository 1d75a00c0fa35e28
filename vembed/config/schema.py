"""The configuration: the sections of all rooms in one flat, checked class, with the keys of every registered loss.

A section stands beside the code that reads it (`vembed/*/keys.py`), the keys of one loss beside that loss. The sections
group the keys; the file that a user writes is flat.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, cast, get_args

from pydantic import ValidationError, create_model, model_validator
from pydantic.fields import FieldInfo

from vembed.checkpoint.keys import OutputKeys
from vembed.config.names import ALIASES, foreign
from vembed.data.keys import ColumnName, DataKeys, SamplingKeys, loss_names, losses_of_sources
from vembed.errors import ConfigError
from vembed.evaluation.keys import EvaluationKeys
from vembed.losses.keys import LossKeys
from vembed.losses.registry import LossSection, RunLoss, loss_section
from vembed.models.keys import AdapterKeys, ModelKeys
from vembed.plan.keys import BatchKeys, DistributedKeys, OptimisationKeys
from vembed.redact import redact_value
from vembed.registry import LOSSES, import_plugins
from vembed.section import Name, Rule, Section, facts_of, idle_rules, key, rules_of
from vembed.text import one_of
from vembed.vectors.keys import MiningKeys, TeacherKeys, teacher_gives_scores

if TYPE_CHECKING:
    from vembed.data.columns import LossNeeds


class PluginKeys(Section):
    """Your own code."""

    plugins: list[Name] = key(
        [],
        "Python modules to import before anything else is read, so that their vembed.register_* take effect. vembed "
        "searches the current folder, PYTHONPATH and the installed packages.",
    )


SECTIONS: Mapping[str, type[Section]] = {
    "Model": ModelKeys,
    "Adapters": AdapterKeys,
    "Data": DataKeys,
    "Loss": LossKeys,
    "Sampling": SamplingKeys,
    "Teacher": TeacherKeys,
    "Mining": MiningKeys,
    "Batch": BatchKeys,
    "Distributed": DistributedKeys,
    "Optimisation": OptimisationKeys,
    "Evaluation": EvaluationKeys,
    "Output": OutputKeys,
    "Plugins": PluginKeys,
}
"""Sections in the order of every listing."""


class BrokenRules(ValueError):  # noqa: N818
    """Rules that a configuration breaks: the keys of each, the one to blame first, with the message."""

    def __init__(self, broken: Sequence[tuple[tuple[str, ...], str]]) -> None:
        super().__init__("; ".join(message for _, message in broken))
        self.broken = tuple(broken)


# Last section first: pydantic collects fields from the last base to the first.
class Config(
    PluginKeys,
    OutputKeys,
    EvaluationKeys,
    OptimisationKeys,
    DistributedKeys,
    BatchKeys,
    MiningKeys,
    SamplingKeys,
    TeacherKeys,
    LossKeys,
    DataKeys,
    AdapterKeys,
    ModelKeys,
):
    """Complete, checked, frozen configuration of a run.

    The type checker sees the keys that every run has. `Config(...)` imports the plugins that it names and makes an
    instance of `config_class()`, which has the keys of all losses as well.
    """

    def __new__(cls, **values: Any) -> Self:
        """Return an instance of `config_class()`, whatever the class."""
        # Keys of losses are known once all losses are registered, plugins' too: not yet where this class is made.
        if cls is not Config:
            return super().__new__(cls)
        import_named(values)
        return cast("Self", super().__new__(config_class()))

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Check values against `config_class()`, whatever the class."""
        import_named(obj if isinstance(obj, Mapping) else {})
        return cast("Self", super(Config, config_class()).model_validate(obj, **options))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Config.model_validate, (self.model_dump(include=self.model_fields_set),)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, redact_value(value)

    def run_loss(self) -> RunLoss:
        """Return the loss of the run: one, the sum of several, or one for each source of the data."""
        return RunLoss.chosen(self.loss_type, self.added_losses, losses_of_sources(self))

    def loss_needs(self) -> "LossNeeds":
        """Return what the loss asks of the data; where a teacher scores a row's documents, any row will do."""
        needs = self.run_loss().needs()
        return needs.taking("positives") if teacher_gives_scores(self) else needs

    @model_validator(mode="before")
    @classmethod
    def _expand_aliases(cls, values: Any) -> Any:
        """Replace aliases by their keys, and values that other trainers write by ours."""
        if not isinstance(values, Mapping):
            return values
        expanded: dict[Any, Any] = {name: value for name, value in values.items() if name not in ALIASES}
        for alias in (name for name in values if name in ALIASES):
            for target in ALIASES[alias]:
                if target in expanded:
                    raise ValueError(f"{alias} sets {target}, which is also set; keep one of them")
                expanded[target] = values[alias]
        for name, value in expanded.items():
            row = foreign(name, value)
            if row is not None and row.verdict == "same":
                expanded[name] = row.ours
        return expanded

    @model_validator(mode="after")
    def _keep_rules(self) -> Self:
        broken = [(rule.keys, text) for rule in rules() if (text := rule.violation(self)) is not None]
        broken += _broken_by_losses(self)
        if broken:
            raise BrokenRules(broken)
        return self


def import_named(values: Mapping[str, object]) -> None:
    """Import the plugins that values name, before they are checked: a plugin's loss brings keys.

    Args:
        values: Of a configuration, as they were written; those that are wrong are left to the schema to refuse.

    Raises:
        ConfigError: A plugin can't be imported.
    """
    import_plugins(values.get("plugins"))
    added = values.get("added_losses")
    for name in (values.get("loss_type"), *(added if isinstance(added, Mapping) else ())):
        if isinstance(name, str):
            LOSSES.find(name)  # by the entry points of installed packages


def config_class() -> type[Config]:
    """Return `Config` with the keys of every registered loss: ours, and those of plugins.

    Raises:
        ConfigError: A plugin's key has the name of another one.
    """
    return _class_with_losses(tuple(loss_section(name) for name in LOSSES.names()))


def fields() -> Mapping[str, FieldInfo]:
    """Return every key, those of losses last."""
    return config_class().model_fields


def section_keys(title: str) -> tuple[str, ...]:
    """Return the keys of a section in the order of every listing; keys of one loss follow loss_type."""
    names = tuple(SECTIONS[title].model_fields)
    of_losses = tuple(name for name in fields() if name not in Config.model_fields) if title == "Loss" else ()
    return (*names[:1], *of_losses, *names[1:])


def key_names() -> tuple[str, ...]:
    """Return every key in the order of every listing."""
    return tuple(name for title in SECTIONS for name in section_keys(title))


def default_of(name: str) -> Any:
    """Return the value of a key that nobody sets."""
    return fields()[name].get_default()


def rules() -> tuple[Rule, ...]:
    """Return the rules of all sections, and one for each key that has an effect only with some values of another."""
    return _all_rules(config_class())


@functools.lru_cache(maxsize=1)
def _all_rules(checked: type[Config]) -> tuple[Rule, ...]:
    # A section that is a base of another one (SourceKeys of DataKeys) gives its rules once, with the latter.
    of_sections = [rule for section in SECTIONS.values() for rule in rules_of(section)]
    # Of loss_type, the values are all losses that act.
    return (
        *of_sections,
        *idle_rules(
            checked.model_fields,
            lambda config, name: loss_names(config) if name == "loss_type" else (getattr(config, name),),
            _hint,
        ),
    )


def _hint(config: Config, other: str, name: str) -> str:
    """Return the end of a message on an idle key: what the chosen loss has in its place."""
    hint = loss_section(config.loss_type).hint(name, getattr(config, name)) if other == "loss_type" else ""
    return f"; {hint}" if hint else ""


@functools.cache  # classes with equal keys are still two classes, and a Config of one is no Config of the other
def _class_with_losses(losses: tuple[type[LossSection], ...]) -> type[Config]:
    """Return the class for some losses."""
    infos: dict[str, FieldInfo] = {}
    losses_of: dict[str, list[str]] = {}  # key -> the losses that have it
    for loss in losses:
        for name, info in loss.model_fields.items():
            known = infos.setdefault(name, Config.model_fields.get(name, info))
            # Several losses may have a key, if they mean the same by it.
            one, other = ((each.annotation, each.default, each.description) for each in (known, info))
            if one != other or (name in Config.model_fields and name not in LossKeys.model_fields):
                raise ConfigError(
                    f"key {name} of the loss {loss.name} has the name of another key; choose another name"
                )
            losses_of.setdefault(name, []).append(loss.name)
    # A key that every loss has is that of LossKeys; any other says which losses have it.
    made: dict[str, Any] = {}
    for name, info in infos.items():
        owners = losses_of[name]
        if len(owners) == len(losses) and name in Config.model_fields:
            continue
        owned, facts = copy.copy(info), facts_of(info)
        owned.description = f"{info.description} Only with loss_type {one_of(owners)}."
        owned.json_schema_extra = facts | {"acts_with": {**facts.get("acts_with", {}), "loss_type": owners}}
        made[name] = (info.annotation, owned)
    if columns := tuple(dict.fromkeys(column.name for loss in losses for column in loss.columns)):
        target: Any = Literal[(*get_args(ColumnName), *columns)]
        made["column_mapping"] = (dict[Name, target | None], Config.model_fields["column_mapping"])
    loss_type = copy.copy(Config.model_fields["loss_type"])
    loss_type.description = f"Training loss. {' '.join(f'{loss.name}: {loss.summary}.' for loss in losses)}"
    made["loss_type"] = (Literal[tuple(loss.name for loss in losses)], loss_type)
    return create_model("Config", __base__=Config, __module__=__name__, **made)


def _broken_by_losses(config: Config) -> list[tuple[tuple[str, ...], str]]:
    """Return the rules of the acting losses' own sections that a configuration breaks."""
    if not {*loss_names(config), *config.added_losses} <= set(LOSSES.names()):
        return []  # a rule of `data` or `added_losses` names the unknown one
    sections = config.run_loss().sections
    broken = [
        (rule.keys, text)
        for section in sections
        for rule in rules_of(section)
        if (text := rule.violation(config)) is not None
    ]
    try:
        for section in sections:
            section.of(config)
    except ValidationError as error:  # validators that a plugin's section brings
        of_losses = [name for part in sections for name in part.model_fields if name not in Config.model_fields]
        broken += [
            ((*map(str, part["loc"]), *of_losses, "loss_type"), str(part.get("ctx", {}).get("error", part["msg"])))
            for part in error.errors()
        ]
    return broken
