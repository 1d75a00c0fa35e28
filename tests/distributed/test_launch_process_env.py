"""Which process this is, as launchers say it."""

from __future__ import annotations

import pytest

from vembed.distributed.process_env import ProcessEnv, first_host, process_env
from vembed.errors import ConfigError

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "1234", "TORCHELASTIC_RUN_ID": "a",
}  # fmt: skip
SRUN = {
    "SLURM_STEP_NUM_TASKS": "20", "SLURM_PROCID": "17", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_STEP_NODELIST": "gpu[003-005]", "SLURM_JOB_ID": "7",
}  # fmt: skip


def test_a_process_that_nobody_launched_is_alone_and_may_launch_others() -> None:
    process = process_env({"PATH": "/bin"})
    assert process == ProcessEnv()
    assert not process.is_launched


def test_the_process_that_torchrun_gives() -> None:
    process = process_env(TORCHRUN)
    assert process == ProcessEnv(5, 8, 1, 4, "torchrun", "10.0.0.1", 1234)
    assert process.is_launched
    assert process_env({**TORCHRUN, **process.environment()}) == process


def test_the_launcher_is_named_for_people() -> None:
    assert process_env({**TORCHRUN, "VEMBED_LAUNCHED_BY": "python run.py"}).launcher == "python run.py"
    accelerate = {**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no"}
    assert process_env(accelerate).launcher == "accelerate launch"
    del accelerate["TORCHELASTIC_RUN_ID"], accelerate["ACCELERATE_MIXED_PRECISION"]
    assert process_env(accelerate).launcher == "the environment"


def test_one_process_of_accelerate_is_not_launched_again() -> None:
    process = process_env({"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_CPU": "True"})
    assert process == ProcessEnv(launcher="accelerate launch", on_cpu=True)
    assert process.is_launched


def test_accelerate_that_was_asked_for_several_and_started_one_is_refused_with_the_cure() -> None:
    asked = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(ConfigError, match=r"started one.*num_processes=2.*distributed_type: MULTI_GPU"):
        process_env(asked)
    assert process_env({**asked, "WORLD_SIZE": "2", "RANK": "1"}).world_size == 2


def test_tasks_of_srun_are_ranks_and_meet_on_the_first_host() -> None:
    process = process_env(SRUN)
    assert process == ProcessEnv(17, 20, 1, 4, "srun", "gpu003", 20_007)
    first = process_env({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert (first.local_world_size, first.main_address, first.main_port) == (8, "gpu003", 20_007)


def test_a_step_of_one_task_launches_by_itself_and_torchrun_inside_srun_is_torchrun() -> None:
    assert not process_env({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}).is_launched
    assert process_env({**SRUN, **TORCHRUN}).launcher == "torchrun"


@pytest.mark.parametrize(
    ("listed", "host"),
    [("gpu003", "gpu003"), ("gpu[003-006,009],login1", "gpu003"), ("a1,b2", "a1"), ("n-[7,9]", "n-7")],
)
def test_the_first_host_of_a_list(listed: str, host: str) -> None:
    assert first_host(listed) == host


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "8"}, "contradict"),
        ({"LOCAL_RANK": "4"}, "contradict"),
        ({"RANK": "five"}, "RANK is 'five'"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR"),
        ({"RANK": None}, "RANK is not set"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(change: dict[str, str | None], message: str) -> None:
    environ = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        process_env(environ)
    assert process_env(TORCHRUN).rank == 5
