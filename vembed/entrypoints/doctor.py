"""`vembed doctor [CONFIG]`: look at the machine, test that processes work together on it, and say what to fix."""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from vembed.config.load import load_config
from vembed.entrypoints.command import quiet_libraries, run_command
from vembed.entrypoints.options import Options, check, parse_words
from vembed.errors import ExitCode
from vembed.redact import redact
from vembed.section import option, word

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class DoctorOptions(Options):
    """Check devices, memory, versions and environment variables, run one training step on two processes, compare its
    gradients with plain autograd, and say what to fix. Exits with code 5 if it finds a problem.
    """  # noqa: D205 - the sentence that --help prints

    config: Path | None = word("CONFIG", "also plan a run of this configuration", None)
    config_override: list[str] = option(
        [],
        "settings that win over the file",
        metavar="KEY=VALUE",
        spellings=["--config_override", "--config-override"],
    )
    as_json: bool = option(False, "print one JSON object instead of text", spellings=["--json"])
    no_self_test: bool = option(False, "skip the self test, which starts processes")


OPTIONS = DoctorOptions


def main(arguments: Sequence[str], *, program: str) -> int:
    """Check and test this machine, and say what to fix."""
    given = parse_words(DoctorOptions, arguments, program=program)
    # What an earlier launcher left in the environment is for the doctor to find; only a plan would wait for processes.
    plans = given["config"] is not None or "config_override" in given
    return run_command(lambda: _run(given), log_to_stderr="as_json" in given, in_several=not plans)


def _run(given: Mapping[str, Any]) -> int:
    options = check(DoctorOptions, given)
    loaded = None
    if options.config is not None or options.config_override:
        loaded = load_config(options.config, options.config_override)
        from vembed.training.early import refuse_wrong_run

        refuse_wrong_run(loaded.config)  # what would end a run of it is told before the machine is looked at
    # It imports torch, which a bad CONFIG must not wait for.
    from vembed.workflows.doctor.machine import (
        as_document,
        check_machine,
        machine_facts,
        odd_variables,
        passed,
        show_checks,
        show_facts,
        show_tests,
        shown_variables,
    )
    from vembed.workflows.doctor.self_test import self_tests

    facts = machine_facts(Path("." if loaded is None else loaded.config.output_dir))
    odd = odd_variables(os.environ, num_cores=facts.num_cores, num_gpus=len(facts.devices))
    variables = {name: redact(value) for name, value in shown_variables(os.environ).items()}
    checks = check_machine(facts, odd)
    if not options.as_json:
        print(show_facts(facts, variables))
    # Text appears as it is found, since the self test takes a while; JSON comes whole at the end.
    tested = {} if options.no_self_test else self_tests(len(facts.devices))
    if not options.as_json:
        print(show_tests(tested, skipped=options.no_self_test))
    plan: dict[str, Any] | None = None
    if loaded is not None:  # may refuse what it plans: only then is anything ready
        from vembed.training.run import run_from_config

        quiet_libraries()
        # The plan is logged and written; nothing is left behind.
        with TemporaryDirectory(prefix="vembed-doctor-") as folder:
            config = loaded.config.model_copy(update={"output_dir": folder})
            run_from_config(config, mode="plan", sources=loaded.sources, notes=loaded.notes)
            plan = json.loads((Path(folder) / "plan.json").read_text("utf-8"))
    if not options.as_json:
        print(show_checks(checks, tested))
    else:
        print(json.dumps(as_document(facts, variables, checks, tested) | {"plan": plan}, indent=2))
    is_broken = any(finding.level == "problem" for finding in checks) or not all(map(passed, tested.values()))
    return ExitCode.ENVIRONMENT if is_broken else ExitCode.OK
