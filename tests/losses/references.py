"""Every loss from its definition: loops over queries, documents and pairs in float64, gradients by autograd.

Nothing here is of the package but the tensors of `BatchStructure`, which `Facts` turns into Python's own numbers. A
similarity is one scalar, so that a term of a loss is written as it stands in the paper. Only products of two rows,
norms and log-sum-exps of lists are left to torch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import softplus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from vembed.losses.base import BatchStructure

    Matrix = list[list[Tensor]]
    """A scalar for each cell."""

ROUNDING = 1e-4
"""Similarities that differ by less than this count as equal where a filter compares them (docs/losses.md)."""


@dataclass(frozen=True)
class Facts:
    """A batch in numbers of Python."""

    queries: range
    documents: range
    positives: set[tuple[int, int]]
    named: set[tuple[int, int]]  # hard negatives of a query's row
    listed: list[tuple[int, int, float]]  # query, document, score
    query_ids: list[int]
    document_ids: list[int]
    weights: list[float]
    teacher: list[list[float]]  # similarity of each query and document

    @classmethod
    def of(cls, structure: BatchStructure) -> Facts:
        def pairs(pairs_P2: Tensor | None) -> list[tuple[int, int]]:
            return [] if pairs_P2 is None else [(i, j) for i, j in pairs_P2.tolist()]

        num_queries, num_documents = len(structure.query_ids_Q), len(structure.document_ids_D)
        scores_P, weights_Q = structure.listed_scores_P, structure.weights_Q
        scores = [] if scores_P is None else scores_P.tolist()
        sides = [[] if side is None else side.double().tolist() for side in (structure.teacher_Q, structure.teacher_D)]
        return cls(
            range(num_queries),
            range(num_documents),
            set(pairs(structure.positives_P2)),
            set(pairs(structure.negatives_P2)),
            [(i, j, score) for (i, j), score in zip(pairs(structure.listed_P2), scores, strict=True)],
            structure.query_ids_Q.tolist(),
            structure.document_ids_D.tolist(),
            [1.0] * num_queries if weights_Q is None else weights_Q.tolist(),
            [[sum(a * b for a, b in zip(q, d, strict=True)) for d in sides[1]] for q in sides[0]],
        )

    def positives_of(self, query: int) -> list[int]:
        return [j for j in self.documents if (query, j) in self.positives]

    def share(self, query: int) -> float:
        """Return the weight of a query over that of all."""
        return self.weights[query] / (sum(self.weights) or 1.0)

    def document_share(self, document: int) -> float:
        """Return the mean weight of a document's queries over the sum of these means."""

        def mean(j: int) -> float:
            weights = [self.weights[i] for i in self.queries if (i, j) in self.positives]
            return sum(weights) / len(weights) if weights else 0.0

        return mean(document) / (sum(mean(j) for j in self.documents) or 1.0)

    def copies(self) -> set[tuple[int, int]]:
        """Return the cells that repeat a known positive, or the query itself, in other words or rows."""
        known = {(self.query_ids[i], self.document_ids[j]) for i, j in self.positives}
        return {
            (i, j)
            for i in self.queries
            for j in self.documents
            if (self.query_ids[i], self.document_ids[j]) in known or self.query_ids[i] == self.document_ids[j]
        } - self.positives

    def masked(self, keys: Any, similarity: Matrix) -> set[tuple[int, int]]:
        """Return the cells that are neither positive nor negative."""
        masked = self.copies() if keys.mask_false_negatives else set()
        if getattr(keys, "false_negative_filter", "identity") == "identity":
            return masked
        judged = self.teacher
        if keys.false_negative_filter == "threshold":
            judged = [[cell.item() for cell in row] for row in similarity]
        for i in self.queries:
            best = max((judged[i][j] for j in self.positives_of(i)), default=math.inf)
            margin = keys.false_negative_margin
            if keys.false_negative_margin_kind == "relative":
                margin *= abs(best)
            limit = best - margin + ROUNDING * max(1.0, abs(best)) if best < math.inf else math.inf
            masked |= {(i, j) for j in self.documents if judged[i][j] > limit}
        return masked - self.positives


# Formulas -------------------------------------------------------------------------------------------------------------


def reference(
    name: str, keys: Any, structure: BatchStructure, q: Sequence[Tensor], d: Sequence[Tensor], own: dict[str, Tensor]
) -> Tensor:
    """Return the value of the loss of some keys, `added_losses` among them.

    Args:
        q: Row of each query, (E,) or (vectors, E), float64.
        d: Row of each document.
        own: The loss's parameters.
    """
    added = {name: 1.0, **keys.added_losses}
    facts, total = Facts.of(structure), torch.zeros((), dtype=torch.float64)
    for number, (loss, weight) in enumerate(added.items()):
        prefix = f"parts.{number}." if len(added) > 1 else ""
        parameters = {key.removeprefix(prefix): value for key, value in own.items() if key.startswith(prefix)}
        total = total + weight * _of_prefixes(FORMULAS[loss], keys, facts, q, d, parameters)
    return total


def _of_prefixes(
    formula: Callable[..., Tensor],
    keys: Any,
    facts: Facts,
    q: Sequence[Tensor],
    d: Sequence[Tensor],
    own: dict[str, Tensor],
) -> Tensor:
    """Return the weighted mean of a formula over embeddings that are cut and normalised."""
    if getattr(keys, "mrl_dims", None) is None or formula is late_interaction:
        return formula(keys, facts, q, d, own)
    weights, total = keys.mrl_weights or [1.0] * len(keys.mrl_dims), torch.zeros((), dtype=torch.float64)
    for dim, weight in zip(keys.mrl_dims, weights, strict=True):
        cut = ([row[:dim] / row[:dim].norm() for row in side] for side in (q, d))
        total = total + weight / sum(weights) * formula(keys, facts, *cut, own)
    return total


def products(left: Iterable[Tensor], right: Sequence[Tensor]) -> Matrix:
    return [[(a * b).sum() for b in right] for a in left]


def lse(terms: Iterable[Tensor]) -> Tensor:
    """Return log sum exp, minus infinity of nothing."""
    terms = list(terms)
    return torch.stack(terms).logsumexp(0) if terms else torch.tensor(-math.inf, dtype=torch.float64)


def summed(terms: Iterable[tuple[float, Tensor]]) -> Tensor:
    return sum((weight * term for weight, term in terms), start=torch.zeros((), dtype=torch.float64))


def averaged(terms: Iterable[tuple[float, Tensor]]) -> Tensor:
    terms = list(terms)
    return summed(terms) / (sum(weight for weight, _ in terms) or 1.0)


def scale_of(keys: Any, own: dict[str, Tensor]) -> Any:
    return own["log_scale"].exp() if "log_scale" in own else 1 / keys.temperature


def hardened(keys: Any, facts: Facts, similarity: Matrix, i: int, j: int) -> Tensor | float:
    """Return what is added to the logit of a negative of a query."""
    mode, is_named = getattr(keys, "hardness_mode", "none"), (i, j) in facts.named
    if mode == "all_negatives" or (mode == "hard_negatives" and is_named):
        return keys.hardness_strength * similarity[i][j].detach()
    return keys.hardness_strength * similarity[i][j].detach() if mode == "in_batch_negatives" and not is_named else 0.0


def focal(keys: Any, loss: Tensor) -> Tensor:
    """Weigh a loss by (1 - p)^gamma, where it is -log p."""
    gamma = getattr(keys, "focal_gamma", 0.0)
    return loss * (1 - (-loss.detach()).exp()) ** gamma if gamma else loss


def of_softmax(
    keys: Any, facts: Facts, similarity: Matrix, scale: Any, *, apart: bool = False, most: int | None = None
) -> Tensor:
    """Return InfoNCE in one direction or two.

    Args:
        apart: Whether each positive has a loss of its own.
        most: How many of the largest negatives count; None takes all.
    """
    masked = facts.masked(keys, similarity)
    total = torch.zeros((), dtype=torch.float64)
    sides: list[tuple[Any, list[list[tuple[int, int]]], bool]] = [
        (facts.share, [[(i, j) for j in facts.documents] for i in facts.queries], True)
    ]
    if keys.loss_bidirectional:
        sides.append((facts.document_share, [[(i, j) for i in facts.queries] for j in facts.documents], False))
    for share, groups, of_queries in sides:
        for number, group in enumerate(groups):
            wanted = [scale * similarity[i][j] for i, j in group if (i, j) in facts.positives]
            if not wanted:
                continue
            others = []
            for i, j in group:
                if (i, j) not in facts.positives | masked:
                    more = hardened(keys, facts, similarity, i, j) if of_queries else 0.0
                    others.append(scale * similarity[i][j] + more)
            others = sorted(others, key=lambda logit: -logit.item())[:most]
            every = lse(wanted + others)
            loss = sum(every - logit for logit in wanted) / len(wanted) if apart else every - lse(wanted)
            total = total + share(number) / len(sides) * focal(keys, loss)
    return total


def of_directions(
    keys: Any, facts: Facts, q: Sequence[Tensor], d: Sequence[Tensor], similarity: Matrix, scale: Any
) -> Tensor:
    """Return InfoNCE with one softmax over several directions."""
    queries, documents, directions = products(q, q), products(d, d), keys.loss_directions
    masked, total = facts.masked(keys, similarity), torch.zeros((), dtype=torch.float64)
    masks, of_query, of_document = keys.mask_false_negatives, defaultdict(set), defaultdict(set)
    for i, j in facts.positives:
        of_query[facts.query_ids[i]].add(facts.document_ids[j])  # the contents that answer a content
    for i, j in facts.positives | facts.named:
        of_document[facts.document_ids[j] if masks else j].add(i)  # the rows that have a document
    askers = defaultdict(set)
    for i, j in facts.positives:
        askers[facts.document_ids[j] if masks else j].add(i)
    for i in facts.queries:
        mine = facts.positives_of(i)
        if not mine:
            continue
        terms = [scale * similarity[i][j] for j in mine]
        wanted = lse(terms)
        negatives = [j for j in facts.documents if (i, j) not in facts.positives | masked]
        terms += [scale * similarity[i][j] + hardened(keys, facts, similarity, i, j) for j in negatives]
        if "query_to_query" in directions:
            for k in facts.queries:
                ids = facts.query_ids[i], facts.query_ids[k]
                related = k == i or (masks and (ids[0] == ids[1] or of_query[ids[0]] & of_query[ids[1]]))
                terms += [] if related else [scale * queries[i][k]]
        for p in mine:
            if "document_to_query" in directions:
                others = [k for k in facts.queries if (k, p) not in facts.positives | masked]
                terms += [scale * similarity[k][p] for k in [i, *others]]
            if "document_to_document" in directions:
                for m in facts.documents:
                    keys_pm = [facts.document_ids[r] if masks else r for r in (p, m)]
                    related = keys_pm[0] == keys_pm[1] or askers[keys_pm[0]] & of_document[keys_pm[1]]
                    terms += [] if related else [scale * documents[p][m]]
        total = total + facts.share(i) * focal(keys, lse(terms) - wanted)
    return total


def infonce(keys: Any, facts: Facts, q: Sequence[Tensor], d: Sequence[Tensor], own: dict[str, Tensor]) -> Tensor:
    similarity, scale = products(q, d), scale_of(keys, own)
    if keys.loss_directions:
        return of_directions(keys, facts, q, d, similarity, scale)
    return of_softmax(keys, facts, similarity, scale)


def supcon(keys: Any, facts: Facts, q: Sequence[Tensor], d: Sequence[Tensor], own: dict[str, Tensor]) -> Tensor:
    return of_softmax(plain_softmax(keys), facts, products(q, d), scale_of(keys, own), apart=True)


def in_batch_hard(keys: Any, facts: Facts, q: Sequence[Tensor], d: Sequence[Tensor], own: dict[str, Tensor]) -> Tensor:
    most = None if keys.use_all_negatives else keys.hard_topk
    return of_softmax(plain_softmax(keys), facts, products(q, d), scale_of(keys, own), most=most)


def late_interaction(
    keys: Any, facts: Facts, q: Sequence[Tensor], d: Sequence[Tensor], own: dict[str, Tensor]
) -> Tensor:
    scores = []
    for row in q:
        best = [[max(((v * w).sum() for w in other), key=lambda s: s.item()) for v in row] for other in d]
        scores.append([sum(each) / (1 if keys.maxsim_sum else len(row)) for each in best])
    without_filter = plain_softmax(keys, false_negative_filter="identity")
    return of_softmax(without_filter, facts, scores, scale_of(keys, own))


def plain_softmax(keys: Any, **changed: Any) -> Any:
    """Return keys without those of InfoNCE alone."""
    return type(keys)(**vars(keys) | {"hardness_mode": "none", "focal_gamma": 0.0} | changed)


def sigmoid(keys: Any, facts: Facts, q: Sequence[Tensor], d: Sequence[Tensor], own: dict[str, Tensor]) -> Tensor:
    similarity = products(q, d)
    masked, total = facts.masked(keys, similarity), torch.zeros((), dtype=torch.float64)
    for i in facts.queries:
        for j in facts.documents:
            logit = own["log_scale"].exp() * similarity[i][j] + own["bias"]
            sign = -1.0 if (i, j) in facts.positives else 1.0
            if (i, j) not in masked:
                total = total + facts.share(i) * softplus(sign * logit, threshold=700)
    return total


def triplet(keys: Any, facts: Facts, q: Sequence[Tensor], d: Sequence[Tensor], own: dict[str, Tensor]) -> Tensor:
    similarity, terms = products(q, d), []
    masked = facts.masked(keys, similarity)
    for i, p in sorted(facts.positives):
        others = [j for j in facts.documents if (i, j) not in facts.positives | masked]
        if keys.triplet_negatives == "listed":
            others = [j for j in others if (i, j) in facts.named]
        excesses = [keys.triplet_margin - similarity[i][p] + similarity[i][j] for j in others]
        if keys.triplet_negatives == "hardest":
            excesses = sorted(excesses, key=lambda excess: excess.item())[-1:]
            excesses = excesses or [torch.zeros((), dtype=torch.float64)]
        terms += [(facts.weights[i], excess.clamp(min=0)) for excess in excesses]
    if keys.triplet_negatives == "all":
        terms = [(weight, term) for weight, term in terms if term > 0]
    return averaged(terms)


def cosent(keys: Any, facts: Facts, q: Sequence[Tensor], d: Sequence[Tensor], own: dict[str, Tensor]) -> Tensor:
    similarity = products(q, d)
    pairs = facts.listed
    if not pairs:
        masked = facts.masked(keys, similarity)
        pairs = [(i, j, float((i, j) in facts.positives)) for i in facts.queries for j in facts.documents]
        pairs = [pair for pair in pairs if pair[:2] not in masked]
    return ordered(keys.cosent_scale, facts, [(i, y, similarity[i][j]) for i, j, y in pairs])


def angle(keys: Any, facts: Facts, q: Sequence[Tensor], d: Sequence[Tensor], own: dict[str, Tensor]) -> Tensor:
    def as_complex(row: Tensor) -> Tensor:
        return torch.complex(row[: len(row) // 2], row[len(row) // 2 :])

    rows = []
    for i, j, y in facts.listed:
        product = as_complex(q[i]) * as_complex(d[j]).conj()
        rows.append((i, y, (product.real + product.imag).sum().abs()))
    return ordered(keys.angle_scale, facts, rows)


def ordered(scale: float, facts: Facts, rows: list[tuple[int, float, Tensor]]) -> Tensor:
    """Return the loss of rows (query, grade, similarity) of which the higher grades are to be more similar."""
    mean = sum(facts.weights) / len(facts.weights)
    gaps = [torch.zeros((), dtype=torch.float64)]
    for i, high, near in rows:
        for k, low, far in rows:
            weight = facts.weights[i] * facts.weights[k] / mean**2
            if high > low and weight > 0:
                gaps.append(scale * (far - near) + math.log(weight))
    return lse(gaps)


def cosine_mse(keys: Any, facts: Facts, q: Sequence[Tensor], d: Sequence[Tensor], own: dict[str, Tensor]) -> Tensor:
    return averaged((facts.weights[i], ((q[i] * d[j]).sum() - y) ** 2) for i, j, y in facts.listed)


def margin_mse(keys: Any, facts: Facts, q: Sequence[Tensor], d: Sequence[Tensor], own: dict[str, Tensor]) -> Tensor:
    terms = []
    for i, p, y in facts.listed:
        for k, n, z in facts.listed:
            if i == k and (i, p) in facts.positives and (i, n) not in facts.positives:
                margin = keys.margin_mse_scale * ((q[i] * d[p]).sum() - (q[i] * d[n]).sum())
                terms.append((facts.weights[i], (margin - (y - z)) ** 2))
    return averaged(terms)


def kl(keys: Any, facts: Facts, q: Sequence[Tensor], d: Sequence[Tensor], own: dict[str, Tensor]) -> Tensor:
    terms = []
    for i in facts.queries:
        row = [(j, y) for k, j, y in facts.listed if k == i]
        if len(row) > 1:
            student = [(q[i] * d[j]).sum() / keys.kl_temperature for j, _ in row]
            teacher = [torch.tensor(y / (keys.kl_teacher_temperature or 1.0), dtype=torch.float64) for _, y in row]
            terms.append((facts.weights[i], max(1.0, keys.kl_temperature) ** 2 * divergence(teacher, student)))
    return averaged(terms)


def divergence(teacher: list[Tensor], student: list[Tensor]) -> Tensor:
    """Return KL(softmax of the teacher's logits || softmax of the student's)."""
    totals, total = (lse(teacher), lse(student)), torch.zeros((), dtype=torch.float64)
    for t, s in zip(teacher, student, strict=True):
        log_t, log_s = t - totals[0], s - totals[1]
        total = total + log_t.exp() * (log_t - log_s)
    return total


def distillation(keys: Any, facts: Facts, q: Sequence[Tensor], d: Sequence[Tensor], own: dict[str, Tensor]) -> Tensor:
    task = infonce(keys, facts, q, d, {name.removeprefix("parts.0."): value for name, value in own.items()})
    similarity, terms, t = products(q, d), [], keys.distillation_temperature
    for i in facts.queries:
        if keys.distillation_loss_type == "mse":
            term = sum((s - y) ** 2 for s, y in zip(similarity[i], facts.teacher[i], strict=True)) / len(d)
        else:
            teacher = [torch.tensor(y / t, dtype=torch.float64) for y in facts.teacher[i]]
            term = max(1.0, t) ** 2 * divergence(teacher, [s / t for s in similarity[i]])
        terms.append((facts.share(i), term))
    return keys.distillation_alpha * task + (1 - keys.distillation_alpha) * summed(terms)


def spread_out(keys: Any, facts: Facts, q: Sequence[Tensor], d: Sequence[Tensor], own: dict[str, Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for side in (q, d):
        pairs = [(a * b).sum() for i, a in enumerate(side) for j, b in enumerate(side) if i != j]
        first, second = sum(pairs) / len(pairs), sum(s**2 for s in pairs) / len(pairs)
        moment = (second - 1 / len(side[0])).clamp(min=0)
        total = total + (keys.spread_out_mean * first**2 + keys.spread_out_second_moment * moment) / 2
    return total


FORMULAS: dict[str, Callable[..., Tensor]] = {
    "angle": angle,
    "colbert": late_interaction,
    "cosent": cosent,
    "cosine_mse": cosine_mse,
    "distillation": distillation,
    "in_batch_hard": in_batch_hard,
    "infonce": infonce,
    "kl": kl,
    "margin_mse": margin_mse,
    "sigmoid": sigmoid,
    "spread_out": spread_out,
    "supcon": supcon,
    "triplet": triplet,
}
