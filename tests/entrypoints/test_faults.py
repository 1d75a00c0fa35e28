"""Faults through the command line: each is refused with its exit code and its fix, and its valid neighbour runs."""

from __future__ import annotations

import json
import math
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.runs import Site, run_here, run_keys, steps_saved, word_pairs, write_config, write_rows
from safetensors.torch import load_file, save_file

import vembed.training.model
import vembed.training.planning
from vembed.losses.infonce import InfoNCE
from vembed.models.tables import NgramBag, NgramBagConfig
from vembed.training import optimizer

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from vembed.losses.streamed import LossGradients

TINY_BAG = NgramBagConfig(dimension=16, buckets=512)


# Configuration


def test_a_misspelt_key_is_named_with_its_line_and_the_closest_one(site: Site, tmp_path: Path) -> None:
    config = write_config(tmp_path, site.keys() | {"learning_rat": 1e-3})
    refused = run_here(config, "--config_override", "epoch=3")
    assert refused.code == 2
    line = 1 + [text.partition(":")[0] for text in config.read_text().splitlines()].index("learning_rat")
    assert f"{config}:{line}: learning_rat: unknown key; did you mean learning_rate?" in refused.err
    assert "override epoch=3: unknown key; did you mean epochs?" in refused.err
    assert not (tmp_path / "out").exists()


def test_several_errors_are_reported_at_once(site: Site, tmp_path: Path) -> None:
    keys = site.keys(batch_size=0, learning_rate=-1, eval_strategy="sometimes", warmup_ratio=float("nan"), fp16=1)
    refused = run_keys(tmp_path, keys, "--config_override", "seed=true", "foo", "=1", "max_steps=")
    assert refused.code == 2
    for key in ("batch_size", "learning_rate", "eval_strategy", "warmup_ratio", "fp16", "seed"):
        assert key in refused.err, key
    for reason in ("override foo: there is no '='", "no key before '='", "no value after '='"):
        assert reason in refused.err, reason
    assert "Traceback" not in refused.err


def test_an_override_may_hold_an_equals_sign(site: Site, tmp_path: Path) -> None:
    folder = tmp_path / "a=b"
    planned = run_keys(tmp_path, site.keys(), "--plan", "--config_override", f"output_dir={folder}")
    assert planned.code == 0
    assert (folder / "plan.json").is_file()


def test_a_batch_of_one_has_no_negatives_and_a_batch_of_two_has(site: Site, tmp_path: Path) -> None:
    refused = run_keys(tmp_path, site.keys(batch_size=1))
    assert refused.code == 2
    assert "batch_size" in refused.err
    assert "2 or more" in refused.err
    assert run_keys(tmp_path, site.keys(batch_size=2, max_steps=1, eval_steps=1)).code == 0


def test_a_learned_temperature_out_of_its_bounds_is_refused(site: Site, tmp_path: Path) -> None:
    refused = run_keys(tmp_path, site.keys(learn_temperature=True, temperature=0.001), "--plan")
    assert refused.code == 2
    assert "a learned temperature starts between 0.01 and 1.0, got 0.001" in refused.err
    assert run_keys(tmp_path, site.keys(temperature=0.001), "--plan").code == 0
    assert run_keys(tmp_path, site.keys(learn_temperature=True, temperature=0.01), "--plan").code == 0


class NormBag(NgramBag):
    """An encoder with batch normalisation."""

    def __init__(self, config: NgramBagConfig, *, name: str) -> None:
        super().__init__(config, name=name)
        self.norm = torch.nn.BatchNorm1d(config.dimension)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.norm(super().forward(inputs))


def test_batch_normalisation_is_refused_with_gradient_caching_only(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(keys: Any, texts: object = (), **_: object) -> NormBag:
        return NormBag(TINY_BAG, name=keys.model_name)

    monkeypatch.setattr(vembed.training.model, "load_encoder", load)
    keys = site.keys(model_name="builtin:ngram-bag", max_steps=2, eval_steps=2)
    refused = run_keys(tmp_path, keys, "--plan")
    assert refused.code == 2
    assert "batch normalisation" in refused.err
    assert "Set use_gradient_cache: false" in refused.err
    neighbour = run_keys(tmp_path, keys | {"use_gradient_cache": False})
    assert neighbour.code == 0, neighbour.err
    assert [row["num_chunks"] for row in neighbour.rows] == [1, 1]


# Data


WITHOUT_DATA = {"data_path": None, "val_data_path": None, "test_data_path": None, "model_name": "builtin:ngram-bag"}


def test_without_data_the_message_holds_the_override_of_a_built_in_set(site: Site, tmp_path: Path) -> None:
    refused = run_keys(tmp_path, site.keys(**WITHOUT_DATA))
    assert refused.code == 3
    assert "--config_override data_path=builtin:stdlib-code" in refused.err


@pytest.mark.slow
def test_the_override_for_missing_data_runs(site: Site, tmp_path: Path) -> None:
    keys = site.keys(**WITHOUT_DATA)
    match = re.search(r"--config_override (data_path=\S+)", run_keys(tmp_path, keys).err)
    assert match is not None
    assert run_keys(tmp_path, keys, "--dry-run", "--config_override", match[1]).code == 0


def test_a_missing_file_is_named_with_the_closest_one(site: Site, tmp_path: Path) -> None:
    refused = run_keys(tmp_path, site.keys(data_path=str(site.train.with_name("trian.jsonl"))))
    assert refused.code == 3
    assert "data_path: " in refused.err
    assert "train.jsonl" in refused.err
    assert not (tmp_path / "out").exists()


BROKEN: list[Any] = [{"query": "a fox"}, '{"query": "cut', {"query": " ", "positive": "x"}]


def test_broken_rows_are_named_with_their_lines(site: Site, tmp_path: Path) -> None:
    rows = word_pairs()[:60]
    data = write_rows(tmp_path / "rows.jsonl", [*rows[:30], *BROKEN, *rows[30:]])
    refused = run_keys(tmp_path, site.keys(data_path=str(data)))
    assert refused.code == 3
    for line in (31, 32, 33):
        assert f"rows.jsonl:{line}" in refused.err
    write_rows(data, rows)
    assert run_keys(tmp_path, site.keys(data_path=str(data)), "--plan").code == 0


def test_broken_rows_may_be_skipped_and_the_plan_says_so(site: Site, tmp_path: Path) -> None:
    rows = word_pairs()[:60]
    data = write_rows(tmp_path / "rows.jsonl", [*rows[:30], *BROKEN, *rows[30:]])
    keys = site.keys(data_path=str(data), skip_invalid_records=True)
    planned = run_keys(tmp_path, keys, "--plan")
    assert planned.code == 0, planned.err
    reasons = json.loads((tmp_path / "out/plan.json").read_text())["reasons"]
    assert any(reason.startswith("3 invalid rows dropped: rows.jsonl:31") for reason in reasons), reasons
    refused = run_keys(tmp_path, keys, "--plan", "--config_override", "max_invalid_records=2")
    assert refused.code == 3


def test_a_positive_among_its_own_negatives_is_refused(site: Site, tmp_path: Path) -> None:
    rows = [row | {"negatives": [f"nope {number}"]} for number, row in enumerate(word_pairs()[:40])]
    data = write_rows(tmp_path / "rows.jsonl", [*rows, rows[0] | {"query": "other", "negatives": rows[0]["positive"]}])
    refused = run_keys(tmp_path, site.keys(data_path=str(data)))
    assert refused.code == 3
    assert "rows.jsonl:41" in refused.err
    assert "own positive" in refused.err
    write_rows(data, rows)
    assert run_keys(tmp_path, site.keys(data_path=str(data), max_steps=1, eval_steps=1)).code == 0


def test_data_smaller_than_a_batch_is_one_batch(site: Site, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", word_pairs()[:10])
    outcome = run_keys(tmp_path, site.keys(data_path=str(data), max_steps=None, epochs=3, batch_size=64, eval_steps=3))
    assert outcome.code == 0, outcome.err
    assert [row["epoch"] for row in outcome.rows] == [1.0, 2.0, 3.0]
    reasons = json.loads((outcome.folder / "plan.json").read_text())["reasons"]
    assert "10 records are fewer than a batch of 64: each step takes all of them." in reasons
    one = write_rows(tmp_path / "one.jsonl", word_pairs()[:1])
    refused = run_keys(tmp_path / "one", site.keys(data_path=str(one)))
    assert refused.code == 3
    assert "at least 2 records" in refused.err


@pytest.mark.parametrize(
    ("count", "steps", "drop_last"), [(33, 2, False), (34, 3, False), (34, 2, True), (32, 2, False)]
)
def test_an_uneven_tail_is_a_smaller_batch_unless_it_is_one_record(
    site: Site, tmp_path: Path, count: int, steps: int, drop_last: bool
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", word_pairs()[:count])
    keys = site.keys(data_path=str(data), max_steps=None, eval_steps=99, drop_last=drop_last)
    outcome = run_keys(tmp_path, keys)
    assert outcome.code == 0, outcome.err
    assert len(outcome.rows) == steps
    assert all(math.isfinite(loss) for loss in outcome.losses)


def test_too_little_data_to_hold_any_out_is_refused_with_the_fix(site: Site, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", word_pairs()[:4])
    keys = site.keys(data_path=str(data), val_data_path=None, max_steps=1, eval_steps=1)
    refused = run_keys(tmp_path, keys)
    assert refused.code == 3
    assert "give val_data_path, or set eval_strategy: no" in refused.err
    write_rows(data, word_pairs()[:20])
    kept = run_keys(tmp_path, keys)
    assert kept.code == 0
    assert "4 of 20 rows held out for validation" in kept.flat
    assert "can't be told from chance" in kept.flat


def test_a_secret_in_an_address_is_shown_nowhere(site: Site, tmp_path: Path) -> None:
    for name in ("data_path", "val_data_path", "test_data_path"):
        config = write_config(tmp_path / name, site.keys() | {name: "https://user:CANARY@host/x?token=CANARY"})
        for words in ((), ("--config_override", "data_split=https://user:CANARY@host/y")):
            refused = run_here(config, *words)
            assert refused.code == 3, refused.err
            assert words or name in refused.err
            assert "CANARY" not in refused.out + refused.err
        for path in (tmp_path / name).rglob("*"):
            assert path == config or path.is_dir() or b"CANARY" not in path.read_bytes(), path


# Numbers


def test_weights_that_are_nan_as_loaded_are_refused(site: Site, tmp_path: Path) -> None:
    broken = tmp_path / "bert"
    shutil.copytree(site.bert, broken)
    weights = load_file(broken / "model.safetensors")
    name = "embeddings.word_embeddings.weight"
    weights[name][3, 4] = math.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    refused = run_keys(tmp_path, site.keys(model_name=str(broken)))
    assert refused.code == 4
    assert f"1 weights are NaN or infinite as loaded, the first is backbone.{name}" in refused.err


def poison(monkeypatch: pytest.MonkeyPatch, calls: set[int], value: float = math.nan) -> None:
    """Make the loss of some steps, counted from 1, not finite."""
    gradients = InfoNCE.gradients
    count = 0

    def poisoned(self: InfoNCE, *arguments: Any) -> LossGradients:
        nonlocal count
        count += 1
        factor = value if count in calls else 1.0
        found = gradients(self, *arguments)
        found.dq_QE.mul_(factor)
        found.dd_DE.mul_(factor)
        return found._replace(loss=found.loss * factor)

    monkeypatch.setattr(InfoNCE, "gradients", poisoned)


@pytest.mark.parametrize("fp16", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_nan_loss_stops_the_run_before_any_weight_changes(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fp16: bool
) -> None:
    config = write_config(tmp_path, site.keys(save_steps=1, fp16=fp16))
    with monkeypatch.context() as patch:
        poison(patch, {4})
        stopped = run_here(config)
    assert stopped.code == 4
    assert "step 4: the loss is nan" in stopped.err
    assert "No weight was changed" in stopped.err
    report = json.loads((stopped.folder / "nonfinite-step-4.json").read_text())
    assert report["loss"] == "nan"
    lines = [int(place.removeprefix("train.jsonl:")) for place in report["rows"]]
    assert len(set(lines)) == 16
    assert all(1 <= line <= len(site.train.read_text("utf-8").splitlines()) for line in lines)
    assert steps_saved(stopped.folder)[-1] == 3
    for part in ("model", "optimizer"):
        for name, tensor in load_file(stopped.folder / f"checkpoints/step-00000003/{part}.safetensors").items():
            assert tensor.isfinite().all(), name
    resumed = run_here(config)
    assert resumed.code == 0, resumed.err
    monkeypatch.undo()
    assert resumed.same_rows == run_keys(tmp_path / "whole", site.keys(save_steps=1, fp16=fp16)).same_rows


def test_weights_that_overflow_stop_the_run_with_the_last_checkpoint_finite(site: Site, tmp_path: Path) -> None:
    keys = site.keys(learning_rate=1e38, scheduler_type="constant", save_steps=1, warmup_steps=2)
    stopped = run_keys(tmp_path, keys)
    assert stopped.code == 4, stopped.err
    assert "Traceback" not in stopped.err
    for folder in (stopped.folder / "checkpoints").glob("step-*"):
        for name, tensor in load_file(folder / "model.safetensors").items():
            assert tensor.isfinite().all(), name
    assert not (stopped.folder / "model").exists()


def test_bad_steps_may_be_skipped_up_to_a_limit(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = site.keys(nonfinite_policy="skip", max_skipped_steps=2)
    with monkeypatch.context() as patch:
        poison(patch, {2, 5})
        skipped = run_keys(tmp_path / "two", keys)
    assert skipped.code == 0, skipped.err
    assert [row["loss"] is None for row in skipped.rows] == [step in (2, 5) for step in range(1, 9)]
    assert "step skipped (2 of at most 2)" in skipped.out
    report = skipped.folder / "report"
    assert json.loads((report / "report.json").read_text())["curves"]["loss"]["num_non_finite"] == 2
    assert "2 values NaN or infinite, left out" in (report / "report.md").read_text()
    assert {path.name for path in skipped.folder.glob("nonfinite*")} == {
        "nonfinite-step-2.json",
        "nonfinite-step-5.json",
    }
    with monkeypatch.context() as patch:
        poison(patch, {2, 5, 6})
        stopped = run_keys(tmp_path / "three", keys)
    assert stopped.code == 4
    assert "all that max_skipped_steps allows" in stopped.err
    state = json.loads((skipped.folder / "checkpoints/step-00000008/state.json").read_text())
    assert state["run"]["skipped_steps"] == 2


def test_the_report_of_a_bad_step_names_the_module_that_is_at_fault(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clipping by a norm that is NaN would make every gradient NaN and hide where it began."""
    from transformers.models.bert.modeling_bert import BertModel

    build = BertModel.forward

    def hooked(self: BertModel, *words: Any, **options: Any) -> Any:
        bias = self.encoder.layer[1].output.dense.bias
        if not bias._backward_hooks:
            bias.register_hook(lambda gradient: gradient * math.nan)
        return build(self, *words, **options)

    monkeypatch.setattr(BertModel, "forward", hooked)
    stopped = run_keys(tmp_path, site.keys())
    assert stopped.code == 4
    norms = json.loads((stopped.folder / "nonfinite-step-1.json").read_text())["module_grad_norms"]
    assert [name for name, norm in norms.items() if isinstance(norm, str)] == [
        "encoder.backbone.encoder.layer.1.output.dense"
    ]
    assert "not finite in encoder.backbone.encoder.layer.1.output.dense" in stopped.err


@pytest.mark.slow
def test_a_float16_overflow_lowers_the_scale_and_is_no_bad_step(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "FIRST_SCALE", 2.0**24)
    outcome = run_keys(tmp_path, site.keys(fp16=True, max_steps=16, eval_steps=16))
    assert outcome.code == 0, outcome.err
    overflows = [step for step, row in enumerate(outcome.rows, start=1) if row["grad_norm"] is None]
    assert overflows[0] == 1
    assert 1 < len(overflows) < 16
    assert all(math.isfinite(loss) for loss in outcome.losses)
    assert f"float16 overflow at scale {2.0**24:g}; skipped" in outcome.out
    assert not list(outcome.folder.glob("nonfinite*"))
    state = json.loads((outcome.folder / "checkpoints/step-00000016/state.json").read_text())
    assert state["run"]["skipped_steps"] == 0
    assert state["updater"]["scaler"]["scale"] == 2.0 ** (24 - len(overflows))


# The output folder


@pytest.mark.slow
def test_another_run_in_the_folder_is_refused_unless_it_may_be_deleted(site: Site, tmp_path: Path) -> None:
    config = write_config(tmp_path, site.keys())
    first = run_here(config)
    losses = first.losses
    (first.folder / "notes.txt").write_text("mine")
    (first.folder / "nonfinite-step-99.json").write_text("{}")
    refused = run_here(config, "--resume", "never")
    assert refused.code == 2
    assert "holds another run" in refused.err
    assert refused.losses == losses
    again = run_here(config, "--resume", "never", "--config_override", "overwrite_output_dir=true", "seed=1")
    assert again.code == 0, again.err
    assert [row["step"] for row in again.rows] == list(range(1, 9))
    assert again.losses != losses
    assert (again.folder / "notes.txt").read_text() == "mine"
    assert not (again.folder / "nonfinite-step-99.json").exists(), "it belongs to the run that was deleted"


@pytest.mark.parametrize("words", [(), ("--plan",), ("--config_override", "overwrite_output_dir=true")])
def test_files_of_others_with_the_names_of_a_run_are_never_replaced(
    site: Site, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """`output_dir: .` in a project that has a model/ and keeps its configuration in config.yaml."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.bin").write_text("years of work")
    config = write_config(tmp_path, site.keys() | {"output_dir": str(tmp_path)})
    text = config.read_text()
    refused = run_here(config, *words)
    assert refused.code == 2, refused.out
    assert "holds config.yaml, model, which no run wrote" in refused.err
    assert str(tmp_path / "run") in refused.err
    assert (tmp_path / "model/weights.bin").read_text() == "years of work"
    assert config.read_text() == text


@pytest.mark.parametrize("words", [(), ("--plan",)])
def test_a_file_in_the_place_of_the_output_folder_is_an_error_of_the_machine(
    site: Site, tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "out").write_text("a file")
    refused = run_keys(tmp_path, site.keys(), *words)
    assert refused.code == 5
    assert "can't be written" in refused.err
    assert "Traceback" not in refused.err
    assert (tmp_path / "out").read_text() == "a file"
    (tmp_path / "out").unlink()
    assert run_keys(tmp_path, site.keys(), "--plan").code == 0


def test_a_model_that_is_not_there_ends_before_anything_is_trained(site: Site, tmp_path: Path) -> None:
    refused = run_keys(tmp_path, site.keys(model_name="builtin:ngram-bg"))
    assert refused.code == 2
    assert "did you mean builtin:ngram-bag?" in refused.err
    assert run_keys(tmp_path, site.keys(model_name="nobody/nothing")).code == 5


def test_a_bug_keeps_its_traceback(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(vembed.training.planning, "make_plan", fail)
    with pytest.raises(ZeroDivisionError, match="ours"):
        run_keys(tmp_path, site.keys(), "--plan")
