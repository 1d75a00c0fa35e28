"""An encoder under training: gradients, checkpointing, mixed precision, gradient caching, size."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from kit.text_models import FAMILY_BUILDERS, TEXTS, embed, load, write_model

from vembed.models.formats import Dense
from vembed.models.profile import model_size
from vembed.models.text import TextEncoder

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("training")
    return {kind: write_model(root / kind.replace(" ", "-"), kind) for kind in FAMILY_BUILDERS}


def test_checkpointing_keeps_fewer_activations(folders: dict[str, Path]) -> None:
    def saved_bytes(**options: Any) -> int:
        encoder, total = load(folders["bert"], **options).train(), 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.nbytes
            return tensor

        features = encoder.featurize(TEXTS, "query")
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            encoder(encoder.collate(features, np.arange(len(TEXTS)), int(features.lengths.max())))
        return total

    assert saved_bytes(gradient_checkpointing=True) < 0.5 * saved_bytes()


def test_dense_layers_run_in_float32_under_autocast(folders: dict[str, Path]) -> None:
    bare = load(folders["bert"])
    torch.manual_seed(0)
    layer = Dense(32, 8, bias=True, activation=torch.nn.Tanh())
    spec = replace(bare.spec, normalize=False)
    before = TextEncoder("x", backbone=bare.backbone, tokenizer=bare.tokenizer, spec=spec).eval()
    behind = TextEncoder("x", backbone=bare.backbone, tokenizer=bare.tokenizer, spec=spec, dense=[layer]).eval()
    with torch.autocast("cpu", torch.bfloat16):
        x, z = embed(before), embed(behind)
    with torch.no_grad():
        assert torch.equal(z, layer(x))
    assert not torch.equal(x, embed(before))


def test_activations_grow_with_the_length_of_a_row(folders: dict[str, Path]) -> None:
    sizes = [
        model_size(load(folders["bert"], max_seq_length=length), compute_dtype=torch.float32) for length in (16, 64)
    ]
    short, long = (size.kept_bytes_per_token(checkpointed=False) for size in sizes)
    assert (
        long - short == 2 * 2.5 * 2 * (64 - 16) * 4
    )  # layers x values for each head and token x heads x tokens x bytes
