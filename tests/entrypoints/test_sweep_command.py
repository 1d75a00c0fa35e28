"""`vembed sweep` and `seeds`: refused early and in the house's words, killed and gone on with, one table at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from kit.runs import ROOT, Site, write_config

import vembed
from vembed.config.load import load_config
from vembed.entrypoints import sweep, train
from vembed.errors import ConfigError, ExitCode
from vembed.workflows.sweeping.process import TrainProcess
from vembed.workflows.sweeping.trials import Request, Trial

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TRIES = ("--try", "learning_rate=1e-3,3e-3,1e-2", "temperature=0.05,0.2")


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Call the command in this process; it is to be refused before anything is trained."""
    code = sweep.main([str(word) for word in words], program="vembed sweep")
    assert code == ExitCode.CONFIG
    return capsys.readouterr().err


def test_every_trial_is_checked_before_the_first_one_starts(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, site.keys())
    told = refused(capsys, config, "--try", "learning_rate=1e-3,none", "temperature=0.1,-1")
    assert "override learning_rate=none: must be a number" in told
    assert "override temperature=-1" in told
    assert len(told.splitlines()) == 2
    told = refused(capsys, config, "--try", f"model_name={site.bert},/no/such/model")
    assert "/no/such/model" in told
    assert not (tmp_path / "out-sweep").exists()


@pytest.mark.parametrize(
    ("words", "keys", "told"),
    [
        (("--try", "lerning_rate=1"), {}, "did you mean learning_rate"),
        (("--try", "learning_rate=1e-5..1e-3"), {}, "--random N"),
        (("--try", "temperature=0.1", "--random", "0"), {}, "--random: must be >= 1, got 0"),
        (("--try", "temperature=0.1", "--seed", "-1"), {}, "--seed: must be >= 0, got -1"),
        (("--try", "temperature=0.1", "--seed", "0"), {}, "--seed has an effect only with --random or --optuna"),
        (("--try", "lr=1e-3", "--config_override", "learning_rate=1"), {}, "given by --config_override and tried"),
        (("--try", "temperature=0.1,0.2"), {"eval_strategy": "no", "eval_steps": None}, "no dev result to choose by"),
        (("--try", "data_path=a,b"), {"val_data_path": None}, "set val_data_path"),
        (("--try", "temperature=0.1,0.2"), {"seeds": [1, 2]}, "try seed=1,2,3"),
    ],
)
def test_what_a_sweep_cannot_do_is_refused_with_the_way_out(
    words: tuple[str, ...], keys: dict[str, Any], told: str, site: Site, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "a").write_text(site.train.read_text("utf-8"))
    (tmp_path / "b").write_text(site.train.read_text("utf-8"))
    for name in ("a", "b"):
        (tmp_path / name).rename(tmp_path / f"{name}.jsonl")
    words = tuple(word.replace("=a,b", f"={tmp_path}/a.jsonl,{tmp_path}/b.jsonl") for word in words)
    assert told in refused(capsys, write_config(tmp_path, site.keys(**keys)), *words)


def test_a_tracker_whose_package_is_missing_is_refused_before_anything_is_trained(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vembed.training.trackers._is_installed", lambda _: False)
    for module in ("vembed.entrypoints.train", "vembed.workflows.sweeping.sweep"):
        monkeypatch.setattr(f"{module}.hold_output", lambda folder: pytest.fail(f"{folder} was begun"))
    one = write_config(tmp_path, site.keys(report_to="wandb"))
    assert train.main([str(one)]) == ExitCode.ENVIRONMENT
    assert sweep.main([str(one), "--try", "temperature=0.1,0.2"], program="vembed sweep") == ExitCode.ENVIRONMENT
    assert train.main([str(write_config(tmp_path, site.keys(report_to="wandb", seeds=[1, 2])))]) == ExitCode.ENVIRONMENT
    assert capsys.readouterr().err.count('pip install "vembed[wandb]"') == 3


def test_a_folder_goes_on_only_with_what_it_was_begun_with(site: Site, tmp_path: Path) -> None:
    path = write_config(tmp_path, site.keys())
    folder = tmp_path / "sweep"
    first = load_config(path, ["learning_rate=1e-3"]).config
    asked = Request.of(("--try learning_rate=1e-3,1e-2",), first, {"learning_rate"})
    asked.go_on(folder, first)
    harmless = load_config(path, ["learning_rate=1e-2", "logging_steps=5"]).config
    asked.go_on(folder, harmless)
    other = load_config(path, ["learning_rate=1e-2", "batch_size=8"]).config
    with pytest.raises(ConfigError, match=r"batch_size: 16 before, 8 now\nSet this back .* delete it to start anew"):
        Request.of(asked.asked, other, {"learning_rate"}).go_on(folder, other)
    with pytest.raises(ConfigError, match="--try learning_rate=1e-3,1e-2 before, --try learning_rate=1e-3 now"):
        Request.of(("--try learning_rate=1e-3",), first, {"learning_rate"}).go_on(folder, first)
    (folder / "request.json").write_text("[]")
    with pytest.raises(ConfigError, match="can't be read"):
        asked.go_on(folder, first)
    (folder / "request.json").unlink()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds other files"):
        asked.go_on(folder, first)


def test_a_process_that_fails_leaves_the_reason_that_it_told(site: Site, tmp_path: Path) -> None:
    config = write_config(tmp_path, site.keys(data_path="/no/such/rows.jsonl"))
    process = TrainProcess(config, ["lr=1e-3"], lambda: None)
    words = process.words({"learning_rate": "2e-3", "output_dir": "'x'"})
    assert words[-2:] == ["learning_rate=2e-3", "output_dir='x'"]
    assert "lr=1e-3" not in words  # the trial's value stands in its place
    folder = tmp_path / "trials" / "01"
    assert "/no/such/rows.jsonl" in process(Trial("01", {"learning_rate": "2e-3"}), folder)


def test_seeds_are_refused_where_they_cannot_run(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(**changes: Any) -> str:
        code = train.main([str(write_config(tmp_path, site.keys(**changes)))])
        assert code == ExitCode.CONFIG
        return capsys.readouterr().err

    assert "seed 1 is listed twice" in told(seeds=[1, 1])
    assert "seeds" in told(seeds=[1])
    assert "eval_strategy no leaves it out" in told(seeds=[1, 2], eval_strategy="no", eval_steps=None)
    assert "each run continues from its own checkpoint" in told(seeds=[1, 2], resume="never")
    with pytest.raises(ConfigError, match="call this once per seed with seed=N"):
        vembed.train(site.keys(seeds=[1, 2], output_dir=str(tmp_path / "python")), quiet=True)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "localhost"),
                        ("MASTER_PORT", "29500"), ("LOCAL_WORLD_SIZE", "1")):  # fmt: skip
        monkeypatch.setenv(name, value)
    assert "launch once per seed with seed=N seeds=null" in told(seeds=[1, 2])


def start(config: Path, output: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vembed", "sweep", str(config), *words, "--output", str(output)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)


def kill_when(started: subprocess.Popen[str], there: Callable[[], bool]) -> None:
    """Kill the command, and nothing else, as soon as something is there."""
    until = time.monotonic() + 300
    while not there() and started.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert started.poll() is None, "it ended before it was killed"
    os.kill(started.pid, signal.SIGKILL)
    started.wait()


def table_of(output: str) -> str:
    return output[output.index("\n  #  ") : output.index("report: ")]


@pytest.mark.slow
def test_a_sweep_killed_twice_ends_in_the_same_table(site: Site, tmp_path: Path) -> None:
    config = write_config(tmp_path, site.keys(save_steps=2))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    straight, _ = start(config, whole, *TRIES).communicate(timeout=600)
    for trial in ("02", "05"):
        started = start(config, killed, *TRIES)
        kill_when(started, lambda: bool(list(killed.glob(f"trials/{trial}_*/checkpoints/step-*"))))  # noqa: B023
    again, _ = start(config, killed, *TRIES).communicate(timeout=600)
    assert again.count("done before") >= 4
    assert table_of(again) == table_of(straight).replace(str(whole), str(killed))
    one, other = (json.loads((folder / "sweep.json").read_text()) for folder in (whole, killed))
    assert one["trials"] == other["trials"]
    assert len(one["trials"]) == 6
    page = (killed / "sweep.html").read_text("utf-8")
    assert "learning_rate" in page
    assert "<svg" in page
    assert (killed / "comparison" / "compare.html").is_file()


@pytest.mark.slow
def test_seeds_end_in_an_interval_and_the_best_model(site: Site, tmp_path: Path) -> None:
    config = write_config(tmp_path, site.keys(seeds=[1, 2, 3]))
    command = [sys.executable, str(ROOT / "run.py"), str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.strip().splitlines()
    assert last.endswith("20 queries, 3 seeds)")
    folder = tmp_path / "out"
    report = json.loads((folder / "seeds.json").read_text())
    assert report["seeds"] == [1, 2, 3]
    assert report["verdict"]["low"] < report["verdict"]["difference"] < report["verdict"]["high"]
    best = max(range(3), key=lambda place: report["dev"][place])
    assert report["kept"] == f"seed-{best + 1}"
    kept = folder / report["kept"] / "model"
    for path in kept.rglob("*"):
        if path.is_file():
            assert (folder / "model" / path.relative_to(kept)).read_bytes() == path.read_bytes()
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.stdout.count("done before") == 3
    assert again.stdout.strip().splitlines()[-1] == last
