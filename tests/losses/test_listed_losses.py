"""Losses over listed pairs: blocks and ranks, batches without pairs, half precision, keys."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from loss_cases import plain
from streamed_cases import assert_equal, over_ranks, streamed, unit_rows
from test_cosent import GradedCase, graded, whole

from vembed.config.load import load_config
from vembed.errors import ConfigError
from vembed.losses.base import LossCommon
from vembed.losses.cosent import AngleLoss
from vembed.losses.listed import CosineMseLoss, KlLoss, ListedPairs, MarginMseLoss
from vembed.losses.streamed import LossGradients, StreamedBatch, StreamedLoss
from vembed.losses.tiles import Prefixes, weighted_similarities

if TYPE_CHECKING:
    from torch import Tensor


KINDS = ("angle", "cosine_mse", "margin_mse", "kl", "kl, hot")


def make(kind: str, *, prefixes: Prefixes | None = None, tile_size: int = 3) -> StreamedLoss:
    common: dict[str, Any] = {"prefixes": prefixes, "tile_size": tile_size}
    made: dict[str, StreamedLoss] = {
        "angle": AngleLoss(scale=20.0, **common),
        "cosine_mse": CosineMseLoss(**common),
        "margin_mse": MarginMseLoss(scale=3.0, **common),
        "kl": KlLoss(temperature=0.1, teacher_temperature=0.5, **common),
        "kl, hot": KlLoss(temperature=2.0, teacher_temperature=1.0, **common),
    }
    return made[kind]


def weighted(case: GradedCase) -> GradedCase:
    """Return rows of which some count more than others, and one not at all."""
    return replace(case, weights=tuple(float((row * 5) % 4) for row in range(len(case.queries))))


def scored(num_queries: int, *, seed: int = 0, most: int = 4) -> GradedCase:
    """Return rows with one or two positives and up to `most` further documents, all of them with a score."""
    rng = np.random.default_rng(seed)
    positives, grades, count = [], [], 0
    for row in range(num_queries):
        near, far = int(rng.integers(1, 3)), int(rng.integers(most + 1))
        positives += [(row, count + place) for place in range(near)]
        grades += [(row, count + place, float(rng.normal())) for place in range(near + far)]
        count += near + far
    case = plain(num_queries, count)
    return GradedCase(case.queries, case.documents, tuple(positives), tuple(grades))


def term(kind: str, loss: Any, case: GradedCase, similarity: Tensor) -> Tensor:
    """Return the loss of one matrix of similarities, term by term."""
    rows = [[each for each in case.grades if each[0] == row] for row in range(len(case.queries))]
    weights = case.weights or [1.0] * len(rows)
    terms: list[tuple[float, Tensor]] = []
    if kind == "cosine_mse":
        terms = [(weights[i], (similarity[i, j] - y) ** 2) for i, j, y in case.grades]
    elif kind == "margin_mse":
        terms = [
            (weights[i], (loss.scale * (similarity[i, p] - similarity[i, n]) - (y - z)) ** 2)
            for row in rows
            for i, p, y in row
            for _, n, z in row
            if (i, p) in case.positives and (i, n) not in case.positives
        ]
    else:
        for row in (row for row in rows if len(row) > 1):
            student = torch.stack([similarity[i, j] / loss.student_temperature for i, j, _ in row]).exp()
            teacher = similarity.new_tensor([y / loss.teacher_temperature for *_, y in row]).exp()
            shares = zip(teacher / teacher.sum(), student / student.sum(), strict=True)
            divergence = torch.stack([p * (p.log() - s.log()) for p, s in shares]).sum()
            factor = loss.student_temperature**2 if loss.student_temperature > 1 else 1
            terms.append((weights[row[0][0]], factor * divergence))
    total = sum(weight for weight, _ in terms)
    return torch.stack([weight / total * each for weight, each in terms]).sum() if total else similarity.sum() * 0


def angles(q_QE: Tensor, d_DE: Tensor) -> Tensor:
    """Return all similarities by complex numbers."""
    half = q_QE.shape[1] // 2
    q, d = (torch.complex(each[:, :half], each[:, half:]) for each in (q_QE, d_DE))
    products = q[:, None] * d[None].conj()
    return (products.real + products.imag).sum(-1).abs()


def looped(kind: str, loss: Any, case: GradedCase, q_QE: Tensor, d_DE: Tensor) -> LossGradients:
    q, d = q_QE.detach().double().requires_grad_(), d_DE.detach().double().requires_grad_()
    total = q.sum() * 0 + d.sum() * 0
    parts: Any = weighted_similarities(q, d, loss.prefixes)
    if kind == "angle":
        cut = [(1.0, None)] if loss.prefixes is None else zip(loss.prefixes.weights, loss.prefixes.dims, strict=True)
        sides = [
            (w, [torch.nn.functional.normalize(z[:, :dim], dim=1) if dim else z for z in (q, d)]) for w, dim in cut
        ]
        parts = [(weight, angles(*both)) for weight, both in sides]
    for weight, similarity in parts:
        if kind != "angle":
            total = total + weight * term(kind, loss, case, similarity)
            continue
        gaps = [
            (loss.scale * (similarity[low[:2]] - similarity[high[:2]])).exp()
            for high in case.grades
            for low in case.grades
            if high[2] > low[2]
        ]
        total = total + weight * torch.log(1 + sum(gaps, start=total * 0))
    return LossGradients(total.detach(), *torch.autograd.grad(total, [q, d]), {})


def rows_of(case: GradedCase, dim: int = 6) -> tuple[Tensor, Tensor]:
    q_QE, d_DE = (unit_rows(len(each), dim, seed=seed) for seed, each in enumerate((case.queries, case.documents)))
    return q_QE.requires_grad_(), d_DE.requires_grad_()


@pytest.mark.parametrize("sizes", [(13,), (7, 6), (5, 0, 8)])
@pytest.mark.parametrize("kind", KINDS)
def test_neither_blocks_nor_ranks_change_anything(kind: str, sizes: tuple[int, ...]) -> None:
    for case in (weighted(scored(13)), graded(13, 29, grades=4)):
        for tile_size in (1, 5, 1000):
            loss = make(kind, tile_size=tile_size, prefixes=Prefixes.of([6, 2]))
            q_QE, d_DE = rows_of(case)
            expected = whole(loss, case, q_QE, d_DE)  # type: ignore[arg-type]
            parts = over_ranks(loss, case, q_QE, d_DE, sizes)
            assert_equal(parts, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_comparison_can_fail(kind: str) -> None:
    case = scored(7)
    other = replace(case, grades=tuple((i, j, y + 0.01 * j) for i, j, y in case.grades))
    q_QE, d_DE = rows_of(case)
    with pytest.raises(AssertionError):
        assert_equal(streamed(make(kind), case, q_QE, d_DE), looped(kind, make(kind), other, q_QE, d_DE))


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_listed_pairs_has_no_loss(kind: str) -> None:
    case = plain(3, 5)
    for found in (streamed(make(kind), case, *rows_of(case)), whole(make(kind), case, *rows_of(case))):  # type: ignore[arg-type]
        assert found.loss == 0
        assert (found.dq_QE == 0).all()
        assert (found.dd_DE == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_accumulated_in_float32_and_nan_reaches_the_loss(kind: str) -> None:
    case = scored(40)
    q_QE, d_DE = (each.detach().to(torch.bfloat16) for each in rows_of(case, 64))
    loss = make(kind, tile_size=32, prefixes=Prefixes.of([16, 64]))
    found = streamed(loss, case, q_QE, d_DE)
    assert (found.loss.dtype, found.dq_QE.dtype, found.dd_DE.dtype) == (torch.float32,) * 3
    assert_equal(found, whole(loss, case, q_QE.double(), d_DE.double()), 5e-5)  # type: ignore[arg-type]
    d_DE[case.grades[0][1], 2] = math.nan
    assert streamed(loss, case, q_QE, d_DE).loss.isnan()


def test_gradients_go_where_the_caller_says() -> None:
    case, loss = scored(5), make("kl")
    q_QE, d_DE = (each.detach() for each in rows_of(case))
    table = torch.full((len(q_QE) + len(d_DE), 6), 9.0, dtype=torch.float64)
    loss.gradients(StreamedBatch(q_QE, d_DE, case.structure), None, (table[:5], table[5:]))
    expected = looped("kl", loss, case, q_QE, d_DE)
    assert torch.allclose(table, torch.cat([expected.dq_QE, expected.dd_DE]), rtol=0, atol=1e-10)


def test_the_keys_make_the_losses_and_odd_lengths_have_no_angles() -> None:
    def built(name: str, *keys: str, dimension: int = 8) -> Any:
        config = load_config(None, ["model_name=m", f"loss_type={name}", "label_kind=grade", *keys]).config
        return config.run_loss().build(config, LossCommon(torch.float32, dimension, 16))

    assert built("angle", "angle_scale=5").scale == 5
    assert built("margin_mse", "margin_mse_scale=4").scale == 4
    kl = built("kl", "kl_temperature=0.5", "kl_teacher_temperature=3", "mrl_dims=[8, 3]")
    assert (kl.student_temperature, kl.teacher_temperature, kl.prefixes) == (0.5, 3.0, Prefixes.of([3, 8]))
    assert built("kl", "kl_temperature=0.5").teacher_temperature == 1.0, "scores of the data are no cosines"
    assert built("cosine_mse").tile_size == 16
    with pytest.raises(ConfigError, match="two by two, and 7 is odd"):
        built("angle", dimension=7)
    with pytest.raises(ConfigError, match="two by two, and 3 is odd"):
        built("angle", "mrl_dims=[8, 3]")


def test_a_student_of_cosines_keeps_the_margins_of_its_teacher_by_default() -> None:
    config = load_config(None, ["model_name=m", "loss_type=kl", "teacher_model_name=t"]).config
    loss = config.run_loss().build(config, LossCommon(torch.float64, 8, 16, scores_are_cosines=True))
    cosines = torch.tensor([0.8, 0.2, 0.1], dtype=torch.float64)
    pairs_P2 = torch.tensor([[0, 0], [0, 1], [0, 2]])
    structure = replace(plain(1, 3).structure, listed_P2=pairs_P2, listed_scores_P=cosines)

    def slope_at(student: Any) -> torch.Tensor:
        own = torch.tensor(student, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(loss.of_similarities(own, ListedPairs.of(structure), structure), [own])
        return slope.abs().max()

    assert slope_at([0.8, 0.2, 0.1]) < 1e-12
    assert slope_at([0.7, 0.65, 0.64]) > 1
