"""Metrics: equal to trec_eval called directly, to numbers worked out by hand, and those of plugins beside them."""

from __future__ import annotations

from math import log2
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import pytrec_eval

import vembed
from vembed.errors import ConfigError
from vembed.evaluation.metrics import DEFAULT_KS, score_run, trec_order, with_relevant
from vembed.registry import METRICS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


TREC_NAMES = {"ndcg": "ndcg_cut", "recall": "recall", "precision": "P", "map": "map_cut", "hit": "success"}


def random_task(seed: int) -> tuple[dict[str, list[tuple[str, float]]], dict[str, dict[str, int]]]:
    """A run with few distinct scores, so that most places are decided by ties, and graded judgements."""
    rng = np.random.default_rng(seed)
    run = {}
    qrels = {}
    for query in range(20):
        documents = [f"d{number}" for number in rng.permutation(60)]
        run[f"q{query}"] = [(document, float(np.float32(rng.integers(0, 6) / 7))) for document in documents[:40]]
        qrels[f"q{query}"] = {document: int(rng.integers(1, 4)) for document in rng.choice(documents, 5)}
    return run, qrels


def trec_eval(
    run: Mapping[str, Sequence[tuple[str, float]]], qrels: Mapping[str, Mapping[str, int]], measure: str
) -> dict[str, float]:
    scored = pytrec_eval.RelevanceEvaluator(qrels, {measure}).evaluate({key: dict(hits) for key, hits in run.items()})
    return {query: values[measure.replace(".", "_")] for query, values in scored.items()}


@pytest.mark.parametrize("name", sorted(TREC_NAMES))
def test_each_metric_equals_trec_eval_called_directly(name: str) -> None:
    run, qrels = random_task(seed=1)
    scored = score_run(run, qrels)
    for k in DEFAULT_KS:
        assert scored[f"{name}@{k}"] == trec_eval(run, qrels, f"{TREC_NAMES[name]}.{k}")


@pytest.mark.parametrize("k", DEFAULT_KS)
def test_mrr_equals_the_reciprocal_rank_of_the_run_cut_in_trec_order(k: int) -> None:
    run, qrels = random_task(seed=2)
    cut = {query: trec_order(hits)[:k] for query, hits in run.items()}
    values = score_run(run, qrels)[f"mrr@{k}"]
    assert values == trec_eval(cut, qrels, "recip_rank")
    assert k == 100 or values != trec_eval(run, qrels, "recip_rank")  # else the cut would show nothing


def test_trec_order_is_the_order_in_which_trec_eval_ranks_ties() -> None:
    near = np.nextafter(np.float64(0.5), 1.0)  # another double, the same float32
    hits = [("a", 0.5), ("é", 0.5), ("b", near), ("\uffee", 0.5), ("\U0001f600", 0.5), ("10", 0.5), ("9", 0.5)]
    hits += [("first", 0.75), ("zero", 0.0), ("minus-zero", -0.0), ("last", -1.0)]
    ranked = [document for document, _ in trec_order(hits)]
    judged = {document: {document: 1} for document in ranked}
    ranks = trec_eval(dict.fromkeys(ranked, hits), judged, "recip_rank")
    assert ranks == {document: 1 / rank for rank, document in enumerate(ranked, start=1)}
    assert ranked != [document for document, _ in sorted(hits, key=lambda hit: -hit[1])]
    assert ranked.index("b") > ranked.index("é")  # as float32 they tie, though b's double is larger


def test_graded_ndcg_by_hand() -> None:
    scored = score_run({"q": [("b", 0.9), ("a", 0.8), ("x", 0.7)]}, {"q": {"a": 3, "b": 1, "c": 0}}, ks=(1, 3))
    ideal = 3 / log2(2) + 1 / log2(3)
    assert scored["ndcg@3"]["q"] == pytest.approx((1 / log2(2) + 3 / log2(3)) / ideal)
    assert scored["ndcg@1"]["q"] == pytest.approx(1 / 3)
    hits = [("a", 0.1), ("b", 0.3), ("c", 0.1)]
    assert trec_order(hits) == trec_order(reversed(hits)) == (("b", 0.3), ("c", 0.1), ("a", 0.1))


def test_binary_metrics_by_hand() -> None:
    run = {"q": [("x", 0.9), ("a", 0.8), ("y", 0.7), ("b", 0.6)]}
    scored = score_run(run, {"q": {"a": 1, "b": 1, "not-in-the-corpus": 1}}, ks=(1, 3, 10))
    expected = {
        "hit": (0, 1, 1),
        "mrr": (0, 1 / 2, 1 / 2),
        "recall": (0, 1 / 3, 2 / 3),
        "precision": (0, 1 / 3, 2 / 10),
        "map": (0, (1 / 2) / 3, (1 / 2 + 2 / 4) / 3),
    }
    for name, values in expected.items():
        assert [scored[f"{name}@{k}"]["q"] for k in (1, 3, 10)] == pytest.approx(list(values))


def test_a_query_missing_from_the_run_scores_zero_like_one_that_found_nothing() -> None:
    scored = score_run(
        {"found": [("a", 1.0)], "empty": []}, {query: {"a": 1} for query in ("found", "empty", "missing")}
    )
    for values in scored.values():
        assert list(values) == ["found", "empty", "missing"]
        assert values["found"] > 0
        assert values["empty"] == values["missing"] == 0


def test_queries_without_a_relevant_document_are_left_out() -> None:
    qrels = {"kept": {"a": 0, "b": 2}, "zero": {"a": 0}, "negative": {"a": -1}, "none": {}}
    assert list(with_relevant(qrels)) == ["kept"]
    scored = score_run({query: [("a", 1.0)] for query in qrels}, qrels)
    assert all(list(values) == ["kept"] for values in scored.values())


@pytest.mark.parametrize("ks", [(), (0, 10), (-1,)])
def test_cut_offs_below_one_are_refused(ks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ks is"):
        score_run({}, {"q": {"a": 1}}, ks)
    assert set(score_run({}, {"q": {"a": 1}}, (1, 1))) == {f"{name}@1" for name in (*TREC_NAMES, "mrr")}


@pytest.fixture
def plugin_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what a test registers."""
    monkeypatch.setattr(METRICS, "_entries", dict(METRICS._entries))
    monkeypatch.setattr(METRICS, "_plugins", dict(METRICS._plugins))


@pytest.mark.usefixtures("plugin_metrics")
def test_a_registered_metric_is_scored_beside_ours() -> None:
    @vembed.register_metric
    def all_found(ranked: Sequence[int], judged: Sequence[int], k: int) -> float:
        return float(sum(grade > 0 for grade in ranked[:k]) == sum(grade > 0 for grade in judged))

    qrels = {"q": {"a": 2, "b": 1, "c": 0}, "r": {"a": 1}}
    run = {"q": [("c", 0.1), ("a", 0.9), ("x", 0.5), ("b", 0.3)], "r": [("a", 1.0)]}
    scored = score_run(run, qrels, (1, 3))
    assert scored["all_found@3"] == {"q": 1.0, "r": 1.0}
    assert scored["all_found@1"] == {"q": 0.0, "r": 1.0}
    assert scored["ndcg@3"] == score_run(run, qrels, (3,))["ndcg@3"]
    all_found.__name__ = "ndcg"
    with pytest.raises(ConfigError, match="'ndcg'"):
        vembed.register_metric(all_found)


@pytest.mark.usefixtures("plugin_metrics")
def test_metrics_stand_in_a_fixed_order_those_of_plugins_as_they_were_registered() -> None:
    def named(name: str) -> Any:
        def metric(ranked: Sequence[int], judged: Sequence[int], k: int) -> float:
            return 0.0

        metric.__name__ = name
        return metric

    plugins = [f"metric_{letter}" for letter in "zaymbx"]
    for name in plugins:
        vembed.register_metric(named(name))
    ours = ["ndcg", "recall", "precision", "map", "hit", "mrr"]
    assert [name.partition("@")[0] for name in score_run({}, {"q": {"a": 1}}, (1,))] == [*ours, *plugins]


@pytest.mark.usefixtures("plugin_metrics")
@pytest.mark.parametrize("value", [1, True, np.float32(1), np.int64(1), np.True_])
def test_a_registered_metric_may_return_a_number_of_numpy(value: Any) -> None:
    def counted(ranked: Sequence[int], judged: Sequence[int], k: int) -> float:
        return value  # type: ignore[no-any-return]

    vembed.register_metric(counted)
    assert repr(score_run({}, {"q": {"a": 1}}, (1,))["counted@1"]["q"]) == "1.0"


@pytest.mark.usefixtures("plugin_metrics")
@pytest.mark.parametrize("value", [float("nan"), None, "1", ZeroDivisionError()])
def test_a_registered_metric_that_returns_no_number_or_fails_is_named(value: Any) -> None:
    def broken(ranked: Sequence[int], judged: Sequence[int], k: int) -> float:
        if isinstance(value, Exception):
            raise value
        return value  # type: ignore[no-any-return]

    vembed.register_metric(broken)
    line = broken.__code__.co_firstlineno + 2
    place = rf"_metrics\.py:{line}: ZeroDivisionError" if isinstance(value, Exception) else "returned"
    with pytest.raises(ConfigError, match=rf"metric broken of .*_metrics.* query 'q' at k = 1.*{place}|{place}.*k = 1"):
        score_run({}, {"q": {"a": 1}}, (1,))


def nothing(ranked: Sequence[int], judged: Sequence[int], k: int) -> float:
    return 0.0


def test_one_of_our_own_may_be_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METRICS, "_builtin", METRICS._builtin | {"nothing": f"{__name__}:nothing"})
    monkeypatch.setattr(METRICS, "_entries", METRICS._entries | {"nothing": nothing})
    assert score_run({}, {"q": {"a": 1}}, (1,))["nothing@1"] == {"q": 0.0}
