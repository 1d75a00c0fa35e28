"""A check finds what was planted, each with its place; and nothing in data that are fine."""

from __future__ import annotations

import io
import json
import random
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
import pytest
from kit.pages import Page, assert_sound
from kit.runs import write_rows as written

from vembed.api.model import load
from vembed.data import near
from vembed.data.check import AllProblems
from vembed.data.near import alike_between, alike_within, jaccard, normalised, sketches
from vembed.data.read import DataSource
from vembed.data.table_writer import RecordWriter
from vembed.entrypoints.data import main
from vembed.workflows.data_check.check import DataCheck, check_data, contradictory_grades
from vembed.workflows.data_check.source import SCRIPTS, Source, num_words, script_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


WORDS = [f"{head}{tail}" for head in ("ka", "lo", "mi", "su", "te") for tail in ("ran", "bel", "dip", "gos", "nuk")]


def sentence(draw: random.Random, count: int = 12) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(count))


def clean_rows(count: int, seed: int = 1) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [{"query": sentence(draw), "positive": sentence(draw, 20)} for _ in range(count)]


@pytest.fixture
def checked(tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """Return what runs the command and gives its exit code, its JSON and its page."""

    def run(rows: list[Any], *words: str) -> tuple[int, dict[str, Any], str]:
        data = written(tmp_path / "train.jsonl", rows)
        report, page = tmp_path / "check.json", tmp_path / "check.html"
        code = main(["check", str(data), *words, "--json", str(report), "--html", str(page)], program="vembed data")
        assert_sound(page.read_text("utf-8"))
        return code, json.loads(report.read_text("utf-8")), page.read_text("utf-8")

    return run


def kinds(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in document["findings"]}


def test_clean_rows_give_no_finding(checked: Callable[..., Any]) -> None:
    code, document, page = checked(clean_rows(200))
    assert (code, document["findings"], document["rows"]) == (0, [], 200)
    assert 'id="examples"' not in page
    assert document["profile"]["lengths"]["queries"]["quantiles"]["0.5"] == 12


@pytest.mark.parametrize(
    ("kind", "spoilt", "sound"),
    [
        ("html_in_texts", "a <p class='x'>paragraph</p>", "a < b > c, and <unknown> words"),
        ("entities_in_texts", "salt &amp; pepper&#39;s", "AT&T; salt & pepper"),
        ("mojibake", "caf\u00c3\u00a9", "S\u00c3O na\u00efve \u2019 20 \u00b0C"),
        ("lost_characters", "caf\ufffd", "caf\u00e9"), ("missing_values", "NaN", "none of them is null"),
        ("missing_values", "None", "Nan is a grandmother"), ("missing_values", "null", "a null pointer"),
    ],
)  # fmt: skip
def test_traces_of_exports_and_wrong_encodings_are_found(
    kind: str, spoilt: str, sound: str, checked: Callable[..., Any]
) -> None:
    rows = clean_rows(20)
    rows[3]["positive"], rows[5]["positive"] = spoilt, sound
    found = kinds(checked(rows)[1])
    assert found.keys() == {kind}
    assert (found[kind]["count"], found[kind]["severity"]) == (1, "warning")
    assert found[kind]["examples"][0]["Row"] == "train.jsonl:4"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stdlib-code", "shapes"])
def test_built_in_sets_have_no_error(name: str, tmp_path: Path) -> None:
    path = f"builtin:{name}"
    check = check_data(DataSource(path, "train"), [DataSource(path, "test")], tmp_path)
    assert [each for each in check.findings if each.severity == "error"] == []


def test_leaks_are_found_exactly_and_nearly_and_told_apart(checked: Callable[..., Any], tmp_path: Path) -> None:
    train, test = clean_rows(200), clean_rows(50, seed=2)
    test[3]["query"] = f"  {train[7]['query'].upper()} !"
    words = train[11]["query"].split()
    test[5]["query"] = " ".join([*words[:-1], "nuks"])
    test[8]["positive"] = train[21]["positive"]
    against = written(tmp_path / "test.jsonl", test)
    code, document, page = checked(train, "--against", str(against))
    found = kinds(document)
    assert code == 3
    assert set(found) == {"leaked_queries", "near_leaked_queries", "leaked_documents"}
    (exact,), (near,), (answer,) = (
        found[kind]["examples"] for kind in ("leaked_queries", "near_leaked_queries", "leaked_documents")
    )
    assert (exact["Evaluation row"], exact["Training row"], exact["Alike"]) == ("test.jsonl:4", "train.jsonl:8", "100%")
    assert (near["Evaluation row"], near["Training row"]) == ("test.jsonl:6", "train.jsonl:12")
    assert 80 <= int(near["Alike"].removesuffix("%")) < 100
    assert (answer["Evaluation row"], answer["Training row"]) == ("test.jsonl:9", "train.jsonl:22")
    assert found["leaked_queries"]["severity"] == "error"
    assert found["leaked_documents"]["severity"] == "warning"
    assert "test.jsonl:4" in page


def test_a_check_that_leaves_candidates_out_says_how_many(
    checked: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = sentence(random.Random(3), 30)
    alike = [{"query": f"{words} {number}", "positive": sentence(random.Random(number), 20)} for number in range(12)]
    against = written(tmp_path / "test.jsonl", [{"query": f"{words} again", "positive": "another one"}])
    monkeypatch.setattr(near, "MOST_COMPARED", 3)
    _, document, _ = checked(alike, "--against", str(against))
    left = r"[\d,]+ further pairs of candidates were not compared"
    assert re.search(left, kinds(document)["near_duplicate_queries"]["advice"])
    assert any(re.search(rf"queries nearly in the training data: {left}", note) for note in document["notes"])


def test_warnings_fail_only_when_asked(checked: Callable[..., Any]) -> None:
    rows = clean_rows(20)
    rows.append(dict(rows[4]))
    code, document, _ = checked(rows)
    (found,) = document["findings"]
    assert (code, found["kind"], found["severity"], found["count"]) == (0, "duplicate_pairs", "warning", 1)
    assert found["examples"][0]["Row"] == "train.jsonl:21"
    assert found["examples"][0]["First in"] == "train.jsonl:5"
    assert checked(rows, "--strict")[0] == 3


def test_duplicates_are_told_apart(checked: Callable[..., Any]) -> None:
    rows = clean_rows(60)
    rows.append({"query": rows[4]["query"], "positive": sentence(random.Random(9), 20)})
    rows.append({"query": sentence(random.Random(8)), "positive": rows[6]["positive"]})
    rows.append({"query": f"{rows[9]['query']}.", "positive": sentence(random.Random(7), 20)})
    rows.append({"query": "say it again", "positive": "Say it again!"})
    _, document, _ = checked(rows)
    assert {kind: each["count"] for kind, each in kinds(document).items()} == {
        "queries_with_several_positives": 1,
        "documents_of_several_queries": 1,
        "near_duplicate_queries": 1,
        "query_is_positive": 1,
    }


def test_contradictions_are_errors_and_constant_grades_a_warning(checked: Callable[..., Any]) -> None:
    rows = clean_rows(20)
    other = sentence(random.Random(5), 20)
    rows.append({"query": rows[3]["query"], "positive": other, "negatives": [rows[3]["positive"]]})
    code, document, _ = checked(rows)
    (example,) = kinds(document)["contradictory_negatives"]["examples"]
    assert (code, example["Negative in"], example["Positive in"]) == (3, "train.jsonl:21", "train.jsonl:4")

    graded = [{**row, "label": number % 2} for number, row in enumerate(clean_rows(20))]
    graded.append({**graded[2], "label": 1})
    code, document, _ = checked(graded, "--label-kind", "pair")
    (example,) = kinds(document)["contradictory_grades"]["examples"]
    assert (code, example["Row and grade"], example["Earlier row"]) == (3, "train.jsonl:21: 1", "train.jsonl:3: 0")
    assert document["profile"]["grades"] == {"0": 10, "1": 11}
    assert "contradictory_negatives" not in kinds(document)
    code, document, _ = checked([{**row, "label": 1} for row in clean_rows(10)], "--label-kind", "pair")
    assert (code, kinds(document)["constant_grades"]["count"]) == (0, 10), "a warning"

    classes = [{**row, "label": f"class {number % 4}"} for number, row in enumerate(clean_rows(20))]
    classes += [{**classes[1], "label": "class 2"}, {**clean_rows(1, seed=4)[0], "label": "alone"}]
    code, document, _ = checked(classes)
    found = kinds(document)
    (example,) = found["contradictory_classes"]["examples"]
    places = (example["Row and class"], example["Earlier row"])
    assert (code, *places) == (3, "train.jsonl:21: class 2", "train.jsonl:2: class 1")
    assert found["classes_of_one_row"]["examples"] == [{"Class": "alone"}]
    assert document["profile"]["classes"]["rows"]["class 2"] == 6


def test_grades_are_those_of_their_pairs_beside_rows_without_any() -> None:
    writer = RecordWriter()
    for line, (query, scores) in enumerate([("a", ()), ("b", (1.0, 0.0)), ("c", ()), ("b", (1.0, 0.5))], start=1):
        writer.add(query, positives=["p"], negatives=["n"], scores=scores, file="rows", line=line)
    (finding,) = contradictory_grades(Source("rows", writer.finish(), (), AllProblems()))
    assert (finding.count, finding.of) == (1, 4)
    assert finding.examples == [("rows:4: 0.5", "rows:2: 0", "b", "n")]


def test_all_broken_rows_are_told_by_kind(checked: Callable[..., Any]) -> None:
    rows: list[Any] = clean_rows(40)
    rows += [{"query": "", "positive": "a"}] * 30 + ["{broken"] + [{"query": "only"}] * 2
    code, document, _ = checked(rows)
    found = kinds(document)["broken_rows"]
    assert (code, found["count"], found["of"], document["rows"]) == (3, 33, 73, 40)
    by_reason = {each["Why"]: each["Rows alike"] for each in found["examples"]}
    assert by_reason["empty text"] == "30"
    assert sum(count == "2" for count in by_reason.values()) >= 1
    assert any("bad JSON" in reason for reason in by_reason)


@pytest.mark.parametrize("text", ["", "  "])
def test_broken_rows_of_a_beir_folder_are_told_once(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "set"
    (folder / "qrels").mkdir(parents=True)
    queries = [{"_id": f"q{number}", "text": row["query"]} for number, row in enumerate(clean_rows(6))]
    documents = [{"_id": f"d{number}", "text": row["positive"]} for number, row in enumerate(clean_rows(6))]
    queries[2]["text"] = text
    documents[4]["text"] = 7
    written(folder / "queries.jsonl", queries)
    written(folder / "corpus.jsonl", documents)
    (folder / "qrels" / "train.tsv").write_text("".join(f"q{n}\td{n}\t1\n" for n in range(6)) + "q1\td1\thigh\n")
    check = check_data(DataSource(str(folder), "train"), [], tmp_path)
    (found,) = check.findings
    assert (found.kind, found.count, len(check.source.table)) == ("broken_rows", 3, 4)
    assert {example[2] for example in found.examples} == {"queries.jsonl:3", "corpus.jsonl:5", "train.tsv:7"}
    assert not any("no relevant document" in note for note in check.source.notes)


def test_a_set_without_a_usable_row_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = written(tmp_path / "train.jsonl", [{"query": "", "positive": "a"}] * 50)
    assert main(["check", str(data)], program="vembed data") == 3
    assert "train.jsonl:1, 2, 3 and 47 more rows: query: empty text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "rows", "fix"),
    [
        ("a.csv", ["café,b"] * 2, "(save a.csv as UTF-8, e.g. iconv -f latin1 -t utf-8 a.csv > new.csv)."),
        ("a.csv", ["café,b", "a,b"], "new.csv), or drop them with skip_invalid_records: true, max_invalid_records: 1"),
        ("a.jsonl", ['"é"'] * 2, "(save a.jsonl as UTF-8, e.g. iconv -f latin1 -t utf-8 a.jsonl > new.jsonl)."),
        ("a.jsonl", ['{"query": "\\ud83d", "positive": "b"}'] * 2, "\nFix the rows."),
    ],
)
def test_rows_are_to_be_fixed_where_none_would_be_left(
    name: str, rows: list[str], fix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = ["query,positive"] if name.endswith(".csv") else []
    (tmp_path / name).write_text("\n".join([*head, *rows]), "latin-1")
    assert main(["show", str(tmp_path / name)], program="vembed data") == 3
    assert capsys.readouterr().err.endswith(f"{fix}\n")


def test_broken_and_tiny_pictures_are_found(checked: Callable[..., Any], tmp_path: Path) -> None:
    for name, side in (("fine.png", 64), ("tiny.png", 8), ("cut.png", 64)):
        noise = np.random.default_rng(side).integers(0, 255, (side, side, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        PIL.Image.fromarray(noise).save(buffer, "PNG")
        data = buffer.getvalue()
        (tmp_path / name).write_bytes(data[: len(data) // 2] if name == "cut.png" else data)
    rows = [{"query": f"picture {name}", "positive_image": f"{name}.png"} for name in ("fine", "tiny", "cut", "gone")]
    code, document, page = checked(rows)
    found = kinds(document)
    assert code == 3
    assert found["broken_pictures"]["examples"][0]["Row"] == "train.jsonl:3"
    assert found["broken_pictures"]["examples"][0]["Picture"] == f"[…/{tmp_path.name}/cut.png]"
    assert found["tiny_pictures"]["examples"][0]["Pixels"] == "8 x 8"
    assert "no such file" in found["broken_rows"]["examples"][0]["Why"]
    assert "cut.png" in page


def test_the_page_shows_hostile_text_and_each_set_by_its_own_name(checked: Callable[..., Any], tmp_path: Path) -> None:
    hostile = '<script>alert(1)</script><img src=x onerror=alert(2)> \u202e "quoted"'
    rows = [*clean_rows(40), {"query": hostile, "positive": "one"}, {"query": hostile, "positive": "one"}]
    tests = {name: clean_rows(20, seed=seed) for seed, name in ((2, "dev.jsonl"), (3, "test.jsonl"))}
    for test in tests.values():
        test[3] = rows[7]
    against = [str(written(tmp_path / name, test)) for name, test in tests.items()]
    _, document, page = checked(rows, "--against", *against)
    assert [finding["kind"] for finding in document["findings"]].count("leaked_queries") == 2
    assert kinds(document)["duplicate_pairs"]["examples"][0]["Query"].startswith("<script>")
    assert "<script>alert(1)</script><img src=x onerror=alert(2)>" in Page(page).text


def test_show_prints_rows_as_training_sees_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"anchor": "a red fox", "text": "un renard", "neg": ["un chat"], "weight": 2, "odd": 1}, *clean_rows(3)[:0]]
    data = written(tmp_path / "train.jsonl", [*rows, *({**rows[0], "anchor": f"fox {n}"} for n in range(5))])
    assert main(["show", str(data), "--rows", "2"], program="vembed data") == 0
    said = capsys.readouterr().out
    for line in (
        "query           column anchor",
        "positive        column text",
        "negatives       column neg",
        "weight          column weight",
        "Ignored columns: odd.",
        "train.jsonl:1\n  query     a red fox\n  positive  un renard\n  negative  un chat\n  weight    2",
    ):
        assert line in said
    assert "train.jsonl:2" in said
    assert "train.jsonl:3" not in said
    later = {"anchor": "a red fox", "positive": "un renard"}
    data = written(tmp_path / "later.jsonl", [later, {**later, "neg": "un chat"}])
    assert main(["show", str(data)], program="vembed data") == 0
    assert "negatives       column neg" in capsys.readouterr().out, "a column that later rows bring"


def test_columns_are_mapped_as_in_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = written(tmp_path / "train.jsonl", [{"ask": "a", "reply": "b", "query": "c"}])
    words = ["--column-mapping", "ask=query", "reply=positive", "query=null"]
    assert main(["show", str(data), *words], program="vembed data") == 0
    assert "query     a\n  positive  b" in capsys.readouterr().out
    assert main(["show", str(data), "--column-mapping", "ask"], program="vembed data") == 2
    assert "THEIRS=OURS" in capsys.readouterr().err


def test_an_option_of_a_model_needs_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = written(tmp_path / "train.jsonl", clean_rows(2))
    for action, words, name in (("check", ["--bf16"], "bf16"), ("show", ["--max-seq-length", "8"], "max-seq-length")):
        assert main([action, str(data), *words], program="vembed data") == 2
        assert f"--{name} has an effect only with --model" in capsys.readouterr().err
    assert main(["show", str(data), "--max-image-pixels", "100"], program="vembed data") == 0


def test_a_model_counts_tokens_and_finds_unlabelled_answers(bag: Path, tmp_path: Path) -> None:
    rows = [{**row, "positive": f"{row['query']} {row['positive'][:40]}"} for row in clean_rows(40)]
    for number in range(0, 20, 2):
        rows[number + 1]["positive"] = [rows[number + 1]["positive"], f"{rows[number]['query']} karan"]
    rows[30]["negatives"] = [f"{rows[30]['query']} karan"]
    data = written(tmp_path / "train.jsonl", rows)
    encode = load(bag, device="cpu").item_encoder(64)
    folder = tmp_path / "scratch"
    folder.mkdir()
    check = check_data(DataSource(str(data), "train"), [], folder, encode)
    found = {each.kind: each for each in check.findings}
    unlabelled = found["probable_false_negatives"]
    planted = {(rows[number]["query"], f"{rows[number]['query']} karan") for number in range(0, 20, 2)}
    assert 8 <= unlabelled.count <= 12
    assert len(planted & {(example[0], example[3]) for example in unlabelled.examples}) >= 8
    assert found["negatives_above_positives"].count == 1
    assert check.profile.unit == "tokens"


@pytest.mark.slow
def test_nearly_equal_texts_are_found_as_by_comparing_all() -> None:
    draw = random.Random(3)
    texts = [sentence(draw) for _ in range(300)]
    for number in range(0, 100, 2):  # a word is changed
        words = texts[number].split()
        words[draw.randrange(len(words))] = draw.choice(WORDS)
        texts[number + 100] = " ".join(words)
    texts = list(dict.fromkeys(map(normalised, texts)))
    wanted = {
        (one, other)
        for one in range(len(texts))
        for other in range(one + 1, len(texts))
        if jaccard(texts[one], texts[other]) >= 0.8
    }
    assert len(wanted) > 20
    bands = sketches(texts)
    found = alike_within(bands, lambda places: [texts[place] for place in places.tolist()])
    pairs = {(min(pair), max(pair)) for pair in zip(found.first_P.tolist(), found.second_P.tolist(), strict=True)}
    assert pairs <= wanted
    assert len(pairs) >= 0.95 * len(wanted)
    crossing = alike_between(bands, 150, lambda places: [texts[place] for place in places.tolist()])
    across = {(one, other) for one, other in wanted if one < 150 <= other}
    assert set(zip(crossing.first_P.tolist(), crossing.second_P.tolist(), strict=True)) <= across
    assert len(crossing.first_P) >= 0.9 * len(across)


def test_sketches_do_not_depend_on_what_stands_beside_a_text() -> None:
    texts = ["", "a", "ab", "karan lobel", "名前は何ですか", "karan lobel midip" * 50]
    together = sketches(texts)
    for place, text in enumerate(texts):
        assert (sketches([text])[:, 0] == together[:, place]).all()


@pytest.mark.parametrize(
    ("text", "script", "words"),
    [
        ("plain words here", "Latin", 3), ("élève à l'école", "Latin", 3), ("Привет, мир", "Cyrillic", 2),
        ("東京の天気", "Japanese", 5), ("天气很好", "Han", 4), ("안녕 하세요", "Hangul", 2),
        ("123 + 4", "no letters", 3), ("สวัสดี", "Thai", 6), ("שלום", "Hebrew", 1), ("🙂", "no letters", 1),
    ],
)  # fmt: skip
def test_scripts_and_words(text: str, script: str, words: int) -> None:
    assert (SCRIPTS[script_of(text)], num_words(text)) == (script, words)


@pytest.mark.slow
def test_scifact_has_near_leaks_and_no_exact_ones(real_data: Path, tmp_path: Path) -> None:
    def check(against: str) -> DataCheck:
        folder = tmp_path / against
        folder.mkdir()
        test = DataSource(str(real_data / "scifact"), "test", split=against)
        return check_data(DataSource(str(real_data / "scifact" / "train.jsonl"), "train"), [test], folder)

    found = {each.kind: each.count for each in check("test").findings}
    assert "leaked_queries" not in found
    assert (found["near_leaked_queries"], found["leaked_documents"]) == (57, 181)
    unseen = check("test_unseen")
    assert not {each.kind for each in unseen.findings if "leaked" in each.kind}
    assert any("(test_unseen): none of its" in note for note in unseen.notes)
