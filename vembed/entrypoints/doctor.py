"""`vembed doctor [CONFIG]`: look at the machine, test that processes work together on it, and say what to mend."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from vembed.config.load import load_config
from vembed.config.redact import redact
from vembed.entrypoints.command import run_command
from vembed.errors import ExitCode, MachineError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.config.load import LoadedConfig
    from vembed.distributed.local_ranks import Backend
    from vembed.distributed.machine_checks import Check
    from vembed.distributed.machine_facts import MachineFacts, Space
    from vembed.training.self_test import SelfTest

DESCRIPTION = (
    "Look at devices, memory, versions and environment variables, let two processes compute one training step "
    "together, compare its gradients with plain autograd, and say what to mend. Exits with 5 where something is wrong."
)


@dataclass(frozen=True, slots=True)
class Tested:
    """A self test and what it came to."""

    name: str  # where it ran
    result: SelfTest | None  # its numbers; None where the processes couldn't work together
    error: str = ""  # why not

    @property
    def passed(self) -> bool:
        """Whether everything is within rounding."""
        return self.result is not None and self.result.passed


def parse_arguments(arguments: Sequence[str], *, program: str) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog=program, description=DESCRIPTION)
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="also show what a run of it would plan")
    parser.add_argument(
        "--config_override", "--config-override", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help="settings that win over the file",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--no-self-test", action="store_true", help="only look, start no process")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str], *, program: str) -> int:
    """Look at the machine, test it, and say what to mend."""
    parsed = parse_arguments(arguments, program=program)
    # What an earlier launcher left in the environment is for the doctor to find; only a plan would wait for processes.
    return run_command(lambda: _run(parsed), log_to_stderr=parsed.json, in_several=parsed.config is None)


def _run(parsed: argparse.Namespace) -> int:
    loaded = None if parsed.config is None else load_config(parsed.config, parsed.config_override)
    from vembed.distributed.machine_checks import check_machine  # imports torch, which a bad CONFIG must not wait for
    from vembed.distributed.machine_facts import machine_facts
    from vembed.distributed.variables import odd_variables, shown_variables

    facts = machine_facts(Path("." if loaded is None else loaded.config.output_dir))
    oddities = odd_variables(os.environ, num_cores=facts.num_cores, num_gpus=len(facts.devices))
    variables = {name: redact(value) for name, value in shown_variables(os.environ).items()}
    checks = check_machine(facts, oddities)
    if not parsed.json:
        print(show_facts(facts, variables))
    tested = [] if parsed.no_self_test else _self_tests(len(facts.devices))
    if not parsed.json:
        print(show_tests(tested, skipped=parsed.no_self_test))
        print(show_checks(checks, tested))
    plan = None if loaded is None else _plan(loaded)
    if parsed.json:
        print(json.dumps(_document(facts, variables, checks, tested) | {"plan": plan}, indent=2))
    is_broken = any(check.level == "problem" for check in checks) or not all(each.passed for each in tested)
    return ExitCode.ENVIRONMENT if is_broken else ExitCode.OK


def _plan(loaded: LoadedConfig) -> dict[str, Any]:
    """Log what a run of the configuration would plan here, and return it; nothing is left behind."""
    from vembed.entrypoints.command import quiet_libraries
    from vembed.training.wiring.run import run_from_config

    quiet_libraries()
    with TemporaryDirectory(prefix="vembed-doctor-") as folder:
        config = loaded.config.model_copy(update={"output_dir": folder})
        run_from_config(config, mode="plan", sources=loaded.sources)
        plan: dict[str, Any] = json.loads((Path(folder) / "plan.json").read_text("utf-8"))
    return plan


def _self_tests(num_gpus: int) -> list[Tested]:
    """Test two processes on the CPU, and one for each GPU where there are any."""
    from vembed.training.self_test import self_test

    wanted: list[tuple[str, int, Backend]] = [("2 processes on the CPU (gloo)", 2, "gloo")]
    if num_gpus:
        each = "1 process on the GPU" if num_gpus == 1 else f"{num_gpus} processes on {num_gpus} GPUs"
        wanted.append((f"{each} (nccl)", num_gpus, "nccl"))
    found = []
    for name, world_size, backend in wanted:
        try:
            found.append(Tested(name, self_test(world_size=world_size, backend=backend)))
        except MachineError as error:
            found.append(Tested(name, None, str(error)))
    return found


def show_facts(facts: MachineFacts, variables: Mapping[str, str]) -> str:
    """Return what was found, for people."""
    from vembed.distributed.machine_facts import EXTRA_PACKAGES
    from vembed.distributed.variables import MEANINGS
    from vembed.plan.memory import show_bytes

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


def show_tests(tested: Sequence[Tested], *, skipped: bool) -> str:
    """Return what the self tests came to, for people."""
    if skipped:
        return "self test\n  left out"
    lines = ["self test: one training step over all processes against plain autograd, in float64"]
    for each in tested:
        if each.result is None:
            lines.append(f"  FAILED  {each.name}: {each.error}")
            continue
        result = each.result
        calls = " + ".join(map(str, result.num_chunks))
        lines.append(
            f"  {'ok' if each.passed else 'WRONG'}  {each.name}: largest gradient error {result.gradient_error:.1e}, "
            f"loss error {result.loss_error:.1e}, collectives {result.collective_error:.1e}, {calls} encoder calls"
        )
    return "\n".join(lines)


def show_checks(checks: Sequence[Check], tested: Sequence[Tested]) -> str:
    """Return what to mend, for people."""
    failed = [each for each in tested if not each.passed]
    lines = [f"  {check.level:<7}  {check.about}: {check.sentence}" for check in checks]
    lines += [f"  problem  self test: {each.name}: {_mend(each)}" for each in failed]
    return "\n".join(["to mend", *(lines or ["  nothing: this machine is ready"])])


def _mend(tested: Tested) -> str:
    if tested.result is None:
        return (
            "The processes can't work together. Behind a firewall or without a host name, set GLOO_SOCKET_IFNAME=lo; "
            "on GPUs, NCCL_DEBUG=WARN says more."
        )
    return "They compute something else than one process does: training would be wrong. Try another version of torch."


def _block(title: str, rows: Mapping[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows.items())])


def _space(space: Space | None) -> str:
    from vembed.plan.memory import show_bytes

    if space is None:
        return "none"
    return f"{show_bytes(space.free_bytes)} free of {show_bytes(space.total_bytes)} at {space.path}"


def _document(
    facts: MachineFacts, variables: Mapping[str, str], checks: Sequence[Check], tested: Sequence[Tested]
) -> dict[str, Any]:
    """Return everything for programs."""
    return {
        "machine": asdict(facts),
        "variables": dict(variables),
        "self_tests": [
            {
                "name": each.name,
                "passed": each.passed,
                "error": each.error,
                **({} if each.result is None else asdict(each.result)),
            }
            for each in tested
        ],
        "checks": [asdict(check) for check in checks],
    }
