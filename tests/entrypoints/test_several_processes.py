"""Whole runs in several processes: the same training, launched in every way, and stopped in every way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kit.runs import RUN, Outcome, Site, assert_same_run, metric_rows, run_process, start_process, write_config
from kit.several_ranks import (
    ACCELERATE,
    TRAIN,
    accelerate,
    bare_environment,
    exact,
    free_port,
    is_gone,
    on_cpu,
    ranks_of,
    wait_until,
)  # fmt: skip

if TYPE_CHECKING:
    from kit.warm import WarmProcess

pytestmark = pytest.mark.slow

ONE_PROCESS = {"batch_size": 32}
TWO_PROCESSES = {"num_processes": 2}


def exit_json(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "exit.json").read_text("utf-8"))
    return content


def test_run_py_starts_two_processes_that_train_as_one_does(site: Site, tmp_path: Path) -> None:
    one = run_process(write_config(tmp_path / "1", exact(site, **ONE_PROCESS)))
    two = run_process(write_config(tmp_path / "2", exact(site, **TWO_PROCESSES)))
    assert (one.code, two.code) == (0, 0), two.err
    assert len(two.losses) == 8
    assert two.losses == pytest.approx(one.losses, abs=1e-10)
    assert two.last_line == one.last_line
    plan = json.loads((two.folder / "plan.json").read_text("utf-8"))
    assert (plan["strategy"], plan["world_size"], plan["global_batch_size"]) == ("ddp", 2, 32)
    assert two.out.count("step 8/8") == 1, "one process tells"
    assert "started by python run.py" in two.flat
    assert not (two.folder / "exit.json").exists()
    report = (two.folder / "report" / "report.md").read_text("utf-8")
    assert "python run.py" in report
    assert "accelerate launch" not in report


@pytest.mark.parametrize(("name", "keys"), [("multi_gpu_ddp", TWO_PROCESSES), ("single_gpu", {})])
def test_accelerate_launch_from_another_folder_writes_the_files_of_run_py(
    site: Site, tmp_path: Path, name: str, keys: dict[str, Any]
) -> None:
    quick = exact(site, max_steps=2, eval_strategy="no", eval_steps=None)
    ours = run_process(write_config(tmp_path / "ours", quick | {"output_dir": "out"}), *overrides(keys))
    config = write_config(tmp_path / "theirs", quick | {"output_dir": "out"})
    elsewhere = config.parent
    theirs = accelerate(config, options=["--config_file", str(on_cpu(name, tmp_path))], folder=elsewhere)
    assert (ours.code, theirs.code) == (0, 0), theirs.err
    assert theirs.losses == ours.losses
    options = ["--config_file", str(tmp_path / f"{name}.yaml")]
    details = accelerate(config, "--plan", "--details", options=options, folder=elsewhere)
    assert f"accelerate launch with {tmp_path / name}.yaml" in details.out
    assert (theirs.folder / "plan.json").read_bytes() == (ours.folder / "plan.json").read_bytes()
    shown = [(each.folder / "config.yaml").read_text("utf-8").splitlines() for each in (theirs, ours)]
    different = [pair for pair in zip(*shown, strict=True) if pair[0] != pair[1]]
    assert [line.partition(":")[0] for line, _ in different] == list(keys), "only what the override says"


def overrides(keys: dict[str, Any]) -> list[str]:
    return ["--config_override", *(f"{key}={value}" for key, value in keys.items())] if keys else []


def test_the_sharded_file_of_accelerate_shards_and_the_configuration_keeps_auto(site: Site, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run", exact(site))
    options = ["--config_file", str(on_cpu("multi_gpu_fsdp", tmp_path))]
    done = accelerate(config, "--plan", "--details", options=options, folder=tmp_path)
    assert done.code == 0, done.err
    plan = json.loads((done.folder / "plan.json").read_text("utf-8"))
    assert plan["strategy"] == "fsdp"
    assert "fsdp_sharding_strategy: FULL_SHARD: use_fsdp: true; carried out with FSDP 2" in done.flat
    assert "use_fsdp: auto" in (done.folder / "config.yaml").read_text("utf-8")
    kept = accelerate(
        config, "--plan", "--details", "--config_override", "use_fsdp=false", options=options, folder=tmp_path
    )
    assert "the configuration says use_fsdp: false, which wins" in kept.flat
    assert json.loads((kept.folder / "plan.json").read_text("utf-8"))["strategy"] == "ddp"


def test_accelerate_launch_without_a_file_trains_in_one_process(site: Site, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run", exact(site, max_steps=2, eval_strategy="no", eval_steps=None))
    done = accelerate(config, options=[], folder=tmp_path)
    assert done.code == 0, done.err
    assert json.loads((done.folder / "plan.json").read_text("utf-8"))["strategy"] == "single"
    assert "started by accelerate launch" in done.flat


def test_accelerate_that_starts_one_of_the_processes_asked_for_is_an_error(site: Site, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run", exact(site))
    done = accelerate(config, options=["--cpu", "--num_processes", "2"], folder=tmp_path)
    assert done.code == 1, "accelerate's own"
    assert "error: accelerate launch was asked for several processes and started one" in done.err
    assert "num_processes=2" in done.err
    assert not done.folder.exists()


def test_copies_that_mpirun_started_write_nothing(site: Site, tmp_path: Path) -> None:
    config = write_config(tmp_path, exact(site, max_steps=2))
    copies = [run_process(config, OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK=rank) for rank in "01"]
    for done in copies:
        assert done.code == 2
        assert "error: mpirun started 2 copies of this command" in done.err
        assert not done.folder.exists()


def test_a_number_of_processes_that_the_launcher_did_not_start_is_refused(site: Site, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run", exact(site, num_processes=3))
    done = accelerate(config, options=["--config_file", str(on_cpu("multi_gpu_ddp", tmp_path))], folder=tmp_path)
    assert done.code == 1
    assert "num_processes is 3, and accelerate launch started 2" in done.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_to_the_launcher_saves_once_and_resuming_is_exact(
    site: Site, tmp_path: Path, number: signal.Signals
) -> None:
    keys = exact(site, **TWO_PROCESSES, max_steps=30, eval_steps=15, model_name=str(site.bert))
    whole = run_process(write_config(tmp_path / "whole", keys))
    assert whole.code == 0, whole.err
    config = write_config(tmp_path / "stopped", keys)
    process = start_process(config)
    folder = config.parent / "out"
    wait_until(lambda: len(metric_rows(folder)) >= 3, process)
    process.send_signal(number)
    assert process.wait(60) == 75, (config.parent / "output.txt").read_text("utf-8")
    found = exit_json(folder)
    assert found["code"] == 75
    assert "resume continues" in found["message"]
    assert number.name in found["message"]
    assert 3 <= len(metric_rows(folder)) < 30
    assert len(list((folder / "checkpoints").glob("step-*"))) == 1
    resumed = run_process(config)
    assert resumed.code == 0, resumed.err
    assert "resume: continuing from" in resumed.out
    assert not (folder / "exit.json").exists()
    assert_same_run(folder, whole.folder)


def test_a_rank_that_is_killed_in_training_is_named_and_nothing_stays_behind(site: Site, tmp_path: Path) -> None:
    process, folder, ranks = start_two(site, tmp_path)
    os.kill(ranks[1], signal.SIGKILL)
    assert process.wait(60) == 5
    found = exit_json(folder)
    assert found["rank"] == 1
    assert "rank 1 on" in (folder.parent / "output.txt").read_text("utf-8")
    assert all(is_gone(pid) for pid in ranks.values())


def test_a_rank_that_is_stopped_in_training_is_named_after_the_timeout(site: Site, tmp_path: Path) -> None:
    process, folder, ranks = start_two(site, tmp_path, nccl_timeout=8)
    os.kill(ranks[1], signal.SIGSTOP)
    assert process.wait(120) == 5
    found = exit_json(folder)
    assert (found["rank"], found["code"]) == (1, 5)
    assert "stopped answering, last seen in vembed/" in found["message"]
    assert all(is_gone(pid) for pid in ranks.values())


@pytest.mark.parametrize("others", [[], [0], [1]])
def test_without_its_launcher_no_process_stays_behind_and_each_says_why_and_how_to_go_on(
    site: Site, tmp_path: Path, others: list[int]
) -> None:
    process, folder, ranks = start_two(site, tmp_path, save_steps=2)
    process.send_signal(signal.SIGSTOP)  # or it would notice the end of a rank
    for rank in others:
        os.kill(ranks[rank], signal.SIGKILL)
    process.kill()
    process.wait(10)
    witness = subprocess.Popen(["sleep", "60"], text=True)
    try:
        wait_until(lambda: all(is_gone(pid) for pid in ranks.values()), witness, seconds=50)
    finally:
        witness.kill()
    said = (folder.parent / "output.txt").read_text("utf-8")
    last = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(last) == 2 - len(others), said
    assert said.rstrip().endswith(last[-1])
    assert "Traceback" not in said
    assert "Broken pipe" not in said
    for line in last:
        assert "stopped answering" in line
        assert "; resume continues from" in line
        assert Path(line.rpartition(" ")[2]).is_dir()
    assert exit_json(folder)["code"] == 5


def start_two(site: Site, tmp_path: Path, **changes: Any) -> tuple[WarmProcess, Path, dict[int, int]]:
    """Start a long run in two processes and return it in the middle of its steps."""
    config = write_config(
        tmp_path / "run", exact(site, **TWO_PROCESSES, max_steps=100_000, eval_strategy="no", eval_steps=None) | changes
    )
    process = start_process(config)
    folder = config.parent / "out"
    wait_until(lambda: len(metric_rows(folder)) >= 3, process)
    ranks = ranks_of(process.pid)
    assert set(ranks) == {0, 1}
    return process, folder, ranks


@pytest.mark.parametrize("rows", [2, 3])
def test_data_smaller_than_the_world_trains_without_a_hang(site: Site, tmp_path: Path, rows: int) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(site.train.read_text("utf-8").splitlines(keepends=True)[:rows]), "utf-8")
    keys = exact(site, data_path=str(few), num_processes=3, batch_size=2, max_steps=3, eval_steps=3, nccl_timeout=60)
    done = run_process(write_config(tmp_path / "run", keys))
    assert done.code == 0, done.err
    one = run_process(write_config(tmp_path / "one", keys | {"num_processes": 1, "batch_size": 6}))
    assert done.losses == pytest.approx(one.losses, abs=1e-10)


def start_node(config: Path, words: list[str], rank: int, port: int) -> subprocess.Popen[str]:
    """Start one of two launchers that meet on this machine."""
    with (config.parent / f"node{rank}.txt").open("w") as file:
        return subprocess.Popen(
            [sys.executable, *words, str(TRAIN), str(config)],
            stdout=file, stderr=file, text=True, cwd=config.parent, env=bare_environment(),
        )  # fmt: skip


def node_words(launcher: str, rank: int, port: int, file: Path) -> list[str]:
    """Return how one of two machines launches."""
    if launcher == "torchrun":
        where = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        return [
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--node-rank",
            str(rank),
            "--nproc-per-node",
            "1",
            *where,
        ]
    where = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
    machines = ["--num_machines", "2", "--num_processes", "2", "--machine_rank", str(rank)]
    return [str(ACCELERATE), "launch", "--config_file", str(file), *machines, *where]


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_two_launchers_make_one_run(site: Site, tmp_path: Path, launcher: str) -> None:
    quick: dict[str, Any] = {"max_steps": 4, "eval_steps": 4}
    one = run_process(write_config(tmp_path / "one", exact(site, **ONE_PROCESS, **quick)))
    config = write_config(tmp_path / "two", exact(site, **quick))
    file, port = on_cpu("multi_gpu_ddp", tmp_path), free_port()
    nodes = []
    for rank in range(2):
        words = node_words(launcher, rank, port, file)
        nodes.append(start_node(config, words, rank, port))
    codes = [node.wait(300) for node in nodes]
    said = [(config.parent / f"node{rank}.txt").read_text("utf-8") for rank in range(2)]
    assert codes == [0, 0], "\n".join(said)
    two = Outcome.of(0, said[0], "", config.parent / "out")
    assert two.losses == pytest.approx(one.losses, abs=1e-10)
    assert "step 4/4" in said[0]
    assert "step 4/4" not in said[1]


def test_tasks_of_srun_make_one_run_and_start_nothing(site: Site, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run", exact(site, max_steps=2, eval_steps=2))
    tasks = []
    for rank in range(2):
        slurm = {
            "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0",
            "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(free_port()),
        }  # fmt: skip
        if rank:
            slurm["MASTER_PORT"] = tasks[0][1]
        with (tmp_path / f"task{rank}.txt").open("w") as file:
            words = [sys.executable, str(RUN), str(config)]
            env = bare_environment() | slurm
            process = subprocess.Popen(words, stdout=file, stderr=file, text=True, cwd=tmp_path, env=env)
        tasks.append((process, slurm["MASTER_PORT"]))
    codes = [process.wait(300) for process, _ in tasks]
    assert codes == [0, 0], (tmp_path / "task1.txt").read_text("utf-8") + (tmp_path / "task0.txt").read_text("utf-8")
    plan = json.loads((config.parent / "out" / "plan.json").read_text("utf-8"))
    assert plan["world_size"] == 2
    assert len(metric_rows(config.parent / "out")) == 2


def test_a_deepspeed_file_in_place_of_a_configuration_is_answered_with_our_keys(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}, "train_batch_size": 64}), "utf-8")
    done = run_process(path)
    assert done.code == 2
    assert "use_fsdp: true, fsdp_mode: sharded" in done.err
    assert "global_batch_size: 64" in done.err
