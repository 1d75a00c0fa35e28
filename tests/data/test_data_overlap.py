"""What judged sets share with the rows that are trained on."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from numpy.typing import NDArray

from vembed.batch import Composed, Image, Item
from vembed.config.schema import Config
from vembed.data.judged import RetrievalData
from vembed.data.overlap import JudgedSets, Overlap
from vembed.data.run_data import load_run_data
from vembed.data.table import ItemTable, RecordTable
from vembed.data.table_writer import RecordWriter

Pair = tuple["Item", "Item"]

LONG = "the quick brown fox jumps over the lazy dog and sleeps until the morning comes"


def table(pairs: Sequence[Pair]) -> RecordTable:
    writer = RecordWriter()
    for line, (query, document) in enumerate(pairs, start=1):
        writer.add(query, positives=(document,), file="train.jsonl", line=line)
    return writer.finish()


def judged(pairs: Sequence[Pair]) -> RetrievalData:
    queries = {f"q{number}": query for number, (query, _) in enumerate(pairs)}
    documents = {f"d{number}": document for number, (_, document) in enumerate(pairs)}
    return RetrievalData("t", queries, documents, {f"q{number}": {f"d{number}": 1} for number in range(len(pairs))})


def overlap(train: Sequence[Pair], test: Sequence[Pair]) -> Overlap:
    records = table(train)
    return JudgedSets({"test": judged(test)}, records).overlaps(records)["test"]


def near(train: Sequence[Pair], test: Sequence[Pair], seconds: float = 60.0) -> Overlap:
    records = table(train)
    overlaps, _ = JudgedSets({"test": judged(test)}, records).find_near(records, seconds=seconds)
    return overlaps["test"]


UNRELATED: list[Pair] = [(f"a question about thing {i * i}", f"answer {i} is {i * 7} of them") for i in range(40)]

SAME: dict[str, tuple[Pair, Pair]] = {
    "exact": (("what purrs", "a cat"), ("what purrs", "a cat")),
    "case and spaces": (("What  PURRS\n", "A Cat"), ("what purrs", "a cat ")),
    "compatible forms": (
        ("\ufb01nd \uff57\uff48\uff41\uff54 purrs", "n\xb2 is a cat"),
        ("find what purrs", "n2 is a cat"),
    ),
    "other scripts": (("ЧТО МУРЛЫЧЕТ", "“Кошка” — это"), ("что  мурлычет", "кошка это")),
    "punctuation of the answer": (("what purrs", "Cats. They purr."), ("what purrs", "cats they purr")),
    "the answer asks": (("a cat", "what purrs"), ("what purrs", "a cat")),
}


@pytest.mark.parametrize(("trained", "asked"), SAME.values(), ids=list(SAME))
def test_a_pair_that_is_trained_on_is_found(trained: Pair, asked: Pair) -> None:
    shared = overlap([*UNRELATED, trained, trained], [("who barks", "a dog"), asked])
    assert shared.trained == {"q1": [40, 41]}, "both rows that hold it"
    assert (shared.num_queries, shared.num_answers) == (2, 2)


APART: dict[str, tuple[Pair, Pair]] = {
    "nothing": (("who barks", "a dog"), ("what purrs", "a cat")),
    "letters in another order": (("spot the cat", "stop"), ("stop the cat", "spot")),
    "signs of the query": (("3 - 4", "-1"), ("3 + 4", "-1")),
    "a document asks": (("a cat", "a dog"), ("what purrs", "a cat")),
    "vowel signs": (
        ("who lives here", "\u0932\u094b\u0917 \u0930\u0939\u0924\u0947"),
        ("who lives here", "\u0932\u094b\u0917 \u0930\u0939\u0924\u093e"),
    ),
}


@pytest.mark.parametrize(("trained", "asked"), APART.values(), ids=list(APART))
def test_other_pairs_are_not(trained: Pair, asked: Pair) -> None:
    assert not overlap([*UNRELATED, trained], [asked]).trained


def test_one_side_alone_is_counted_and_no_leak() -> None:
    train: list[Pair] = [*UNRELATED, ("what purrs", "an engine"), ("who meows", "a dog")]
    shared = overlap(train, [("What purrs", "a cat"), ("who barks", "a dog"), ("who sings", "a bird")])
    assert (shared.trained, shared.asked, shared.num_shared) == ({}, {"q0"}, 1)
    assert shared.line == "1 trained on with other documents, 1 of 3 answers are training documents"
    assert overlap(UNRELATED, [("who sings", "a bird")]).line == "no query trained on"


def test_pictures_are_the_same_by_their_bytes_whatever_they_are_called() -> None:
    train: list[Pair] = [
        ("a red dot", Image("train/1.png", b"one")),
        ("a blue dot", Image("train/2.png", b"two")),
        (Composed((Image("train/3.png", b"three"),), "in green"), Image("train/4.png", b"four")),
    ]
    test: list[Pair] = [
        ("A red  dot", Image("test/9.png", b"one")),
        ("a pink dot", Image("test/8.png", b"two")),
        ("a blue dot", Image("test/7.png", b"other")),
        (Composed((Image("test/6.png", b"three"),), "in green"), Image("test/5.png", b"four")),
        (Composed((Image("test/6.png", b"three"),), "in grey"), Image("test/4.png", b"four")),
    ]
    shared = overlap(train, test)
    assert shared.trained == {"q0": [0], "q3": [2]}
    assert shared.asked == {"q2"}
    assert shared.num_shared == 3, "of four pictures that answer, one of them twice"


NEAR: dict[str, tuple[Pair, Pair]] = {
    "both sides nearly": ((LONG, f"one: {LONG[9:]}"), (f"{LONG}!?", f"one {LONG[9:]} again")),
    "the query nearly": ((LONG, "a cat"), (f"{LONG} too", "A cat.")),
    "the answer nearly": (("what purrs", LONG), ("what purrs", f"{LONG} too")),
    "the query but for its signs": (("3 - 4", "-1"), ("3 + 4", "-1")),
    "a caption nearly, of the same picture": ((LONG, Image("a.png", b"one")), (f"{LONG} too", Image("b.png", b"one"))),
}


@pytest.mark.parametrize(("trained", "asked"), NEAR.values(), ids=list(NEAR))
def test_a_pair_that_is_nearly_trained_on_is_found(trained: Pair, asked: Pair) -> None:
    train = [*UNRELATED, trained]
    shared = near(train, [("who barks", "a dog"), asked])
    assert (shared.trained, shared.near) == ({}, {"q1": 40})
    assert "1 nearly trained on" in shared.line
    assert near(train, [asked], seconds=0.0).near is None, "no time: not compared"


def test_a_pair_of_which_one_side_is_another_is_not_near() -> None:
    train: list[Pair] = [*UNRELATED, (LONG, "a cat"), ("what purrs", LONG)]
    assert near(train, [(f"{LONG} too", "a quite different thing"), ("who sings", f"{LONG} too")]).near == {}
    trained, asked = APART["vowel signs"]
    assert near([*UNRELATED, trained], [asked]).near == {}


def test_a_query_that_is_trained_on_is_not_also_near() -> None:
    shared = near([(LONG, "a cat"), (f"{LONG} too", "a cat")], [(LONG, "a cat")])
    assert (shared.trained, shared.near) == ({"q0": [0]}, {})


def test_only_what_may_be_equal_becomes_python_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    records = table([(f"question {i} of many", f"answer {i} of many") for i in range(20_000)])
    walked = 0
    walk = ItemTable.walk

    def counted(self: ItemTable, numbers: NDArray) -> Iterator[Item]:
        nonlocal walked
        walked += len(numbers)
        return walk(self, numbers)

    monkeypatch.setattr(ItemTable, "walk", counted)
    sets = JudgedSets({"test": judged([("QUESTION 77 of many", "answer 77 of many!"), ("other", "text")])}, records)
    assert sets.overlaps(records)["test"].trained == {"q0": [77]}
    assert 2 <= walked < 100, "some questions have the same digits in another order"


def test_texts_without_letters_and_of_several_scripts_are_compared() -> None:
    scripts = (
        "\uff1f\uff01",
        "...",
        "\u2764\ufe0f",
        "\u0928\u092e\u0938\u094d\u0924\u0947, \u0e17\u0e35\u0e48\u0e19\u0e35\u0e48",
        "naïve café",
        "NAÏVE CAFÉ?",
        "何が鳴きますか",
        "plain text",
    )
    train: list[Pair] = [(text, f"{number}: {text}") for number, text in enumerate(scripts)]
    shared = overlap(train, [*train, ("…?", "other")])
    assert shared.trained == {f"q{number}": [number] for number in range(len(scripts))}


def test_rows_that_are_left_out_are_not_trained_on() -> None:
    records = table([("what purrs", "a cat"), ("who barks", "a dog")])
    sets = JudgedSets({"test": judged([("what purrs", "a cat"), ("who barks", "a dog")])}, records)
    assert sets.overlaps(records.subset([1]))["test"].trained == {"q1": [0]}


REAL = {
    "scifact": {"data_path": "scifact/train.jsonl", "test_data_path": "scifact"},
    "tldr": {"data_path": "tldr/train.jsonl", "val_data_path": "tldr/dev", "test_data_path": "tldr"},
    "emoji": {
        "data_path": "emoji/train.jsonl",
        "test_data_path": "emoji/eval_style",
        "guard_data": "emoji/eval_concept",
    },
    "emoji pictures": {"data_path": "emoji/train_image_image.jsonl", "test_data_path": "emoji/eval_image"},
}


@pytest.mark.parametrize("keys", REAL.values(), ids=list(REAL))
def test_real_sets_raise_no_alarm(real_data: Path, keys: dict[str, str]) -> None:
    values = {name: str(real_data / path) for name, path in keys.items()}
    root = {"image_root": str(real_data / "emoji")} if "emoji" in keys["data_path"] else {}
    data = load_run_data(Config.model_validate({"model_name": "m", "leak": "refuse"} | values | root), needs_dev=False)
    assert data.leaks() == []
    assert data.overlaps, "they were compared"


def test_what_a_real_set_shares_without_a_leak_is_counted(real_data: Path) -> None:
    keys = {"data_path": str(real_data / "scifact/train.jsonl"), "test_data_path": str(real_data / "scifact")}
    data = load_run_data(Config.model_validate({"model_name": "m"} | keys), needs_dev=False)
    assert data.judged is not None
    overlaps, _ = data.judged.find_near(data.records, seconds=60.0)
    assert overlaps["test"].num_shared > 100, "claims of one abstract are in both splits"
    assert 40 < len(overlaps["test"].near or ()) < 70, "claims that differ in a word, of the same abstract"
