"""Prove what vembed promises on one GPU, and measure what it takes, in under ten minutes.

    python benchmarks/gpu_proof.py --output proof              # on the GPU
    python benchmarks/gpu_proof.py --group first               # 150 seconds: does it work here at all
    python benchmarks/gpu_proof.py --device cpu                # tiny shapes, to see that the proof itself works
    python benchmarks/gpu_proof.py --only attention exactness  # steps by the beginning of their names
    python benchmarks/gpu_proof.py --list                      # steps, their groups, and the packages that are missing
    python benchmarks/gpu_proof.py --wheels DIR                # with packages that were carried here

Groups: `first` (what must hold before anything else counts), `ranks` (NCCL, shards, whole runs), `feed` (loader
against step), `speed` and `compile`. In a group steps are ordered by worth, and rows are written as they come:
`rows.jsonl` and `proof.md` in the output folder. A row has one of five states: `held` and `FAILED` (what must be true
is, or isn't), `measured` (figures to read, nothing that must be), `skipped` (with the reason: what this version or
machine can't do, a missing package, no time left) and `unfinished` (it took too long: the machine is busy, or it
hangs; the row says where it stood). Times never fail a row. A step that fails or takes its process down is a row too,
and the next one starts in a fresh process. Exit code 1: something failed; 75: something wasn't finished.

Needs torch, numpy, transformers, safetensors and accelerate. A step that needs more is skipped and names it; the last
line says how to fetch the wheels where there is a network. Nothing need be installed: PYTHONPATH=. python
benchmarks/gpu_proof.py. How to read it: docs/devices.md.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import proof_engine
import proof_feed
import proof_kernels
import proof_programs
from proof_rows import Report, Row, Setting, Skipped, State, Step, Unfinished, how_to_carry, unpack_wheels

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

OTHERS_SHARE = 0.1
"""Of a GPU's memory: what other programs hold beyond excuses running out of it. A context of CUDA takes about 1%."""

GROUPS = ("first", "ranks", "feed", "speed", "compile")

_MODEL = ("transformers", "safetensors")
_PLAN = (*_MODEL, "accelerate", "pydantic", "PIL", "peft")
_RUN = (*_PLAN, "yaml", "pyarrow", "datasets", "faiss", "pytrec_eval", "bm25s", "Stemmer", "jinja2", "matplotlib")


def _sweep(  # `compile` is the option's own name
    group: str,
    family: str,
    name: str,
    seconds: int,
    packing: bool = False,
    compile: bool = False,  # noqa: A002
) -> Step:
    ways = " and ".join(["packing"] * packing + ["compile"] * compile)
    needs = (*_MODEL, "pydantic", "PIL") if family == "clip" else _MODEL
    title = f"sweep {name}{', ' if ways else ''}{ways}"
    return Step(group, title, partial(proof_engine.sweep, family, packing=packing, compile=compile), seconds, needs)


STEPS: tuple[Step, ...] = (
    Step("first", "versions", proof_kernels.versions, 5),
    Step("first", "attention", proof_kernels.attention, 15),
    Step("first", "exactness", proof_engine.exactness, 20, _MODEL),
    Step("first", "LoRA", proof_engine.lora, 10, (*_MODEL, "peft")),
    Step("first", "one rank", partial(proof_programs.ranks, world_size=1), 20, (*_MODEL, "accelerate")),
    Step("first", "waits and busy share", proof_engine.host, 20, _MODEL),
    Step("first", "out of memory", proof_engine.repair, 10, _MODEL),
    Step("first", "plan", proof_programs.plan_against_memory, 50, _PLAN),
    Step("ranks", "two ranks", partial(proof_programs.ranks, world_size=2), 45, (*_MODEL, "accelerate")),
    Step("ranks", "killed rank", proof_programs.killed_rank, 40, _RUN),
    Step("ranks", "commands", proof_programs.commands, 60, _RUN),
    Step("feed", "loader against step", proof_feed.texts, 30, _MODEL),
    _sweep("speed", "bert", "BERT", 15),
    Step("speed", "retention at equal memory", proof_engine.retention, 30, _MODEL),
    Step(
        "speed",
        "sentence-transformers, dropout 0",
        partial(proof_programs.sentence_transformers, dropout=0.0),
        60,
        (*_RUN, "sentence_transformers"),
    ),
    Step("speed", "8B", proof_engine.one_step_at_8b, 45, (*_MODEL, "peft")),
    _sweep("speed", "bert", "BERT", 15, packing=True),
    Step("speed", "open_clip", proof_programs.open_clip, 40, (*_RUN, "open_clip")),
    _sweep("speed", "modernbert", "ModernBERT", 15),
    _sweep("speed", "qwen3", "Qwen3", 20),
    _sweep("speed", "clip", "CLIP", 20),
    _sweep("speed", "qwen3", "Qwen3", 20, packing=True),
    _sweep("speed", "modernbert", "ModernBERT", 15, packing=True),
    Step(
        "speed",
        "sentence-transformers, dropout 0.1",
        partial(proof_programs.sentence_transformers, dropout=0.1),
        60,
        (*_RUN, "sentence_transformers"),
    ),
    Step("compile", "compiled step", proof_engine.compiled, 60, _MODEL),
    _sweep("compile", "bert", "BERT", 40, compile=True),
    _sweep("compile", "qwen3", "Qwen3", 45, compile=True),
    _sweep("compile", "modernbert", "ModernBERT", 45, compile=True),
    _sweep("compile", "clip", "CLIP", 45, compile=True),
    _sweep("compile", "bert", "BERT", 40, packing=True, compile=True),
    _sweep("compile", "qwen3", "Qwen3", 45, packing=True, compile=True),
    _sweep("compile", "modernbert", "ModernBERT", 45, packing=True, compile=True),
)
"""The groups one after the other; in each in order of worth."""


def main() -> int:
    """Run the steps that there is time for; return the exit code."""
    arguments = _arguments()
    steps = [step for step in STEPS if step.group in arguments.group]
    if arguments.only:
        steps = [step for step in steps if step.name.startswith(tuple(arguments.only))]
    if arguments.wheels is not None:
        unpack_wheels(arguments.wheels, arguments.output / "site")
    missing = dict.fromkeys(module for step in steps for module in step.missing)
    carry = f"missing: {', '.join(missing)}. To carry them: {how_to_carry(missing)}; then --wheels WHEELS"
    if arguments.list:
        for step in steps:
            without = f"  (needs {', '.join(step.missing)})" if step.missing else ""
            print(f"{step.group:8} {step.seconds:4} s  {step.name}{without}")
        if missing:
            print(carry)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended on the way out
    until = time.monotonic() + 60 * arguments.minutes
    small = ": tiny shapes and gloo. It shows that the proof works, and nothing about a GPU"
    report = Report(arguments.output, f"Proof on {arguments.device}{small if arguments.device == 'cpu' else ''}")
    prove(steps, report, arguments.device, until)
    code = report.close()
    if missing:
        print(carry)
    return code


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="where it runs; cpu: tiny shapes")
    parser.add_argument("--minutes", type=float, default=10.0, help="all that it may take")
    parser.add_argument("--group", nargs="+", choices=GROUPS, default=GROUPS, help="steps of these groups; all")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="folder of wheels that are used in the proof")
    parser.add_argument("--only", nargs="+", default=[], metavar="STEP", help="steps whose names begin so")
    parser.add_argument("--output", type=Path, default=Path("gpu_proof"), help="folder that gets the rows")
    parser.add_argument("--list", action="store_true", help="print the steps, and do nothing")
    return parser.parse_args()


def prove(steps: list[Step], report: Report, device: str, until: float) -> None:
    """Run steps one after the other while there is time.

    Args:
        until: When it must be over, by time.monotonic.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ending:
        setting = Setting(device, Path(folder))
        worker = None
        for step in steps:
            if step.missing:
                words = f"not installed: {', '.join(step.missing)}; see --wheels"
                report.add(Row(step.name, "", "skipped", {}, words))
                continue
            left = until - time.monotonic()
            if left < (1 if setting.is_small else step.seconds):
                words = f"no time: {max(0.0, left):.0f} s are left, and it takes about {step.seconds} s"
                report.add(Row(step.name, "", "skipped", {}, words))
                continue
            if worker is None:
                worker = Worker(setting)
                ending.callback(worker.close)
            for row in worker.run(step, left if setting.is_small else min(left, step.limit_seconds)):
                report.add(row)
                if row.state == "FAILED":
                    worker.is_spent = True  # an error of the device stays with the process that saw it
            if worker.is_spent:
                ending.close()
                worker = None


class Worker:
    """A process that runs steps, with all that they start: what it can't survive is a row, and a new one takes over."""

    def __init__(self, setting: Setting) -> None:
        setting.stack_file.write_text("", "utf-8")
        context = multiprocessing.get_context("spawn")
        self._end, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, setting))
        self._process.start()
        self._setting = setting
        theirs.close()
        self.is_spent = False

    def run(self, step: Step, limit_seconds: float) -> Iterator[Row]:
        """Yield the rows of a step as they come; a row says so where it took too long or ended the process."""
        self._end.send(step)
        started = time.monotonic()
        while True:
            if not self._end.poll(max(0.0, started + limit_seconds - time.monotonic())):
                self.is_spent = True
                words = f"it wasn't done after {limit_seconds:.0f} s; it stood at {self._stack()}"
                yield Row(step.name, "", "unfinished", {}, words, limit_seconds)
                return
            try:
                row = self._end.recv()
            except EOFError:
                self._process.join()
                words = f"its process ended with code {self._process.exitcode}"
                yield Row(step.name, "", "FAILED", {}, words, time.monotonic() - started)
                return
            if row is None:
                return
            yield row

    def _stack(self) -> str:
        """Ask the process where it is, and return the innermost lines."""
        os.kill(self._process.pid or 0, signal.SIGUSR1)
        time.sleep(1)  # the handler writes from C, also while a library waits
        lines = [line.split() for line in self._setting.stack_file.read_text("utf-8").splitlines() if "File" in line]
        return " < ".join(f"{Path(words[1].strip(chr(34) + ',')).name}:{words[3]}" for words in lines[:3]) or "?"

    def close(self) -> None:
        """End the process and all that it started."""
        try:
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        except ProcessLookupError:
            self._process.kill()  # it has ended, or hasn't come as far as a group of its own
        self._process.join()


def _work(end: Connection, setting: Setting) -> None:
    os.setsid()
    faulthandler.register(signal.SIGUSR1, setting.stack_file.open("w"), all_threads=False)
    if setting.device == "cuda":
        with contextlib.suppress(ModuleNotFoundError):  # the steps that need the missing package say so
            from vembed.distributed.runtime import prepare_device

            prepare_device()
    try:
        while True:
            step: Step = end.recv()
            for row in rows_of(step, setting):
                end.send(row)
            end.send(None)
    except (EOFError, BrokenPipeError):  # the proof has ended, whatever way
        os.killpg(0, signal.SIGKILL)


def rows_of(step: Step, setting: Setting) -> Iterator[Row]:
    """Run a step here and yield its rows; an error is the last of them."""
    started = time.monotonic()
    try:
        for finding in step.run(setting):
            now = time.monotonic()
            words = finding.why_not or finding.late
            yield Row(step.name, finding.case, finding.state, finding.figures, words, now - started)
            started = now
    except Skipped as reason:
        yield Row(step.name, "", "skipped", {}, str(reason), time.monotonic() - started)
    except Unfinished as reason:
        yield Row(step.name, "", "unfinished", {}, str(reason), time.monotonic() - started)
    except ModuleNotFoundError as error:
        state, words = _missing(error)
        yield Row(step.name, "", state, {}, words, time.monotonic() - started)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this step's row
        traceback.print_exc()
        busy = _taken_by_others(error, setting.device)
        yield Row(
            step.name, "", "skipped" if busy else "FAILED", {}, busy or _words_of(error), time.monotonic() - started
        )
    _give_memory_back(setting.device)


def _missing(error: ModuleNotFoundError) -> tuple[State, str]:
    """Return state and words: a package that isn't installed is a reason, a module of ours that is gone an error."""
    name = error.name or "?"
    if name.partition(".")[0] == "vembed" or (Path(__file__).parent / f"{name}.py").exists():
        return "FAILED", _words_of(error)
    return "skipped", f"not installed: {name.partition('.')[0]}; see --wheels"


def _taken_by_others(error: BaseException, device: str) -> str:
    """Return a reason where memory ran out on a GPU that other programs use too, else an empty text."""
    if device != "cuda" or "out of memory" not in str(error).lower():
        return ""
    import torch

    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()
    return f"other programs hold {others >> 30} of {total >> 30} GiB" if others > OTHERS_SHARE * total else ""


def _words_of(error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text} ({Path(place.filename).name}:{place.lineno})"


def _give_memory_back(device: str) -> None:
    gc.collect()
    if device == "cuda" and "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
