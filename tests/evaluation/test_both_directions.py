"""Both directions of a set: judgements turned round, items encoded once, recalls added up, by the command too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import PIL.Image
import pytest
import torch
from kit.runs import write_rows

from vembed.batch import Composed, Image
from vembed.data.judged import RetrievalData
from vembed.entrypoints.evaluate import main
from vembed.evaluation.evaluate import (
    EvaluationOptions,
    count_truncated,
    encode_directions,
    evaluate,
    search_task,
    sides_agree,
)
from vembed.evaluation.judge import RSUM_METRICS, recall_sum, sum_interval
from vembed.evaluation.results import EvaluationResult
from vembed.gradcache.chunks import ChunkBudget
from vembed.models.from_scratch import TinyClip
from vembed.models.tables import NgramBag, NgramBagConfig
from vembed.vectors.encode import ItemEncoder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from vembed.batch import Features, Item, Side


PLAIN = EvaluationOptions(system="bag")


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
        ("text", PICTURE, True), (PICTURE, "text", True), ("text", "text", False), (PICTURE, PICTURE, False),
        (Composed((PICTURE,), "in red"), PICTURE, False),
    ],
)  # fmt: skip
def test_only_texts_against_pictures_cross(query: Item, document: Item, crosses: bool) -> None:
    task = RetrievalData("s", {"q": query}, {"d": document}, {"q": {"d": 1}})
    assert task.crosses_modalities == task.reversed().crosses_modalities == crosses
    assert not replace(task, documents={"d": PICTURE, "e": "text"}).crosses_modalities
    assert not replace(task, candidates={"q": frozenset({"d"})}).crosses_modalities
    if (query, document) == ("text", PICTURE):
        assert (task.direction, task.reversed().direction) == ("texts search pictures", "pictures search texts")


def test_both_directions_are_what_each_alone_would_be_and_nothing_is_encoded_twice() -> None:
    encode = encoder_of()
    forward, reverse = (search_task(task, PLAIN) for task in encode_directions(encode, TASK, PLAIN, both=True))
    assert [side for side, _ in encode.calls] == ["document", "query"]
    assert sum(len(items) for _, items in encode.calls) == 4 + 3, "4 documents, 3 judged queries"
    assert numbers(forward) == numbers(evaluate(encoder_of(), TASK, PLAIN))
    assert numbers(reverse) == numbers(evaluate(encoder_of(), TASK.reversed(), PLAIN))
    assert len(encode_directions(encoder_of(), TASK, PLAIN, both=False)) == 1


def test_sides_that_a_prompt_tells_apart_are_encoded_again() -> None:
    encode = encoder_of(PromptedBag)
    _, reverse = (search_task(task, PLAIN) for task in encode_directions(encode, TASK, PLAIN, both=True))
    assert [(side, len(items)) for side, items in encode.calls] == [
        ("document", 4), ("query", 3), ("query", 3), ("document", 3)
    ]  # fmt: skip
    assert numbers(reverse) == numbers(evaluate(encoder_of(PromptedBag), TASK.reversed(), PLAIN))
    assert not sides_agree(encode.encoder, ["a red ring"])
    assert sides_agree(encoder_of().encoder, ["a red ring"])


def test_texts_that_are_cut_are_counted_without_encoding() -> None:
    bag = NgramBag(NgramBagConfig(dimension=8, buckets=64, max_words=2))
    assert count_truncated(bag, ["one two", "one two three", PICTURE, "a b c d"], "query") == 2


def values_of(values: dict[str, list[float]]) -> EvaluationResult:
    per_query = {name: {f"q{row}": value for row, value in enumerate(own)} for name, own in values.items()}
    means = {name: sum(own) / len(own) for name, own in values.items()}
    return EvaluationResult("s", "m", means, per_query, {}, len(next(iter(values.values()))), 9)


def test_the_sum_of_recalls_is_in_percent_over_six_numbers() -> None:
    forward = values_of({"hit@1": [1, 0], "hit@5": [1, 0], "hit@10": [1, 1]})
    reverse = values_of({"hit@1": [0, 0, 0, 1], "hit@5": [1, 0, 0, 1], "hit@10": [1, 1, 1, 1]})
    found = recall_sum(forward, reverse)
    assert found is not None
    assert found.value == pytest.approx(50 + 50 + 100 + 25 + 50 + 100)
    assert found.low < found.value < found.high
    assert (found.low / 100, found.high / 100) == sum_interval((forward, reverse), RSUM_METRICS)
    perfect = values_of({key: [1.0, 1.0] for key in RSUM_METRICS})
    best = recall_sum(perfect, perfect)
    assert best is not None
    assert (best.value, best.low, best.high) == pytest.approx((600, 600, 600))
    assert recall_sum(forward, values_of({"hit@1": [1.0]})) is None


COUNT = 12


@pytest.fixture
def captions(tmp_path: Path) -> Path:
    """A set of captions that search pictures."""
    folder, rows = tmp_path / "captions", []
    folder.mkdir()
    for number in range(COUNT):
        PIL.Image.new("RGB", (16, 16), (20 * number, 255 - 20 * number, 90)).save(folder / f"{number}.png")
        rows.append({"query": f"shade number {number}", "positive_image": f"{number}.png"})
    return write_rows(folder / "rows.jsonl", rows)


@pytest.fixture
def words(tmp_path: Path) -> Path:
    rows = [{"query": f"word {number}", "positive": f"the word {number}"} for number in range(COUNT)]
    return write_rows(tmp_path / "words.jsonl", rows)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The rows of every encoder call."""
    rows: list[int] = []
    forward = TinyClip.forward

    def counting(self: TinyClip, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        vectors = forward(self, inputs)
        rows.append(len(vectors))
        return vectors

    monkeypatch.setattr(TinyClip, "forward", counting)
    return rows


def command(*arguments: object) -> int:
    return main([str(argument) for argument in arguments], program="vembed evaluate")


def board_of(output: Path) -> dict:
    return json.loads((output / "leaderboard.json").read_text())


def test_a_set_of_captions_stands_in_two_rows_and_everything_is_encoded_once(
    captions: Path, tmp_path: Path, encoded: list[int]
) -> None:
    out = tmp_path / "out"
    assert command("builtin:tiny-clip", "--data", captions, "--output", out, "--both-directions") == 0
    assert sum(encoded) == 2 * COUNT
    board = board_of(out)
    assert board["sets"] == ["rows.jsonl", "rows.jsonl reversed"]
    (system,) = board["systems"]
    forward, reverse = (json.loads((out / cell["folder"] / "metrics.json").read_text()) for cell in system["sets"])
    (total,) = board["both_directions"]
    assert total["total"]["value"] == pytest.approx(
        100 * sum(each["metrics"][f"hit@{k}"] for each in (forward, reverse) for k in (1, 5, 10))
    )
    assert total["reverse"] == pytest.approx([100 * reverse["metrics"][f"hit@{k}"] for k in (1, 5, 10)])
    for name in ("leaderboard.html", "leaderboard.md"):
        assert f"{total['total']['value']:.1f}" in (out / name).read_text(), name


@pytest.mark.slow
def test_a_rerun_encodes_nothing_and_the_option_adds_only_the_other_direction(
    captions: Path, tmp_path: Path, encoded: list[int]
) -> None:
    out, plain = tmp_path / "out", ("builtin:tiny-clip", "--data", captions, "--output", tmp_path / "out")
    assert command(*plain) == 0
    assert board_of(out)["both_directions"] == []
    encoded.clear()
    assert command(*plain, "--both-directions") == 0
    assert encoded == [], "the vectors of the set serve its reverse"
    first = board_of(out)
    assert command(*plain, "--both-directions") == 0
    assert encoded == []
    assert board_of(out)["both_directions"] == first["both_directions"]


@pytest.mark.parametrize("are_alike", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_reverse_is_the_set_of_pictures_that_search_their_captions(
    captions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, are_alike: bool
) -> None:
    if not are_alike:  # a prompt for queries: vectors of one direction don't serve the other
        featurize = TinyClip.featurize

        def prompted(self: TinyClip, items: Sequence[Item], side: Side) -> Features:
            queries = [f"find {item}" if isinstance(item, str) else item for item in items]
            return featurize(self, queries if side == "query" else items, side)

        monkeypatch.setattr(TinyClip, "featurize", prompted)
    rows = [json.loads(line) for line in captions.read_text().splitlines()]
    rows = [{"query_image": row["positive_image"], "positive": row["query"]} for row in rows]
    turned = write_rows(captions.with_name("turned.jsonl"), rows)
    out = tmp_path / "out"
    assert command("builtin:tiny-clip", "--data", captions, turned, "--output", out, "--both-directions") == 0
    values = {cell["task"]: cell["value"] for cell in board_of(out)["systems"][0]["sets"]}
    assert values["rows.jsonl reversed"] == values["turned.jsonl"]
    assert values["rows.jsonl"] == values["turned.jsonl reversed"]


@pytest.mark.slow
def test_sets_of_texts_are_searched_in_one_direction_and_alone_the_option_is_refused(
    captions: Path, words: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    NgramBag(NgramBagConfig(dimension=8, buckets=64)).save(tmp_path / "bag")
    out = tmp_path / "out"
    assert command(tmp_path / "bag", "--data", words, "--output", out, "--both-directions") == 2
    assert command(tmp_path / "bag", "--data", words, "--output", out) == 0
    assert command("builtin:tiny-clip", "--data", words, captions, "--output", out, "--both-directions") == 0
    assert board_of(out)["sets"] == ["words.jsonl", "rows.jsonl", "rows.jsonl reversed"]


def test_word_matching_stands_on_the_sets_that_it_can_take_and_has_no_mean(
    captions: Path, words: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert command("builtin:tiny-clip", "bm25", "--data", captions, words, "--output", out) == 0
    board = board_of(out)
    assert board["sets"] == ["rows.jsonl", "words.jsonl"], "in the order of the command"
    assert [row["system"] for row in board["systems"]] == ["builtin:tiny-clip", "BM25"], "whoever lacks a set is last"
    first, last = board["systems"]
    assert isinstance(first["mean"], float)
    assert (last["mean"], last["interval"], len(last["sets"])) == (None, None, 1)
