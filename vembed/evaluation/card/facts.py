"""What a card is made of, as plain data."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Literal

from vembed.models.dual import DualEncoder
from vembed.models.families import family_of
from vembed.models.text import TextEncoder
from vembed.models.vision import VisionEncoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vembed.batch import Side
    from vembed.evaluation.card.names import PublicName
    from vembed.evaluation.significance import Comparison
    from vembed.models.encoder import Encoder, Similarity
    from vembed.models.export.forms import Form


_SOURCE = re.compile(r" \([^()]*\)$")
"""Where an encoder read what it says of itself: another file once it was written again."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a program that uses transformers alone must do to get an encoder's vectors.

    Attributes:
        kind: What it encodes.
        auto_class: The class of transformers that loads it.
        pooling: How tokens become a vector: "mean", "cls", "lasttoken", "head"; "" for both towers' own projection.
        text_padding: Arguments of the tokenizer that pad texts; empty without texts.
    """

    kind: Literal["text", "dual", "vision"]
    auto_class: str
    pooling: str
    text_padding: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """An encoder as a card tells of it.

    Attributes:
        form: The library that its folder is written for.
        takes_texts: Whether it encodes texts.
        takes_pictures: Whether it encodes pictures.
        dimension: Numbers of a vector.
        max_length: Longest text in tokens, None where there is no limit.
        similarity: How vectors are compared.
        prompts: Text before each side's texts.
        num_parameters: Numbers in its weights.
        dtype: Type of the stored weights.
        described: What the encoder says of itself, label -> value.
        recipe: How transformers alone gives its vectors; None where that takes more than a few lines.
    """

    form: Form
    takes_texts: bool
    takes_pictures: bool
    dimension: int
    max_length: int | None
    similarity: Similarity
    prompts: Mapping[Side, str]
    num_parameters: int
    dtype: str
    described: Mapping[str, str]
    recipe: Recipe | None


@dataclass(frozen=True, slots=True)
class MetricFacts:
    """One metric of one set.

    Attributes:
        name: The metric, e.g. "ndcg@10".
        baseline: Before training, or None.
        final: The model of the card, or None.
        bm25: BM25, or None.
        comparison: Final against baseline with its interval, or None.
    """

    name: str
    baseline: float | None
    final: float | None
    bm25: float | None
    comparison: Comparison | None


@dataclass(frozen=True, slots=True)
class SetFacts:
    """What was measured on one set.

    Attributes:
        name: The set.
        role: What it is, in a word or two.
        note: What it was used for, in words.
        num_queries: Queries with judgements.
        num_documents: Documents searched.
        metrics: The metric of the verdict first.
        sentence: The verdict, or "".
    """

    name: str
    role: str
    note: str
    num_queries: int
    num_documents: int
    metrics: tuple[MetricFacts, ...]
    sentence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """A training run as a card tells of it. Texts hold no paths and no secrets; they aren't escaped.

    Attributes:
        name: The run.
        base: The model that training started from.
        data: (label, name) of the data sets.
        data_facts: (label, value): counts, directions, what was left out.
        settings: (key, value) of the training.
        sets: What was measured, the verdict's set first.
        environment: Versions and machine.
        methods: Names of the methods used, for the citations.
        notes: What a reader must know of the run itself, one sentence each.
    """

    name: str
    base: PublicName
    data: tuple[tuple[str, PublicName], ...]
    data_facts: tuple[tuple[str, str], ...]
    settings: tuple[tuple[str, str], ...]
    sets: tuple[SetFacts, ...]
    environment: tuple[tuple[str, str], ...]
    methods: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """Everything that a card says.

    Attributes:
        title: Name of the model.
        folder: Name of its folder, for the examples.
        model: The encoder.
        run: The run that trained it, None where nothing is known of one.
        base: What it was made from where no run is known, else None.
        license_id: The model's licence as its owner gave it, None where he gave none.
        base_license: The licence of the model that it was trained from, as the owner gave it.
        languages: Codes of its languages, as the owner gave them.
        versions: (package, version) that wrote the folder.
    """

    title: str
    folder: str
    model: ModelFacts
    run: RunFacts | None = None
    base: PublicName | None = None
    license_id: str | None = None
    base_license: str | None = None
    languages: tuple[str, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()


def written_with() -> tuple[tuple[str, str], ...]:
    """Return (package, version) of what writes a model's folder."""
    return tuple((package, version(package)) for package in ("vembed", "transformers", "torch", "safetensors"))


def model_facts(encoder: Encoder, form: Form) -> ModelFacts:
    """Return what a card tells of an encoder.

    Args:
        encoder: The encoder, its weights in the type that is stored.
        form: The form of its folder.
    """
    parameters = list(encoder.parameters())
    return ModelFacts(
        form=form,
        takes_texts="text" in encoder.modalities,
        takes_pictures="image" in encoder.modalities,
        dimension=encoder.dimension,
        max_length=encoder.max_length,
        similarity=encoder.similarity,
        prompts=encoder.prompts,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        dtype=str(parameters[0].dtype).removeprefix("torch."),
        described=_described(encoder),
        recipe=_recipe(encoder),
    )


def _described(encoder: Encoder) -> dict[str, str]:
    """Return what the encoder says of itself as a model, whatever of it was trained."""
    of_training = encoder.training_facts()
    described = {label: value for label, value in encoder.describe().items() if label not in of_training}
    return {label: _SOURCE.sub("", value) for label, value in described.items()}


def _recipe(encoder: Encoder) -> Recipe | None:
    if isinstance(encoder, DualEncoder):
        padding: dict[str, object] = {"padding": True, "padding_side": "right"}
        if encoder.family.pads_texts:
            padding = {"padding": "max_length", "padding_side": encoder.tokenizer.padding_side}
        return Recipe("dual", "AutoModel", "", padding)
    if isinstance(encoder, VisionEncoder):
        return Recipe("vision", "AutoModel", encoder.family.pooling)
    if not isinstance(encoder, TextEncoder):
        return None
    spec = encoder.spec
    is_plain = len(encoder.dense) == 0 and spec.include_prompt and not spec.lower_case
    if not is_plain or len(spec.pooling) != 1 or spec.pooling[0] not in ("mean", "cls", "lasttoken"):
        return None
    auto_class = family_of(encoder.backbone.config).auto_class.__name__
    return Recipe("text", auto_class, spec.pooling[0], {"padding": True, "padding_side": "right"})
