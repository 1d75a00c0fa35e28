"""Which way a run's data is searched, what its pictures are, and what of it enters the fingerprint."""

from __future__ import annotations

import io
import json
import logging
from typing import TYPE_CHECKING, cast

import PIL.Image
import pytest

from vembed.batch import Image, ImageLimits
from vembed.config.schema import Config
from vembed.data.judged import RetrievalData
from vembed.data.keys import DataKeys
from vembed.data.picture_survey import ItemCounts, PictureSurvey, RetrievalMode
from vembed.data.run_data import RunData, load_run_data, record_texts
from vembed.errors import DataError
from vembed.training.evaluations import Evaluations
from vembed.training.run import run_from_config

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.vectors.encode import ItemEncoder

MODES: tuple[RetrievalMode, ...] = ("t2t", "t2i", "i2t", "i2i")
COLUMNS = {"t": ("query", "positive"), "i": ("query_image", "positive_image")}


def drawn(number: int, size: tuple[int, int] = (8, 8)) -> bytes:
    buffer = io.BytesIO()
    PIL.Image.new("RGB", size, (number, 255 - number, 7)).save(buffer, "PNG")
    return buffer.getvalue()


def write_rows(folder: Path, mode: str, *, count: int = 4, name: str = "rows.jsonl") -> Path:
    """Write rows of one direction, pictures beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        for place in (0, 1):
            (folder / f"{place}-{number}.png").write_bytes(drawn(10 * number + place, (8 + number, 8)))
        cells = [f"text {number} {place}" if mode[2 * place] == "t" else f"{place}-{number}.png" for place in (0, 1)]
        rows.append({COLUMNS[mode[2 * place]][place]: cells[place] for place in (0, 1)})
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def loaded(path: Path, mode: RetrievalMode = "auto", test: Path | None = None, root: Path | None = None) -> RunData:
    keys = DataKeys(
        data_path=str(path),
        test_data_path=None if test is None else str(test),
        image_root=None if root is None else str(root),
        retrieval_mode=mode,
    )
    return load_run_data(keys, needs_dev=False)


@pytest.mark.parametrize("own", MODES)
def test_data_of_one_direction_pass_under_their_own_mode_and_auto_and_no_other(tmp_path: Path, own: str) -> None:
    path = write_rows(tmp_path, own)
    for mode in MODES:
        if mode == own:
            assert loaded(path, mode).fingerprint == loaded(path).fingerprint
            continue
        with pytest.raises(
            DataError, match=rf"retrieval_mode {mode} is for data in which .* set retrieval_mode to {own}"
        ):
            loaded(path, mode)


def test_the_message_says_what_the_data_hold(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl holds 4 query texts, 4 document pictures"):
        loaded(write_rows(tmp_path, "t2i"), "i2t")


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
    with pytest.raises(
        DataError, match="1 query texts, 1 document texts, 1 document pictures; set retrieval_mode to auto"
    ):
        counts.require("t2i", "set")


def test_the_facts_tell_direction_number_and_sizes_of_pictures(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "t2i")
    facts = dict(loaded(path, test=path).facts())
    assert facts["training direction"] == "texts search pictures"
    assert facts["distinct pictures in them"] == "4; smallest 8 x 8, median 9 x 8, largest 11 x 8 pixels"
    assert "4 queries, 4 documents; texts search pictures; 4 trained on with an answer" in facts["test set"]


def test_a_run_of_texts_has_no_fact_about_pictures(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "t2t")
    facts = dict(loaded(path, test=path).facts())
    assert not any("picture" in label or "picture" in value for label, value in facts.items())


def test_the_same_picture_in_two_files_counts_once(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(drawn(1, (5, 4)))
    survey = PictureSurvey(ImageLimits())
    survey.add(
        [Image(str(tmp_path / "a.png")), Image(str(tmp_path / "b.png")), "text", Image("memory", drawn(1, (5, 4)))]
    )
    assert survey.text == "1, all 5 x 4 pixels"
    survey.add([Image("memory", drawn(2, (5, 4)))])
    assert survey.text == "2, all 5 x 4 pixels"


def test_the_fingerprint_is_of_what_pictures_show_and_not_of_where_they_lie(tmp_path: Path) -> None:
    here, there = write_rows(tmp_path / "a", "t2i"), write_rows(tmp_path / "b", "t2i")
    before = loaded(here, test=here).fingerprint
    assert loaded(there, test=there).fingerprint == before
    other = write_rows(tmp_path / "c", "t2i")
    (tmp_path / "c" / "1-2.png").write_bytes(drawn(99))
    assert loaded(other, test=other).fingerprint != before


def test_a_root_of_pictures_without_a_picture_is_noted(tmp_path: Path) -> None:
    texts, captions = write_rows(tmp_path, "t2t", name="texts.jsonl"), write_rows(tmp_path, "t2i")
    assert any("image_root has no effect" in note for note in loaded(texts, root=tmp_path).notes)
    assert not any("image_root" in note for note in loaded(texts).notes)
    assert not any("image_root" in note for note in loaded(captions, root=tmp_path).notes)


def test_tokenizers_are_trained_on_the_texts_alone(tmp_path: Path) -> None:
    assert sorted(record_texts(loaded(write_rows(tmp_path, "t2i")).records)) == [f"text {n} 0" for n in range(4)]


def test_a_run_on_pictures_leaves_bm25_out_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = RetrievalData("photos", {"q": "a cat"}, {"d": Image("cat.png", b"x")}, {"q": {"d": 1}})
    unused = cast("ItemEncoder", None)

    def run(task: RetrievalData) -> Evaluations:
        return Evaluations(unused, None, task, tmp_path, "ndcg@10", lambda: None, bm25_language="english")

    with caplog.at_level(logging.INFO, logger="vembed"):
        assert run(task).bm25() is None
    assert [record.getMessage().count("BM25 is left out") for record in caplog.records] == [1]
    assert not (tmp_path / "bm25").exists()
    words = RetrievalData("words", {"q": "a cat"}, {"d": "a cat"}, {"q": {"d": 1}})
    assert run(words).bm25() is not None


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
