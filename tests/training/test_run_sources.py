"""Runs on several sources: what is read, what each batch is made of, and what is said of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import vembed
from vembed.batch import Augmentation
from vembed.config.load import load_values
from vembed.config.schema import Config
from vembed.data.run_data import load_run_data, refuse_missing_data
from vembed.entrypoints.train import main
from vembed.errors import ConfigError, DataError
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder
from vembed.training.batches import BatchSource
from vembed.training.data import build_sampler, prompted

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    for name, num_rows, query in (("a", 24, "query"), ("b", 48, "ask")):
        rows = [{query: f"{name} word{row} one", "positive": f"{name} word{row} two"} for row in range(num_rows)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model_name": "builtin:static",
        "data": [
            {"path": str(tmp_path / "a.jsonl"), "weight": 2, "query_prompt": "first: "},
            {"path": str(tmp_path / "b.jsonl"), "column_mapping": {"ask": "query"}, "document_prompt": "second: "},
        ],
        "batch_size": 12,
        "eval_strategy": "no",
    }


def test_texts_of_each_source_have_its_prompts(keys: dict[str, Any]) -> None:
    config = Config.model_validate(keys)
    data = load_run_data(config, needs_dev=False)
    texts = [item for record in data.records for item in (record.query, *record.positives)]
    encoder = load_encoder(
        ModelKeys(model_name="builtin:static", query_prompt="q "), texts=[*texts, "first: second: q"]
    )
    source = BatchSource(
        data.records,
        build_sampler(config, data.records, 12),
        encoder,
        next(encoder.parameters()).device,
        Augmentation("none", flip=False, seed=0),
        prompted=prompted(config, encoder),
    )
    wanted = {"a": {"query": "first: ", "document": ""}, "b": {"query": "q ", "document": "second: "}}
    for world_size in (1, 2):
        for rank in range(world_size):
            made = BatchSource(**{**_fields(source), "rank": rank, "world_size": world_size}).batch(0)
            records = [data.records[row] for row in made.record_ids]
            items = [("query", each.query) for each in records] + [("document", each.positives[0]) for each in records]
            [(features, slots)] = made.parts
            for row, slot in enumerate(slots.tolist()):
                side, text = items[slot]
                alone = encoder.with_prompts({"query": "", "document": ""})
                expected = alone.featurize([wanted[text[0]][side] + text], "query").columns["input_ids"].values
                ids = features.columns["input_ids"]
                assert np.array_equal(ids.values[ids.offsets[row] : ids.offsets[row + 1]], expected)
            assert {text[0] for _, text in items} == {"a", "b"}
    assert encoder.prompts == {"query": "q ", "document": ""}


def _fields(source: BatchSource) -> dict[str, Any]:
    return {name: getattr(source, name) for name in source.__slots__}


def test_a_dev_set_is_held_out_of_all_sources_and_facts_name_them(keys: dict[str, Any]) -> None:
    data = load_run_data(Config.model_validate(keys), needs_dev=True)
    assert data.dev is not None
    assert len(data.records) + len(data.dev.queries) == 72
    paths = [source["path"] for source in keys["data"]]
    counts = np.bincount(data.records.sources).tolist()
    assert data.facts()[1:3] == [(f"of {path}", str(count)) for path, count in zip(paths, counts, strict=True)]


def test_prompts_for_a_model_that_takes_none_are_refused(keys: dict[str, Any], bag: Path) -> None:
    encoder = load_encoder(ModelKeys(model_name=str(bag)))
    with pytest.raises(ConfigError, match="takes no prompts: leave query_prompt and document_prompt out"):
        prompted(Config.model_validate(keys), encoder)
    plain = [{name: value for name, value in each.items() if "prompt" not in name} for each in keys["data"]]
    assert prompted(Config.model_validate({**keys, "data": plain}), encoder) == ()


def test_a_missing_source_is_named(keys: dict[str, Any]) -> None:
    keys["data"][1]["path"] += ".gone"
    with pytest.raises(DataError, match=r"b\.jsonl\.gone"):
        refuse_missing_data(Config.model_validate(keys))


def test_validating_looks_for_every_source(
    keys: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(keys))
    assert main([str(config), "--validate"]) == 0
    (tmp_path / "b.jsonl").unlink()
    assert main([str(config), "--validate"]) == 3
    assert "b.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([{"path": "a", "weigth": 2}], "data[0].weigth: unknown key; an entry of data has path, split, weight"),
        ([{"path": "a"}, {"weight": 2}], "data[1].path: a required key is missing"),
        ([{"path": "a", "weight": "2"}], "data[0].weight: must be a number > 0, got '2'; remove the quotes"),
        ([], "data: must be a list [{path: ..., "),
    ],
)
def test_a_wrong_entry_is_named_with_its_place(data: list[object], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_values({"model_name": "m", "data": data}, {})
    assert words in str(refused.value)


@pytest.mark.slow
def test_a_loss_for_each_source_is_logged_by_source_and_resumes_exactly(keys: dict[str, Any], tmp_path: Path) -> None:
    graded = [{"ask": f"b w{row} one", "positive": f"b w{row} two", "label": row % 3} for row in range(48)]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in graded))
    sources = [{**keys["data"][0], "weight": 1}, {**keys["data"][1], "loss": "cosent"}]
    keys |= {"data": sources, "source_batches": "single", "label_kind": "grade", "learn_temperature": True}
    keys |= {"learning_rate": 1e-2, "num_processes": 1, "bm25": False, "val_data_path": str(tmp_path / "a.jsonl")}
    keys |= {"save_strategy": "steps", "save_steps": 5, "save_total_limit": 9, "epochs": 2}
    vembed.train(keys, output_dir=str(tmp_path / "whole"))
    rows = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    names = [[name for name in row if name.startswith("loss_source")] for row in rows]
    assert sorted(map(tuple, names)) == [("loss_source_1",)] * 4 + [("loss_source_2",)] * 8
    assert all(row[own] == row["loss"] for row, [own] in zip(rows, names, strict=True))
    report = (tmp_path / "whole/report/report.md").read_text()
    assert "Training loss, source 1" in report
    assert "Training loss, source 2" in report
    vembed.train(keys, output_dir=str(tmp_path / "part"))
    for saved in (tmp_path / "part/checkpoints").iterdir():
        if saved.is_dir() and int(saved.name.partition("-")[2]) != 5:
            saved.rename(tmp_path / saved.name)
    vembed.train(keys, output_dir=str(tmp_path / "part"))
    assert _losses(tmp_path / "part") == _losses(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("source_batches", ["mixed", "single"])
def test_a_run_says_what_its_sources_gave_and_resumes_exactly(
    keys: dict[str, Any], tmp_path: Path, source_batches: str
) -> None:
    keys |= {"source_batches": source_batches, "learning_rate": 1e-2, "num_processes": 1, "bm25": False}
    keys |= {"val_data_path": keys["data"][0]["path"], "save_strategy": "steps", "save_steps": 4, "save_total_limit": 9}
    whole = vembed.train(keys, output_dir=str(tmp_path / "whole"), epochs=2)
    part = tmp_path / "part"
    vembed.train(keys, output_dir=str(part), epochs=2)
    for saved in (part / "checkpoints").iterdir():
        if saved.is_dir() and int(saved.name.partition("-")[2]) != 4:
            saved.rename(tmp_path / saved.name)
    vembed.train(keys, output_dir=str(part), epochs=2)
    losses = [_losses(tmp_path / name) for name in ("whole", "part")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 12
    plan = json.loads((tmp_path / "whole/plan.json").read_text())
    assert [each for each in plan["reasons"] if each.startswith("source ") and "rows of an epoch" in each]
    report = json.loads((tmp_path / "whole/report/report.json").read_text())
    assert [f"of {keys['data'][0]['path']}", "24"] in [list(pair) for pair in report["data_facts"]]
    assert whole is not None


def _losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
