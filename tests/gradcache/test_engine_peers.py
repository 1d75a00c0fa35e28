"""A step of the engine beside the cached losses of sentence-transformers: one value, one gradient of each weight."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from engine_cases import SmallBert
from test_engine import CPU, assert_same_gradients, gradients

from vembed.gradcache.chunks import ChunkBudget
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.losses.filters import FalseNegativeFilter
from vembed.losses.infonce import Hardness, InfoNCE
from vembed.losses.joint import JointInfoNCE
from vembed.losses.tiles import Prefixes

if TYPE_CHECKING:
    from torch import Tensor

QUERIES, NUMBERS = 7, 16
DIMS, WEIGHTS = [16, 4], [1.0, 0.5]


class Theirs(torch.nn.Sequential):
    """An encoder as sentence-transformers calls it."""

    def __init__(self, bert: SmallBert) -> None:
        super().__init__(bert)

    def get_embedding_dimension(self) -> int:
        return NUMBERS

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        inputs = {"ids": features["input_ids"], "mask": features["attention_mask"].bool()}
        return {"sentence_embedding": self[0](inputs)}


def gist(library: Any, model: Theirs, guide: Theirs, strategy: str, margin: float) -> Any:
    loss = library.CachedGISTEmbedLoss.__new__(library.CachedGISTEmbedLoss)  # its constructor wants tokenizers
    torch.nn.Module.__init__(loss)
    loss.model, loss.guide, loss.must_retokenize = model, guide, False
    loss.similarity_fct, loss.cross_entropy_loss = torch.nn.CosineSimilarity(dim=-1), torch.nn.CrossEntropyLoss()
    loss.temperature, loss.margin_strategy, loss.margin = 0.05, strategy, margin
    loss.mini_batch_size, loss.mini_batch_num_tokens, loss.show_progress_bar = 3, None, False
    loss.contrast_anchors = loss.contrast_positives = loss.gather_across_devices = False
    return loss


def losses(kind: str, library: Any, model: Theirs, guide: Theirs) -> tuple[Any, Any]:
    """Return our loss and theirs."""
    common: dict[str, Any] = {
        "temperature": 0.05,
        "dtype": torch.float64,
        "tile_size": 5,
        "mask_false_negatives": False,
    }
    asked: dict[str, Any] = {"scale": 20.0, "mini_batch_size": 3}
    if "matryoshka" in kind:
        common["prefixes"] = Prefixes.of(DIMS, WEIGHTS)
    if "gist" in kind:
        strategy, margin = ("relative", 0.05) if "relative" in kind else ("absolute", 0.1)
        common["negative_filter"] = FalseNegativeFilter("teacher", margin, relative=strategy == "relative")
        return InfoNCE(**common), gist(library, model, guide, strategy, margin)
    if "all directions" in kind:
        common |= {"hardness": Hardness("all_negatives", 4.0)}
        ours: Any = JointInfoNCE(
            directions=("query_to_document", "query_to_query", "document_to_query", "document_to_document"), **common
        )
        asked |= {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")}
        asked |= {"hardness_mode": "all_negatives", "hardness_strength": 4.0}
    else:
        ours = InfoNCE(**common, bidirectional="both" in kind)
        asked |= {"directions": ("query_to_doc", "doc_to_query")[: 1 + ("both" in kind)]}
        asked |= {"partition_mode": "per_direction"}
    return ours, library.CachedMultipleNegativesRankingLoss(model, **asked)


@pytest.mark.slow
@pytest.mark.parametrize("matryoshka", ["", ", matryoshka"])
@pytest.mark.parametrize("kind", ["one direction", "both directions", "all directions", "gist", "gist, relative"])
def test_the_engine_steps_as_cached_losses_do(case_maker: Any, kind: str, matryoshka: str) -> None:
    library = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    case = case_maker(dropout=0.0, negatives=1, num_queries=QUERIES)
    [bert], [pool] = case.encoder, case.pools
    torch.manual_seed(7)
    model, guide = Theirs(bert), Theirs(SmallBert(0.0).double())
    ours, theirs = losses(kind + matryoshka, library, model, guide)
    if matryoshka:
        theirs = library.MatryoshkaLoss(model, theirs, matryoshka_dims=DIMS, matryoshka_weights=WEIGHTS)
    columns = []
    for rows in (np.arange(QUERIES), *(QUERIES + place + 2 * np.arange(QUERIES) for place in (0, 1))):
        inputs = pool.collate(pool.features, rows, int(pool.features.lengths[rows].max()))
        columns.append({"input_ids": inputs["ids"], "attention_mask": inputs["mask"].long()})
    with torch.no_grad():
        queries, *documents = (guide(column)["sentence_embedding"] for column in columns)
    teacher_D = torch.stack(documents, dim=1).flatten(0, 1)
    structure = replace(case.structure, teacher_Q=queries, teacher_D=teacher_D)

    value = theirs(columns, None)
    value.backward()
    expected = gradients(case.encoder)
    factor = 1 / sum(WEIGHTS) if matryoshka else 1.0
    result = GradCacheEngine(ours, EngineOptions(ChunkBudget(4, 10**6), CPU, retain=0.3)).step(case.pools, structure)
    assert result.num_chunks > 4
    assert result.loss == pytest.approx(value.item() * factor, rel=1e-9)
    assert_same_gradients(gradients(case.encoder), {name: each * factor for name, each in expected.items()}, 1e-8)
