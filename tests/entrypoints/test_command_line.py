"""The command line itself: what only looks, what refuses, and that every way of starting is the same run."""

from __future__ import annotations

import io
import json
import logging
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from kit.runs import ROOT, RUN, Site, environment, run_here, run_keys, write_config

from vembed.entrypoints import command, export
from vembed.entrypoints.command import quiet_libraries, run_command
from vembed.entrypoints.train import main
from vembed.registry import COMMANDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TRAIN = ROOT / "vembed" / "entrypoints" / "train.py"
HEAVY = ("torch", "transformers", "datasets", "accelerate", "faiss")  # pyarrow, which holds the rows, takes 60 ms


def test_validate_is_quick_and_imports_nothing_heavy(site: Site, tmp_path: Path) -> None:
    config = write_config(tmp_path, site.keys())
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(RUN), str(config), "--validate"],
        capture_output=True, text=True, cwd=tmp_path, env=environment(), check=False,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0
    assert f"{config}: valid, " in done.stdout
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "pydantic" in modules, "the list of imports must be one"
    assert not modules & set(HEAVY)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3  # under one, on an idle machine
    assert not (tmp_path / "out").exists()


def test_validate_refuses_what_training_would_refuse_and_warns_of_missing_data(site: Site, tmp_path: Path) -> None:
    wrong = run_keys(tmp_path, site.keys(batch_size=1), "--validate")
    assert wrong.code == 2
    assert "batch_size" in wrong.err
    unknown = run_keys(tmp_path, site.keys(model_name="builtin:ngram-bg"), "--validate")
    assert unknown.code == 2
    assert "no built-in model 'builtin:ngram-bg'; did you mean builtin:ngram-bag?" in unknown.err
    right = run_keys(tmp_path, {"model_name": "builtin:ngram-bag"}, "--validate")
    assert right.code == 0
    assert "warning: data_path is not set; training needs it (data_path=builtin:stdlib-code is built in)" in right.out


def test_validate_names_the_plugins_that_it_ran(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ran_when_validated.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    monkeypatch.chdir(tmp_path)
    done = run_keys(tmp_path, site.keys(plugins=["ran_when_validated"]), "--validate")
    assert done.code == 0, done.err
    assert (tmp_path / "ran").exists()
    file = tmp_path / "ran_when_validated.py"
    assert f"plugins: ran_when_validated ({file}) registers nothing; its code ran\n" in done.out


def test_a_run_is_named_in_place_of_its_model_and_the_plan_says_so(site: Site, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    (run / "plan.json").write_text("{}")
    (run / "model").symlink_to(site.bert)
    planned = run_keys(tmp_path, site.keys(model_name=str(run)), "--plan")
    assert planned.code == 0, planned.err
    assert f"{run} is a run: its model is {run / 'model'}" in planned.flat


@pytest.mark.parametrize("name", ["static", "ngram-bag"])
def test_every_built_in_model_of_texts_is_planned(name: str, site: Site, tmp_path: Path) -> None:
    planned = run_keys(tmp_path, site.keys(model_name=f"builtin:{name}"), "--plan")
    assert planned.code == 0, planned.err
    assert json.loads((planned.folder / "plan.json").read_text())


def test_a_tilde_is_the_home_of_the_user(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    planned = run_keys(tmp_path, {**site.keys(), "output_dir": "~/run"}, "--plan")
    assert planned.code == 0, planned.err
    assert (tmp_path / "home" / "run" / "plan.json").is_file()
    assert not (tmp_path / "~").exists()


def test_plan_writes_the_plan_and_trains_nothing(site: Site, tmp_path: Path) -> None:
    planned = run_keys(tmp_path, site.keys(), "--plan")
    assert planned.code == 0, planned.err
    assert {path.name for path in planned.folder.iterdir()} == {"config.yaml", "plan.json"}
    assert planned.out.startswith("plan\n")
    assert "step 1/" not in planned.out
    before = json.loads((planned.folder / "plan.json").read_text())
    trained = run_keys(tmp_path, site.keys())
    assert trained.code == 0, "a folder that holds a plan only is free for the run"
    assert json.loads((trained.folder / "plan.json").read_text()) == before


def test_a_plan_in_the_folder_of_a_run_leaves_the_runs_own(site: Site, tmp_path: Path) -> None:
    run_keys(tmp_path, site.keys(max_steps=1, eval_steps=1))
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    planned = run_keys(tmp_path, site.keys(max_steps=5), "--plan")
    assert planned.code == 0
    assert "plan.json is not written" in planned.out
    assert "5 (0.833 epochs of 6)" in planned.out
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before


def test_dry_run_does_one_step_and_writes_nothing(site: Site, tmp_path: Path) -> None:
    config = write_config(tmp_path, site.keys())
    before = sorted(tmp_path.rglob("*"))
    tried = run_here(config, "--dry-run")
    assert tried.code == 0, tried.err
    assert "dry run: one step of 16 queries" in tried.out
    assert "nothing was written" in tried.out
    assert sorted(tmp_path.rglob("*")) == before


def test_dry_run_does_the_first_step_of_the_run(site: Site, tmp_path: Path) -> None:
    keys = site.keys(model_name=str(site.bert_without_dropout), max_steps=1, eval_steps=1)
    tried = run_keys(tmp_path, keys, "--dry-run")
    (first,) = run_keys(tmp_path, keys).rows
    assert f"loss {first['loss']:.4f}, gradient norm {first['grad_norm']:.3g}" in tried.out


def test_only_one_of_the_three_looks_at_a_time(site: Site, tmp_path: Path) -> None:
    refused = run_keys(tmp_path, site.keys(), "--plan", "--dry-run")
    assert refused.code == 2
    assert "not allowed with argument" in refused.err


def test_a_json_configuration_is_the_same_run(site: Site, tmp_path: Path) -> None:
    keys = site.keys() | {"output_dir": str(tmp_path / "out")}
    yaml_run = run_here(write_config(tmp_path, keys), "--plan")
    plan = (tmp_path / "out/config.yaml").read_bytes()
    path = tmp_path / "config.json"
    path.write_text(json.dumps(keys))
    json_run = run_here(path, "--plan")
    assert (yaml_run.code, json_run.code) == (0, 0)
    assert (tmp_path / "out/config.yaml").read_bytes() == plan


def test_the_configuration_may_be_an_option_but_not_given_twice(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, site.keys())
    assert main(["--config", str(config), "--validate"]) == 0
    assert main([str(config), "--config", str(config), "--validate"]) == 2
    assert "the configuration is given twice" in capsys.readouterr().err


def test_without_any_configuration_it_is_said_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "name a configuration: vembed train CONFIG; vembed init DATA writes one" in capsys.readouterr().err
    assert main(["--config_override", "batch_size=8"]) == 2
    assert "model_name: a required key is missing" in capsys.readouterr().err
    assert main(["--config_override", "model_name=builtin:ngram-bag", "--validate"]) == 0


def test_overrides_win_over_the_file_and_resume_is_a_key_too(site: Site, tmp_path: Path) -> None:
    config = write_config(tmp_path, site.keys())
    planned = run_here(config, "--plan", "--config_override", "batch_size=8", "--config-override", "max_steps=3")
    assert planned.code == 0
    plan = json.loads((planned.folder / "plan.json").read_text())
    assert (plan["batch_size"], plan["steps"]) == (8, 3)
    twice = run_here(config, "--plan", "--resume", "never", "--config_override", "resume=auto")
    assert twice.code == 2
    assert "resume" in twice.err


@pytest.mark.slow
def test_accelerate_launch_from_another_folder_is_the_same_run(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = site.keys(max_steps=2, eval_steps=2) | {"output_dir": "out"}
    here, there = tmp_path / "here", tmp_path / "there"
    configs = [write_config(folder, keys) for folder in (here, there)]
    launch = [
        sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--cpu",
        str(ROOT / "vembed/entrypoints/train.py"), str(configs[1]),
    ]  # fmt: skip
    done = subprocess.run(
        launch, cwd=there, env=environment(), text=True, capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(here)
    assert run_here(configs[0]).code == 0
    for name in ("config.yaml", "plan.json"):
        assert (here / "out" / name).read_bytes() == (there / "out" / name).read_bytes(), name
    assert (here / "out/model/model.safetensors").read_bytes() == (there / "out/model/model.safetensors").read_bytes()


def test_half_of_a_launchers_word_is_refused_and_other_commands_run_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, {"model_name": "x"})
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused = run_here(config, "--validate")
    assert refused.code == 2
    assert "RANK is not set" in refused.err
    for name, value in {"RANK": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    assert run_here(config, "--validate").code == 0
    words = ["model", "--output", str(tmp_path / "exported")]
    assert export.main(words, program="vembed export") == 2
    assert "this command runs in one" in capsys.readouterr().err


def test_the_module_starts_as_well(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vembed.entrypoints.train", "--validate", "--config_override", "model_name=x"],
        capture_output=True, text=True, cwd=tmp_path, env=environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_command_line_lists_its_commands_and_suggests_the_nearest() -> None:
    def vembed(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "vembed", *words], capture_output=True, text=True, check=False)

    listing = vembed("--help")
    assert listing.returncode == 0
    assert all(name in listing.stdout for name in COMMANDS.names())
    assert vembed().returncode == 2
    typo = vembed("evalute")
    assert typo.returncode == 2
    assert "did you mean evaluate" in typo.stderr


def test_the_command_leaves_the_callers_logging_alone(site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture)\
        -> None:  # fmt: skip
    import logging

    logger = logging.getLogger("vembed")
    before = (logger.level, logger.propagate, list(logger.handlers))
    assert run_keys(tmp_path, site.keys(), "--plan").code == 0
    assert (logger.level, logger.propagate, list(logger.handlers)) == before
    with caplog.at_level("INFO", logger="vembed"):
        logger.info("still heard")
    assert "still heard" in caplog.text


@pytest.mark.parametrize(("script", "code", "said"), [(RUN, 130, "interrupted\n"), (TRAIN, -signal.SIGINT, "")])
def test_ctrl_c_while_modules_are_imported_is_no_traceback(tmp_path: Path, script: Path, code: int, said: str) -> None:
    (tmp_path / "argparse.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"
    )
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False,
        env=environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}"),
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (code, said)


def test_an_interrupt_while_a_command_is_imported_leaves_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import vembed.__main__ as program

    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(program.COMMANDS, "load", interrupted)
    monkeypatch.setattr("sys.argv", ["vembed", "encode"])
    assert program.main() == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_disk_that_is_full_at_the_first_weights_is_one_sentence(
    tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError

    from vembed.models.text import TextEncoder

    def full(encoder: object, folder: Path) -> None:
        (folder / "half").write_bytes(b"half a file")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(TextEncoder, "save", full)
    done = run_keys(tmp_path, site.keys(model_name="builtin:tiny-transformer"))
    assert done.code == 5
    assert done.err == (
        f"error: {done.folder}/initial_model can't be written: No space left on device. Free some space, or choose "
        "another output_dir\n"
    )
    assert not [path for path in done.folder.iterdir() if "initial_model" in path.name]


def test_progress_bars_are_off_in_libraries_that_were_imported_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants, utils

    bars = sys.modules["huggingface_hub.utils.tqdm"]
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", None)
    monkeypatch.setattr(bars, "HF_HUB_DISABLE_PROGRESS_BARS", None)
    monkeypatch.setattr(bars, "progress_bar_states", {})
    monkeypatch.delitem(sys.modules, "transformers", raising=False)  # which follows the hub's package once it comes
    assert not utils.are_progress_bars_disabled()
    quiet_libraries()
    assert utils.are_progress_bars_disabled()


def test_what_a_terminal_cannot_show_is_escaped_and_ends_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", shown)

    def tell() -> int:
        print("döner")
        logging.getLogger("vembed").info("data from \udcff.jsonl")  # a file name that is no UTF-8
        return 0

    assert run_command(tell) == 0
    assert shown.errors == "strict", "a program that calls keeps its own"
    shown.flush()
    assert shown.buffer.getvalue() == b"d\\xf6ner\ndata from \\udcff.jsonl\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize("has_run", [True, False], ids=["behind its end", "before it begins"])
def test_a_signal_just_outside_of_a_command_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_run: bool
) -> None:
    @contextmanager
    def interrupted(**_: bool) -> Iterator[None]:
        if has_run:
            yield
        os.kill(os.getpid(), signal.SIGINT)
        yield

    monkeypatch.setattr(command, "printed_lines", interrupted)
    assert run_command(lambda: 0) == 130
    assert capsys.readouterr().err == "error: stopped by SIGINT\n"


@pytest.mark.parametrize(("interrupts", "code"), [(1, 2), (2, -signal.SIGINT)])
def test_an_interrupt_while_the_interpreter_ends_changes_nothing_and_two_end_it(interrupts: int, code: int) -> None:
    program = (
        "import atexit, os, signal, sys, time\n"
        "def end():\n"  # stands for torch's
        f"    for _ in range({interrupts}):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(0.1)\n"
        "atexit.register(end)\n"
        "from vembed.__main__ import main\n"
        "sys.argv = ['vembed', 'explain', 'temperatur']\n"
        "sys.exit(main())\n"
    )
    words = [sys.executable, "-c", program]
    ended = subprocess.run(words, capture_output=True, text=True, env=environment(), check=False)
    assert ended.returncode == code
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1
