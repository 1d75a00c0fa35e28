"""One softmax over several directions equals loops over cells; its keys are checked."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from loss_cases import LossCase, masked_cells
from streamed_cases import random_case, streamed
from test_triplet import named

from vembed.config.load import load_config
from vembed.errors import ConfigError
from vembed.losses.base import LossCommon
from vembed.losses.joint import JointInfoNCE

MORE = ("query_to_query", "document_to_query", "document_to_document")
CHOICES = [("query_to_document", *some) for count in (1, 2, 3) for some in combinations(MORE, count)]


def make(directions: tuple[str, ...], **options: Any) -> JointInfoNCE:
    given = {"temperature": 0.2, "learn_temperature": True, "dtype": torch.float64, **options}
    return JointInfoNCE(directions=directions, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("directions", CHOICES, ids=lambda some: "+".join(some[1:]))
def test_the_definition_equals_loops_over_cells(directions: tuple[str, ...], seed: int) -> None:
    case = named(random_case(seed, num_queries=6, num_documents=11, texts=12))
    q_QE, d_DE = (each.detach() for each in case.embeddings())
    expected = np.mean([_lost(case, i, q_QE.numpy(), d_DE.numpy(), directions) for i in range(len(case.queries))])
    assert make(directions)(q_QE, d_DE, case.structure).item() == pytest.approx(expected, rel=1e-12)


def _lost(case: Any, i: int, q: Any, d: Any, directions: tuple[str, ...]) -> float:
    """Return what one query loses, term by term."""
    masked, positives = masked_cells(case), set(case.positives)
    queries, documents = [each.strip() for each in case.queries], [each.strip() for each in case.documents]
    answers = [{documents[j] for k, j in positives if queries[k] == query} for query in queries]

    def owned(j: int, *, as_positive: bool) -> set[int]:
        return {
            k for k, m in (positives if as_positive else positives | set(case.hard)) if documents[m] == documents[j]
        }

    def e(a: Any, b: Any) -> float:
        return float(np.exp(5.0 * (a @ b)))

    mine = [j for k, j in positives if k == i]
    wanted = sum(e(q[i], d[j]) for j in mine)
    terms = [e(q[i], d[j]) for j in range(len(d)) if (i, j) not in masked]
    if "query_to_query" in directions:
        terms += [e(q[i], q[k]) for k in range(len(q)) if queries[k] != queries[i] and not answers[i] & answers[k]]
    for p in mine:
        if "document_to_query" in directions:
            others = [k for k in range(len(q)) if (k, p) not in masked and (k, p) not in positives]
            terms += [e(q[k], d[p]) for k in [i, *others]]
        if "document_to_document" in directions:
            alike = owned(p, as_positive=True)
            others = [m for m in range(len(d)) if documents[m] != documents[p]]
            terms += [e(d[p], d[m]) for m in others if not alike & owned(m, as_positive=False)]
    return float(-np.log(wanted / sum(terms)))


@pytest.mark.slow
def test_rows_of_one_class_are_joined_without_following_each_other_s_lists() -> None:
    size = 300  # following them would take 27 million steps
    pairs = tuple((i, j) for i in range(size) for j in range(size))
    case = LossCase(tuple(f"q{i}" for i in range(size)), tuple(f"d{j}" for j in range(size)), pairs)
    loss, (q_QE, d_DE) = make(CHOICES[-1], tile_size=64), case.embeddings()
    found = streamed(loss, case, q_QE, d_DE)
    assert found.loss.item() == pytest.approx(np.log(2), rel=1e-9), "only the positives, counted once more, compete"


def test_keys_choose_the_directions_and_contradictions_are_refused() -> None:
    common = ["model_name=m", "loss_directions=[query_to_document, query_to_query]"]
    config = load_config(None, common).config
    made = config.run_loss().build(config, LossCommon(torch.float32, 8, 128))
    assert isinstance(made, JointInfoNCE)
    assert (made.queries_too, made.columns_too, made.documents_too) == (True, False, False)
    for more, words in (
        ("loss_bidirectional=true", "set one of them"),
        ("false_negative_filter=threshold", "set false_negative_filter to identity"),
        ("loss_directions=[query_to_query]", "names query_to_document"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_config(None, [*common, more] if "directions" not in more else ["model_name=m", more])
