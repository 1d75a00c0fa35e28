"""Losses held against other libraries' own code: sentence-transformers', also in its Matryoshka, and open_clip's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from loss_cases import GradedCase, LossCase, NamedCase, graded, named, plain
from streamed_cases import streamed, unit_rows

from vembed.losses.cosent import AngleLoss, CosentLoss
from vembed.losses.filters import FalseNegativeFilter
from vembed.losses.infonce import Hardness, InfoNCE
from vembed.losses.joint import JointInfoNCE
from vembed.losses.listed import CosineMseLoss, KlLoss, MarginMseLoss
from vembed.losses.sigmoid import SigmoidLoss
from vembed.losses.spread_out import SpreadOutLoss
from vembed.losses.tiles import Prefixes
from vembed.losses.triplet import TripletLoss

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

COUNT, WAYS, NUMBERS = 9, 3, 8
DIMS, WEIGHTS = [8, 4, 2], [1.0, 0.5, 0.25]
LABELS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3, 3])
TWINS = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])


class Columns(torch.nn.Module):
    """A model whose embeddings are given."""

    def __init__(self, name: str = "ours") -> None:
        super().__init__()
        self.name = name

    def get_embedding_dimension(self) -> int:
        return NUMBERS

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features[self.name]}


class Through(torch.nn.Module):
    """A loss of theirs, and what makes ours of it."""

    def __init__(self, inner: Any, made: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.inner, self.made = inner, made

    def forward(self, features: Any, labels: Any) -> Tensor:
        return self.made(self.inner(features, labels))


def lists(q_QE: Tensor, d_DE: Tensor) -> list[Tensor]:
    """Return the columns of rows with a positive and hard negatives."""
    return [q_QE, *d_DE.split(len(q_QE))]


@dataclass(frozen=True)
class Peer:
    """One loss of ours and theirs, with a batch for both."""

    case: LossCase
    ours: Callable[..., Any]  # by its prefixes
    theirs: Callable[[Any, Columns], torch.nn.Module]  # by the library and the model
    labels: Tensor | None = None
    columns: Callable[[Tensor, Tensor], list[Tensor]] = lists


def ranking(directions: tuple[str, ...] = (), mode: Any = None, *, both: bool = False) -> Peer:
    """Return InfoNCE of some directions, in one softmax or in two that are averaged."""
    common: dict[str, Any] = {"temperature": 0.05, "dtype": torch.float64, "tile_size": 5}
    asked: dict[str, Any] = {"directions": tuple(each.replace("document", "doc") for each in directions)}
    if mode is not None:
        common["hardness"] = Hardness(mode, 4.0)
        asked |= {"hardness_mode": mode, "hardness_strength": 4.0}
    if both:
        asked = asked | {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}

    def ours(prefixes: Any) -> Any:
        if directions[1:]:
            return JointInfoNCE(directions=directions, prefixes=prefixes, **common)  # type: ignore[arg-type]
        return InfoNCE(bidirectional=both, prefixes=prefixes, **common)

    def theirs(library: Any, model: Columns) -> Any:
        return library.MultipleNegativesRankingLoss(model, scale=20.0, **asked)

    return Peer(named(plain(COUNT, WAYS * COUNT)), ours, theirs)


def gist(strategy: str, margin: float, ways: int) -> Peer:
    rule = FalseNegativeFilter("teacher", margin, relative=strategy == "relative")

    def theirs(library: Any, model: Columns) -> Any:
        loss = library.GISTEmbedLoss.__new__(library.GISTEmbedLoss)  # its constructor wants tokenizers
        torch.nn.Module.__init__(loss)
        loss.model, loss.guide, loss.must_retokenize = model, Columns("theirs"), False
        loss.similarity_fct, loss.cross_entropy_loss = torch.nn.CosineSimilarity(dim=-1), torch.nn.CrossEntropyLoss()
        loss.temperature, loss.margin_strategy, loss.margin = 0.05, strategy, margin
        loss.contrast_anchors = loss.contrast_positives = loss.gather_across_devices = False
        return loss

    def ours(prefixes: Any) -> Any:
        return InfoNCE(temperature=0.05, dtype=torch.float64, tile_size=5, negative_filter=rule, prefixes=prefixes)

    return Peer(replace(plain(COUNT, ways * COUNT), teacher=True), ours, theirs)


def pairs(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Peer:
    """Return a loss of graded pairs; some queries have several."""
    case = graded(12, 12, grades=4)
    rows = [row for row, *_ in case.grades]
    scores = torch.tensor([score for *_, score in case.grades], dtype=torch.float64)
    return Peer(case, ours, theirs, scores, lambda q_QE, d_DE: [q_QE[rows], d_DE])


def taught(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Peer:
    """Return a loss of rows whose documents have a teacher's scores."""
    case, scores = plain(COUNT, WAYS * COUNT), np.random.default_rng(1).uniform(size=(COUNT, WAYS))
    grades = [(row, way * COUNT + row, float(scores[row, way])) for row in range(COUNT) for way in range(WAYS)]
    graded_case = GradedCase(case.queries, case.documents, case.positives, tuple(grades))
    return Peer(graded_case, ours, theirs, torch.from_numpy(scores))


def triplet(negatives: Any) -> Callable[..., Any]:
    return lambda prefixes: TripletLoss(margin=0.3, negatives=negatives, tile_size=3, prefixes=prefixes)


def of_classes(negatives: str, labels: Tensor, name: str) -> Peer:
    """Return the triplets of rows with labels: on both sides the same rows, and none beside itself."""
    texts = tuple(str(place) for place in range(len(labels)))
    same = (labels[:, None] == labels) & ~torch.eye(len(labels), dtype=torch.bool)
    case = NamedCase(texts, texts, tuple(map(tuple, same.nonzero().tolist())))

    def theirs(library: Any, model: Columns) -> Any:
        cosine = library.BatchHardTripletLossDistanceFunction.cosine_distance
        return getattr(library, name)(model, distance_metric=cosine, margin=0.3)

    return Peer(case, triplet(negatives), theirs, labels, lambda q_QE, _: [q_QE])


def listed_triplets() -> Peer:
    """Return triplets of each row with each of its hard negatives."""

    def columns(q_QE: Tensor, d_DE: Tensor) -> list[Tensor]:
        more = WAYS - 1
        return [q_QE.repeat(more, 1), d_DE[:COUNT].repeat(more, 1), d_DE[COUNT:]]

    def theirs(library: Any, model: Columns) -> Any:
        cosine = library.TripletDistanceMetric.COSINE
        return library.TripletLoss(model, distance_metric=cosine, triplet_margin=0.3)

    return Peer(named(plain(COUNT, WAYS * COUNT)), triplet("listed"), theirs, columns=columns)


ALL = ("query_to_query", "document_to_query", "document_to_document")
MODES = ("in_batch_negatives", "hard_negatives", "all_negatives")
QUERIES = ("query_to_document",)
PEERS: dict[str, Peer] = {
    "one direction": ranking(QUERIES),
    "both directions": ranking(both=True),
    **{f"{mode}, one direction": ranking(QUERIES, mode) for mode in MODES},
    **{f"{mode}, both directions": ranking(mode=mode, both=True) for mode in MODES},
    **{
        f"all_negatives, {'+'.join(more)}": ranking((*QUERIES, *more), "all_negatives")
        for count in (1, 2, 3)
        for more in combinations(ALL, count)
    },
    **{
        f"gist, {strategy} {margin}, {ways - 1} hard": gist(strategy, margin, ways)
        for strategy, margin in (("absolute", 0.0), ("absolute", 0.1), ("relative", 0.05))
        for ways in (1, 2)
    },
    "cosent": pairs(
        lambda prefixes: CosentLoss(scale=20.0, tile_size=3, prefixes=prefixes),
        lambda library, model: library.CoSENTLoss(model, scale=20.0),
    ),
    "angle": pairs(
        lambda prefixes: AngleLoss(scale=20.0, tile_size=3, prefixes=prefixes),
        lambda library, model: library.AnglELoss(model, scale=20.0),
    ),
    "cosine_mse": pairs(
        lambda prefixes: CosineMseLoss(tile_size=3, prefixes=prefixes),
        lambda library, model: library.CosineSimilarityLoss(model),
    ),
    "margin_mse": taught(
        lambda prefixes: MarginMseLoss(tile_size=3, prefixes=prefixes),
        lambda library, model: library.MarginMSELoss(model),
    ),
    "kl": taught(
        lambda prefixes: KlLoss(temperature=1.0, teacher_temperature=1.0, prefixes=prefixes),
        lambda library, model: library.DistillKLDivLoss(model, temperature=1.0),
    ),
    "kl, hot": taught(
        lambda prefixes: KlLoss(temperature=2.0, teacher_temperature=1.0, prefixes=prefixes),
        lambda library, model: library.DistillKLDivLoss(model, student_temperature=2.0, teacher_temperature=1.0),
    ),
    "kl, cold": taught(
        lambda prefixes: KlLoss(temperature=0.5, teacher_temperature=1.0, prefixes=prefixes),
        lambda library, model: Through(  # theirs shrinks with the square of every temperature
            library.DistillKLDivLoss(model, student_temperature=0.5, teacher_temperature=1.0),
            lambda value: value / 0.5**2,
        ),
    ),
    "triplet, all": of_classes("all", LABELS, "BatchAllTripletLoss"),
    "triplet, hardest": of_classes("hardest", TWINS, "BatchHardTripletLoss"),
    "triplet, listed": listed_triplets(),
    "spread_out": Peer(
        plain(COUNT, COUNT),
        lambda prefixes: SpreadOutLoss(mean=2.0, second_moment=0.5, prefixes=prefixes),
        lambda library, model: Through(
            library.GlobalOrthogonalRegularizationLoss(model, mean_weight=2.0, second_moment_weight=0.5),
            lambda parts: torch.stack(list(parts.values())).sum(),
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("matryoshka", [False, True], ids=["whole", "matryoshka"])
@pytest.mark.parametrize("name", PEERS)
def test_losses_are_sentence_transformers_own(name: str, matryoshka: bool) -> None:
    library = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    peer, model = PEERS[name], Columns()
    structure = peer.case.structure
    leaves = [1.5 * unit_rows(len(each), NUMBERS, seed=seed) for seed, each in enumerate(sides(peer.case))]
    leaves = [(leaf + leaf[:1] / 2).requires_grad_() for leaf in leaves]  # near enough to be spread out
    units = [torch.nn.functional.normalize(leaf, dim=1) for leaf in leaves]
    q_QE, d_DE = units[0], units[-1]
    inputs = [{"ours": column} for column in peer.columns(q_QE, d_DE)]
    if structure.teacher_Q is not None and structure.teacher_D is not None:
        guides = lists(structure.teacher_Q.double(), structure.teacher_D.double())
        inputs = [{**one, "theirs": guide} for one, guide in zip(inputs, guides, strict=True)]
    theirs = peer.theirs(library, model)
    prefixes = Prefixes.of(DIMS, WEIGHTS) if matryoshka else None
    if matryoshka:
        theirs = library.MatryoshkaLoss(model, theirs, matryoshka_dims=DIMS, matryoshka_weights=WEIGHTS)
    value = theirs(inputs, peer.labels) / (sum(WEIGHTS) if matryoshka else 1)
    assert value > 0.01
    expected = torch.autograd.grad(value, leaves, retain_graph=True)
    found = streamed(peer.ours(prefixes), peer.case, q_QE, d_DE)
    assert found.loss.item() == pytest.approx(value.item(), rel=1e-6)
    slopes = torch.autograd.grad([q_QE, d_DE], leaves, [found.dq_QE, found.dd_DE])
    for own, other in zip(slopes, expected, strict=True):
        assert other.abs().max() > 1e-4
        assert torch.allclose(own, other, rtol=1e-6, atol=1e-12)


def sides(case: LossCase) -> list[tuple[str, ...]]:
    """Return the texts of queries and documents, or those of one side where both are the same."""
    return [case.queries] if case.queries == case.documents else [case.queries, case.documents]


@pytest.mark.slow
def test_batch_hard_is_the_worst_positive_of_each_row() -> None:
    """Ours takes every positive of a row beside its most similar negative, theirs only the farthest."""
    library = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    leaf = unit_rows(len(LABELS), NUMBERS, seed=3).requires_grad_()
    rows = torch.nn.functional.normalize(leaf, dim=1)
    cosine = library.BatchHardTripletLossDistanceFunction.cosine_distance
    theirs = library.BatchHardTripletLoss(None, distance_metric=cosine, margin=0.3)
    expected = theirs.batch_hard_triplet_loss(LABELS, rows)
    worst = []
    for row, label in enumerate(LABELS):
        others = [place for place in range(len(LABELS)) if place != row]
        near = [place for place in others if LABELS[place] == label]
        far = [place for place in others if LABELS[place] != label]
        case = plain(1, 1 + len(far))
        terms = [triplet("hardest")(None)(rows[[row]], rows[[place, *far]], case.structure) for place in near]
        worst.append(torch.stack(terms).max())
    ours = torch.stack(worst).mean()
    assert ours.item() == pytest.approx(expected.item(), rel=1e-6)
    slopes, wanted = (torch.autograd.grad(value, leaf, retain_graph=True)[0] for value in (ours, expected))
    assert torch.allclose(slopes, wanted, rtol=1e-6, atol=1e-12)
    every = PEERS["triplet, all"].case.structure
    assert triplet("hardest")(None)(rows, rows, every) < expected


@pytest.mark.slow
def test_the_sigmoid_loss_is_open_clips() -> None:
    library = pytest.importorskip("open_clip.loss")
    q_QE, d_DE = (unit_rows(COUNT, NUMBERS, seed=seed).requires_grad_() for seed in (0, 1))
    ours = SigmoidLoss(init_logit_scale=2.0, init_logit_bias=-5.0, dtype=torch.float64, tile_size=5)
    own = dict(ours.named_parameters())
    log_scale, bias = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (2.0, -5.0))
    expected = library.SigLipLoss()(q_QE, d_DE, log_scale.exp(), bias)
    slopes = torch.autograd.grad(expected, [q_QE, d_DE, log_scale, bias])
    found = streamed(ours, plain(COUNT, COUNT), q_QE, d_DE)
    assert len(own) == len(found.parameters) == 2
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for each, slope in zip((found.dq_QE, found.dd_DE, *found.parameters.values()), slopes, strict=True):
        assert torch.allclose(each, slope, rtol=1e-6, atol=1e-9)
