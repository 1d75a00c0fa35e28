"""`python run.py CONFIG`, `vembed train CONFIG` and `accelerate launch vembed/entrypoints/train.py CONFIG`: train."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if not __package__:  # started as a file: Python put this folder on the path, where the package's parent belongs
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    # Ctrl-C while modules are imported ends this process without a traceback: its launcher says what happened.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from vembed import collector_paused
from vembed.config.load import file_values, load_config
from vembed.distributed.accelerate import deepspeed_refusal, is_deepspeed
from vembed.distributed.lock import hold_output
from vembed.distributed.process_env import LAUNCHED_BY, process_env
from vembed.distributed.signals import StopSignal
from vembed.distributed.watchdog import Watchdog
from vembed.entrypoints.command import command_line, quiet_libraries, run_command
from vembed.entrypoints.options import ConfigOptions, check, flags, parse_words
from vembed.errors import ConfigError, ExitCode
from vembed.redact import redact
from vembed.registry import plugin_lines
from vembed.section import option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.config.load import LoadedConfig
    from vembed.config.schema import Config
    from vembed.training.run import Mode


class TrainOptions(ConfigOptions):
    """Train an embedding model from a configuration file, and compare it with the untrained model."""

    resume: str | None = option(None, "continue from a checkpoint; overrides the key resume", metavar="auto|never|PATH")
    mode: Literal["train", "validate", "plan", "dry-run"] = flags(
        "train",
        {
            "validate": "check the configuration and stop",
            "plan": "print the plan, write plan.json and stop",
            "dry-run": "load everything, do one step and stop; writes nothing",
        },
    )
    details: bool = option(False, "with --plan: also list every reason and every way to train")


OPTIONS = TrainOptions


def main(arguments: Sequence[str] | None = None, *, program: str = "vembed train") -> int:
    """Train a model from a configuration file.

    Args:
        arguments: Words behind the program's name; None takes the process's own.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    given = parse_words(TrainOptions, words, program=program)
    # Words behind --help and in the report are those of the user, not of the launcher.
    called = os.environ.get(LAUNCHED_BY, program)  # a process of several: as the user called the first one
    # A signal ends the command at once, until the loop begins and there is something to save.
    watchdog, stop = Watchdog(), StopSignal(at_once=True)
    watchdog.words.doing = "starting"
    body = partial(_run, given, words, called, watchdog, stop)
    return run_command(body, in_several=True, watchdog=watchdog, stop=stop)


def _run(given: Mapping[str, Any], words: Sequence[str], called: str, watchdog: Watchdog, stop: StopSignal) -> int:
    options = check(TrainOptions, given)
    if options.details and options.mode != "plan":
        raise ConfigError("--details belongs to --plan: add --plan, or leave it out")
    loaded = _load(options)
    # Validation stops short of torch: it answers in under a second, and importing torch takes several.
    if options.mode == "validate":
        from vembed.training.early import refuse_wrong_run

        refuse_wrong_run(loaded.config, needs_data=False)
        where = str(loaded.path) if loaded.path is not None else "the overrides"
        print(f"{redact(where)}: valid, {len(loaded.sources)} keys set, the others have their defaults")
        lines = [*(f"{line}; its code ran" for line in plugin_lines(loaded.config.plugins)), *loaded.notes]
        print(*lines, sep="\n", end="\n" if lines else "")
        if loaded.config.data_path is None and loaded.config.data is None:
            print("warning: data_path is not set; training needs it (data_path=builtin:stdlib-code is built in)")
        return ExitCode.OK
    mode: Mode = options.mode
    # Several seeds are several processes; this one only waits, and never loads torch.
    if loaded.config.seeds is not None and mode == "train":
        return _train_seeds(loaded.config, options, command_line(called, words))
    # The lock on the output outlives everything that writes there: it is entered first and left last.
    with ExitStack() as held:
        if not process_env().is_launched:  # what can be told before torch is imported, which takes seconds
            from vembed.training.early import refuse_wrong_inputs, refuse_wrong_output
            from vembed.training.trackers import refuse_missing_packages

            refuse_wrong_inputs(loaded.config)
            if mode == "train":
                refuse_missing_packages(loaded.config.report_to)
                held.enter_context(hold_output(Path(loaded.config.output_dir)))
            if mode != "plan":
                refuse_wrong_output(loaded.config)
        # Counting devices needs torch, so it comes behind all that can be refused without.
        num_processes = 1
        if mode != "plan" and not process_env().is_launched and loaded.config.num_processes != 1:
            with collector_paused():
                from vembed.distributed.runtime import processes_to_start

            num_processes = processes_to_start(loaded.config.num_processes)
        if num_processes > 1:
            from vembed.distributed.launch import launch

            held.close()  # the first of them holds it
            script, wait = Path(__file__).resolve(), loaded.config.nccl_timeout
            return launch(script, words, num_processes=num_processes, called=called, stop_seconds=wait)
        with collector_paused():
            from vembed.distributed.runtime import shut_down
            from vembed.training.run import run_from_config

        quiet_libraries()
        command = command_line(called, words)
        run_from_config(
            loaded.config,
            mode=mode,
            command=command,
            sources=loaded.sources,
            notes=loaded.notes,
            watchdog=watchdog,
            stop=stop,
            details=options.details,
        )
    shut_down(watchdog)
    return ExitCode.OK


def _train_seeds(config: Config, options: TrainOptions, command: str) -> int:
    """Train once per seed, each time in a process of its own that this one waits for."""
    from vembed.training.early import refuse_wrong_inputs
    from vembed.training.trackers import refuse_missing_packages
    from vembed.workflows.sweeping.process import GO_ON, TrainProcess
    from vembed.workflows.sweeping.seeds import refuse_unfit, train_seeds

    refuse_unfit(config, launcher=process_env().launcher if process_env().is_launched else "")
    refuse_wrong_inputs(config)
    refuse_missing_packages(config.report_to)
    with StopSignal(advice=GO_ON) as stop, hold_output(Path(config.output_dir)):
        process = TrainProcess(options.path, options.config_override, stop.poll)
        train_seeds(config, process, process.steps, command)
    return ExitCode.OK


def _load(options: TrainOptions) -> LoadedConfig:
    overrides = list(options.config_override)
    if options.resume is not None:
        overrides.append(f"resume={options.resume}")
    path = options.path
    if path is None and not overrides:
        raise ConfigError("name a configuration: vembed train CONFIG; vembed init DATA writes one")
    try:
        return load_config(path, overrides)
    except ConfigError as error:
        # A file of DeepSpeed's is JSON too: its own keys would each be unknown, so it gets one answer for all.
        if path is not None and path.suffix.lower() == ".json":
            try:
                content = file_values(path)
            except ConfigError:
                raise error from None  # it says already why the file can't be read
            if is_deepspeed(content):
                raise ConfigError(deepspeed_refusal(content, where=str(path))) from error
        raise


if __name__ == "__main__":
    code = main(program="accelerate launch vembed/entrypoints/train.py")
    sys.stdout.flush()
    sys.stderr.flush()
    # One of several processes ends without taking the interpreter down: a thread of torch's process groups that
    # outlives its object there aborts the process, and a run that is whole would count as failed.
    if process_env().world_size > 1:
        os._exit(code)
    sys.exit(code)
