"""Keys of training data from several sources."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from vembed.config.fields import ANY, Name, Positive, Section, Text, key, rule
from vembed.registry import LOSSES

if TYPE_CHECKING:
    from vembed.config.schema import Config


def _one_by_one(mapping: object) -> object:
    """Return a column mapping with a list of columns under `negatives` as an entry for each of them."""
    listed = mapping.get("negatives") if isinstance(mapping, Mapping) else None
    if not isinstance(mapping, Mapping) or not isinstance(listed, list):
        return mapping
    if not listed or not all(isinstance(name, str) and name.strip() for name in listed):
        return mapping  # refused as any other value that is no column of ours
    others = {name: target for name, target in mapping.items() if name != "negatives"}
    if twice := [name for name in listed if name in others]:
        raise ValueError(f"names {twice[0]} twice: under negatives and by itself")
    return others | dict.fromkeys(listed, "negatives")


LISTED_NEGATIVES = BeforeValidator(_one_by_one)
"""Lets a column mapping list the columns that are negatives."""


class Source(Section):
    """One entry of `data`."""

    path: Name = key(..., "As data_path.")
    split: Name | None = key(None, "As data_split.")
    weight: Positive = key(1.0, "How much more often its rows come.")
    loss: Name | None = key(None, "Loss of the batches of these rows; null is loss_type, with added_losses.")
    query_prompt: Text | None = key(None, "Text before each query of these rows in training; null is the run's.")
    document_prompt: Text | None = key(None, "Text before each document of these rows in training; null is the run's.")
    column_mapping: Annotated[Mapping[Name, Name | None] | None, LISTED_NEGATIVES] = key(
        None, "As column_mapping; null is the run's."
    )

    @property
    def prompts(self) -> dict[Literal["query", "document"], str]:
        """Prompt of each side that has one of its own."""
        given: dict[Literal["query", "document"], Any] = {"query": self.query_prompt, "document": self.document_prompt}
        return {side: prompt for side, prompt in given.items() if prompt is not None}


class SourceKeys(Section):
    """Several sources that are trained on together."""

    data: Annotated[list[Source], Field(min_length=1)] | None = key(
        None,
        "Several sources of training data, in place of data_path. Each entry has a path, and may have: split and "
        "column_mapping, as data_split and column_mapping; weight, 1 by default, how much more often its rows come; "
        "loss, with source_batches: single, the loss of its batches in place of loss_type; "
        "query_prompt and document_prompt, put before its texts in training. An epoch has as many rows as all sources "
        "have; rows of one that comes less often wait for the next epochs. Classes of different sources differ.",
    )
    source_batches: Literal["mixed", "single"] = key(
        "mixed", "mixed: a batch holds rows of all sources. single: of one.", acts_with={"data": ANY}
    )
    source_temperature: Positive = key(
        1.0,
        "Sources share an epoch as weight x rows^(1 / source_temperature); above 1 small sources come more often.",
        acts_with={"data": ANY},
    )


def losses_of_sources(config: "Config") -> tuple[str | None, ...]:
    """Return the loss that each source has of its own."""
    return tuple(source.loss for source in config.data or ())


def loss_names(config: "Config") -> tuple[str, ...]:
    """Return the `loss_type` of every loss that acts, known or not."""
    own = losses_of_sources(config)
    shared = () if own and all(own) else (config.loss_type, *config.added_losses)
    return tuple(dict.fromkeys((*shared, *(name for name in own if name is not None))))


@rule("data", "loss_type", "source_batches")
def _losses_of_sources_fit(config: "Config") -> str | None:
    """A `loss` in `data` learns from rows, takes as many vectors of a row as `loss_type`, and needs single batches."""
    for number, name in enumerate(losses_of_sources(config)):
        if name is None:
            continue
        if name not in LOSSES or not LOSSES.load(name).takes:
            taken = [each for each in LOSSES.names() if LOSSES.load(each).takes]
            found = "learns nothing from the rows alone" if name in LOSSES else "is no loss"
            return f"data[{number}].loss: {name!r} {found}; name one of {', '.join(taken)}"
        if LOSSES.load(name).multi_vector != LOSSES.load(config.loss_type).multi_vector:
            return f"data[{number}].loss: {name} and {config.loss_type} differ: one takes several vectors a row"
        if config.source_batches == "mixed" and len(config.data or ()) > 1:
            return (
                f"data[{number}].loss: a mixed batch holds rows of all sources and has one loss; set source_batches to "
                f"single, or leave the loss out"
            )
    return None


@rule("data", "added_losses")
def _added_losses_act(config: "Config") -> str | None:
    """`added_losses` has no effect where every source has a `loss` of its own."""
    if config.added_losses and config.data and all(losses_of_sources(config)):
        return "added_losses has no effect: every source of data has a loss of its own; remove one of them"
    return None


@rule("data", "data_path")
def _data_is_named_once(config: "Config") -> str | None:
    """`data` must not stand beside a `data_path`."""
    if config.data is None or config.data_path is None:
        return None
    return "data lists the sources in place of data_path; remove one of them"
