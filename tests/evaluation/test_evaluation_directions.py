"""Both directions of a set: the judgements turned round, everything encoded once, recalls added up."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from vembed.batch import Composed, Image
from vembed.data.judged import RetrievalData
from vembed.evaluation.evaluate import (
    EvaluationOptions,
    asking_rows,
    count_truncated,
    encode_directions,
    evaluate,
    search_directions,
    sides_agree,
)
from vembed.evaluation.judge import RSUM_METRICS, recall_sum, sum_interval
from vembed.evaluation.results import EvaluationResult
from vembed.gradcache.chunks import ChunkBudget
from vembed.models.tables import NgramBag, NgramBagConfig
from vembed.vectors.encode import ItemEncoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from vembed.batch import Features, Item, Side

OPTIONS = EvaluationOptions(system="bag")
PICTURE = Image("a.png", b"a")
TASK = RetrievalData(
    name="captions",
    queries={"q1": "a red ring", "q2": "a blue star", "q3": "one of another split", "q4": "a red circle"},
    documents={"d1": "red ring", "d2": "blue star", "d3": "nobody asks for this", "d4": "red"},
    qrels={"q1": {"d1": 2, "d4": 1, "d2": 0}, "q2": {"d2": 1}, "q3": {"d3": 0}, "q4": {"d4": 1, "gone": 1}},
)


class PromptedBag(NgramBag):
    """A bag of n-grams that treats queries otherwise, as models with prompts do."""

    def featurize(self, items: Sequence[Item], side: Side) -> Features:
        return super().featurize([f"find {item}" if side == "query" else item for item in items], side)


class Counting(ItemEncoder):
    """Remembers what it encoded."""

    calls: list[tuple[Side, list[Item]]]

    def __call__(self, items: Sequence[Item], side: Side) -> NDArray[np.float32]:
        self.calls.append((side, list(items)))
        return ItemEncoder.__call__(self, items, side)


def encoder_of(kind: type[NgramBag] = NgramBag) -> Counting:
    torch.manual_seed(0)
    encode = Counting(kind(NgramBagConfig(dimension=16, buckets=256)), ChunkBudget(64, 10**6), torch.device("cpu"))
    encode.calls = []
    return encode


def numbers(result: EvaluationResult) -> EvaluationResult:
    return replace(result, seconds=0.0)


def test_documents_ask_for_the_queries_that_they_are_relevant_to() -> None:
    turned = TASK.reversed()
    assert turned.name == "captions reversed"
    assert list(turned.queries) == ["d1", "d2", "d4"]
    assert list(turned.documents) == ["q1", "q2", "q4"]
    assert turned.qrels == {"d1": {"q1": 2}, "d4": {"q1": 1, "q4": 1}, "d2": {"q1": 0, "q2": 1}}
    assert turned.notes == ("1 of 4 documents are relevant to no query: they don't ask.",)


def test_turning_twice_gives_the_set_back_where_everything_is_judged() -> None:
    whole = RetrievalData("s", {"a": "x", "b": "y"}, {"c": "v", "d": "w"}, {"a": {"c": 1, "d": 0}, "b": {"d": 3}})
    again = whole.reversed().reversed()
    assert replace(again, name="s") == whole
    assert whole.reversed().notes == ()


def test_what_may_not_be_ranked_is_turned_round_too() -> None:
    turned = replace(TASK, excluded={"q1": frozenset({"d2"})}, cutoffs=(7,)).reversed()
    assert turned.excluded["d2"] == {"q1"}
    assert turned.excluded["d1"] == frozenset()
    assert turned.cutoffs == (7,)
    named = replace(TASK, candidates={"q1": frozenset({"d1"})}).reversed()
    assert named.candidates["d1"] == {"q1", "q2", "q4"}, "q1 ranks d1 alone, the others rank all"
    assert named.candidates["d2"] == {"q2", "q4"}


@pytest.mark.parametrize(
    ("query", "document", "crosses"),
    [
        ("text", PICTURE, True),
        (PICTURE, "text", True),
        ("text", "text", False),
        (PICTURE, PICTURE, False),
        (Composed((PICTURE,), "in red"), PICTURE, False),
    ],
)
def test_only_texts_against_pictures_cross(query: Item, document: Item, crosses: bool) -> None:
    task = RetrievalData("s", {"q": query}, {"d": document}, {"q": {"d": 1}})
    assert task.crosses_modalities == crosses
    assert task.reversed().crosses_modalities == crosses


def test_a_side_of_both_kinds_and_a_set_of_candidates_dont_cross() -> None:
    task = RetrievalData("s", {"q": "text"}, {"d": PICTURE}, {"q": {"d": 1}})
    assert not replace(task, documents={"d": PICTURE, "e": "text"}).crosses_modalities
    assert not replace(task, candidates={"q": frozenset({"d"})}).crosses_modalities
    assert task.direction == "texts search pictures"
    assert task.reversed().direction == "pictures search texts"


def test_both_directions_are_what_each_alone_would_be_and_nothing_is_encoded_twice() -> None:
    encode = encoder_of()
    found = search_directions(encode_directions(encode, TASK, OPTIONS, both=True), OPTIONS)
    assert [side for side, _ in encode.calls] == ["document", "query"]
    assert sum(len(items) for _, items in encode.calls) == 4 + 3, "4 documents, 3 judged queries"
    assert found.reverse is not None
    assert numbers(found.forward) == numbers(evaluate(encoder_of(), TASK, OPTIONS))
    assert numbers(found.reverse) == numbers(evaluate(encoder_of(), TASK.reversed(), OPTIONS))
    assert search_directions(encode_directions(encoder_of(), TASK, OPTIONS, both=False), OPTIONS).reverse is None


def test_sides_that_a_prompt_tells_apart_are_encoded_again() -> None:
    encode = encoder_of(PromptedBag)
    found = search_directions(encode_directions(encode, TASK, OPTIONS, both=True), OPTIONS)
    assert [(side, len(items)) for side, items in encode.calls] == [
        ("document", 4), ("query", 3), ("query", 3), ("document", 3)
    ]  # fmt: skip
    assert found.reverse is not None
    assert numbers(found.reverse) == numbers(evaluate(encoder_of(PromptedBag), TASK.reversed(), OPTIONS))
    assert not sides_agree(encode.encoder, ["a red ring"])
    assert sides_agree(encoder_of().encoder, ["a red ring"])


def test_the_documents_that_ask_are_found_by_row() -> None:
    assert asking_rows(TASK, TASK.reversed()).tolist() == [0, 1, 3]


def test_texts_that_are_cut_are_counted_without_encoding() -> None:
    bag = NgramBag(NgramBagConfig(dimension=8, buckets=64, max_words=2))
    assert count_truncated(bag, ["one two", "one two three", PICTURE, "a b c d"], "query") == 2


def scored(values: dict[str, list[float]]) -> EvaluationResult:
    per_query = {name: {f"q{row}": value for row, value in enumerate(own)} for name, own in values.items()}
    means = {name: sum(own) / len(own) for name, own in values.items()}
    return EvaluationResult("s", "m", means, per_query, {}, len(next(iter(values.values()))), 9)


def test_the_sum_of_recalls_is_in_percent_over_six_numbers() -> None:
    forward = scored({"hit@1": [1, 0], "hit@5": [1, 0], "hit@10": [1, 1]})
    reverse = scored({"hit@1": [0, 0, 0, 1], "hit@5": [1, 0, 0, 1], "hit@10": [1, 1, 1, 1]})
    found = recall_sum(forward, reverse)
    assert found is not None
    assert found.value == pytest.approx(50 + 50 + 100 + 25 + 50 + 100)
    assert found.low < found.value < found.high
    assert (found.low / 100, found.high / 100) == sum_interval((forward, reverse), RSUM_METRICS)
    perfect = scored({key: [1.0, 1.0] for key in RSUM_METRICS})
    best = recall_sum(perfect, perfect)
    assert best is not None
    assert (best.value, best.low, best.high) == pytest.approx((600, 600, 600))
    assert recall_sum(forward, scored({"hit@1": [1.0]})) is None


def test_the_interval_of_a_sum_over_sets_is_that_of_independent_draws() -> None:
    draw = np.random.default_rng(0)
    sets = [scored({"hit@1": draw.random(300).tolist()}) for _ in range(2)]
    low, high = sum_interval(sets, ["hit@1"])
    single = [sum_interval([each], ["hit@1"]) for each in sets]
    assert high - low == pytest.approx(np.hypot(*(top - bottom for bottom, top in single)), rel=0.05)
