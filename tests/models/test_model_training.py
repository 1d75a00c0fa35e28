"""An encoder under training: gradients, checkpointing, mixed precision, gradient caching, size."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from model_cases import FAMILY_BUILDERS, TEXTS, embed, load, write_model

from vembed.batch import ContrastiveBatch, Features, content_id
from vembed.gradcache.chunking import ChunkBudget
from vembed.gradcache.engine import EngineOptions, GradCacheEngine, Pool
from vembed.gradcache.reference import reference_step
from vembed.losses.base import BatchStructure
from vembed.losses.infonce import InfoNCE
from vembed.models.formats import Dense
from vembed.models.ngram_bag import NgramBag, NgramBagConfig
from vembed.models.profile.profile import model_size
from vembed.models.text import TextEncoder

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.models.encoder import Encoder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("training")
    return {kind: write_model(root / kind.replace(" ", "-"), kind) for kind in FAMILY_BUILDERS}


def with_dropout(folder: Path, probability: float = 0.1, **options: Any) -> Any:
    """Load an encoder whose every dropout layer and attention dropout drops."""
    encoder = load(folder, **options).train()
    layers = [module for module in encoder.modules() if isinstance(module, torch.nn.Dropout)]
    for layer in layers:
        layer.p = probability
    for module in encoder.modules():
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = probability  # type: ignore[assignment]
    return encoder


def gradients_of(encoder: Encoder, texts: tuple[str, ...] = TEXTS) -> dict[str, torch.Tensor]:
    """Backward a fixed random projection of the embeddings, with seeded dropout."""
    features = encoder.featurize(texts, "query")
    inputs = encoder.collate(features, np.arange(len(texts)), int(features.lengths.max()))
    direction = torch.randn(len(texts), encoder.dimension, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(11)
    z = encoder(inputs)
    (z * direction.to(z.dtype)).sum().backward()
    found = {name: p.grad.clone() for name, p in encoder.named_parameters() if p.grad is not None}
    encoder.zero_grad()
    return found


@pytest.mark.parametrize("kind", FAMILY_BUILDERS)
def test_every_trainable_parameter_takes_part(folders: dict[str, Path], kind: str) -> None:
    encoder = load(folders[kind]).train()
    trainable = {name for name, parameter in encoder.named_parameters() if parameter.requires_grad}
    unused = trainable - gradients_of(encoder).keys()
    assert unused <= {name for name in unused if "token_type_embeddings" in name}


@pytest.mark.parametrize("kind", ["bert", "modernbert", "qwen3", "gpt2", "t5"])
def test_checkpointing_gives_the_same_gradients_with_dropout(folders: dict[str, Path], kind: str) -> None:
    plain = with_dropout(folders[kind], dtype=torch.float64)
    expected, repeated = gradients_of(plain), gradients_of(plain)
    recomputed = with_dropout(folders[kind], dtype=torch.float64, gradient_checkpointing=True)
    assert any(getattr(module, "gradient_checkpointing", False) for module in recomputed.modules())
    found = gradients_of(recomputed)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(gradient, repeated[name])
        assert torch.allclose(found[name], gradient, rtol=1e-9, atol=1e-12), name
    without = gradients_of(plain.eval())
    assert any(not torch.allclose(without[name], expected[name], rtol=1e-3) for name in expected), "dropout is off"


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


@pytest.mark.parametrize("kind", FAMILY_BUILDERS)
def test_under_autocast_embeddings_are_float32_and_gradients_flow(folders: dict[str, Path], kind: str) -> None:
    encoder = load(folders[kind]).train()
    expected = gradients_of(encoder)
    with torch.autocast("cpu", torch.bfloat16):
        z = encoder(encoder.collate(encoder.featurize(TEXTS[:2], "query"), np.arange(2), 30))
        found = gradients_of(encoder)
    assert z.dtype == torch.float32
    assert (z.norm(dim=-1) - 1).abs().max() < 1e-5  # normalised in float32: bfloat16 would miss by 1e-3
    ours, reference = (torch.cat([g.flatten() for g in each.values()]) for each in (found, expected))
    assert 0 < (ours - reference).norm() < 0.2 * reference.norm()


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


def make_batch(num_queries: int) -> ContrastiveBatch:
    """Give query i one positive and i % 3 hard negatives, of unequal lengths."""
    queries = tuple(f"query {'x' * (number % 5)}{number}" for number in range(num_queries))
    documents, pairs = [], []
    for number in range(num_queries):
        pairs.append((number, len(documents)))
        documents += [f"{'text ' * (1 + copy)}{number}{copy}" for copy in range(1 + number % 3)]
    return ContrastiveBatch(
        queries=queries,
        documents=tuple(documents),
        positives_P2=np.array(pairs, dtype=np.int64),
        query_ids_Q=np.array([content_id(query) for query in queries]),
        document_ids_D=np.array([content_id(document) for document in documents]),
        record_ids=tuple(range(num_queries)),
    )


@pytest.mark.parametrize("kind", ["text encoder", "text encoder, checkpointed", "ngram bag"])
def test_gradient_caching_equals_the_plain_step(folders: dict[str, Path], kind: str) -> None:
    if kind == "ngram bag":
        torch.manual_seed(0)
        encoder: Any = NgramBag(NgramBagConfig(dimension=16, buckets=512)).double()
    else:
        encoder = with_dropout(
            folders["bert"], dtype=torch.float64, gradient_checkpointing="checkpointed" in kind, prompts={"query": "q:"}
        )
    batch, budget = make_batch(7), ChunkBudget(rows=4, tokens=150)
    features = Features.concat(
        [encoder.featurize(batch.queries, "query"), encoder.featurize(batch.documents, "document")]
    )
    pools = [Pool(encoder, encoder.collate, features, np.arange(len(features)))]
    loss = InfoNCE(temperature=0.1, learn_temperature=True, bidirectional=True, dtype=torch.float64)
    structure = BatchStructure.of(batch)

    def collect() -> dict[str, torch.Tensor]:
        parameters = [*encoder.named_parameters(), *loss.named_parameters()]
        found = {name: p.grad.clone() for name, p in parameters if p.grad is not None}
        for _, parameter in parameters:
            parameter.grad = None
        return found

    torch.manual_seed(5)
    value = reference_step(pools, structure, loss, budget=budget)
    expected = collect()
    torch.manual_seed(5)
    result = GradCacheEngine(loss, EngineOptions(budget, CPU, retain=0.3)).step(pools, structure)
    found = collect()
    assert result.num_chunks > 3
    assert result.loss == pytest.approx(value.item(), rel=1e-12)
    assert result.replay_drift == 0
    assert found.keys() == expected.keys()
    assert "log_scale" in found
    largest = max(gradient.norm().item() for gradient in expected.values())
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-10 * gradient.norm() + 1e-14 * largest, name


@pytest.mark.parametrize("kind", FAMILY_BUILDERS)
def test_the_size_of_an_encoder_is_counted(folders: dict[str, Path], kind: str) -> None:
    encoder = load(folders[kind], dtype=torch.float64)
    size = model_size(encoder, compute_dtype=torch.bfloat16)
    assert size.num_parameters == sum(parameter.numel() for parameter in encoder.parameters())
    pooler = getattr(encoder.backbone, "pooler", None)
    frozen = 0 if pooler is None else sum(parameter.numel() for parameter in pooler.parameters())
    assert (frozen > 0) == (kind in ("bert", "roberta", "xlm-roberta"))
    assert size.num_trainable == size.num_parameters - frozen
    assert size.bytes_per_value == 8
    assert (size.dimension, size.max_length) == (32, encoder.max_length)
    full = model_size(encoder, compute_dtype=torch.float32).activation_bytes_per_token
    assert full == 2 * size.activation_bytes_per_token > 0


def test_activations_grow_with_the_length_of_a_row(folders: dict[str, Path]) -> None:
    short, long = (
        model_size(load(folders["bert"], max_seq_length=length), compute_dtype=torch.float32).activation_bytes_per_token
        for length in (16, 64)
    )
    assert (
        long - short == 2 * 2.5 * 2 * (64 - 16) * 4
    )  # layers x values for each head and token x heads x tokens x bytes


def test_the_size_of_a_bag_is_counted() -> None:
    size = model_size(NgramBag(NgramBagConfig(dimension=16, buckets=512)), compute_dtype=torch.float32)
    assert size.num_parameters == size.num_trainable == 512 * 17
    assert size.max_length is None
    assert size.activation_bytes_per_token > 0
