"""Options of a sweep: what is tried, and by which way through it."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from vembed.section import LARGEST_COUNT, Count, Section, option


class SweepKeys(Section):
    """Options of a sweep."""

    tries: list[str] = option(
        ...,
        "values to try: learning_rate=1e-5,2e-5, or a range to draw from: learning_rate=1e-6..1e-4",
        metavar="KEY=A,B",
        spellings=["--try"],
    )
    random: Count | None = option(None, "draw N random combinations; default: try all", metavar="N", one_of="way")
    optuna: Count | None = option(
        None, "try N combinations that Optuna suggests, one after another", metavar="N", one_of="way"
    )
    halving: bool = option(
        False,
        "train all trials for part of the steps, then the better half again for twice as many, until two are left",
    )
    seed: Annotated[int, Field(ge=0, le=LARGEST_COUNT)] | None = option(
        None, "seed of --random and --optuna; default: 0", metavar="N"
    )
    output: Path | None = option(None, "folder of the sweep; default: OUTPUT_DIR-sweep", metavar="DIR")
    dry_run: bool = option(False, "list the trials with their steps and time, and stop")
