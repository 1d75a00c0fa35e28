"""Prove what vembed promises on one GPU, and measure what it takes, in under ten minutes.

    python benchmarks/gpu_proof.py --output proof              # on the GPU
    python benchmarks/gpu_proof.py --device cpu                # tiny shapes, to see that the proof itself works
    python benchmarks/gpu_proof.py --only attention exactness  # steps by the beginning of their names
    python benchmarks/gpu_proof.py --list

Steps are ordered by worth, and each one's rows are written as they come: `rows.jsonl` and `proof.md` in the output
folder. A row has one of four states: `held` and `FAILED` (what must be true is, or isn't), `measured` (figures to read,
nothing that must be), `skipped` (with the reason: what this version or machine can't do, or no time left). A step that
fails, hangs or takes its process down is a row too, and the next one starts in a fresh process. Exit code 1 says that
something failed. From a checkout nothing need be installed but torch and what a step names when it is skipped:
PYTHONPATH=. python benchmarks/gpu_proof.py. How to read it: docs/gpu.md.
"""

from __future__ import annotations

import argparse
import contextlib
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
import proof_kernels
import proof_programs
from proof_rows import Report, Row, Setting, Skipped, State, Step

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

STEPS: tuple[Step, ...] = (
    Step("versions", proof_kernels.versions, 5),
    Step("attention", proof_kernels.attention, 15),
    Step("exactness", proof_engine.exactness, 15),
    Step("waits and busy share", proof_engine.host, 20),
    Step("out of memory", proof_engine.repair, 10),
    Step("plan", proof_programs.plan_against_memory, 50),
    Step("sentence-transformers, dropout 0", partial(proof_programs.sentence_transformers, dropout=0.0), 60),
    Step("ranks", proof_programs.ranks, 45),
    Step("sweep BERT", partial(proof_engine.sweep, "bert"), 15),
    Step("commands", proof_programs.commands, 60),
    Step("sentence-transformers, dropout 0.1", partial(proof_programs.sentence_transformers, dropout=0.1), 60),
    Step("8B", proof_engine.one_step_at_8b, 45),
    Step("sweep BERT, packing", partial(proof_engine.sweep, "bert", packing=True), 15),
    Step("sweep BERT, compile", partial(proof_engine.sweep, "bert", compile=True), 40),
    Step("open_clip", proof_programs.open_clip, 40),
    Step("sweep ModernBERT", partial(proof_engine.sweep, "modernbert"), 15),
    Step("sweep Qwen3", partial(proof_engine.sweep, "qwen3"), 20),
    Step("sweep CLIP", partial(proof_engine.sweep, "clip"), 20),
    Step("sweep Qwen3, packing", partial(proof_engine.sweep, "qwen3", packing=True), 20),
    Step("sweep ModernBERT, packing", partial(proof_engine.sweep, "modernbert", packing=True), 15),
    Step("sweep Qwen3, compile", partial(proof_engine.sweep, "qwen3", compile=True), 45),
    Step("sweep ModernBERT, compile", partial(proof_engine.sweep, "modernbert", compile=True), 45),
    Step("sweep CLIP, compile", partial(proof_engine.sweep, "clip", compile=True), 45),
    Step("sweep BERT, packing and compile", partial(proof_engine.sweep, "bert", packing=True, compile=True), 40),
    Step("sweep Qwen3, packing and compile", partial(proof_engine.sweep, "qwen3", packing=True, compile=True), 45),
    Step(
        "sweep ModernBERT, packing and compile",
        partial(proof_engine.sweep, "modernbert", packing=True, compile=True),
        45,
    ),
)
"""In order of worth."""


def main() -> int:
    """Run the steps that there is time for; return the exit code."""
    arguments = _arguments()
    steps = [step for step in STEPS if not arguments.only or step.name.startswith(tuple(arguments.only))]
    if arguments.list:
        print("\n".join(f"{step.seconds:4} s  {step.name}" for step in steps))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended on the way out
    until = time.monotonic() + 60 * arguments.minutes
    report = Report(arguments.output, f"Proof on {arguments.device}")
    prove(steps, report, arguments.device, until)
    return report.close()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="where it runs; cpu: tiny shapes")
    parser.add_argument("--minutes", type=float, default=10.0, help="all that it may take")
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
        context = multiprocessing.get_context("spawn")
        self._end, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, setting))
        self._process.start()
        theirs.close()
        self.is_spent = False

    def run(self, step: Step, limit_seconds: float) -> Iterator[Row]:
        """Yield the rows of a step as they come; a row says so where it took too long or ended the process."""
        self._end.send(step)
        started = time.monotonic()
        while True:
            if not self._end.poll(max(0.0, started + limit_seconds - time.monotonic())):
                self.is_spent = True
                yield Row(step.name, "", "FAILED", {}, f"it wasn't done after {limit_seconds:.0f} s", limit_seconds)
                return
            try:
                said = self._end.recv()
            except EOFError:
                self._process.join()
                words = f"its process ended with code {self._process.exitcode}"
                yield Row(step.name, "", "FAILED", {}, words, time.monotonic() - started)
                return
            if said is None:
                return
            yield said

    def close(self) -> None:
        """End the process and all that it started."""
        try:
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        except ProcessLookupError:
            self._process.kill()  # it has ended, or hasn't come as far as a group of its own
        self._process.join()


def _work(end: Connection, setting: Setting) -> None:
    os.setsid()
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
            yield Row(step.name, finding.case, finding.state, finding.figures, finding.why_not, now - started)
            started = now
    except Skipped as reason:
        yield Row(step.name, "", "skipped", {}, str(reason), time.monotonic() - started)
    except ModuleNotFoundError as error:
        state, words = _missing(error)
        yield Row(step.name, "", state, {}, words, time.monotonic() - started)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this step's row
        traceback.print_exc()
        yield Row(step.name, "", "FAILED", {}, _words_of(error), time.monotonic() - started)
    _give_memory_back(setting.device)


def _missing(error: ModuleNotFoundError) -> tuple[State, str]:
    """Return state and words: a package that isn't installed is a reason, a module of ours that is gone an error."""
    name = error.name or "?"
    if name.partition(".")[0] == "vembed" or (Path(__file__).parent / f"{name}.py").exists():
        return "FAILED", _words_of(error)
    return "skipped", f"{name} is not installed; pip install -c constraints.txt -e . from the checkout brings it"


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
