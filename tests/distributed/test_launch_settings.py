"""Which process this is, and what accelerate and DeepSpeed ask for, in keys of ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml

from vembed.config.schema import Config
from vembed.distributed import accelerate as module
from vembed.distributed import runtime
from vembed.distributed.accelerate import Setting, accelerate_settings, deepspeed_refusal, is_deepspeed
from vembed.distributed.process_env import ProcessEnv, first_host, process_env, refuse_copies
from vembed.distributed.runtime import start_runtime
from vembed.errors import ConfigError
from vembed.training import launcher
from vembed.training.launcher import under_launcher

if TYPE_CHECKING:
    from collections.abc import Sequence

# Which process this is, as launchers say it


TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "1234", "TORCHELASTIC_RUN_ID": "a",
}  # fmt: skip

SRUN = {
    "SLURM_STEP_NUM_TASKS": "20", "SLURM_PROCID": "17", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_STEP_NODELIST": "gpu[003-005]", "SLURM_JOB_ID": "7",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "process"),
    [
        pytest.param({"PATH": "/bin"}, ProcessEnv(), id="nobody launched it"),
        pytest.param(TORCHRUN, ProcessEnv(5, 8, 1, 4, "torchrun", "10.0.0.1", 1234), id="torchrun"),
        pytest.param(
            {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_CPU": "True"},
            ProcessEnv(launcher="accelerate launch", on_cpu=True),
            id="one process of accelerate",
        ),
        pytest.param(SRUN, ProcessEnv(17, 20, 1, 4, "srun", "gpu003", 20_007), id="a task of srun"),
        pytest.param(
            SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
            ProcessEnv(0, 20, 0, 8, "srun", "gpu003", 20_007),
            id="the first task of srun",
        ),
        pytest.param(SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, ProcessEnv(), id="a step of one task"),
    ],
)
def test_which_process_this_is(environ: dict[str, str], process: ProcessEnv) -> None:
    assert process_env(environ) == process
    assert process.is_launched == (process != ProcessEnv()), "who isn't may launch others"
    if process.launcher == "torchrun":
        assert process_env(environ | process.environment()) == process


def test_the_launcher_is_named_for_people() -> None:
    assert process_env({**TORCHRUN, "VEMBED_LAUNCHED_BY": "python run.py"}).launcher == "python run.py"
    accelerate = {**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no"}
    assert process_env(accelerate).launcher == "accelerate launch"
    del accelerate["TORCHELASTIC_RUN_ID"], accelerate["ACCELERATE_MIXED_PRECISION"]
    assert process_env(accelerate).launcher == "the environment"
    assert process_env({**SRUN, **TORCHRUN}).launcher == "torchrun", "inside srun"


def test_accelerate_that_was_asked_for_several_and_started_one_is_refused_with_the_cure() -> None:
    asked = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(ConfigError, match=r"started one.*num_processes=2.*distributed_type: MULTI_GPU"):
        process_env(asked)
    assert process_env({**asked, "WORLD_SIZE": "2", "RANK": "1"}).world_size == 2


OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "0"}  # of MPICH and Intel MPI


@pytest.mark.parametrize(
    ("environ", "copies"),
    [
        (OPEN_MPI, "2 copies of this command (OMPI_COMM_WORLD_SIZE"),
        (HYDRA, "4 copies of this command (PMI_SIZE"),
        ({"MV2_COMM_WORLD_SIZE": "3"}, "3 copies"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", **OPEN_MPI}, "2 copies"),  # mpirun in a batch script
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "2", **HYDRA}, "4 copies"),  # a daemon on each machine, started by srun
        ({"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", **OPEN_MPI}, "2 copies"),  # mpirun in the shell of salloc
    ],
)
def test_copies_that_mpirun_started_are_refused_with_the_cure(environ: dict[str, str], copies: str) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse_copies(environ)
    assert copies in str(refused.value)
    assert "torchrun" in str(refused.value)
    refuse_copies({**environ, "WORLD_SIZE": "1"})  # the cure for copies that are meant
    assert process_env({**environ, "WORLD_SIZE": "1"}).world_size == 1


def test_a_copy_joins_no_run_from_python_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="mpirun started 2 copies"):
        start_runtime(deterministic=False)


@pytest.mark.parametrize(
    ("environ", "world_size"),
    [
        ({}, 1),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, 1),
        ({**TORCHRUN, **OPEN_MPI}, 8),  # torchrun on each machine, started by mpirun
        ({**SRUN, "PMI_SIZE": "20", "PMI_RANK": "17"}, 20),  # srun --mpi=pmi2
        ({"SLURM_NTASKS": "2", "SLURM_NPROCS": "2", "SLURM_JOB_ID": "7"}, 1),  # the shell of salloc, or a batch script
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}, 1),  # of sbatch
        (
            {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"},
            1,
        ),  # --pty bash
    ],
)
def test_one_process_and_processes_that_know_each_other_are_no_copies(environ: dict[str, str], world_size: int) -> None:
    refuse_copies(environ)
    assert process_env(environ).world_size == world_size


@pytest.mark.parametrize(
    ("listed", "host"),
    [("gpu003", "gpu003"), ("gpu[003-006,009],login1", "gpu003"), ("a1,b2", "a1"), ("n-[7,9]", "n-7")],
)
def test_the_first_host_of_a_list(listed: str, host: str) -> None:
    assert first_host(listed) == host


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *[({"RANK": "8"}, "contradict"), ({"LOCAL_RANK": "4"}, "contradict"), ({"RANK": "five"}, "RANK is 'five'")],
        *[({"MASTER_ADDR": None}, "MASTER_ADDR"), ({"RANK": None}, "RANK is not set")],
    ],
)
def test_numbers_that_make_no_sense_are_refused(change: dict[str, str | None], message: str) -> None:
    environ = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        process_env(environ)
    assert process_env(TORCHRUN).rank == 5


# What launchers ask for


PROCESS = ProcessEnv(1, 8, 1, 4, "accelerate launch")

FSDP = {
    "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_OFFLOAD_PARAMS": "false", "FSDP_ACTIVATION_CHECKPOINTING": "false",
}  # fmt: skip

CONFIGS = Path(__file__).parents[2] / "configs" / "accelerate"


def asked(**changes: str) -> tuple[str, Sequence[Setting]]:
    found = accelerate_settings(PROCESS, FSDP | changes)
    assert found is not None
    return found


def keys(**changes: str) -> dict[str, Any]:
    return {key: value for setting in asked(**changes)[1] for key, value in setting.keys.items()}


def test_without_accelerate_nobody_asks_for_anything() -> None:
    assert accelerate_settings(PROCESS, {"RANK": "0"}) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"bf16": True, "use_fsdp": True}),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, {"fp16": True, "bf16": False, "use_fsdp": True}),
        ({"FSDP_SHARDING_STRATEGY": "2"}, {"bf16": True, "use_fsdp": True, "fsdp_mode": "lean"}),
        ({"FSDP_SHARDING_STRATEGY": "NO_SHARD"}, {"bf16": True, "use_fsdp": False}),
        ({"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, {"bf16": True, "use_fsdp": True, "sharding_factor": 4}),
        (
            {"FSDP_SHARDING_STRATEGY": "5"},
            {"bf16": True, "use_fsdp": True, "sharding_factor": 4, "fsdp_mode": "lean"},
        ),
        (
            {"FSDP_OFFLOAD_PARAMS": "true", "FSDP_ACTIVATION_CHECKPOINTING": "true"},
            {"bf16": True, "use_fsdp": True, "cpu_offload": True, "gradient_checkpointing": True},
        ),
        (
            {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"},
            {"bf16": True, "use_fsdp": True, "fsdp_mode": "lean"},
        ),
        (
            {"FSDP_VERSION": "2", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "4", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"},
            {"bf16": True, "use_fsdp": True, "sharding_factor": 2},
        ),
        ({"ACCELERATE_USE_FSDP": "false"}, {"bf16": True}),
    ],
)
def test_each_setting_becomes_a_key(changes: dict[str, str], expected: dict[str, object]) -> None:
    assert keys(**changes) == expected


@pytest.mark.parametrize("strategy", ["4", "HYBRID_SHARD_ZERO2"])
def test_a_copy_on_each_machine_of_one_process_is_replicated(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    environ = FSDP | {"FSDP_SHARDING_STRATEGY": strategy}
    monkeypatch.setattr(
        launcher, "accelerate_settings", lambda _: accelerate_settings(ProcessEnv(1, 2, 0, 1, "accelerate"), environ)
    )
    config, _, _ = under_launcher(Config(model_name="a"), {})
    assert (config.use_fsdp, config.sharding_factor, config.fsdp_mode) == (False, "auto", "auto")


def test_settings_of_fsdp_1_are_said_to_be_carried_out_with_fsdp_2() -> None:
    remarks = [setting.remark for setting in asked()[1]]
    assert any("FSDP 2" in remark for remark in remarks)
    assert not any("FSDP 2" in setting.remark for setting in asked(FSDP_VERSION="2")[1])


def test_a_compiler_is_referred_to_the_key_that_compiles() -> None:
    (setting,) = [setting for setting in asked(ACCELERATE_DYNAMO_BACKEND="INDUCTOR")[1] if "dynamo" in setting.words]
    assert setting == Setting({}, "dynamo_backend: INDUCTOR", "no effect; the key compile does that")
    assert "compile" in Config.model_fields


def test_no_mixed_precision_counts_only_where_somebody_said_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    silent, said = tmp_path / "silent.yaml", tmp_path / "said.yaml"
    silent.write_text("distributed_type: 'NO'\n")
    said.write_text("mixed_precision: 'no'\n")
    plain = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_FSDP": "false"}
    for path, expected in ((silent, {}), (said, {"bf16": False})):
        command = ["python", "accelerate", "launch", "--config_file", str(path), "train.py"]
        monkeypatch.setattr(module, "_parent_command", lambda words=command: words)
        assert keys(**plain) == expected
        assert asked(**plain)[0] == f"accelerate launch with {path}"
    for option in (["--mixed_precision", "no"], ["--mixed_precision=no"], ["--mixed-precision", "no"]):
        command = ["python", "accelerate", "launch", "--config_file", str(silent), *option, "train.py"]
        monkeypatch.setattr(module, "_parent_command", lambda words=command: words)
        assert keys(**plain) == {"bf16": False}, option


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "fp8; choose no, bf16 or fp16"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron"),
        ({"PARALLELISM_CONFIG_TP_SIZE": "2"}, "parallelism_config_tp_size 2"),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
            r"(?s)DeepSpeed.*use_fsdp: true, fsdp_mode: sharded",
        ),
    ],
)
def test_what_this_program_has_not_is_refused_with_what_it_has(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        asked(**changes)
    assert asked()[1]


DEEPSPEED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 16,
    "gradient_clipping": 0.5,
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95]}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True},
}


def test_a_deepspeed_file_is_refused_with_the_equal_keys_which_exist() -> None:
    assert is_deepspeed(DEEPSPEED)
    assert not is_deepspeed({"model_name": "a", "batch_size": 2})
    everything = DEEPSPEED | {
        "train_batch_size": 8, "activation_checkpointing": {"number_checkpoints": 2}, "fp16": {"enabled": True},
        "scheduler": {"params": {"warmup_num_steps": 3}},
    }  # fmt: skip
    first, *lines = deepspeed_refusal(everything, where="ds.json").split("\n  ")
    assert first.startswith("ds.json is a DeepSpeed configuration")
    keys = {}
    for line in lines[:-1]:
        keys |= yaml.safe_load(f"{{{line.partition('  (')[0]}}}")
    assert keys.items() >= {
        "use_fsdp": True, "fsdp_mode": "lean", "cpu_offload": True, "batch_size": 16, "max_grad_norm": 0.5,
        "bf16": True, "adam_beta1": 0.9, "adam_beta2": 0.95,
    }.items()  # fmt: skip
    assert keys.keys() <= Config.model_fields.keys()
    assert lines[-1].endswith("optimizer.type, zero_optimization.overlap_comm")


def effective(
    monkeypatch: pytest.MonkeyPatch, config: Config, environ: dict[str, str]
) -> tuple[Config, str, tuple[str, ...]]:
    monkeypatch.setattr(launcher, "accelerate_settings", lambda place: accelerate_settings(PROCESS, environ))
    return under_launcher(config, {"bf16": "a.yaml:3", "use_fsdp": "override"})


def test_the_users_word_wins_over_the_launchers_and_the_launchers_over_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    untouched = Config(model_name="a")
    config, _, notes = effective(monkeypatch, untouched, FSDP)
    assert (config.bf16, config.use_fsdp) == (True, True)
    assert any("mixed_precision: bf16: bf16: true" in note for note in notes)
    config, _, notes = effective(monkeypatch, Config(model_name="a", bf16=False), FSDP)
    assert (config.bf16, config.use_fsdp) == (False, True)
    assert any("the configuration says bf16: false (a.yaml:3), which wins" in note for note in notes)
    assert (untouched.bf16, untouched.use_fsdp) == ("auto", "auto")


@pytest.mark.parametrize(
    "parts",
    [
        {"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"},
        {"FSDP_OFFLOAD_PARAMS": "true"},
        {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"},
        {"FSDP_VERSION": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"},
    ],
)
def test_parts_of_a_sharding_that_the_user_switched_off_act_nowhere(
    monkeypatch: pytest.MonkeyPatch, parts: dict[str, str]
) -> None:
    config, _, notes = effective(monkeypatch, Config(model_name="a", use_fsdp=False), FSDP | parts)
    assert (config.use_fsdp, config.sharding_factor, config.fsdp_mode) == (False, "auto", "auto")
    assert config.cpu_offload == "auto"
    assert any("use_fsdp: false, which wins" in note for note in notes)
    assert not any("carried out with FSDP 2" in note for note in notes)


def test_offload_of_what_accelerate_leaves_whole_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = FSDP | {"FSDP_SHARDING_STRATEGY": "NO_SHARD", "FSDP_OFFLOAD_PARAMS": "true"}
    config, _, notes = effective(monkeypatch, Config(model_name="a"), environ)
    assert (config.use_fsdp, config.cpu_offload) == (False, "auto")
    assert any("fsdp_offload_params: true: no effect: nothing is sharded" in note for note in notes)


def test_the_ready_files_say_what_they_promise() -> None:
    files = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in CONFIGS.glob("*.yaml")}
    assert set(files) == {"single_gpu", "multi_gpu_ddp", "multi_gpu_fsdp", "multi_node"}
    assert files["single_gpu"]["num_processes"] == 1
    assert files["multi_gpu_ddp"]["distributed_type"] == "MULTI_GPU"
    assert {"num_machines", "machine_rank", "main_process_ip", "main_process_port"} <= set(files["multi_node"])
    assert files["multi_gpu_fsdp"]["mixed_precision"] == "bf16"
    fsdp = files["multi_gpu_fsdp"]["fsdp_config"]
    assert (fsdp["fsdp_version"], fsdp["fsdp_sharding_strategy"]) == (1, "FULL_SHARD")
    assert not fsdp["fsdp_offload_params"]


def test_a_process_that_nobody_launched_trains_alone_and_plans_for_as_many_as_it_would_start() -> None:
    with pytest.raises(ConfigError, match=r"num_processes is 2.*python run.py.*torchrun --nproc-per-node 2"):
        start_runtime(deterministic=False, num_processes=2)
    alone = start_runtime(deterministic=False, num_processes=1)
    planned = start_runtime(deterministic=False, num_processes=2, plans_only=True)
    assert (alone.ranks.world_size, alone.world_size) == (1, 1)
    assert (planned.ranks.world_size, planned.world_size) == (1, 2)
    assert alone.machine.torch_version == torch.__version__, "the plan judges it"
    if alone.device.type == "cpu":
        assert planned.machine.memory_bytes == alone.machine.memory_bytes // 2


def test_more_processes_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "num_devices", lambda: 2)
    with pytest.raises(ConfigError, match="num_processes is 3, and this machine has 2 devices"):
        runtime.processes_to_start(3)
    assert (runtime.processes_to_start(2), runtime.processes_to_start("auto")) == (2, 2)
    monkeypatch.setattr(runtime, "num_devices", lambda: 0)
    assert (runtime.processes_to_start(3), runtime.processes_to_start("auto")) == (3, 1)
