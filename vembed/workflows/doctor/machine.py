"""Facts of a machine and what they mean for a run: devices, memory, versions, variables, and what to do about each.

1. `machine_facts` looks at the machine, and never fails: a fact that can't be had is empty.
2. `check_machine` and `odd_variables` are pure rules over facts and environment variables. A rule speaks where a user
   can act, and its sentence says how.
3. `show_facts`, `show_tests`, `show_checks` and `as_document` put all of it, with the self tests, into text for people
   and into one object for programs.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from vembed.errors import MachineError
from vembed.plan.devices import OLDEST_TORCH, cpu_cores, cpu_memory_bytes
from vembed.text import show_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.workflows.doctor.self_test import SelfTest

REQUIRED_PACKAGES = (
    "vembed", "torch", "transformers", "accelerate", "peft", "open_clip_torch", "datasets", "safetensors", "faiss-cpu",
    "pytrec-eval-terrier", "tensorboard", "numpy",
)  # fmt: skip
EXTRA_PACKAGES = {
    "sentence-transformers": "loads exported models elsewhere",
    "nvidia-ml-py": "measures how busy a GPU is",
    "bitsandbytes": "4-bit weights",
}
"""Packages that a run does without, and their use."""

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where processes of one machine exchange data; only its size is read

COMMAND_SECONDS = 20
"""Longest wait for a command of the driver."""

Level: TypeAlias = Literal["warning", "problem"]
"""A warning costs speed or may cost the run; with a problem nothing can be trained as it is."""

Tested: TypeAlias = "Mapping[str, SelfTest | MachineError]"
"""Where a self test ran -> its numbers, or why the processes couldn't work together."""

SMALL_SHARED_MEMORY = 1 << 30
"""Below it data workers and NCCL run out with large pictures or many GPUs; containers have 64 MiB by default."""

SMALL_DISK, NO_DISK = 20 << 30, 1 << 30
"""A checkpoint holds the weights and twice as much of optimizer state."""

BUSY_SHARE = 0.1
"""Memory of a device that is taken before a run, from which another program must be using it."""

SHOWN = re.compile(
    r"^(NCCL_|TORCH_NCCL_|TORCH_|GLOO_|OMP_|MKL_|CUDA_|CUBLAS_|PYTORCH_|ACCELERATE_|FSDP_|SLURM_(?:JOB_ID|PROCID|NTASKS)$"
    r"|MASTER_|WORLD_SIZE$|RANK$|LOCAL_RANK$|LOCAL_WORLD_SIZE$|HF_HUB_OFFLINE$|HF_HOME$)"
)
"""Names that are shown; nothing with a token or a password has such a name."""

MEANINGS = {
    "NCCL_DEBUG": "how much NCCL tells; WARN or INFO when something hangs",
    "NCCL_SOCKET_IFNAME": "network interface between machines",
    "NCCL_P2P_DISABLE": "1: GPUs of one machine don't copy to each other directly",
    "NCCL_SHM_DISABLE": "1: processes of one machine don't use shared memory",
    "NCCL_IB_DISABLE": "1: InfiniBand is not used",
    "GLOO_SOCKET_IFNAME": "network interface of gloo",
    "TORCH_NCCL_BLOCKING_WAIT": "1: the program waits in every collective",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0: a failed collective doesn't end the process",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL checks every collective, at a cost",
    "OMP_NUM_THREADS": "threads of one process on the CPU",
    "CUDA_VISIBLE_DEVICES": "GPUs that this program may see",
    "CUDA_LAUNCH_BLOCKING": "1: the program waits for every kernel",
    "PYTORCH_ALLOC_CONF": "settings of the memory allocator; unset, a run on GPUs takes expandable_segments:True",
    "PYTORCH_CUDA_ALLOC_CONF": "settings of the memory allocator, by its older name",
    "WORLD_SIZE": "processes of the run, set by a launcher",
    "RANK": "this process, set by a launcher",
    "LOCAL_RANK": "this process on its machine, set by a launcher",
    "MASTER_ADDR": "where processes meet, set by a launcher",
    "MASTER_PORT": "port where processes meet, set by a launcher",
}
"""Of the more common ones, for the list of those that are set."""

_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "The program waits for every kernel: for finding a failing one only; unset it.",
    "TORCH_NCCL_BLOCKING_WAIT": "The program waits in every collective: unset it; nccl_timeout ends what hangs.",
    "NCCL_P2P_DISABLE": "GPUs exchange data through the host's memory, far slower: unset it unless they hang without.",
    "NCCL_SHM_DISABLE": "Processes of one machine talk over the network: unset it, and give containers shared memory.",
    "NCCL_IB_DISABLE": "Machines talk over TCP even where there is InfiniBand: unset it where there is.",
}
"""Switches that a search for a fault sets and forgets: name -> what it costs while it is on."""


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator."""

    name: str
    memory_bytes: int
    free_bytes: int  # used by no program now
    fast_bf16: bool  # it computes in bfloat16
    capability: str  # of its architecture, e.g. "9.0"


@dataclass(frozen=True, slots=True)
class Space:
    """Room on a disk."""

    path: str
    total_bytes: int
    free_bytes: int

    @classmethod
    def at(cls, path: Path) -> Space | None:
        """Return the room at a path, or at the nearest folder above it that exists; None where there is nothing."""
        for folder in (path, *path.parents):
            if os.path.exists(folder):  # noqa: PTH110 - pathlib raises where a folder may not be entered
                usage = shutil.disk_usage(folder)
                return cls(str(path), usage.total, usage.free)
        return None


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Hardware, versions and room of a machine."""

    system: str  # operating system and processor
    python: str
    num_cores: int  # that this process may use
    all_cores: int
    memory_bytes: int  # that this process may use: a container limits it
    all_memory_bytes: int
    devices: tuple[Device, ...]
    driver: str  # version of the GPUs' driver; empty where there is none
    cuda: str  # version that torch was built with; empty for a build without
    nccl: str  # likewise
    topology: str  # how the devices are connected, as the driver draws it
    packages: dict[str, str]  # name -> version, empty where it is missing
    extras: dict[str, str]  # the same of what isn't needed
    shared_memory: Space | None  # where processes of one machine exchange data
    disk: Space | None  # for the output
    cuda_error: str = ""  # why torch can't use the devices that the driver shows


def machine_facts(output: Path) -> MachineFacts:
    """Look at the machine; `output` is where a run would write."""
    devices, cuda_error = [], ""
    # torch counts devices by asking the driver. Only a call that uses one tells that the driver is too old, or that
    # another program has the device to itself.
    try:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            # Capability 8 (A100) is the first with bfloat16 in tensor cores; older ones emulate it, slower than
            # float32.
            is_fast, capability = properties.major >= 8, f"{properties.major}.{properties.minor}"
            devices.append(Device(properties.name, total, free, is_fast, capability))
    except RuntimeError as error:
        devices, cuda_error = [], str(error).strip().partition("\n")[0]
    # Cores and memory that this process may use, beside those of the machine: in a container they differ.
    return MachineFacts(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        num_cores=cpu_cores(),
        all_cores=os.cpu_count() or 1,
        memory_bytes=cpu_memory_bytes(),
        all_memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        devices=tuple(devices),
        driver=_driver("--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
        cuda=torch.version.cuda or "",
        nccl=".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "",
        topology=_driver("topo", "-m") if len(devices) > 1 else "",
        packages={name: installed_version(name) for name in REQUIRED_PACKAGES},
        extras={name: installed_version(name) for name in EXTRA_PACKAGES},
        shared_memory=Space.at(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None,
        disk=Space.at(output.resolve()),
        cuda_error=cuda_error,
    )


def installed_version(package: str) -> str:
    """Return the version of a package, empty where it isn't installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _driver(*words: str) -> str:
    """Return the output of nvidia-smi, empty where it isn't there or fails."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    # With a time limit: the command hangs on a machine whose driver does.
    try:
        done = subprocess.run([command, *words], capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


@dataclass(frozen=True, slots=True)
class Check:
    """Something that isn't as it should be."""

    level: Level
    about: str  # a word or two
    sentence: str  # the fact, and what to do


def check_machine(facts: MachineFacts, variables: Sequence[Check]) -> tuple[Check, ...]:
    """Return what isn't as it should be, problems first: `variables` are the answer of `odd_variables`."""
    checks: list[Check] = []

    def say(level: Level, about: str, sentence: str) -> None:
        checks.append(Check(level, about, sentence))

    missing = [name for name, version in facts.packages.items() if not version]
    if missing:
        say("problem", "packages", f"{', '.join(missing)} missing: pip install {' '.join(missing)}.")
    # Of "2.15.0+cu130" the first two numbers; what follows a plus names the build.
    numbers = tuple(int(part) for part in re.findall(r"\d+", facts.packages.get("torch", ""))[:2])
    if numbers and numbers < OLDEST_TORCH:
        say("problem", "torch", f"{facts.packages['torch']} is too old: 2.11 or newer is needed.")

    # A driver answers and torch sees nothing: a build without CUDA, or one that is newer than the driver.
    if facts.cuda_error:
        say(
            "problem",
            "devices",
            f"torch can't use the GPUs: {facts.cuda_error.rstrip('.')}. Install a driver that fits torch's CUDA "
            f"{facts.cuda}, and end programs that hold a GPU.",
        )
    elif not facts.devices and facts.driver:
        why = "torch is built without CUDA" if not facts.cuda else "torch can't use them"
        say("problem", "devices", f"The driver shows GPUs and {why}: install a CUDA build of torch that fits it.")
    # In GiB: cards of one model may report slightly different bytes.
    kinds = {(device.name, device.memory_bytes >> 30) for device in facts.devices}
    if len(kinds) > 1:
        listed = ", ".join(sorted(f"{name} ({gib} GiB)" for name, gib in kinds))
        say("warning", "devices", f"They differ ({listed}): the slowest and the smallest set the pace of all.")
    for number, device in enumerate(facts.devices):
        taken = device.memory_bytes - device.free_bytes
        if taken > BUSY_SHARE * device.memory_bytes:
            say(
                "warning",
                f"device {number}",
                f"{show_bytes(taken)} of {show_bytes(device.memory_bytes)} are taken by another program: end it, or "
                f"leave the device out with CUDA_VISIBLE_DEVICES.",
            )

    # Of shared memory the total counts: what is free now is free again when a program ends.
    shared, disk = facts.shared_memory, facts.disk
    if shared is not None and shared.total_bytes < SMALL_SHARED_MEMORY:
        say(
            "warning",
            "shared memory",
            f"{shared.path} has {show_bytes(shared.total_bytes)}: data workers and NCCL may run out; start the "
            f"container with --shm-size=8g, or set num_workers: 0.",
        )
    if disk is not None and disk.free_bytes < SMALL_DISK:
        say(
            "problem" if disk.free_bytes < NO_DISK else "warning",
            "disk",
            f"{show_bytes(disk.free_bytes)} free for {disk.path}: checkpoints take three times the weights each; free "
            f"some, or set output_dir to another disk.",
        )
    checks += variables
    return tuple(sorted(checks, key=lambda check: check.level != "problem"))


def shown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that matter here, by name."""
    return {name: environment[name] for name in sorted(environment) if SHOWN.match(name)}


def odd_variables(environment: Mapping[str, str], *, num_cores: int, num_gpus: int) -> tuple[Check, ...]:
    """Return the variables whose values slow a run down, break it, or contradict each other."""
    checks = []

    def odd(name: str, sentence: str) -> None:
        checks.append(Check("warning", name, sentence))

    # "0" and an empty value switch them off, as NCCL and torch read them.
    for name, cost in _SLOW.items():
        if environment.get(name, "0") not in ("0", ""):
            odd(name, cost)
    if environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0":
        odd("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0 lets processes hang when another one is gone: unset it.")
    if environment.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper() == "DETAIL":
        odd("TORCH_DISTRIBUTED_DEBUG", "DETAIL checks every collective: unset it when the search for a hang is over.")
    if environment.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE"):
        odd("NCCL_DEBUG", "It fills the log: WARN is enough when nothing hangs.")
    if environment.get("CUDA_VISIBLE_DEVICES") == "" and num_gpus == 0:
        odd("CUDA_VISIBLE_DEVICES", "It is empty, so that no GPU is seen: unset it to train on GPUs.")
    # OpenMP ignores what is no count, and takes all cores in every process.
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads and (not threads.isdigit() or threads == "0"):
        odd(
            "OMP_NUM_THREADS",
            f"{threads!r} is no number of threads: unset it, or set it to cores divided by processes.",
        )
    elif threads and int(threads) > num_cores:
        odd(
            "OMP_NUM_THREADS",
            f"{threads} threads share {num_cores} cores and slow each other down: at most cores divided by processes.",
        )
    if "PYTORCH_CUDA_ALLOC_CONF" in environment and "PYTORCH_ALLOC_CONF" in environment:
        odd("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF is its newer name, and both are set: keep one.")
    # A shell in which a launcher's variables were exported: a run would wait for processes that nobody starts.
    if "WORLD_SIZE" not in environment and ("RANK" in environment or "LOCAL_RANK" in environment):
        odd("RANK", "It is set without WORLD_SIZE, which no launcher does: unset what an earlier run left behind.")
    if environment.get("WORLD_SIZE", "1") not in ("1", ""):
        odd(
            "WORLD_SIZE",
            f"A run started here takes itself for one of {environment['WORLD_SIZE']} processes and waits for the "
            f"others: unset it, unless a launcher has just set it.",
        )
    return tuple(checks)


# For people and for programs ------------------------------------------------------------------------------------------


def show_facts(facts: MachineFacts, variables: Mapping[str, str]) -> str:
    """Return the facts of a machine in blocks, with the environment variables that matter."""
    limited = (
        f", limited from {show_bytes(facts.all_memory_bytes)}" if facts.memory_bytes < facts.all_memory_bytes else ""
    )
    machine = {
        "system": f"{facts.system}, Python {facts.python}",
        "cores": f"{facts.num_cores} of {facts.all_cores}",
        "memory": f"{show_bytes(facts.memory_bytes)}{limited}",
        "shared memory": _space(facts.shared_memory),
        "disk": _space(facts.disk),
    }
    devices = {
        str(number): f"{device.name}, {show_bytes(device.free_bytes)} free of {show_bytes(device.memory_bytes)}, "
        f"capability {device.capability}, bfloat16 {'yes' if device.fast_bf16 else 'no'}"
        for number, device in enumerate(facts.devices)
    }
    if facts.devices:
        devices["software"] = f"driver {facts.driver or 'unknown'}, CUDA {facts.cuda}, NCCL {facts.nccl}"
    packages = {name: version or "missing" for name, version in facts.packages.items()}
    extras = {name: f"{version or 'not installed'} ({EXTRA_PACKAGES[name]})" for name, version in facts.extras.items()}
    meant = {name: f"{value}  ({MEANINGS[name]})" if name in MEANINGS else value for name, value in variables.items()}
    blocks = [
        _block("machine", machine),
        _block("devices", devices or {"none": "training runs on the CPU"}),
        *(["topology\n" + "\n".join(f"  {line}" for line in facts.topology.splitlines())] if facts.topology else []),
        _block("packages", packages),
        _block("extras", extras),
        _block("variables", meant or {"none": "of those that matter is set"}),
    ]
    return "\n".join(blocks)


def show_tests(tested: Tested, *, skipped: bool) -> str:
    """Return the results of the self tests as lines for the terminal."""
    if skipped:
        return "self test\n  left out"
    lines = ["self test: one training step over all processes against plain autograd, in float64"]
    for name, result in tested.items():
        if isinstance(result, MachineError):
            lines.append(f"  FAILED  {name}: {result}")
            continue
        calls = " + ".join(map(str, result.num_chunks))
        lines.append(
            f"  {'ok' if result.passed else 'WRONG'}  {name}: largest gradient error {result.gradient_error:.1e}, "
            f"loss error {result.loss_error:.1e}, collectives {result.collective_error:.1e}, {calls} encoder calls"
        )
    return "\n".join(lines)


def show_checks(checks: Sequence[Check], tested: Tested) -> str:
    """Return the problems, each with its fix."""
    lines = [f"  {check.level:<7}  {check.about}: {check.sentence}" for check in checks]
    for name, result in tested.items():
        if isinstance(result, MachineError):
            advice = (
                "The processes can't work together. Behind a firewall or without a host name, set "
                "GLOO_SOCKET_IFNAME=lo; on GPUs, NCCL_DEBUG=WARN says more."
            )
        elif not result.passed:
            advice = (
                "They compute something else than one process does: training would be wrong. Try another version of "
                "torch."
            )
        else:
            continue
        lines.append(f"  problem  self test: {name}: {advice}")
    return "\n".join(["problems", *(lines or ["  none: this machine is ready"])])


def passed(result: SelfTest | MachineError) -> bool:
    """Return True where a self test ran, and everything was within rounding."""
    return not isinstance(result, MachineError) and result.passed


def _block(title: str, rows: Mapping[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows.items())])


def _space(space: Space | None) -> str:
    if space is None:
        return "none"
    return f"{show_bytes(space.free_bytes)} free of {show_bytes(space.total_bytes)} at {space.path}"


def as_document(
    facts: MachineFacts, variables: Mapping[str, str], checks: Sequence[Check], tested: Tested
) -> dict[str, Any]:
    """Return everything, for programs."""
    tests = []
    for name, result in tested.items():
        is_error = isinstance(result, MachineError)
        head = {"name": name, "passed": passed(result), "error": str(result) if is_error else ""}
        tests.append(head if isinstance(result, MachineError) else head | asdict(result))
    return {
        "machine": asdict(facts),
        "variables": dict(variables),
        "self_tests": tests,
        "checks": [asdict(check) for check in checks],
    }
