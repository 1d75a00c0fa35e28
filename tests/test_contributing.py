"""The recipes of CONTRIBUTING.md do what they say: their code is taken from the page and run."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
from kit.recipes import write_recipe
from kit.warm import run_warm

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path


@pytest.fixture
def vembed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run the program in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        done = run_warm(["-m", "vembed", *words], cwd=tmp_path, env=os.environ, scratch=tmp_path)
        assert done.returncode in (0, 2, 3), done.stderr
        return done

    return run


FAILING_COMMAND = """
import vembed

@vembed.register_command
def fail(arguments, *, program):
    raise vembed.DataError("no rows")
"""


def test_a_command_of_a_plugin_is_listed_and_runs(vembed, tmp_path: Path) -> None:
    write_recipe(tmp_path, "my_commands")
    (tmp_path / "notes.txt").write_text("three short words")
    listing = vembed("--plugins", "my_commands", "--help")
    assert "count-words count the words of a file" in listing.stdout
    done = vembed("--plugins", "my_commands", "count-words", "notes.txt")
    assert (done.returncode, done.stdout) == (0, "3\n")
    unknown = vembed("count-words", "notes.txt")
    assert unknown.returncode == 2
    assert "no command 'count-words'" in unknown.stderr
    (tmp_path / "failing.py").write_text(FAILING_COMMAND)
    failed = vembed("--plugins=failing", "fail")
    assert (failed.returncode, failed.stderr) == (3, "error: no rows\n")
    missing = vembed("--plugins", "no_such_module", "train")
    assert missing.returncode == 2
    assert "there is no module no_such_module" in missing.stderr


def write_config(folder: Path, model: Path, settings: str) -> None:
    """Write pairs and a configuration that trains a small model on them."""
    rows = [{"query": f"colour {number}", "positive": f"farbe {number}"} for number in range(64)]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "config.yaml").write_text(
        f"model_name: {model}\ndata_path: train.jsonl\nbatch_size: 16\nbm25: false\noutput_dir: run\n"
        f"num_processes: 1\n{settings}"
    )


@pytest.mark.slow
def test_a_metric_of_a_plugin_chooses_the_best_checkpoint(vembed, bag: Path, tmp_path: Path) -> None:
    write_recipe(tmp_path, "my_metrics")
    write_config(tmp_path, bag, "max_steps: 2\neval_strategy: steps\neval_steps: 1\nreport_to: none\n")
    chosen = "metric_for_best_model=all_found@10"
    refused = vembed("train", "config.yaml", "--validate", "--config_override", chosen)
    assert refused.returncode == 2
    assert "must be NAME@K (NAME: ndcg" in refused.stderr
    misspelt = vembed(
        "train", "config.yaml", "--validate", "--config_override", "plugins=[my_metrics]",
        "metric_for_best_model=all_fund@10",
    )  # fmt: skip
    assert "hit, all_found; K: " in misspelt.stderr
    assert "did you mean all_found@10?" in misspelt.stderr
    done = vembed("train", "config.yaml", "--config_override", chosen, "plugins=[my_metrics]")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "run/evaluation/final/metrics.json").read_text())["metrics"]
    assert 0 < found["all_found@1"] <= found["all_found@100"] <= 1
    assert found["all_found@10"] == pytest.approx(found["recall@10"])  # every query here has one relevant document
    assert "all_found@10" in (tmp_path / "run/report/report.md").read_text()
    assert "my_metrics" in (tmp_path / "run/plan.json").read_text()


@pytest.mark.slow
def test_a_set_of_a_plugin_is_trained_on_and_evaluated(vembed, bag: Path, tmp_path: Path) -> None:
    write_recipe(tmp_path, "my_sets")
    (tmp_path / "config.yaml").write_text(
        f"model_name: {bag}\ndata_path: builtin:sums\ntest_data_path: builtin:sums\nbatch_size: 8\n"
        "max_steps: 2\neval_strategy: 'no'\nbm25: false\noutput_dir: run\nnum_processes: 1\nreport_to: none\n"
    )
    unknown = vembed("train", "config.yaml")
    assert unknown.returncode == 3
    assert "no built-in data set 'sums'; there are: pages, shapes, stdlib-code" in unknown.stderr
    done = vembed("train", "config.yaml", "--config_override", "plugins=[my_sets]")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "run/report/report.json").read_text())
    assert "sums/test: 3 queries, 3 documents" in json.dumps(report)
    assert "my_sets.py) registers data set sums" in (tmp_path / "run/plan.json").read_text()


@pytest.mark.slow
def test_a_format_of_a_plugin_is_read_by_commands_and_its_printed_tests_pass(vembed, tmp_path: Path) -> None:
    write_recipe(tmp_path, "my_formats")
    write_recipe(tmp_path, "test_my_formats")
    (tmp_path / "rows.pairs").write_text("what is red => a red thing\nwhat is blue => a blue thing\nno arrow\n")
    unknown = vembed("data", "show", "rows.pairs")
    assert unknown.returncode == 3
    assert "rows.pairs: unknown kind of file; expected .jsonl, .json, " in unknown.stderr
    refused = vembed("--plugins", "my_formats", "data", "show", "rows.pairs")
    assert refused.returncode == 3
    assert "rows.pairs:3: there is no => in the line" in refused.stderr
    (tmp_path / "config.yaml").write_text(
        "plugins: [my_formats]\nmodel_name: builtin:ngram-bag\ndata_path: rows.pairs\ntest_data_path: rows.pairs\n"
    )
    (tmp_path / "rows.pairs").write_text("what is red => a red thing\nwhat is blue => a blue thing\n")
    shown = vembed("--plugins", "my_formats", "data", "show", "rows.pairs")
    assert shown.returncode == 0, shown.stderr
    assert "a blue thing" in shown.stdout
    done = vembed("train", "config.yaml", "--validate")
    assert done.returncode == 0, done.stderr
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_formats.py"]
    tests = run_warm(words, cwd=tmp_path, env=os.environ, scratch=tmp_path)
    assert tests.returncode == 0, tests.stdout
    assert " passed" in tests.stdout


BROKEN = """
import vembed
from vembed.training.trackers import Tracker

@vembed.register_tracker
class Broken(Tracker):
    name = "broken"

    def log(self, step, values):
        raise ConnectionError("the server is down")

@vembed.register_tracker
class Unmade(Tracker):
    name = "unmade"

    def __init__(self, *arguments, **named):
        raise ConnectionError("no such server")
"""


@pytest.mark.slow
def test_trackers_of_plugins_get_every_step_and_failing_ones_stop_nothing(vembed, bag: Path, tmp_path: Path) -> None:
    write_recipe(tmp_path, "my_trackers")
    (tmp_path / "broken.py").write_text(BROKEN)
    write_config(tmp_path, bag, "max_steps: 3\neval_strategy: 'no'\n")
    wanted = "report_to=[broken, loss-table, unmade]"
    refused = vembed("train", "config.yaml", "--validate", "--config_override", wanted)
    assert refused.returncode == 2
    assert (
        "must be tensorboard, wandb, mlflow, trackio, swanlab, all, none or a list "
        "[tensorboard, wandb, mlflow, trackio or swanlab, ...]" in refused.stderr
    )
    done = vembed("train", "config.yaml", "--config_override", wanted, "plugins=[my_trackers, broken]")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    table = [line.split(",") for line in (tmp_path / "run/trackers/loss-table/loss.csv").read_text().splitlines()]
    assert [(int(step), float(loss)) for step, loss in table] == [(row["step"], row["loss"]) for row in rows]
    assert len(rows) == 3
    log = (tmp_path / "run/train.log").read_text()
    assert log.count("Tracker broken failed") == 1
    assert "Tracker unmade failed and is switched off" in log
    assert "my_trackers.py) registers tracker loss-table" in (tmp_path / "run/plan.json").read_text()
