"""Facts, self tests and problems of a machine, as text for people and as one object for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeAlias

from vembed.errors import MachineError
from vembed.text import show_bytes
from vembed.workflows.doctor.machine import EXTRA_PACKAGES, MEANINGS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.workflows.doctor.machine import Check, MachineFacts, Space
    from vembed.workflows.doctor.self_test import SelfTest

Tested: TypeAlias = "Mapping[str, SelfTest | MachineError]"
"""Where a self test ran -> its numbers, or why the processes couldn't work together."""


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
