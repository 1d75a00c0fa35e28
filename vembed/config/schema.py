"""The configuration: all sections of keys in one flat, checked class, with the keys of every registered loss.

The sections (keys/) and the losses group the keys; the file that a user writes is flat. A fact about a key stands where
it is declared and nowhere else: the reference, the JSON schema and the messages are made from it. Values are strict:
`True` is no integer and "3" is no number; an integer is fine where a float is expected.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, Self, cast, get_args

from pydantic import ValidationError, create_model, model_validator
from pydantic.fields import FieldInfo

from vembed.config.fields import RULES, BrokenRules, Name, Rule, Section, facts_of, idle_rules
from vembed.config.keys.adapters import AdapterKeys
from vembed.config.keys.batch import BatchKeys
from vembed.config.keys.data import ColumnName, DataKeys
from vembed.config.keys.distributed import DistributedKeys
from vembed.config.keys.evaluation import EvaluationKeys
from vembed.config.keys.loss import LossKeys
from vembed.config.keys.mining import MiningKeys
from vembed.config.keys.model import ModelKeys
from vembed.config.keys.optimisation import OptimisationKeys
from vembed.config.keys.output import OutputKeys
from vembed.config.keys.sampling import SamplingKeys
from vembed.config.keys.sources import loss_names, losses_of_sources
from vembed.config.keys.teacher import TeacherKeys
from vembed.config.plugins import PluginKeys, import_plugins
from vembed.config.synonyms import ALIASES, foreign
from vembed.errors import ConfigError
from vembed.redact import redact_value
from vembed.registry import LOSSES

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
"""The sections in the order of every listing."""


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
    """A complete, checked configuration; it can't be changed.

    This class has the keys that every run reads. Making one imports its plugins and gives an instance of
    `config_class()`, which has those of the losses beside them.
    """

    NOT_HASHED: ClassVar[frozenset[str]] = frozenset(
        {
            "output_dir",
            "overwrite_output_dir",
            "resume",
            "logging_steps",
            "num_workers",
            "prefetch_factor",
            "report_to",
            "log_model",
            "save_strategy",
            "save_steps",
            "save_minutes",
            "save_total_limit",
        }
    )
    """Keys that decide nothing about the result."""

    def __new__(cls, **values: Any) -> Self:
        """Return an instance of `config_class()`, whatever the class."""
        if cls is not Config:
            return super().__new__(cls)
        import_plugins(values.get("plugins"))
        return cast("Self", super().__new__(config_class()))

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Check values against `config_class()`, whatever the class."""
        import_plugins(obj.get("plugins") if isinstance(obj, Mapping) else None)
        return cast("Self", super(Config, config_class()).model_validate(obj, **options))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Config.model_validate, (self.model_dump(include=self.model_fields_set),)

    def loss_facts(self) -> Any:
        """Return the facts (`LossFacts` of vembed.losses) of the chosen loss, or of the sum of several."""
        return LOSSES.load(self.loss_type).with_added(self.added_losses).with_sources(losses_of_sources(self))

    def loss_keys(self) -> Any:
        """Return the keys of the chosen loss, as its own section; of a sum those of each part."""
        return self.loss_facts().keys_in(self)

    @model_validator(mode="before")
    @classmethod
    def _expand_aliases(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        expanded: dict[Any, Any] = {name: value for name, value in values.items() if name not in ALIASES}
        for alias in (name for name in values if name in ALIASES):
            for target in ALIASES[alias]:
                if target in expanded:
                    msg = f"{alias} sets {target}, which is also set; keep one of them"
                    raise ValueError(msg)
                expanded[target] = values[alias]
        for name, value in expanded.items():
            row = foreign(name, value)
            if row is not None and row.verdict == "same":
                expanded[name] = row.ours
        return expanded

    @model_validator(mode="after")
    def _keep_rules(self) -> Self:
        broken = [(each.keys, sentence) for each in rules() if (sentence := each.check(self)) is not None]
        broken += _broken_of_loss(self)
        if broken:
            raise BrokenRules(broken)
        return self

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, redact_value(value)


def config_class() -> type[Config]:
    """Return `Config` with the keys of every registered loss: ours, and those of plugins.

    Raises:
        ConfigError: A plugin's key has the name of another one.
    """
    return _with_losses(tuple(LOSSES.load(name) for name in LOSSES.names()))


def fields() -> Mapping[str, FieldInfo]:
    """Return every key, those of losses last."""
    return config_class().model_fields


def section_keys(title: str) -> tuple[str, ...]:
    """Return the keys of a section in the order of every listing; the keys of losses stand in that of the loss."""
    own = tuple(SECTIONS[title].model_fields)
    of_losses = tuple(name for name in fields() if name not in Config.model_fields) if title == "Loss" else ()
    return (*own[:1], *of_losses, *own[1:])


def key_names() -> tuple[str, ...]:
    """Return every key in the order of every listing."""
    return tuple(name for title in SECTIONS for name in section_keys(title))


def default_of(name: str) -> Any:
    """Return the value of a key that nobody sets."""
    return fields()[name].get_default()


def rules() -> list[Rule]:
    """Return the rules between keys: those that are written, and one for each key that acts only with another."""
    return [*RULES, *_idle_rules(config_class())]


@functools.lru_cache(maxsize=1)
def _idle_rules(checked: type[Config]) -> list[Rule]:
    further = {"loss_type": (("added_losses", "data"), loss_names)}
    return idle_rules(checked.model_fields, {"loss_type": _hint}, further)


def _hint(config: Config, name: str) -> str:
    """Return what the chosen loss says to a user who set the key of another one."""
    hint = LOSSES.load(config.loss_type).hint(name, getattr(config, name))
    return f"; {hint}" if hint else ""


@functools.cache  # values of two classes are never equal
def _with_losses(losses: tuple[Any, ...]) -> type[Config]:
    """Return the class for these losses (`LossFacts` of vembed.losses, which this room must not import)."""
    owners: dict[str, list[str]] = {}
    found: dict[str, FieldInfo] = {}
    for loss in losses:
        for name, info in loss.keys.model_fields.items():
            known = found.setdefault(name, Config.model_fields.get(name, info))
            if (name in Config.model_fields and name not in LossKeys.model_fields) or not _alike(known, info):
                raise ConfigError(
                    f"key {name} of the loss {loss.name} has the name of another key; choose another name"
                )
            owners.setdefault(name, []).append(loss.name)
    names = [loss.name for loss in losses]
    made: dict[str, Any] = {
        name: (found[name].annotation, _of_losses(found[name], owners[name]))
        for name in found
        if len(owners[name]) < len(names) or name not in Config.model_fields
    }
    if asked := tuple(dict.fromkeys(column.name for loss in losses for column in loss.columns)):
        target: Any = Literal[(*get_args(ColumnName), *asked)]
        made["column_mapping"] = (dict[Name, target | None], Config.model_fields["column_mapping"])
    chosen = copy.copy(Config.model_fields["loss_type"])
    chosen.description = f"The loss: {'; '.join(f'{loss.name}, {loss.summary}' for loss in losses)}."
    made["loss_type"] = (Literal[tuple(names)], chosen)
    return create_model("Config", __base__=Config, __module__=__name__, **made)


def _alike(one: FieldInfo, other: FieldInfo) -> bool:
    return (one.annotation, one.default, one.description) == (other.annotation, other.default, other.description)


def _of_losses(info: FieldInfo, names: list[str]) -> FieldInfo:
    """Return the key of some losses as one that says so."""
    key = copy.copy(info)
    key.description = f"{info.description} Only with loss_type {' or '.join(names)}."
    extra = dict(facts_of(info))
    key.json_schema_extra = extra | {"acts_with": {**extra.get("acts_with", {}), "loss_type": names}}
    return key


def _broken_of_loss(config: Config) -> list[tuple[tuple[str, ...], str]]:
    """Return what the chosen loss's own section refuses."""
    try:
        if {*loss_names(config), *config.added_losses} <= set(LOSSES.names()):  # a rule tells others
            config.loss_keys()
    except ValidationError as refused:
        errors = [(each["loc"], each.get("ctx", {}).get("error", each["msg"])) for each in refused.errors()]
        of_rules = [found for _, error in errors if isinstance(error, BrokenRules) for found in error.broken]
        names = [name for facts in config.loss_facts().alone for name in facts.keys.model_fields]
        own = [name for name in names if name not in Config.model_fields]
        others = [
            ((*map(str, where), *own, "loss_type"), str(error))
            for where, error in errors
            if not isinstance(error, BrokenRules)
        ]
        return [*of_rules, *others]
    return []
