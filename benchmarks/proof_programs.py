"""Parts of the proof that start programs: other benchmarks, two ranks, and the commands that a user types."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proof_rows import Finding, Setting, Skipped, Unfinished

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

SAME = 1e-4
"""Most that losses and norms of two ranks may differ from those of one process, relative: float32 adds up in order."""

RANKS_SECONDS = 120
"""Longest wait for ranks that write nothing: on a busy machine they take long to start."""

OTHERS_BYTES = 64 << 20
"""Change in what other programs hold on the GPU that is still no reason to leave a row unjudged."""

START_SECONDS = 200
"""Longest wait for the first steps of a run."""

NOTICE_SECONDS = 30
"""`nccl_timeout` of the run that is killed."""

STOP_SECONDS = 120
"""Longest wait for a run that is stopped by SIGTERM: it ends its step and saves."""

LONGEST_NOTICE_SECONDS = 120
"""How long rank 0 is waited for: far longer than its timeout, as the machine may be busy."""


def _environment(setting: Setting, **more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if setting.device == "cpu":
        own |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, **more}


def _start(words: Sequence[object], setting: Setting, log: Path, **variables: str) -> subprocess.Popen[str]:
    """Start a Python program whose output goes to a file."""
    with log.open("w") as said:
        return subprocess.Popen(
            [sys.executable, *map(str, words)],
            stdout=said,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=setting.folder,
            env=_environment(setting, **variables),
        )


def _run(words: Sequence[object], setting: Setting, *, codes: Sequence[int] = (0,)) -> str:
    """Run a Python program to its end and return what it said.

    Raises:
        Skipped: It needs a package that isn't installed.
        RuntimeError: It ended with another code; its last line is in the message.
    """
    log = setting.folder / "said.txt"
    code = _start(words, setting, log).wait()
    said = log.read_text("utf-8", errors="replace")
    if code not in codes:
        raise _failure(f"{Path(str(words[0])).name} ended with code {code}", said)
    return said


def _failure(what: str, said: str) -> Exception:
    """Return what to raise for a program that failed, by what it said last."""
    missing = re.search(r"No module named '((?!vembed)\w+)", said)
    if missing is not None:
        return Skipped(f"not installed: {missing[1]}; see --wheels")
    if "Duplicate GPU" in said:
        return Skipped("this NCCL gives a GPU to one rank only; newer ones take NCCL_MULTI_RANK_GPU_ENABLE=1")
    lines = said.strip().splitlines()
    return RuntimeError(f"{what}: {lines[-1] if lines else 'it said nothing'}")


def plan_against_memory(setting: Setting) -> Iterator[Finding]:
    """Compare what the plan predicts with what a step allocates, the allocator reserves, and the driver gives."""
    from vembed.plan.problem import FIT_FACTOR, Way, reserve

    results = setting.folder / "memory.json"
    cases = ["BERT, LoRA"] if setting.is_small else ["GPU"]
    _run([HERE / "memory_prediction.py", *cases, "--device", setting.device, "--json", results], setting)
    for each in json.loads(results.read_text("utf-8")):
        predicted, measured = each["predicted"]["total"], each["measured"]
        figures = {"predicted_bytes": predicted, "allocated_bytes": measured["peak"]}
        figures["predicted/allocated (aim: 0.95 to 1.05)"] = each["ratio"]
        most = measured["peak"]
        if "driver" in measured:
            figures |= {"reserved_bytes": measured["reserved"], "driver_bytes": measured["driver"]}
            figures["predicted/reserved (aim: 0.9 to 1.1)"] = predicted / measured["reserved"]
            most = measured["driver"]
            figures["others_changed_bytes"] = measured["others_changed"]
        room = FIT_FACTOR * predicted + sum(reserve(setting.device, Way("single"), 1).values())
        # What the plan takes to fit must fit; the driver's count is no judge while other programs take memory.
        is_shared = abs(measured.get("others_changed", 0)) > OTHERS_BYTES
        yield Finding(each["case"], figures, held=None if is_shared else most <= room)


def sentence_transformers(setting: Setting, *, dropout: float) -> Iterator[Finding]:
    """Compare with sentence-transformers' cached loss, in its fastest setting of a sweep."""
    words: list[object] = ["--lengths", "mixed", "--no-plain", "--output", setting.folder, "--dropout", dropout]
    if setting.is_small:
        words += ["--texts", 16, "--layers", 1, "--rounds", 1, "--tokens", 256, "--peer-rows", 8, "--peer-tokens"]
    else:
        words += [
            "--device",
            "cuda",
            "--shape",
            "bert-base",
            "--bf16",
            "--packing",
            "--texts",
            8192,
            "--check-texts",
            512,
        ]
        words += ["--rounds", 3, "--tokens", 16384, 65536]
        words += ["--peer-rows", 64, 256, 1024, "--peer-tokens", 16384, 65536]
    _run([HERE / "engine.py", *words, "--only", r"^ST|^vembed, \d+ tokens"], setting)
    rows = json.loads((setting.folder / "engine.json").read_text("utf-8"))["results"]["mixed"]
    yield from _compared(rows, peer="ST", error="gradient_error")


def open_clip(setting: Setting) -> Iterator[Finding]:
    """Compare with open_clip's gradient accumulation."""
    words: list[object] = ["--output", setting.folder]
    if setting.is_small:
        words += ["--batch", 8, "--rows", 4, "--rounds", 1]
    else:
        words += ["--device", "cuda", "--shape", "vit-b-32", "--batch", 2048, "--rows", 256, "--rounds", 3, "--bf16"]
    _run([HERE / "open_clip_accum.py", *words], setting)
    rows = json.loads((setting.folder / "open_clip_accum.json").read_text("utf-8"))["results"]
    yield from _compared(rows, peer="open_clip", error="encoder_error")


def _compared(rows: dict[str, dict[str, float]], *, peer: str, error: str) -> Iterator[Finding]:
    """Yield a row for each variant, with its speed over the fastest of the peer's."""
    best = min((name for name in rows if name.startswith(peer)), key=lambda name: rows[name]["cpu_seconds"])
    for name, row in rows.items():
        figures = {"seconds": row["cpu_seconds"], f"over {best}": rows[best]["cpu_seconds"] / row["cpu_seconds"]}
        yield Finding(name, figures | {"peak_bytes": int(row["peak_bytes"]), error: row[error]})


def ranks(setting: Setting, *, world_size: int) -> Iterator[Finding]:
    """Train on the ranks of one device in every way, and compare with a process that knows no ranks.

    A single rank takes the same ways: its collectives and shards are the library's, with nobody else in them.
    """
    import torch
    from proof_ranks import ALONE, WAYS, trajectory

    from vembed.distributed.ranks import Ranks

    alone = trajectory(ALONE, torch.device(setting.device), Ranks())
    todo = list(WAYS)
    while todo:
        rows, failure = _run_ranks(todo, setting, world_size)
        for row in rows:
            todo.remove(row["way"])
            if "refused" in row:
                yield Finding(row["way"], {}, why_not=row["refused"])
                continue
            error = max(abs(number / truth - 1) for number, truth in zip(row["trajectory"], alone, strict=True))
            yield Finding(row["way"], {"error against one process": error, "most": SAME}, held=error <= SAME)
        if not todo:
            return
        if isinstance(failure, Skipped):
            raise failure
        if isinstance(failure, Unfinished):
            yield Finding(todo.pop(0), {}, late=str(failure))
        else:
            yield Finding(todo.pop(0), {"error": str(failure)}, held=False)


def _run_ranks(ways: Sequence[str], setting: Setting, world_size: int) -> tuple[list[dict[str, Any]], Exception]:
    """Run ranks through some ways; return the rows of rank 0, and why there are no more."""
    logs = [setting.folder / f"rank{rank}.txt" for rank in range(world_size)]
    meet = setting.folder / f"meet{time.monotonic_ns()}"
    words = [HERE / "proof_ranks.py", *ways, "--device", setting.device, "--ranks", world_size, "--meet", meet]
    running = [
        _start([*words, "--rank", rank], setting, log, NCCL_MULTI_RANK_GPU_ENABLE="1") for rank, log in enumerate(logs)
    ]
    until, num_bytes = time.monotonic() + RANKS_SECONDS, 0
    while any(process.poll() is None for process in running) and time.monotonic() < until:
        if any(process.poll() not in (None, 0) for process in running):
            time.sleep(2)  # the other may say why
            break
        if logs[0].stat().st_size > num_bytes:  # each way has the whole wait
            until, num_bytes = time.monotonic() + RANKS_SECONDS, logs[0].stat().st_size
        time.sleep(0.1)
    is_late = time.monotonic() >= until and all(process.poll() in (None, 0) for process in running)
    for process in running:
        process.kill()
        process.wait()
    texts = [log.read_text("utf-8", errors="replace") for log in logs]
    rows = [json.loads(line) for line in texts[0].splitlines() if line.startswith("{")]
    if is_late:
        return rows, Unfinished(f"{world_size} ranks weren't done after {RANKS_SECONDS} s")
    errors = [line for text in reversed(texts) for line in text.splitlines() if not line.startswith("{")]
    return rows, _failure(f"codes {[process.returncode for process in running]}", "\n".join(errors))


def killed_rank(setting: Setting) -> Iterator[Finding]:
    """Kill rank 1 of a run that is under way; rank 0 must say who is gone, and end with code 5."""
    output = setting.folder / "killed"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    overrides = [f"nccl_timeout={NOTICE_SECONDS}", "max_steps=100000", "warmup_steps=1", f"output_dir={output}"]
    words = [ROOT / "vembed/entrypoints/train.py", *_text_run(overrides)]
    # Each believes to be alone on a machine with one device: no launcher gives a device to two.
    meet = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    meet |= {"MASTER_PORT": str(port), "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    logs = [setting.folder / f"killed{rank}.txt" for rank in range(2)]
    first, second = (_start(words, setting, log, RANK=str(rank), **meet) for rank, log in enumerate(logs))
    try:
        _wait_for_step(output, 2, first, logs[0])
        second.kill()
        started = time.monotonic()
        code = first.wait(timeout=LONGEST_NOTICE_SECONDS)
    except subprocess.TimeoutExpired:
        yield Finding("kill -9 of rank 1", {}, late=f"rank 0 still ran after {LONGEST_NOTICE_SECONDS} s")
        return
    finally:
        for process in (first, second):
            process.kill()
            process.wait()
    exit_file = output / "exit.json"
    content = json.loads(exit_file.read_text("utf-8")) if exit_file.is_file() else {}
    figures = {"seconds to notice": time.monotonic() - started, "code": code}
    figures["message"] = content.get("message", "nothing")
    yield Finding("kill -9 of rank 1", figures, held=code == 5 and content.get("rank") == 1)


def _text_run(overrides: Sequence[str]) -> list[str]:
    """Return the arguments of a run that trains a small text model, and leaves out what isn't training."""
    usual = ["eval_strategy=no", "test_data_path=null", "bm25=false", "report_to=none", "logging_steps=1"]
    return [str(ROOT / "configs" / "quickstart_text.yaml"), "--config_override", *usual, *overrides]


def _wait_for_step(output: Path, step: int, process: subprocess.Popen[str], said: Path) -> None:
    """Wait until a run has logged a step.

    Args:
        said: File that gets what it says.

    Raises:
        RuntimeError: It ended before.
        Unfinished: It takes too long.
    """
    log = output / "metrics.jsonl"
    until = time.monotonic() + START_SECONDS
    while not (log.is_file() and len(_steps(output)) >= step):
        if process.poll() is not None:
            raise _failure(f"no step {step}, code {process.poll()}", said.read_text("utf-8", errors="replace"))
        if time.monotonic() > until:
            raise Unfinished(f"no step {step} after {START_SECONDS} s")
        time.sleep(0.01)


def _steps(output: Path) -> list[dict[str, Any]]:
    lines = (output / "metrics.jsonl").read_text("utf-8").splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if "loss" in row]


def commands(setting: Setting) -> Iterator[Finding]:
    """Run what a user types: the quickstart, then a run that is stopped, resumed and compared with one that wasn't."""
    started = time.monotonic()
    quick = setting.folder / "quick"
    shortened = ["max_steps=2", "test_data_path=null"] if setting.is_small else []
    words = [ROOT / "configs/quickstart.yaml", "--config_override", f"output_dir={quick}", *shortened]
    said = _run([ROOT / "run.py", *words], setting)
    verdict = said.strip().splitlines()[-1]
    whole = "improved" in verdict or setting.is_small
    figures = {"seconds": time.monotonic() - started, "verdict": verdict}
    yield Finding("quickstart", figures, held=whole and (quick / "model").is_dir())
    outputs = [setting.folder / name for name in ("whole", "stopped")]
    runs = [
        [ROOT / "run.py", *_text_run([f"max_steps={24 if setting.is_small else 200}", f"output_dir={output}"])]
        for output in outputs
    ]
    _run(runs[0], setting)
    log = setting.folder / "stopped.txt"
    process = _start(runs[1], setting, log)
    try:
        _wait_for_step(outputs[1], 3, process, log)
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        raise Unfinished(f"a run that was sent SIGTERM still ran after {STOP_SECONDS} s") from None
    finally:
        process.kill()
        process.wait()
    saved = len(_steps(outputs[1]))
    _run(runs[1], setting)
    losses = [_steps(output)[-1]["loss"] for output in outputs]
    files = [sorted((output / "model").rglob("*.safetensors")) for output in outputs]
    equal = [each.read_bytes() for each in files[0]] == [each.read_bytes() for each in files[1]] and len(files[0]) > 0
    error = abs(losses[1] / losses[0] - 1)
    figures = {"code of the stop": code, "steps by then": saved, "weights equal": equal, "error of the loss": error}
    # Some kernels of a GPU add up in an order of their own.
    held = equal if setting.is_small else error < 1e-2
    yield Finding("stopped by SIGTERM and resumed", figures, held=held and code in (0, 75))
