"""What one run leaves: the files of the contract and nothing else, a verdict, a model that gives its numbers again."""

from __future__ import annotations

import json
import math
import re
import shlex
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml
from kit.runs import Site, evaluation, run_here, run_keys, steps_saved, word_pairs, write_config, write_rows

import vembed.__main__
import vembed.evaluation.report.run_report
from vembed.data.read import DataSource
from vembed.evaluation.evaluate import EvaluationOptions, evaluate
from vembed.gradcache.chunks import ChunkBudget
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder
from vembed.registry import TRACKERS
from vembed.training.trackers import Tracker
from vembed.vectors.encode import ItemEncoder

if TYPE_CHECKING:
    from pathlib import Path

    from kit.runs import Outcome

METRIC_KEYS = {
    "step", "epoch", "loss", "learning_rate", "grad_norm", "samples_per_second", "tokens_per_second",
    "peak_memory_bytes", "padding_ratio", "replay_drift", "step_seconds", "data_seconds", "encode_seconds",
    "loss_seconds", "update_seconds",
}  # fmt: skip
PLAN_KEYS = {
    "strategy", "reasons", "world_size", "batch_size", "global_batch_size", "gradient_cache_chunk_size",
    "gradient_cache_chunk_tokens", "retain", "dtype", "steps", "candidates",
}  # fmt: skip


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_run_ends_well_and_its_last_line_is_the_verdict(finished: Outcome) -> None:
    assert finished.code == 0, finished.err
    assert finished.last_line.startswith("improved: ndcg@10 ")
    assert "Traceback" not in finished.out + finished.err
    report = json.loads((finished.folder / "report" / "report.json").read_text())
    assert finished.last_line in json.dumps(report, ensure_ascii=False)


def test_the_end_tells_the_time_and_commands_that_work_as_they_stand(
    finished: Outcome, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = finished.out.splitlines()
    assert re.fullmatch(
        r"time +\d+:\d\d for 16 steps: \d+:\d\d steps, \d+:\d\d evaluation, \d+:\d\d start, saving and report",
        lines[-2],
    )
    place = next(number for number, line in enumerate(lines) if line.startswith("next "))
    commands = [line.removeprefix("next").strip() for line in lines[place:-2]]
    assert [command.split()[:3] for command in commands] == [
        ["vembed", "evaluate", f"{finished.folder}/model"], ["vembed", "export", str(finished.folder)]
    ]  # fmt: skip
    monkeypatch.setattr("sys.argv", shlex.split(commands[0]))
    assert vembed.__main__.main() == 0
    final = evaluation(finished.folder, "final")["metrics"]["ndcg@10"]
    assert f"{final:.3f}"[1:] in capsys.readouterr().out, "the number of the run"


def test_the_lines_of_steps_stand_in_columns_and_tell_the_time_left(finished: Outcome) -> None:
    lines = [line for line in finished.out.splitlines() if re.match(r"step +\d+/16  ", line)]
    assert len(lines) == 16
    assert len({line.index("/s") for line in lines}) == 1
    assert max(map(len, lines)) <= 80
    assert all(re.search(r"  \d+:\d\d left$", line) for line in lines[:-1])
    assert lines[-1].endswith("/s")


def test_the_output_folder_holds_the_files_of_the_contract_and_nothing_else(finished: Outcome) -> None:
    folder = finished.folder
    assert names(folder) == {
        "config.yaml", "plan.json", "metrics.jsonl", "train.log", "checkpoints", "model", "evaluation", "report"
    }  # fmt: skip
    assert names(folder / "evaluation") == {"baseline", "final", "step-0", "step-8", "step-16"}
    for name in names(folder / "evaluation"):
        assert names(folder / "evaluation" / name) == {"metrics.json", "per_query.json", "run.trec"}
    assert names(folder / "report") == {"report.html", "report.md", "report.json"}
    assert names(folder / "checkpoints") == {"BEST", "LATEST", "step-00000008", "step-00000016"}


def test_the_report_has_a_map_of_what_the_trained_model_made(finished: Outcome) -> None:
    assert "## Embedding map" in (finished.folder / "report" / "report.md").read_text("utf-8")


def test_without_a_test_set_the_baseline_is_said_once(site: Site, tmp_path: Path) -> None:
    run = run_keys(tmp_path, site.keys(test_data_path=None, max_steps=2, eval_steps=2))
    assert run.code == 0, run.err
    said = [line.split()[0] for line in (run.out + run.err).splitlines() if "  mrr@10 " in line]
    assert said == ["step-0", "step-2", "final"]


def test_what_is_written_beside_the_contract_belongs_to_an_option(site: Site, tmp_path: Path) -> None:
    keys = site.keys(model_name="builtin:tiny-transformer", max_steps=1, eval_steps=1, report_to="tensorboard")
    assert run_keys(tmp_path, keys | {"bm25": True}).code == 0
    extra = names(tmp_path / "out") - {
        "config.yaml", "plan.json", "metrics.jsonl", "train.log", "checkpoints", "model", "evaluation", "report"
    }  # fmt: skip
    assert extra == {"initial_model", "tensorboard"}
    assert "bm25" in names(tmp_path / "out" / "evaluation")


def test_metrics_hold_each_step_once_with_the_keys_of_the_contract(finished: Outcome) -> None:
    rows = finished.rows
    assert [row["step"] for row in rows] == list(range(1, 17))
    for row in rows:
        assert row.keys() >= METRIC_KEYS
        assert all(math.isfinite(value) for value in row.values())
    assert rows[5]["epoch"] == 1.0
    assert rows[0]["learning_rate"] == 0
    assert max(row["learning_rate"] for row in rows) == pytest.approx(3e-3)
    assert rows[0]["temperature"] == pytest.approx(0.1)
    assert rows[-1]["temperature"] != rows[1]["temperature"]
    assert all(row["padding_ratio"] >= 1 for row in rows)


def test_the_parts_of_a_step_are_parts_of_it_and_the_run_says_where_its_time_went(finished: Outcome) -> None:
    parts = ("data_seconds", "encode_seconds", "loss_seconds", "update_seconds")
    for row in finished.rows[1:]:
        spent = sum(row[part] for part in parts)
        assert all(row[part] > 0 for part in parts)
        assert spent <= row["step_seconds"], "no part is counted twice"
        assert "wait_seconds" not in row, "one process waits for no other"
    report = json.loads((finished.folder / "report" / "report.json").read_text())
    assert report["time_of_a_step"]["num_steps"] == 15
    assert report["performance"]["processes"] == 1
    assert report["performance"]["global_batch_size"] == 16
    shown = [f"{finding['cause']}: {finding['sentence']}" for finding in report["findings"]]
    assert all(line in finished.out for line in shown or ["nothing stands out"])
    assert "time of step  " in finished.out


def test_the_loss_falls(finished: Outcome) -> None:
    full = [row["loss"] for row in finished.rows if row["epoch"] % 1]  # the last batch of an epoch is smaller
    assert full[-1] < 0.7 * full[0]


def test_plan_has_the_keys_of_the_contract(finished: Outcome) -> None:
    plan = json.loads((finished.folder / "plan.json").read_text())
    assert plan.keys() >= PLAN_KEYS
    assert (plan["strategy"], plan["world_size"], plan["steps"]) == ("single", 1, 16)
    assert (plan["batch_size"], plan["global_batch_size"]) == (16, 16)
    assert plan["dtype"] == "float32"
    (candidate,) = [each for each in plan["candidates"] if each["recommended"]]
    assert candidate.keys() >= {"strategy", "bytes_per_device", "fits", "relative_speed", "estimated"}
    parts = candidate["bytes_per_device"]
    assert parts.keys() >= {"parameters", "gradients", "optimizer", "activations", "loss", "total"}
    assert parts["total"] == sum(count for part, count in parts.items() if part != "total")
    assert (
        f"{len(plan['reasons'])} reasons and {len(plan['candidates'])} strategies compared: see --plan --details"
        in finished.flat
    )
    assert "The last batch of each epoch has 4 records instead of 16." in plan["reasons"]


def test_config_keeps_auto_and_the_plan_what_became_of_it(finished: Outcome) -> None:
    config = yaml.safe_load((finished.folder / "config.yaml").read_text())
    plan = json.loads((finished.folder / "plan.json").read_text())
    assert config["gradient_cache_chunk_tokens"] == "auto"
    assert plan["gradient_cache_chunk_tokens"] > 0
    assert config["learning_rate"] == 3e-3


def test_the_log_file_holds_what_was_printed(finished: Outcome) -> None:
    log = (finished.folder / "train.log").read_text()
    for line in finished.out.splitlines():
        assert line.removeprefix("warning: ") in log


def test_the_model_reloads_and_gives_the_final_metrics_again(finished: Outcome, site: Site) -> None:
    encoder = load_encoder(ModelKeys(model_name=str(finished.folder / "model")))
    task = DataSource(str(site.test), "test").judged()
    encode = ItemEncoder(encoder, ChunkBudget(256, 10**6), torch.device("cpu"))
    again = evaluate(encode, task, EvaluationOptions(system="again"))
    assert dict(again.metrics) == evaluation(finished.folder, "final")["metrics"]
    untrained = ItemEncoder(
        load_encoder(ModelKeys(model_name=str(site.bert))), ChunkBudget(256, 10**6), torch.device("cpu")
    )
    assert dict(evaluate(untrained, task, EvaluationOptions(system="untrained")).metrics) != dict(again.metrics)


def test_the_model_is_the_checkpoint_that_the_dev_set_chose(site: Site, tmp_path: Path) -> None:
    outcome = run_keys(tmp_path, site.keys(max_steps=12, eval_steps=2, learning_rate=2e-2, scheduler_type="constant"))
    assert outcome.code == 0
    scores = {step: evaluation(outcome.folder, f"step-{step}")["metrics"]["ndcg@10"] for step in range(2, 13, 2)}
    best = max(scores, key=lambda step: (scores[step], -step))
    assert best < 12, "the learning rate must be so high that the last step isn't the best"
    assert f"step {best}, the best on the dev set" in outcome.out
    assert best in steps_saved(outcome.folder)
    kept = load_encoder(ModelKeys(model_name=str(outcome.folder / "model")))
    task = DataSource(str(site.dev), "validation").judged()
    encode = ItemEncoder(kept, ChunkBudget(256, 10**6), torch.device("cpu"))
    assert evaluate(encode, task, EvaluationOptions(system="kept")).metrics["ndcg@10"] == scores[best]


@pytest.mark.slow
def test_a_best_checkpoint_that_was_lost_is_said_and_not_passed_over(site: Site, tmp_path: Path) -> None:
    config = write_config(tmp_path, site.keys(max_steps=10, eval_steps=2, learning_rate=2e-2))
    whole = run_here(config)
    best = json.loads((whole.folder / "checkpoints/step-00000010/state.json").read_text())["run"]["best_step"]
    assert best < 10
    (whole.folder / f"checkpoints/step-{best:08d}/model.safetensors").write_bytes(b"broken")
    again = run_here(config)
    assert again.code == 0, again.err
    assert re.search(f"warning: step {best} was the best, but has no whole checkpoint; step \\d+ is kept", again.out)
    assert "was the best, but" not in whole.out


@pytest.mark.slow
def test_a_run_that_makes_its_model_worse_keeps_a_trained_one_and_says_so(site: Site, tmp_path: Path) -> None:
    good = run_keys(tmp_path / "good", site.keys(max_steps=16, eval_steps=8))
    keys = site.keys(model_name=str(good.folder / "model"), learning_rate=0.5, max_steps=4, eval_steps=2)
    spoilt = run_keys(tmp_path / "spoilt", keys)
    assert spoilt.code == 0, spoilt.err
    assert spoilt.last_line.startswith("worse: ndcg@10")
    assert re.search("step [24], the best on the dev set", spoilt.out)


def test_running_a_finished_run_again_trains_nothing_and_ends_the_same(site: Site, tmp_path: Path) -> None:
    config = write_config(tmp_path, site.keys())
    first = run_here(config)
    weights = (first.folder / "model/model.safetensors").read_bytes()
    second = run_here(config)
    assert (second.code, second.last_line) == (0, first.last_line)
    assert second.rows == first.rows
    assert (second.folder / "model/model.safetensors").read_bytes() == weights
    assert "resume: continuing from" in second.out


def test_early_stopping_ends_the_run_and_a_second_start_does_not_go_on(site: Site, tmp_path: Path) -> None:
    keys = site.keys(learning_rate=1e-12, max_steps=20, eval_steps=2, early_stopping_patience=2)
    config = write_config(tmp_path, keys)
    first = run_here(config)
    assert first.code == 0
    assert [row["step"] for row in first.rows] == [1, 2, 3, 4, 5, 6]
    assert "stopped early: 2 evaluations without a better dev metric than" in first.out
    second = run_here(config)
    assert second.code == 0
    assert second.rows == first.rows


@pytest.mark.parametrize("error", [RuntimeError("no ink"), pytest.param(OSError("no ink"), marks=pytest.mark.slow)])
def test_a_report_that_fails_leaves_the_model_the_verdict_and_exit_code_0(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(vembed.evaluation.report.run_report, "write_report", fail)
    outcome = run_keys(tmp_path, site.keys())
    assert outcome.code == 0
    assert "error: the report could not be written; the model is complete" in outcome.err
    assert "no ink" in outcome.err
    assert ("Traceback" in outcome.err) == isinstance(error, RuntimeError), "a full disk is no fault of the program"
    assert outcome.last_line.startswith("improved")
    assert load_encoder(ModelKeys(model_name=str(outcome.folder / "model"))).dimension == 32
    assert not (outcome.folder / "report").exists()


def test_a_tracker_that_fails_does_not_stop_the_run(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Tracker):
        name = "tensorboard"

        def log(self, step: int, values: object) -> None:
            raise ConnectionError("nobody listens")

        log_evaluation = log

        def close(self) -> None:
            raise ConnectionError("nobody listens")

    monkeypatch.setitem(TRACKERS._entries, "tensorboard", Failing)
    outcome = run_keys(tmp_path, site.keys(report_to="tensorboard"))
    assert outcome.code == 0
    assert outcome.out.count("nobody listens") == 1
    assert "warning: Tracker tensorboard failed and is switched off" in outcome.out
    assert len(outcome.rows) == 8


def test_a_secret_of_the_environment_is_nowhere(finished: Outcome) -> None:
    canary = b"hf_canary0123456789secret"
    files = [path for path in finished.folder.rglob("*") if path.is_file()]
    assert len(files) > 20
    for path in files:
        assert canary not in path.read_bytes(), path
    assert canary.decode() not in finished.out + finished.err


class Elements(HTMLParser):
    """Collects what a browser would act on."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.handlers: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_markup_in_the_data_stays_text_in_the_report(site: Site, tmp_path: Path) -> None:
    attack = "</script><img src=x onerror=alert(1)>"
    rows: list[Any] = [{key: f"{text} {attack}" for key, text in row.items()} for row in word_pairs()[-20:]]
    test = write_rows(tmp_path / f"{'x' * 3}<img src=y onerror=alert(2)>.jsonl", rows)
    outcome = run_keys(tmp_path, site.keys(test_data_path=str(test)))
    assert outcome.code == 0, outcome.err
    page = (outcome.folder / "report/report.html").read_text()
    parser = Elements()
    parser.feed(page)
    assert any(attack in text for text in parser.text), "the attack must be shown, as text"
    assert "img" not in parser.tags
    assert parser.handlers == []
    parser_of_raw = Elements()
    parser_of_raw.feed(f"<p>{attack}</p>")
    assert parser_of_raw.tags == ["p", "img"], "the check itself sees the attack"
