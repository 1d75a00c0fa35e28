"""The table of losses that engine and loss stage are tested with has every loss and key, and each key of it acts."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
import torch
from engine_cases import random_batch
from loss_kinds import KINDS, LATE, build, structure_for

from vembed.losses.base import BatchStructure
from vembed.losses.registry import loss_section
from vembed.registry import LOSSES

NEGATIVES = [0, 3, 1, 7, 0, 0, 2, 1, 1]


def choices(annotation: Any) -> set[Any]:
    """Return the values of all Literals in an annotation."""
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return set().union(*(choices(each) for each in get_args(annotation)))


def test_every_section_names_the_loss_that_is_built_from_it() -> None:
    for kind, (name, keys) in (KINDS | LATE).items():
        section, loss = loss_section(name), build(kind, tile_size=8)
        assert section.name == name
        assert loss.multi_vector == section.multi_vector
        if "added_losses" not in keys:
            assert isinstance(loss, section.loss_class())


def test_every_value_of_every_key_has_a_row() -> None:
    ours = [name for name in LOSSES.names() if isinstance(loss_section(name).loss, str)]  # a plugin's brings its class
    assert len(ours) > 10
    for name in ours:
        rows = [values for loss, values in (KINDS | LATE).values() if loss == name]
        assert rows, f"{name}: no row"
        for key, info in loss_section(name).model_fields.items():
            if key == "loss_tile_size":
                continue
            given = [values.get(key, info.default) for values in rows]
            flat = {each for value in given for each in (value if isinstance(value, list) else [value])}
            assert info.default in given, f"{name}, {key}: never its default"
            assert any(value != info.default for value in given), f"{name}, {key}: nothing but its default"
            missing = choices(info.annotation) - flat
            assert not missing, f"{name}, {key}: without {missing}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_of_a_row_acts(kind: str) -> None:
    structure = structure_for(kind, BatchStructure.of(random_batch(9, NEGATIVES, np.random.default_rng(1))))
    name, values = KINDS[kind]
    found = outcome(name, values, structure)
    for key in values:
        without = outcome(name, {each: value for each, value in values.items() if each != key}, structure)
        same = found.keys() == without.keys() and all(torch.equal(found[each], without[each]) for each in found)
        assert not same, f"{key} changes nothing"


def outcome(name: str, values: dict[str, Any], structure: BatchStructure) -> dict[str, torch.Tensor]:
    """Return the value, and gradients by embeddings and by the loss's own parameters."""
    draw = torch.Generator().manual_seed(3)
    count = structure.num_queries
    rows = torch.randn(count + structure.num_documents, 16, generator=draw, dtype=torch.float64)
    rows = torch.nn.functional.normalize(rows + rows[:1], dim=1).requires_grad_()  # so near that they can be spread
    loss: Any = build((name, values), 5)
    own = dict(loss.named_parameters())
    value = loss(rows[:count], rows[count:], structure)
    assert value > 0
    found = dict(zip(["rows", *own], torch.autograd.grad(value, [rows, *own.values()]), strict=True))
    return found | {"value": value}
