"""What the tests of whole runs in several processes share."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kit.runs import ROOT, Outcome, Site, environment
from kit.warm import WarmProcess
from vembed.distributed.process_env import ProcessEnv

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TRAIN = ROOT / "vembed" / "entrypoints" / "train.py"
ACCELERATE = Path(sys.executable).with_name("accelerate")
FILES = ROOT / "configs" / "accelerate"


def exact(site: Site, **changes: Any) -> dict[str, Any]:
    """Return the settings of a run whose numbers can be compared over numbers of processes."""
    return site.keys(model_name=str(site.bert_without_dropout), torch_dtype="float64") | changes


def on_cpu(name: str, folder: Path, **changes: Any) -> Path:
    """Write a ready file of accelerate so that it works without GPUs, for two processes."""
    content: dict[str, Any] = yaml.safe_load((FILES / f"{name}.yaml").read_text("utf-8"))
    content.pop("gpu_ids", None)
    content |= {"use_cpu": True, "num_processes": min(2, content["num_processes"])} | changes
    if "mixed_precision" in content:
        content["mixed_precision"] = "no"
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content), "utf-8")
    return path


def accelerate(config: Path, *words: str, options: Sequence[str], folder: Path) -> Outcome:
    """Run `accelerate launch OPTIONS vembed/entrypoints/train.py CONFIG` in a folder."""
    done = subprocess.run(
        [ACCELERATE, "launch", *options, str(TRAIN), str(config), *words],
        capture_output=True, text=True, cwd=folder, env=bare_environment(), timeout=300, check=False,
    )  # fmt: skip
    return Outcome.of(done.returncode, done.stdout, done.stderr, config.parent / "out")


def run_ranks(config: Path, *words: str, count: int = 2, machines: int = 1, **variables: str) -> Outcome:
    """Run a configuration in several processes, started as a launcher starts them; the output is that of the first.

    Args:
        machines: Machines that the processes are told they run on, equally many on each.
        variables: Further variables of their environment.
    """
    port, processes, on_each = free_port(), [], count // machines
    for rank in range(count):
        told = ProcessEnv(rank, count, local_rank=rank % on_each, local_world_size=on_each, main_port=port)
        output, errors = (config.parent / f"rank-{rank}-{name}.txt" for name in ("output", "errors"))
        output.unlink(missing_ok=True)
        errors.unlink(missing_ok=True)
        processes.append(
            WarmProcess(
                [str(TRAIN), str(config), *words], cwd=config.parent, output=output, errors=errors,
                env=environment(**told.environment(), **variables),
            )
        )  # fmt: skip
    try:
        codes = [process.wait(300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    out, err = ((config.parent / f"rank-0-{name}.txt").read_text("utf-8") for name in ("output", "errors"))
    return Outcome.of(max(codes, key=abs), out, err, config.parent / "out")


def bare_environment() -> dict[str, str]:
    """Return the environment of a child that must find the package by itself."""
    return {name: value for name, value in environment().items() if name != "PYTHONPATH"}


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(is_so: Callable[[], bool], process: WarmProcess | subprocess.Popen[str], seconds: float = 120) -> None:
    """Wait until something is so, or fail."""
    until = time.monotonic() + seconds
    while not is_so():
        assert process.poll() is None, "the run ended before"
        assert time.monotonic() < until, "it never was so"
        time.sleep(0.05)


def ranks_of(launcher: int) -> dict[int, int]:
    """Return rank -> process id of the processes that a launcher started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    ranks = {}
    for child in children:
        environ = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        found = [entry.removeprefix(b"RANK=") for entry in environ if entry.startswith(b"RANK=")]
        if found:
            ranks[int(found[0])] = int(child)
    return ranks


def is_gone(process: int) -> bool:
    """Return whether a process has ended."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
