"""Every key of the configuration: type, default, unit, bounds, meaning, alias, and the rules between keys.

The sections (keys/) group the keys; the file that a user writes is flat. A fact about a key stands there and nowhere
else: the reference, the JSON schema and the error messages are made from it. Values are strict: `True` is no integer
and "3" is no number; an integer is fine where a float is expected.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, model_validator

from vembed.config.fields import RULES, BrokenRules
from vembed.config.keys.adapters import AdapterKeys
from vembed.config.keys.batch import BatchKeys
from vembed.config.keys.data import DataKeys
from vembed.config.keys.distributed import DistributedKeys
from vembed.config.keys.evaluation import EvaluationKeys
from vembed.config.keys.loss import LossKeys
from vembed.config.keys.model import ModelKeys
from vembed.config.keys.optimisation import OptimisationKeys
from vembed.config.keys.output import OutputKeys
from vembed.config.redact import redact_value

ALIASES: Mapping[str, tuple[str, ...]] = {
    "model_name_or_path": ("model_name",),
    "prompt": ("query_prompt", "document_prompt"),
    "per_device_train_batch_size": ("batch_size",),
    "lr": ("learning_rate",),
    "resume_from_checkpoint": ("resume",),
    "dataloader_num_workers": ("num_workers",),
    "num_gpus": ("num_processes",),
}
"""Other names of a key, or of several that one value sets. An alias beside its key is an error."""

SECTIONS: Mapping[str, type[BaseModel]] = {
    "Model": ModelKeys,
    "Adapters": AdapterKeys,
    "Data": DataKeys,
    "Loss": LossKeys,
    "Batch": BatchKeys,
    "Distributed": DistributedKeys,
    "Optimisation": OptimisationKeys,
    "Evaluation": EvaluationKeys,
    "Output": OutputKeys,
}
"""The sections in the order of every listing."""


# Last section first: pydantic collects fields from the last base to the first.
class Config(
    OutputKeys,
    EvaluationKeys,
    OptimisationKeys,
    DistributedKeys,
    BatchKeys,
    LossKeys,
    DataKeys,
    AdapterKeys,
    ModelKeys,
):
    """A complete, checked configuration; it can't be changed."""

    NOT_HASHED: ClassVar[frozenset[str]] = frozenset(
        {
            "output_dir",
            "overwrite_output_dir",
            "resume",
            "logging_steps",
            "num_workers",
            "report_to",
            "save_steps",
            "save_minutes",
            "save_total_limit",
        }
    )
    """Keys that decide nothing about the result."""

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
        return expanded

    @model_validator(mode="after")
    def _keep_rules(self) -> Self:
        broken = [(each.keys, sentence) for each in RULES if (sentence := each.check(self)) is not None]
        if broken:
            raise BrokenRules(broken)
        return self

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, redact_value(value)


def default_of(name: str) -> Any:
    """Return the default of a key.

    Args:
        name: A key that isn't required.

    Returns:
        The value that stands in the schema.
    """
    return Config.model_fields[name].get_default()
