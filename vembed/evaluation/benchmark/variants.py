"""Cheaper forms of the same vectors: fewer dimensions, fewer bits, an index that looks at fewer documents.

The reference is exact search over all dimensions in float32. Each number of dimensions is tried in float32 and in every
precision; each precision also on all dimensions; each index on all dimensions in float32. Forms of fewer dimensions or
bits are also tried with rescoring, which ranks some candidates for each hit by the full vectors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from vembed.errors import ConfigError
from vembed.evaluation.benchmark.names import unique_folders
from vembed.evaluation.evaluator import EXACT
from vembed.vectors.index import new_index, trained_clusters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.models.encoder import Encoder

Precision: TypeAlias = Literal["float32", "int8", "binary"]

ADVISED_ROWS_PER_LIST = 39
"""Documents for each list below which FAISS's clustering itself warns."""

REFERENCE_NAME = "exact"


@dataclass(frozen=True, slots=True)
class Variant:
    """One form of the vectors and one way to search them."""

    name: str  # for people: "exact", "64 dims", "64 dims, int8", "HNSW32"
    folder: str  # name of its folder; empty for the reference
    dimension: int | None = None  # leading dimensions that are kept, or None for all
    precision: Precision = "float32"  # what a number of a document is stored as
    index: str = EXACT  # FAISS index string
    rescored: int = 0  # candidates for each hit that are ranked by the full vectors; 0 for none

    @property
    def is_reference(self) -> bool:
        """Whether this is exact search over the vectors as the model gave them."""
        return not self.folder


REFERENCE = Variant(name=REFERENCE_NAME, folder="")


def plan_variants(
    *,
    dims: Sequence[int] = (),
    precisions: Sequence[Precision] = (),
    indexes: Sequence[str] = (),
    rescored: Sequence[int] = (),
) -> tuple[Variant, ...]:
    """Return what to try, the reference first.

    Raises:
        ConfigError: When a number of dimensions or candidates is below 1, or nothing is there to rescore.
    """
    if dims and min(dims) < 1:
        raise ConfigError(f"--dims: a model keeps at least 1 dimension, got {min(dims)}")
    if rescored and min(rescored) < 1:
        raise ConfigError(f"--rescore: at least 1 candidate for each hit is ranked again, got {min(rescored)}")
    if rescored and not dims and not precisions:
        raise ConfigError("--rescore ranks the candidates of a cheaper form: add --quantize int8 binary, or --dims")
    forms: list[Variant] = []
    for dimension in (None, *sorted(set(dims), reverse=True)):
        for precision in dict.fromkeys(("float32", *precisions)):
            words = [] if dimension is None else [f"{dimension} dims"]
            words += [] if precision == "float32" else [precision]
            for factor in dict.fromkeys((0, *rescored)) if words else ():
                name = ", ".join([*words, *([f"{factor}x rescored"] if factor else [])])
                forms.append(Variant(name, name, dimension, precision, rescored=factor))
    forms += [Variant(index, index, index=index) for index in dict.fromkeys(indexes) if index != EXACT]
    folders = unique_folders([form.name for form in forms])
    return (REFERENCE, *(replace(form, folder=folder) for form, folder in zip(forms, folders, strict=True)))


def check_model(variants: Sequence[Variant], model: str, encoder: Encoder) -> None:
    """Refuse to keep more dimensions than a model has, and an index that can't hold its vectors.

    Raises:
        ConfigError: Names the dimensions that are too many, or the index.
    """
    dimension = encoder.dimension
    if encoder.multi_vector:
        if len(variants) > 1:
            raise ConfigError(
                f"--dims, --quantize, --index: {model} gives several vectors for each row, which are compared by exact "
                f"MaxSim; leave these options or this model out"
            )
        return
    asked = {variant.dimension or 0 for variant in variants}
    over = sorted(each for each in asked if each > dimension)
    if over:
        raise ConfigError(
            f"--dims {','.join(str(each) for each in over)}: {model} has {dimension} dimensions; give at most "
            f"{dimension}, or leave this model out"
        )
    for variant in variants:
        new_index(variant.index, variant.dimension or dimension)


def check_sizes(variants: Sequence[Variant], task: str, num_documents: int) -> None:
    """Refuse an index that a set is too small to train.

    Raises:
        ConfigError: Names the index and one that the set can train.
    """
    for variant in variants:
        lists, codes = trained_clusters(variant.index)
        if max(lists, codes) <= num_documents:
            continue
        if lists > num_documents:
            fitting = 1 << (max(1, num_documents // ADVISED_ROWS_PER_LIST).bit_length() - 1)
            advice = f"use {variant.index.replace(f'IVF{lists}', f'IVF{fitting}')}"
        else:
            advice = "use fewer bits for each code, or an index that isn't trained, e.g. HNSW32"
        raise ConfigError(
            f"--index {variant.index}: it is trained on at least {max(lists, codes)} documents, {task} has "
            f"{num_documents}; {advice}, or leave this set out"
        )


def size_note(variant: Variant, num_documents: int) -> str | None:
    """Return a sentence where an index can be trained, but on fewer documents than FAISS advises."""
    lists, codes = trained_clusters(variant.index)
    wanted = ADVISED_ROWS_PER_LIST * max(lists, codes)
    if wanted <= num_documents:
        return None
    return (
        f"FAISS advises {wanted} documents to train {variant.index}, and there are {num_documents}: "
        "its clusters are rough."
    )
