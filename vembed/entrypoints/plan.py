"""`vembed plan CONFIG`: what `vembed train CONFIG --plan` says, and plans for other devices without data or model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from vembed.config.load import load_config
from vembed.entrypoints import train
from vembed.entrypoints.command import add_config_arguments, config_path, quiet_libraries, run_command
from vembed.errors import ConfigError, ExitCode
from vembed.plan.devices import parse_devices
from vembed.plan.text import comparison, explain, explain_fully

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.plan.plan import Plan

DESCRIPTION = "Show how a run would train, and what every other way would cost."

ASSUMED_RECORDS = 100_000
"""Records of a run whose data nobody reads."""


def parse_arguments(arguments: Sequence[str], *, program: str) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=DESCRIPTION,
        epilog="With --devices or --model-config, neither data nor weights are read. Otherwise the plan is for this "
        "machine, and plan.json is written to the output folder; --json prints it instead.",
    )
    add_config_arguments(parser)
    parser.add_argument("--devices", metavar="8xH100-80GB", help="devices to plan for; also 4x24GB or 2x8xA100-40GB")
    parser.add_argument(
        "--model-config",
        metavar="FILE",
        help="JSON file with the model's shape, used instead of the model (configs/shapes)",
    )
    parser.add_argument(
        "--records", type=int, metavar="N", help=f"rows to assume when no data are read; default: {ASSUMED_RECORDS:,}"
    )
    parser.add_argument("--details", action="store_true", help="also list every reason and every way to train")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str], *, program: str) -> int:
    """Show how a run would train, here or on other devices."""
    parsed = parse_arguments(arguments, program=program)
    elsewhere = parsed.devices is not None or parsed.model_config is not None
    if not elsewhere and not parsed.json and parsed.records is None:
        return train.main([*arguments, "--plan"], program=program)
    return run_command(lambda: _plan(parsed, elsewhere=elsewhere), log_to_stderr=parsed.json)


def _plan(parsed: argparse.Namespace, *, elsewhere: bool) -> int:
    if parsed.records is not None and (not elsewhere or parsed.records < 2):
        raise ConfigError("--records says how many of at least 2 records to assume, beside --devices or --model-config")
    if parsed.model_config is not None and not Path(parsed.model_config).is_file():
        raise ConfigError(f"--model-config {parsed.model_config}: no such file; configs/shapes holds some")
    loaded = load_config(config_path(parsed), parsed.config_override)
    devices = None if parsed.devices is None else parse_devices(parsed.devices)
    from vembed.training.planning import plan_elsewhere
    from vembed.training.run import run_from_config

    quiet_libraries()
    if not elsewhere:
        with TemporaryDirectory(prefix="vembed-plan-") as folder:
            run_from_config(
                loaded.config.model_copy(update={"output_dir": folder}),
                mode="plan",
                sources=loaded.sources,
                notes=loaded.notes,
            )
            print((Path(folder) / "plan.json").read_text("utf-8"), end="")
        return ExitCode.OK
    made = plan_elsewhere(
        loaded.config, devices, shape=parsed.model_config, num_records=parsed.records or ASSUMED_RECORDS
    )
    _show(
        made.noting(*loaded.notes, first=True),
        loaded.config.model_name if parsed.model_config is None else parsed.model_config,
        parsed,
    )
    return ExitCode.OK


def _show(plan: Plan, model: str, parsed: argparse.Namespace) -> None:
    if parsed.json:
        print(json.dumps(plan.to_json(), indent=2))
        return
    facts = {"model": model, "devices": parsed.devices or "this machine"}
    print(explain(plan, facts=facts, details="--details, or --json"))
    if parsed.details:
        print(explain_fully(plan, facts=facts), comparison(plan), sep="\n")
