"""Train from Python."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vembed.config.load import load_values
from vembed.config.schema import Config
from vembed.distributed.watchdog import Watchdog
from vembed.redact import redact
from vembed.training.finish import RunResult
from vembed.training.wiring.run import run_from_config

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["RunResult", "train"]


def train(config: str | Path | Mapping[str, object] | Config, /, **overrides: object) -> RunResult:
    """Train what a configuration describes, as `vembed train` does, in this process.

    In a script that torchrun or accelerate launch started, the processes train together.

    Args:
        config: A YAML or JSON file, key -> value, or a `Config`.
        overrides: Keys that win over it, e.g. `batch_size=32`.

    Returns:
        The verdict, the evaluations before and after, and the output folder.

    Raises:
        VembedError: As the command line; `exit_code` is the code that it would have ended with.
    """
    base: Path | Mapping[str, object]
    if isinstance(config, Config):
        base = config.model_dump(include=config.model_fields_set)
    else:
        base = Path(config) if isinstance(config, str) else config
    loaded = load_values(base, overrides)
    given = repr(str(config)) if isinstance(config, (str, Path)) else "config"
    words = [given, *(f"{name}={value!r}" for name, value in overrides.items())]
    command = redact(f"vembed.train({', '.join(words)})")
    watchdog = Watchdog()
    try:
        result = run_from_config(
            loaded.config, command=command, sources=loaded.sources, notes=loaded.notes, watchdog=watchdog
        )
    except BaseException:
        watchdog.stop(together=False)
        raise
    watchdog.stop()
    assert result is not None  # only a plan or a dry run has none
    return result
