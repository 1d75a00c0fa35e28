"""`vembed plan CONFIG`: what `vembed train CONFIG --plan` says, and plans for other devices without data or model."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from vembed.config.load import load_config
from vembed.entrypoints import train
from vembed.entrypoints.command import quiet_libraries, run_command
from vembed.entrypoints.options import ConfigOptions, check, parse_words
from vembed.errors import ConfigError, ExitCode
from vembed.plan.devices import parse_devices
from vembed.plan.text import comparison, explain, explain_fully
from vembed.section import option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

ASSUMED_RECORDS = 100_000
"""Records of a run whose data nobody reads."""


class PlanOptions(ConfigOptions):
    """Show how a run would train, and what every other way would cost."""

    epilog = (
        "With --devices or --model-config, neither data nor weights are read. Otherwise the plan is for this machine, "
        "and plan.json is written to the output folder; --json prints it instead."
    )

    devices: str | None = option(None, "devices to plan for; also 4x24GB or 2x8xA100-40GB", metavar="8xH100-80GB")
    model_config_file: str | None = option(
        None,
        "JSON file with the model's shape, used instead of the model (configs/shapes)",
        metavar="FILE",
        spellings=["--model-config"],  # `model_config` is pydantic's
    )
    records: int | None = option(
        None, f"rows to assume when no data are read; default: {ASSUMED_RECORDS:,}", metavar="N"
    )
    details: bool = option(False, "also list every reason and every way to train")
    as_json: bool = option(False, "print the plan as JSON", spellings=["--json"])


OPTIONS = PlanOptions


def main(arguments: Sequence[str], *, program: str) -> int:
    """Show how a run would train, here or on other devices."""
    given = parse_words(PlanOptions, arguments, program=program)
    # The plan of this machine is what `vembed train --plan` prints, data and model read: the same code says it.
    if not given.keys() & {"devices", "model_config_file", "as_json", "records"}:
        return train.main([*arguments, "--plan"], program=program)
    return run_command(lambda: _run(given), log_to_stderr="as_json" in given)


def _run(given: Mapping[str, Any]) -> int:
    options = check(PlanOptions, given)
    shape = options.model_config_file
    elsewhere = options.devices is not None or shape is not None
    if options.records is not None and (not elsewhere or options.records < 2):
        raise ConfigError("--records says how many of at least 2 records to assume, beside --devices or --model-config")
    if shape is not None and not Path(shape).is_file():
        raise ConfigError(f"--model-config {shape}: no such file; configs/shapes holds some")
    loaded = load_config(options.path, options.config_override)
    devices = None if options.devices is None else parse_devices(options.devices)
    from vembed.training.planning import plan_elsewhere
    from vembed.training.run import run_from_config

    quiet_libraries()
    if not elsewhere:
        # A plan that is only printed must not touch the folder of a run that may be there.
        with TemporaryDirectory(prefix="vembed-plan-") as folder:
            run_from_config(
                loaded.config.model_copy(update={"output_dir": folder}),
                mode="plan",
                sources=loaded.sources,
                notes=loaded.notes,
            )
            print((Path(folder) / "plan.json").read_text("utf-8"), end="")
        return ExitCode.OK
    plan = plan_elsewhere(loaded.config, devices, shape=shape, num_records=options.records or ASSUMED_RECORDS)
    plan = plan.noting(*loaded.notes, first=True)
    if options.as_json:
        print(json.dumps(plan.to_json(), indent=2))
        return ExitCode.OK
    facts = {"model": shape or loaded.config.model_name, "devices": options.devices or "this machine"}
    print(explain(plan, facts=facts, details="--details, or --json"))
    if options.details:
        print(explain_fully(plan, facts=facts), comparison(plan), sep="\n")
    return ExitCode.OK
