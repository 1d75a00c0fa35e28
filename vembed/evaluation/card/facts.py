"""What a card is made of, as plain data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

import vembed
from vembed.redact import redact
from vembed.registry import ENCODERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vembed.batch import Side
    from vembed.evaluation.card.names import PublicName
    from vembed.evaluation.judge import Comparison
    from vembed.models.encoder import Encoder, Similarity
    from vembed.models.exportable import Form, Recipe


# Where an encoder read what it says of itself: another file once it was written again.
_SOURCE = re.compile(r" \([^()]*\)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """An encoder as a card tells of it."""

    form: Form  # the library that its folder is written for
    takes_texts: bool
    takes_pictures: bool
    dimension: int
    max_length: int | None  # longest text in tokens
    similarity: Similarity
    prompts: Mapping[Side, str]
    num_parameters: int
    dtype: str  # of the stored weights
    described: Mapping[str, str]  # what the encoder says of itself
    recipe: Recipe | None  # None where transformers alone takes more than a few lines
    multi_vector: bool = False  # several vectors for each row
    plugin: str = ""  # module that registers the encoder's class; empty for ours


@dataclass(frozen=True, slots=True)
class MetricFacts:
    """One metric of one set; None where it wasn't measured."""

    name: str
    baseline: float | None  # before training
    final: float | None  # the model of the card
    bm25: float | None
    comparison: Comparison | None  # final against baseline


@dataclass(frozen=True, slots=True)
class SetFacts:
    """What was measured on one set."""

    name: str
    role: str  # e.g. "test set"
    note: str  # what it was used for
    num_queries: int  # with judgements
    num_documents: int
    metrics: tuple[MetricFacts, ...]  # the metric of the verdict first
    sentence: str = ""  # the verdict

    @property
    def forgets(self) -> bool:
        """Whether the model lost on it what it was to keep."""
        return self.sentence.startswith("forgets")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """A training run as a card tells of it. Texts hold no paths and no secrets; they aren't escaped."""

    name: str
    base: PublicName  # the model that training started from
    data: tuple[tuple[str, PublicName], ...]  # "training", "dev" or "test", and the set
    data_facts: tuple[tuple[str, str], ...]  # counts, directions, what was left out
    settings: tuple[tuple[str, str], ...]
    sets: tuple[SetFacts, ...]  # the verdict's first
    environment: tuple[tuple[str, str], ...]  # versions and machine
    methods: tuple[str, ...]  # for the citations
    notes: tuple[str, ...]  # what a reader must know of the run, one sentence each


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """Everything that a card says; licences and languages are as the model's owner gave them."""

    title: str
    folder: str  # name of the model's folder
    model: ModelFacts
    run: RunFacts | None = None
    base: PublicName | None = None  # what the model was made from where no run is known
    license_id: str | None = None
    base_license: str | None = None
    languages: tuple[str, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()  # packages that wrote the folder


def written_with() -> tuple[tuple[str, str], ...]:
    """Return (package, version) of what writes a model's folder."""
    others = ("transformers", "torch", "safetensors")
    return (("vembed", vembed.__version__), *((package, version(package)) for package in others))


def model_facts(encoder: Encoder, form: Form) -> ModelFacts:
    """Return what a card tells of an encoder whose weights are in the type that is stored."""
    parameters = list(encoder.parameters())
    module = type(encoder).__module__
    return ModelFacts(
        form=form,
        takes_texts="text" in encoder.modalities,
        takes_pictures="image" in encoder.modalities,
        dimension=encoder.dimension,
        max_length=encoder.max_length,
        similarity=encoder.similarity,
        prompts={side: redact(prompt) for side, prompt in encoder.prompts.items()},
        num_parameters=sum(parameter.numel() for parameter in parameters),
        dtype=str(parameters[0].dtype).removeprefix("torch."),
        described=_described(encoder),
        recipe=encoder.recipe(),
        multi_vector=encoder.multi_vector,
        plugin=module if module in ENCODERS.plugins().values() else "",
    )


def _described(encoder: Encoder) -> dict[str, str]:
    """Return what the encoder says of itself as a model, whatever of it was trained."""
    return {label: redact(_SOURCE.sub("", value)) for label, value in encoder.facts().items()}
