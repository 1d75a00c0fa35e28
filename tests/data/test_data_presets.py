"""Published sets in their published form: what they become, what is refused with its reason, and runs on them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from preset_cases import (
    CAPTIONS,
    PHOTOS,
    PRODUCTS,
    SETS,
    WRITERS,
    draw,
    pairs,
    photos,
    write_cirr,
    write_flickr30k,
    write_flickr30k_lists,
    write_json,
    write_sop,
)

from vembed.batch import Composed, Image
from vembed.config.schema import Config
from vembed.data.collate import collate
from vembed.data.hold_out import hold_out
from vembed.data.judged import RetrievalData
from vembed.data.keys import DataKeys
from vembed.data.picture_survey import ItemCounts, RetrievalMode
from vembed.data.presets import preset_hint
from vembed.data.read import DataSource
from vembed.data.run_data import RunData, load_run_data, record_texts
from vembed.data.table import LoadedRecords
from vembed.entrypoints.evaluate import main
from vembed.errors import DataError
from vembed.losses.base import BatchStructure
from vembed.losses.cells import false_negative_mask, positive_mask
from vembed.training.run import run_from_config

pytestmark = pytest.mark.usefixtures("undrawn")


def records(name: str, folder: Path, **options: Any) -> LoadedRecords:
    return DataSource(f"{name}:{folder}", "train", DataKeys(**options)).records()


def task(name: str, folder: Path, split: str | None = None, **options: Any) -> RetrievalData:
    return DataSource(f"{name}:{folder}", "test", DataKeys(**options), split=split).judged()


def refused(name: str, folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        task(name, folder)
    return str(caught.value)


def picture_of(folder: Path, path: str) -> Image:
    return Image(str((folder / path).resolve()))


@pytest.mark.parametrize("write", [write_flickr30k, write_flickr30k_lists])
def test_each_caption_of_flickr30k_is_a_record_and_a_query_of_its_picture(tmp_path: Path, write: Any) -> None:
    folder = write(tmp_path / "f30k")
    table = records("flickr30k", folder).table
    assert len(table) == PHOTOS["train"] * CAPTIONS
    assert table[0].query == "train photo 0 seen by 0."
    assert table[4].positives == (picture_of(folder, "flickr30k-images/train0.jpg"),)
    assert table[5].positives == (picture_of(folder, "flickr30k-images/train1.jpg"),)
    found = task("flickr30k", folder)
    assert found.name == "flickr30k/test"
    assert list(found.documents) == ["test0.jpg", "test1.jpg", "test2.jpg"]
    assert len(found.queries) == PHOTOS["test"] * CAPTIONS
    assert found.queries["test1.jpg#3"] == "test photo 1 seen by 3."
    assert all(found.qrels[name] == {name.partition("#")[0]: 1} for name in found.queries)
    assert found.cutoffs == (1, 5, 10)
    dev = DataSource(f"flickr30k:{folder}", "validation").judged()
    assert (dev.name, len(dev.documents)) == ("flickr30k/val", PHOTOS["val"])


def test_captions_of_one_picture_are_never_negatives_of_each_other(tmp_path: Path) -> None:
    table = records("flickr30k", write_flickr30k(tmp_path)).table
    batch = collate(table.take([0, 1, 5, 6, 2]), [0, 1, 5, 6, 2])
    structure = BatchStructure.of(batch)
    positive_QD = positive_mask(structure)
    allowed_QD = ~(positive_QD | false_negative_mask(structure, positive_QD))
    photo = torch.tensor([0, 0, 1, 1, 0])
    assert torch.equal(allowed_QD, photo[:, None] != photo[None, :])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"filename": "../../secret.png"}, "dataset_flickr30k.json:2 (../../secret.png): filename: '"),
        ({"filename": "gone.jpg"}, "dataset_flickr30k.json:2 (gone.jpg): filename: 'flickr30k-images/gone.jpg': no"),
        ({"filename": 3}, "dataset_flickr30k.json:2: filename: expected text, got the number 3"),
        ({"filename": "test0.jpg"}, "dataset_flickr30k.json:2 (test0.jpg): filename: the picture is given twice"),
        ({"sentences": []}, "dataset_flickr30k.json:2 (test9.jpg): sentences: expected a list of sentences"),
        ({"sentences": [{"raw": "ok"}, {"raw": " "}]}, "dataset_flickr30k.json:2 (test9.jpg): sentences: blank text"),
    ],
)
def test_a_broken_picture_of_flickr30k_is_refused_by_its_number(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    draw(tmp_path / "secret.png", 1)
    base = {**next(photo for photo in photos() if photo["filename"] == "test0.jpg")}
    good = {**base, "filename": "test9.jpg"}
    folder = write_flickr30k(tmp_path / "a/f30k", [base, good])
    draw(folder / "flickr30k-images/test9.jpg", 99)
    assert len(task("flickr30k", folder).documents) == 2
    write_flickr30k(folder, [base, {**good, **change}])
    assert words in refused("flickr30k", folder)


def test_training_may_drop_broken_pictures_but_never_one_outside(tmp_path: Path) -> None:
    draw(tmp_path / "secret.png", 1)
    entries = photos()
    entries[0]["filename"] = "gone.jpg"
    folder = write_flickr30k(tmp_path / "a/f30k", entries)
    assert entries[0]["split"] == "test"
    assert records("flickr30k", folder).num_invalid == 0, "other splits are not looked at"
    first = next(photo for photo in entries if photo["split"] == "train")
    first["filename"] = "gone.jpg"
    write_flickr30k(folder, entries)
    with pytest.raises(DataError, match="skip_invalid_records: true"):
        records("flickr30k", folder)
    loaded = records("flickr30k", folder, skip_invalid_records=True, max_invalid_records=1)
    assert len(loaded.table) == (PHOTOS["train"] - 1) * CAPTIONS
    assert loaded.notes[0].startswith("1 invalid row dropped: dataset_flickr30k.json:")
    first["filename"] = "../../../secret.png"
    write_flickr30k(folder, entries)
    with pytest.raises(DataError, match="leads out of"):
        records("flickr30k", folder, skip_invalid_records=True, max_invalid_records=9)


@pytest.mark.parametrize(
    ("file", "line", "words"),
    [
        ("results_20130124.token", "nonsense", "results_20130124.token:56: expected NAME.jpg#NUMBER"),
        ("test.txt", "nobody", "test.txt:4: 'nobody.jpg' has no caption in results_20130124.token"),
        ("test.txt", "test0.jpg", "test.txt:4 (test0.jpg): filename: the picture is given twice"),
    ],
)
def test_a_broken_line_of_the_original_captions_is_named(tmp_path: Path, file: str, line: str, words: str) -> None:
    folder = write_flickr30k_lists(tmp_path)
    assert len(task("flickr30k", folder).documents) == 3
    with (folder / file).open("a") as handle:
        handle.write(f"{line}\n")
    assert words in refused("flickr30k", folder)


def test_each_picture_of_a_product_is_paired_with_the_next_one(tmp_path: Path) -> None:
    folder = write_sop(tmp_path)
    loaded = records("sop", folder)
    found = [(record.query, record.positives, record.label) for record in loaded.table]
    ring = [(7, 0, 1), (8, 0, 1), (7, 1, 2), (8, 1, 0), (7, 2, 0)]
    assert found == [
        (picture_of(folder, f"mug_final/{p}_{a}.JPG"), (picture_of(folder, f"mug_final/{p}_{b}.JPG"),), p)
        for p, a, b in ring
    ]
    assert loaded.table[0].location == "Ebay_train.txt:2"
    assert loaded.notes == ("1 product has one picture and so no pair: left out.",)


def test_pictures_of_a_product_are_never_negatives_and_a_copy_of_the_query_is_no_positive(tmp_path: Path) -> None:
    table = records("sop", write_sop(tmp_path)).table
    batch = collate(list(table), range(len(table)))
    structure = BatchStructure.of(batch)
    positive_QD = positive_mask(structure)
    neither_QD = false_negative_mask(structure, positive_QD)
    product = torch.tensor([record.label for record in table])
    itself_QD = torch.from_numpy(batch.query_ids_Q[:, None] == batch.document_ids_D[None, :])
    assert torch.equal(positive_QD | neither_QD, product[:, None] == product[None, :])
    assert torch.equal(neither_QD, itself_QD)
    assert itself_QD.sum() == len(table)
    assert (batch.positives_P2 == np.argwhere(positive_QD.numpy())).all(), "sorted, without repeats"


def test_a_record_whose_positive_repeats_its_query_keeps_it(tmp_path: Path) -> None:
    folder = write_sop(tmp_path)
    (folder / "mug_final/8_1.JPG").write_bytes((folder / "mug_final/8_0.JPG").read_bytes())
    table = records("sop", folder).table
    batch = collate(list(table), range(len(table)))
    assert set(batch.positives_P2[:, 0].tolist()) == set(range(len(table)))


def test_held_out_products_share_no_picture_with_training(tmp_path: Path) -> None:
    table = records("sop", write_sop(tmp_path)).table
    train_rows, held_out_rows, _ = hold_out(table, fraction=0.5)
    kept, held = ({table[row].label for row in rows.tolist()} for rows in (train_rows, held_out_rows))
    assert (kept, held) == ({7}, {8})


def test_every_test_picture_searches_all_others_of_its_list(tmp_path: Path) -> None:
    found = task("sop", write_sop(tmp_path))
    count = sum(PRODUCTS["test"].values())
    assert found.queries == found.documents
    assert len(found.queries) == count
    relevant = sorted(len(grades) for grades in found.qrels.values())
    assert relevant == [0, 1, 1, 2, 2, 2]
    assert not any(name in grades for name, grades in found.qrels.items())
    assert found.cutoffs == (1, 10, 100)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("99 20 8", "Ebay_test.txt:8: 3 columns; expected image_id class_id super_class_id path"),
        ("x 20 8 mug_final/20_0.JPG", "Ebay_test.txt:8: image_id 'x' is not a whole number"),
        ("99 -1 8 mug_final/20_0.JPG", "Ebay_test.txt:8: class_id '-1' is not a whole number"),
        ("99 20 8 ../secret.png", "Ebay_test.txt:8: path: '../secret.png' leads out of"),
        ("99 20 8 http://host.example/x.png", "Ebay_test.txt:8: path: a path that starts with http: is an address"),
        ("99 20 8 mug_final/none.JPG", "Ebay_test.txt:8: path: 'mug_final/none.JPG': no such file"),
        ("7 20 8 mug_final/20_0.JPG", "Ebay_test.txt:8: image_id 7 is given twice"),
    ],
)
def test_a_broken_line_of_sop_is_named(tmp_path: Path, line: str, words: str) -> None:
    draw(tmp_path / "secret.png", 1)
    folder = write_sop(tmp_path / "sop")
    with (folder / "Ebay_test.txt").open("a") as handle:
        handle.write("\n")
    assert len(task("sop", folder).queries) == 6, "blank lines hold nothing"
    lines = (folder / "Ebay_test.txt").read_text().rstrip()
    (folder / "Ebay_test.txt").write_text(f"{lines}\n{line}\n")
    assert words in refused("sop", folder)


def test_a_query_of_cirr_is_a_picture_with_a_text_and_its_reference_is_never_ranked(tmp_path: Path) -> None:
    folder = write_cirr(tmp_path)
    first = records("cirr", folder).table[0]
    assert first.query == Composed((picture_of(folder, "img_raw/train/3/train-0-0.png"),), "show 1 more of group 0")
    assert first.positives == (picture_of(folder, "img_raw/train/3/train-0-1.png"),)
    found = task("cirr", folder)
    assert found.name == "cirr/val"
    assert (len(found.queries), len(found.documents)) == (4, 12)
    assert found.qrels["11"] == {"val-1-2": 1}
    assert found.excluded["11"] == {"val-1-0"}
    assert (found.candidates, found.cutoffs) == ({}, (1, 5, 10, 50))
    assert DataSource(f"cirr:{folder}", "validation").judged().queries == found.queries


def test_the_subset_split_ranks_the_members_of_the_set_alone(tmp_path: Path) -> None:
    found = task("cirr", write_cirr(tmp_path), split="val-subset")
    assert found.candidates["10"] == {f"val-1-{place}" for place in range(6)}
    assert (found.name, found.cutoffs) == ("cirr/val-subset", (1, 2, 3))


@pytest.mark.parametrize("arrange", ["cirr/", "beside"])
def test_other_projects_arrangements_of_cirr_are_read_too(tmp_path: Path, arrange: str) -> None:
    folder = write_cirr(tmp_path)
    if arrange == "cirr/":
        (folder / "cirr").mkdir()
        for name in ("captions", "image_splits"):
            (folder / name).rename(folder / "cirr" / name)
    for name in ("train", "dev", "test1"):
        (folder / "img_raw" / name).rename(folder / name)
    assert len(task("cirr", folder).documents) == 12
    assert len(records("cirr", folder).table) == 4


def test_the_targets_of_test1_are_nobodys(tmp_path: Path) -> None:
    folder = write_cirr(tmp_path)
    with pytest.raises(DataError, match="cirr has no split 'test1': the targets of test1 are not published"):
        task("cirr", folder, split="test1")
    assert len(task("cirr", folder, split="test").queries) == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reference": "nobody"}, "cap.rc2.val.json pairid 1: reference: 'nobody' is no picture of split.rc2.val.json"),
        ({"target_hard": None}, "cap.rc2.val.json pairid 1: target_hard: missing, or no text"),
        ({"target_hard": "val-0-0"}, "cap.rc2.val.json pairid 1: target_hard: is the reference itself"),
        ({"caption": " "}, "cap.rc2.val.json pairid 1: caption: blank text"),
        ({"pairid": 0}, "cap.rc2.val.json pairid 0: pairid: given twice"),
        ({"pairid": "x"}, "cap.rc2.val.json:1: pairid: missing, or not a whole number"),
    ],
)
def test_a_broken_query_of_cirr_is_named_by_its_pairid(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    folder = write_cirr(tmp_path)
    rows = pairs("val")
    rows[1] |= change
    write_json(folder / "captions/cap.rc2.val.json", rows)
    assert words in refused("cirr", folder)


def test_a_query_whose_set_lacks_its_target_has_no_place_in_the_subset(tmp_path: Path) -> None:
    folder = write_cirr(tmp_path)
    rows = pairs("val")
    del rows[2]["img_set"]
    write_json(folder / "captions/cap.rc2.val.json", rows)
    assert len(task("cirr", folder).queries) == 4
    with pytest.raises(DataError, match="pairid 10: img_set: its members don't hold the target"):
        task("cirr", folder, split="val-subset")


@pytest.mark.parametrize(
    ("path", "words"),
    [("./../../secret.png", "leads out of"), ("./dev/none.png", "no such file"), (7, "expected a path, got int")],
)
def test_a_bad_path_of_cirr_is_refused_and_the_others_are_not(tmp_path: Path, path: object, words: str) -> None:
    draw(tmp_path / "secret.png", 1)
    folder = write_cirr(tmp_path / "cirr")
    assert len(task("cirr", folder).documents) == 12
    file = folder / "image_splits/split.rc2.val.json"
    write_json(file, json.loads(file.read_text()) | {"val-0-3": path})
    message = refused("cirr", folder)
    assert "split.rc2.val.json 'val-0-3'" in message
    assert words in message


@pytest.mark.parametrize(
    ("name", "gone", "words"),
    [
        ("flickr30k", ["dataset_flickr30k.json"], "is missing dataset_flickr30k.json or results_20130124.token in "),
        ("flickr30k", ["flickr30k-images"], "is missing flickr30k-images/ or flickr30k_images/ or images/ in "),
        ("flickr30k", ["dataset_flickr30k.json", "flickr30k-images"], "is missing dataset_flickr30k.json or results_2"),
        ("sop", ["Ebay_test.txt"], "is missing Ebay_test.txt in "),
        ("cirr", ["captions"], "is missing captions/cap.rc2.val.json or cirr/captions/cap.rc2.val.json in "),
        ("cirr", ["img_raw"], "is missing img_raw/dev/ or dev/ in "),
    ],
)
def test_all_that_is_missing_is_named(tmp_path: Path, name: str, gone: list[str], words: str) -> None:
    folder = WRITERS[name](tmp_path / "set")
    assert task(name, folder).queries
    for part in gone:
        (folder / part).rename(tmp_path / part)
    assert refused(name, folder).startswith(f"{name}:{folder} {words}")


@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_too_high_is_told_where_the_set_is(tmp_path: Path, name: str) -> None:
    folder = WRITERS[name](tmp_path / "Set")
    with pytest.raises(DataError, match=f"{folder} has it: name that folder, {name}:{folder}"):
        task(name, tmp_path)
    with pytest.raises(DataError, match="there is no folder"):
        task(name, tmp_path / "nowhere")


def test_pictures_may_lie_in_image_root(tmp_path: Path) -> None:
    folder = write_flickr30k(tmp_path / "captions")
    (folder / "flickr30k-images").rename(tmp_path / "elsewhere")
    assert len(task("flickr30k", folder, image_root=str(tmp_path / "elsewhere")).documents) == 3
    cirr = write_cirr(tmp_path / "cirr")
    (cirr / "img_raw").rename(tmp_path / "nlvr2")
    assert len(task("cirr", cirr, image_root=str(tmp_path / "nlvr2")).documents) == 12


def test_a_split_that_a_set_has_not_is_refused_with_those_it_has(tmp_path: Path) -> None:
    folder = write_sop(tmp_path)
    with pytest.raises(DataError, match="sop has no split 'dev': leave val_data_path out, and whole products"):
        DataSource(f"sop:{folder}", "validation").judged()
    with pytest.raises(DataError, match="sop has no split 'extra': it has: train, test"):
        task("sop", folder, split="extra")


def test_names_that_only_look_like_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_sop(tmp_path / "set")
    assert len(DataSource("sop:set", "train").records().table) == 5
    (tmp_path / "sop:set.jsonl").write_text('{"query": "q", "positive": "p"}\n')
    assert len(DataSource("./sop:set.jsonl", "train").records().table) == 1
    with pytest.raises(DataError, match="sop: names no folder: write sop:FOLDER"):
        DataSource("sop:", "train").records()
    with pytest.raises(DataError, match=r"flicker30k:set doesn't exist \(did you mean 'flickr30k:\.\.\.'\?\)"):
        DataSource("flicker30k:set", "train").records()
    assert preset_hint("owner/sop:config") == "", "a hub id with a configuration"


def test_a_column_mapping_has_no_effect_and_says_so(tmp_path: Path) -> None:
    folder = write_sop(tmp_path)
    mapping = {"a": "query"}
    assert "column_mapping has no effect on a published set." in records("sop", folder, column_mapping=mapping).notes
    assert "column_mapping has no effect on a published set." in task("sop", folder, column_mapping=mapping).notes


# Through the whole program: evaluate, one step of training, a short run; rows of one's own


COUNTS = {
    "flickr30k": (PHOTOS["test"] * CAPTIONS, PHOTOS["test"]),
    "sop": (sum(PRODUCTS["test"].values()) - 1, sum(PRODUCTS["test"].values())),
    "cirr": (2 * SETS, 6 * SETS),
}
"""Queries that count, and documents."""

MODES = {"flickr30k": "t2i", "sop": "i2i", "cirr": "m2i"}


def evaluate(tmp_path: Path, name: str, *words: str) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Evaluate an untrained model; return its metrics.json and the ids that each query found, best first."""
    folder = tmp_path / "set"
    if not folder.exists():
        WRITERS[name](folder)
    output = tmp_path / "-".join(("out", *words))
    arguments = ["builtin:tiny-clip", "--data", f"{name}:{folder}", "--output", str(output), *words]
    assert main(arguments, program="vembed evaluate") == 0
    (metrics,) = output.glob("*/*/metrics.json")
    run: dict[str, list[str]] = {}
    for line in (metrics.parent / "run.trec").read_text().splitlines():
        query, _, document, *_ = line.split()
        run.setdefault(query, []).append(document)
    return json.loads(metrics.read_text()), run


@pytest.mark.parametrize("name", WRITERS)
def test_a_published_set_is_evaluated_by_its_name(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, run = evaluate(tmp_path, name)
    assert (found["num_queries"], found["num_documents"]) == COUNTS[name]
    assert len(run) == COUNTS[name][0]
    out = capsys.readouterr().out
    assert "hit@1 " in out
    if name == "sop":
        assert not any(query in documents for query, documents in run.items()), "no picture finds itself"
        assert {len(documents) for documents in run.values()} == {COUNTS[name][1] - 1}
    if name == "flickr30k":
        assert {len(documents) for documents in run.values()} == {PHOTOS["test"]}
    if name == "cirr":
        assert found["metrics"]["recall@50"] == 1.0
        assert not any(f"val-{int(query) // 10}-0" in documents for query, documents in run.items())
        assert {len(documents) for documents in run.values()} == {6 * SETS - 1}


@pytest.mark.slow
def test_the_subset_of_cirr_is_the_whole_ranking_restricted(tmp_path: Path) -> None:
    whole, ranked = evaluate(tmp_path, "cirr")
    subset, found = evaluate(tmp_path, "cirr", "--split", "val-subset")
    for query, documents in found.items():
        group = int(query) // 10
        assert documents == [name for name in ranked[query] if name.startswith(f"val-{group}-")]
        assert len(documents) == 5
    targets = {query: f"val-{int(query) // 10}-{int(query) % 10 + 1}" for query in found}
    for k in (1, 2, 3):
        share = np.mean([targets[query] in documents[:k] for query, documents in found.items()])
        assert subset["metrics"][f"recall@{k}"] == pytest.approx(share)
    assert "recall@2" not in whole["metrics"]


@pytest.mark.slow
def test_a_cut_off_of_a_thousand_may_be_asked_for(tmp_path: Path) -> None:
    found, _ = evaluate(tmp_path, "sop", "--metric", "hit@1000")
    assert found["metrics"]["hit@1000"] == 1.0


def dry_run(tmp_path: Path, data: str, **keys: Any) -> None:
    values = {
        "model_name": "builtin:tiny-clip", "data_path": data, "test_data_path": data, "eval_strategy": "no",
        "batch_size": 4, "report_to": "none", "bm25": False, "output_dir": str(tmp_path / "run"),
    }  # fmt: skip
    run_from_config(Config.model_validate(values | keys), mode="dry-run")


@pytest.mark.parametrize(
    "name", ["flickr30k", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sop", "cirr"))]
)
def test_a_published_set_trains_a_step_in_its_own_mode_alone(tmp_path: Path, name: str) -> None:
    folder = WRITERS[name](tmp_path / "set")
    dry_run(tmp_path, f"{name}:{folder}", retrieval_mode=MODES[name])
    with pytest.raises(DataError, match=f"set retrieval_mode to {MODES[name]}"):
        dry_run(tmp_path, f"{name}:{folder}", retrieval_mode="t2t")
    with pytest.raises(DataError, match="builtin:ngram-bag reads texts, and"):
        dry_run(tmp_path, f"{name}:{folder}", model_name="builtin:ngram-bag")


@pytest.mark.slow
def test_a_short_run_on_composed_queries_ends_with_a_report_that_shows_both_parts(tmp_path: Path) -> None:
    folder = write_cirr(tmp_path / "set")
    keys = {
        "model_name": "builtin:tiny-clip", "data_path": f"cirr:{folder}", "val_data_path": f"cirr:{folder}",
        "val_data_split": "val-subset", "test_data_path": f"cirr:{folder}", "batch_size": 4, "max_steps": 2,
        "eval_strategy": "steps", "eval_steps": 1, "report_to": "none", "output_dir": str(tmp_path / "run"),
    }  # fmt: skip
    result = run_from_config(Config.model_validate(keys))
    assert result is not None
    report = (tmp_path / "run/report/report.html").read_text("utf-8")
    assert "show 1 more of group 0" in report
    assert "data:image/" in report
    assert "pictures with a text search pictures" in report
    final = json.loads((tmp_path / "run/evaluation/final/metrics.json").read_text())
    assert "recall@50" in final["metrics"]


def write_rows(folder: Path, *, query_text: str = "but {} red", positive: str = "{}-b.png") -> Path:
    """Write 4 rows whose queries are a picture and a text."""
    rows = []
    for number in range(4):
        for side in "ab":
            draw(folder / f"{number}-{side}.png", 10 * number + ord(side))
        text = query_text.format(number)
        target = positive.format(number)
        column = "positive_image" if target.endswith(".png") else "positive"
        rows.append({"query": text, "query_image": f"{number}-a.png", column: target})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def loaded(path: Path, mode: RetrievalMode = "auto") -> RunData:
    keys = DataKeys(data_path=str(path), test_data_path=str(path), retrieval_mode=mode)
    return load_run_data(keys, needs_dev=False)


def test_composed_rows_are_of_mode_m(tmp_path: Path) -> None:
    pictures, texts = write_rows(tmp_path / "i"), write_rows(tmp_path / "t", positive="answer {}")
    facts = dict(loaded(pictures, "m2i").facts())
    assert facts["training direction"] == "pictures with a text search pictures"
    assert facts["distinct pictures in them"].startswith("8, all 24 x 20")
    assert loaded(texts, "m2t").counts.items.direction == "pictures with a text search texts"
    with pytest.raises(
        DataError, match="holds 4 query pictures with a text, 4 document texts; set retrieval_mode to m2t"
    ):
        loaded(texts, "m2i")
    with pytest.raises(DataError, match="set retrieval_mode to m2i"):
        loaded(pictures, "i2i")
    assert sorted(record_texts(loaded(pictures).records)) == [f"but {number} red" for number in range(4)]


def test_documents_of_both_kinds_have_no_mode_but_auto() -> None:
    counts = ItemCounts()
    counts.add("query", ["a"])
    counts.add("document", [Composed((Image("c.png"),), "t")])
    counts.require("auto", "set")
    with pytest.raises(DataError, match="1 document pictures with a text; set retrieval_mode to auto"):
        counts.require("t2i", "set")


def test_the_fingerprint_of_a_run_is_of_both_parts(tmp_path: Path) -> None:
    before = loaded(write_rows(tmp_path / "a")).fingerprint
    assert loaded(write_rows(tmp_path / "b")).fingerprint == before, "wherever the pictures lie"
    assert loaded(write_rows(tmp_path / "c", query_text="but {} blue")).fingerprint != before
    other = write_rows(tmp_path / "d")
    draw(tmp_path / "d/2-a.png", 999)
    assert loaded(other).fingerprint != before


def test_composed_rows_train_a_step_and_need_a_model_of_two_towers(tmp_path: Path) -> None:
    path = write_rows(tmp_path)
    dry_run(tmp_path, str(path), retrieval_mode="m2i", image_augmentation="light")
    with pytest.raises(DataError, match="reads texts, and"):
        dry_run(tmp_path, str(path), model_name="builtin:ngram-bag")
