"""Which way a run's data is searched, what its pictures are, and what of it enters the fingerprint."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

import pytest
from kit.rows import png
from kit.runs import write_rows as write_lines

from vembed.batch import Image, ImageLimits
from vembed.config.schema import Config
from vembed.data.judged import RetrievalData
from vembed.data.keys import DataKeys
from vembed.data.picture_survey import ItemCounts, PictureSurvey
from vembed.data.read import DataSource
from vembed.data.run_data import RunData, load_run_data, record_texts
from vembed.errors import DataError
from vembed.training.evaluations import Evaluations
from vembed.training.run import run_from_config

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.vectors.encode import ItemEncoder

MODES = ("t2t", "t2i", "i2t", "i2i")
COLUMNS = {"t": ("query", "positive"), "i": ("query_image", "positive_image")}


def drawn(number: int, size: tuple[int, int] = (8, 8)) -> bytes:
    return png(f"rgb({number},{255 - number},7)", size)


def write_rows(folder: Path, mode: str, *, count: int = 4, name: str = "rows.jsonl") -> Path:
    """Write rows of one direction, pictures beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        for place in (0, 1):
            (folder / f"{place}-{number}.png").write_bytes(drawn(10 * number + place, (8 + number, 8)))
        cells = [f"text {number} {place}" if mode[2 * place] == "t" else f"{place}-{number}.png" for place in (0, 1)]
        rows.append({COLUMNS[mode[2 * place]][place]: cells[place] for place in (0, 1)})
    return write_lines(folder / name, rows)


def loaded(path: Path, mode: str = "auto", test: Path | None = None, root: Path | None = None) -> RunData:
    paths = {"data_path": path, "test_data_path": test, "image_root": root}
    keys: dict[str, Any] = {key: str(value) for key, value in paths.items() if value is not None}
    return load_run_data(DataKeys(retrieval_mode=mode, **keys), needs_dev=False)


@pytest.mark.parametrize("own", MODES)
def test_data_of_one_direction_pass_under_their_own_mode_and_auto_and_no_other(tmp_path: Path, own: str) -> None:
    path = write_rows(tmp_path, own)
    query, document = ({"t": "texts", "i": "pictures"}[side] for side in (own[0], own[2]))
    held = rf"rows\.jsonl holds 4 query {query}, 4 document {document}"
    for mode in MODES:
        if mode == own:
            assert loaded(path, mode).fingerprint == loaded(path).fingerprint
            continue
        with pytest.raises(DataError, match=rf"retrieval_mode {mode} is for .*{held}.* set retrieval_mode to {own}"):
            loaded(path, mode)


def test_the_test_set_must_have_the_direction_as_well(tmp_path: Path) -> None:
    train, other, same = (
        write_rows(tmp_path / name, mode) for name, mode in zip("abc", ("t2i", "i2t", "t2i"), strict=True)
    )
    with pytest.raises(DataError, match=r"retrieval_mode t2i.*holds 4 query pictures, 4 document texts"):
        loaded(train, "t2i", other)
    assert loaded(train, "t2i", same).test is not None
    assert loaded(train, "auto", other).test is not None


def test_a_side_of_texts_and_pictures_is_taken_by_auto_alone() -> None:
    counts = ItemCounts()
    counts.add("query", ["a"])
    counts.add("document", ["b", Image("c.png")])
    assert counts.direction == "texts search texts and pictures"
    counts.require("auto", "set")
    held = "1 query texts, 1 document texts, 1 document pictures; set retrieval_mode to auto"
    with pytest.raises(DataError, match=held):
        counts.require("t2i", "set")


def test_the_facts_tell_direction_number_and_sizes_of_pictures_where_there_are_any(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "t2i")
    facts = dict(loaded(path, test=path).facts())
    assert facts["training direction"] == "texts search pictures"
    assert facts["distinct pictures in them"] == "4; smallest 8 x 8, median 9 x 8, largest 11 x 8 pixels"
    assert "4 queries, 4 documents; texts search pictures; 4 trained on with an answer" in facts["test set"]
    texts = write_rows(tmp_path, "t2t", name="texts.jsonl")
    assert "picture" not in str(loaded(texts, test=texts).facts())


def test_the_same_picture_in_two_files_counts_once(tmp_path: Path) -> None:
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    for path in paths:
        path.write_bytes(drawn(1, (5, 4)))
    survey = PictureSurvey(ImageLimits())
    survey.add([*(Image(str(path)) for path in paths), "text", Image("memory", drawn(1, (5, 4)))])
    assert survey.text == "1, all 5 x 4 pixels"
    survey.add([Image("memory", drawn(2, (5, 4)))])
    assert survey.text == "2, all 5 x 4 pixels"


def test_the_fingerprint_is_of_what_pictures_show_and_not_of_where_they_lie(tmp_path: Path) -> None:
    here, there, other = (write_rows(tmp_path / name, "t2i") for name in "abc")
    before = loaded(here, test=here).fingerprint
    assert loaded(there, test=there).fingerprint == before
    (other.parent / "1-2.png").write_bytes(drawn(99))
    assert loaded(other, test=other).fingerprint != before


def test_the_fingerprint_covers_all_that_a_run_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write_rows(tmp_path, "t2t")
    keys = DataKeys(data_path=str(rows), test_data_path="builtin:shapes")

    def fingerprint(*, document: str = "d", grade: int = 1, query: str = "q") -> str:
        task = RetrievalData("test", {"1": query}, {"2": document}, {"1": {"2": grade}})
        monkeypatch.setattr(DataSource, "judged", lambda *_, **__: task)
        return load_run_data(keys, needs_dev=False).fingerprint

    first = fingerprint()
    assert fingerprint() == first
    others = {fingerprint(document="e"), fingerprint(grade=2), fingerprint(query="r")}
    rows.write_text(rows.read_text().replace("text 3", "text 4"))
    assert len(others | {first, fingerprint()}) == 5


def test_a_root_of_pictures_without_a_picture_is_noted(tmp_path: Path) -> None:
    texts, captions = write_rows(tmp_path, "t2t", name="texts.jsonl"), write_rows(tmp_path, "t2i")
    for path, root, noted in ((texts, tmp_path, True), (texts, None, False), (captions, tmp_path, False)):
        assert any("image_root has no effect" in note for note in loaded(path, root=root).notes) == noted


def test_tokenizers_are_trained_on_the_texts_alone(tmp_path: Path) -> None:
    assert sorted(record_texts(loaded(write_rows(tmp_path, "t2i")).records)) == [f"text {n} 0" for n in range(4)]


def test_a_run_on_pictures_leaves_bm25_out_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run(query: str, document: Any) -> Evaluations:
        task = RetrievalData("a set", {"q": query}, {"d": document}, {"q": {"d": 1}})
        unused = cast("ItemEncoder", None)
        return Evaluations(unused, None, task, tmp_path, "ndcg@10", lambda: None, bm25_language="english")

    with caplog.at_level(logging.INFO, logger="vembed"):
        assert run("a cat", Image("cat.png", b"x")).bm25() is None
    assert [record.getMessage().count("BM25 is left out") for record in caplog.records] == [1]
    assert not (tmp_path / "bm25").exists()
    assert run("a cat", "a cat").bm25() is not None


def test_the_keys_reach_the_data_and_the_model(tmp_path: Path) -> None:
    manifest = tmp_path / "lists" / "rows.jsonl"
    manifest.parent.mkdir()
    write_rows(tmp_path / "pictures", "t2i").rename(manifest)

    def run(**keys: object) -> None:
        values = {
            "model_name": "builtin:tiny-clip",
            "data_path": str(manifest),
            "test_data_path": str(manifest),
            "image_root": str(tmp_path / "pictures"),
            "retrieval_mode": "t2i",
            "max_image_pixels": 88,
            "eval_strategy": "no",
            "batch_size": 4,
            "output_dir": str(tmp_path / "run"),
        }
        run_from_config(Config.model_validate(values | keys), mode="dry-run")

    run()
    for refused, words in (
        ({"image_root": None}, "no such file"),
        ({"image_root": str(tmp_path / "gone")}, "image_root"),
        ({"retrieval_mode": "i2i"}, "set retrieval_mode to t2i"),
        ({"max_image_pixels": 87}, "raise max_image_pixels"),
        ({"model_name": "builtin:ngram-bag"}, "reads texts, and .* holds pictures"),
    ):
        with pytest.raises(DataError, match=words):
            run(**refused)
