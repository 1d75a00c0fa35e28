"""Parts of the proof that run the engine: exact gradients, what the host waits for, sizes of chunks, repair, 8B."""

from __future__ import annotations

import contextlib
import shutil
import time
import traceback
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memory_cases import bert
from proof_models import (
    add_lora,
    encoder_of,
    engine_of,
    largest_error,
    shape_of,
    take_gradients,
    whole_error,
    workload_of,
)
from proof_rows import Finding, Setting, Skipped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from engine_workload import Workload
    from torch import Tensor

    from vembed.gradcache.engine import GradCacheEngine, StepResult
    from vembed.models.encoder import Encoder

GIB = 1 << 30
MUCH_MEMORY = 40 * GIB
"""Free on a GPU: enough for a model of 8B with LoRA, and for chunks of 32k tokens of BERT-base."""

EXACT = 1e-9
"""Most that a gradient may differ from the plain step's in float64, relative to its norm."""

WORSE_IN_BF16 = 2.0
"""Most that chunks may add to the error of bfloat16 and float16: they round sums of other lengths."""

FLOAT16_SCALE = 2.0**10
"""Factor on the gradients of a float16 step, which would underflow without."""

SAME_COMPILED = 1e-3
"""Most that the gradients of compiled layers may differ in float32, relative: fused kernels round elsewhere."""


def exactness(setting: Setting) -> Iterator[Finding]:
    """Compare the gradients of a step in chunks with those of the plain step, then replay one with dropout."""
    import torch
    from engine_workload import batch_of

    shape, pairs = bert(128, 2, 256), 24 if setting.is_small else 256
    still = {**shape, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    workload = workload_of(encoder_of(still, setting, "float64"), setting, pairs)
    truth, found = _plain_gradients(workload), _chunked_gradients(workload)
    error = largest_error(found, truth)
    yield Finding("float64", {"gradient error": error, "most": EXACT}, held=error <= EXACT)
    torch.manual_seed(0)
    workload = workload_of(encoder_of(still, setting), setting, pairs)
    truth = _plain_gradients(workload)
    rounded = replace(workload, autocast=torch.bfloat16)
    plain, chunked = (whole_error(found(rounded), truth) for found in (_plain_gradients, _chunked_gradients))
    figures = {"error of the chunks": chunked, "of the plain step": plain}
    yield Finding("bfloat16 against float32", figures, held=chunked <= WORSE_IN_BF16 * plain)
    half = replace(workload, autocast=torch.float16)
    plain, chunked = (whole_error(_scaled_gradients(half, retain), truth) for retain in (1.0, 0.3))
    figures = {"error of the chunks": chunked, "of the plain step": plain, "loss scale": FLOAT16_SCALE}
    yield Finding("float16 against float32", figures, held=chunked <= WORSE_IN_BF16 * plain)
    workload = workload_of(encoder_of(shape, setting), setting, pairs, torch.bfloat16)
    pool, structure = batch_of(workload)
    drift = engine_of(workload, 512).step([pool], structure).replay_drift  # raises where it is more than rounding
    yield Finding("replay with dropout, bfloat16", {"drift": drift}, held=True)


def _chunked_gradients(workload: Workload) -> dict[str, Tensor]:
    from engine_workload import batch_of

    pool, structure = batch_of(workload)
    engine_of(workload, 512, retain=0.3).step([pool], structure)
    return take_gradients(workload.encoder)


def _scaled_gradients(workload: Workload, retain: float) -> dict[str, Tensor]:
    """Return the gradients of a step whose loss is scaled; with all graphs kept in one chunk it is the plain step."""
    from engine_workload import batch_of

    pool, structure = batch_of(workload)
    engine = engine_of(workload, 1 << 20 if retain == 1.0 else 512, retain)
    engine.step([pool], structure, gradient_scale=FLOAT16_SCALE)
    return {name: gradient / FLOAT16_SCALE for name, gradient in take_gradients(workload.encoder).items()}


def lora(setting: Setting) -> Iterator[Finding]:
    """Compare the gradients of adapters: a step in chunks against the plain step, in float64."""
    import torch

    torch.manual_seed(0)
    shape = {**bert(128, 2, 256), "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    encoder = encoder_of(shape, setting, "float64")
    add_lora(encoder)
    workload = workload_of(encoder.to(setting.device).train(), setting, 24 if setting.is_small else 256)
    truth, gradients = _plain_gradients(workload), _chunked_gradients(workload)
    error = largest_error(gradients, truth)
    frozen = [name for name in truth if "lora" not in name]
    figures = {"gradient error": error, "most": EXACT, "adapters": len(truth), "others": len(frozen)}
    yield Finding("float64", figures, held=error <= EXACT and len(truth) > 0 and not frozen)


def _plain_gradients(workload: Workload) -> dict[str, Tensor]:
    """Return the gradients of the batch in one graph."""
    import torch
    from engine_workload import batch_of

    from vembed.gradcache.reference import reference_step

    def encode(inputs: dict[str, Tensor]) -> Tensor:
        with torch.autocast(workload.device.type, workload.autocast, enabled=workload.autocast is not None):
            z: Tensor = workload.encoder({name: each.to(workload.device) for name, each in inputs.items()})
        return z.to(torch.promote_types(z.dtype, torch.float32))

    pool, structure = batch_of(workload)
    reference_step([replace(pool, encode=encode)], structure.to(workload.device), engine_of(workload, 512).loss)
    return take_gradients(workload.encoder)


def host(setting: Setting) -> Iterator[Finding]:
    """Count what a step waits for, and how long the device works in it."""
    import torch
    from engine_workload import batch_of

    on_gpu = setting.device == "cuda"
    pairs, tokens = (16, 256) if setting.is_small else (2048, 16384)
    encoder = encoder_of(shape_of("bert", setting), setting)
    workload = workload_of(encoder, setting, pairs, torch.bfloat16 if on_gpu else None)
    pool, structure = batch_of(workload)
    counted = []
    with _synchronisations(setting):  # the first warning of a process waits by itself
        engine_of(workload, tokens).step([pool], structure)
    for factor in (1, 2):
        engine = engine_of(workload, tokens // factor)
        results = [engine.step([pool], structure) for _ in range(2)]  # what is done once is done
        with _synchronisations(setting) as places:
            engine.step([pool], structure)
        counted.append(sum(places.values()))
        yield Finding(f"waits of a step, {results[0].num_chunks} chunks", {"waits": counted[-1], "at": dict(places)})
    yield Finding("waits for each chunk more", {"waits": counted[1] - counted[0]}, held=counted[1] == counted[0])
    engine = engine_of(workload, tokens)
    seconds, result = _median_step(engine, workload, rounds=1 if setting.is_small else 5)
    engine.stopwatch.read()
    engine.step([pool], structure)
    parts = engine.stopwatch.read()
    figures: dict[str, Any] = {"step_seconds": seconds, "chunks": result.num_chunks, "parts": dict(parts)}
    figures["loss share (aim: under 0.05)"] = parts.get("loss", 0.0) / max(1e-9, sum(parts.values()))
    if on_gpu:
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            engine.step([pool], structure)
            torch.cuda.synchronize()
        kernels = sum(each.self_device_time_total for each in profile.key_averages()) / 1e6
        figures["busy (aim: 0.85)"] = kernels / seconds
    else:
        figures["busy"] = "counted on a GPU only"
    yield Finding("where the time of a step goes", figures)


@contextlib.contextmanager
def _synchronisations(setting: Setting) -> Iterator[Counter[str]]:
    """Count by place in our code where the host waits for the device; on a CPU, where it reads a number from one."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    places: Counter[str] = Counter()

    class CountReads(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default:
                places[_own_place()] += 1
            return func(*args, **kwargs or {})

    def note(message: Any, *rest: Any, **more: Any) -> None:  # noqa: ARG001
        if "synchronizing" in str(message):
            places[_own_place()] += 1

    if setting.device == "cpu":
        with CountReads():  # type: ignore[no-untyped-call]
            yield places
        return
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _own_place() -> str:
    """Return the innermost line of vembed that is at work."""
    import vembed

    stack = [each for each in traceback.extract_stack() if each.filename != __file__]
    own = [each for each in stack if each.filename.startswith(str(Path(vembed.__file__).parent))] or stack
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}"


def _median_step(engine: GradCacheEngine, workload: Workload, *, rounds: int) -> tuple[float, StepResult]:
    from engine_workload import batch_of

    pool, structure = batch_of(workload)
    return _median(lambda: engine.step([pool], structure), workload.encoder, rounds=rounds)


def _median(step: Callable[[], StepResult], encoder: Encoder, *, rounds: int) -> tuple[float, StepResult]:
    """Return the median seconds of a step behind one that warms up; a step ends with reading its loss."""
    result, seconds = step(), []
    for _ in range(rounds):
        encoder.zero_grad(set_to_none=True)
        started = time.perf_counter()
        result = step()
        seconds.append(time.perf_counter() - started)
    return sorted(seconds)[len(seconds) // 2], result


def sweep(family: str, setting: Setting, *, packing: bool = False, compile: bool = False) -> Iterator[Finding]:  # noqa: A002
    """Time a step with chunks of 1k to 64k tokens."""
    import torch

    from vembed.errors import MachineError
    from vembed.training.compiling import compile_layers

    if compile and setting.is_small:
        raise Skipped("compiling for a CPU takes minutes: tests/models/test_compiling.py does it")
    shape = shape_of(family, setting)
    if packing and family == "bert":
        shape["attention_probs_dropout_prob"] = 0.0  # torch's own operator for packed rows drops nothing
    encoder = encoder_of(shape, setting)
    autocast = torch.bfloat16 if setting.device == "cuda" else None
    if packing:
        why_not = encoder.why_not_packed(setting.device, autocast or torch.float32)
        if why_not:
            raise Skipped(why_not)
        encoder.pack()
    if compile:
        compile_layers(encoder, strict=True)
    for tokens in (128, 512) if setting.is_small else (1024, 4096, 16384, 65536):
        if setting.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            seconds, result = _timed_sweep_step(family, encoder, setting, tokens, autocast)
        except MachineError as error:
            yield Finding(f"{tokens} tokens", {}, why_not=str(error))
            return  # larger ones won't fit either
        figures = {"tokens/s": result.tokens / seconds, "chunks": result.num_chunks, "step_seconds": seconds}
        figures["padding"] = result.padded_tokens / result.tokens
        if setting.device == "cuda":
            figures["peak_bytes"] = torch.cuda.max_memory_allocated()
        yield Finding(f"{tokens} tokens", figures)


def compiled(setting: Setting) -> Iterator[Finding]:
    """Compile a small model: its gradients must be those of the eager one, and with dropout its replay must hold."""
    import torch
    from engine_workload import batch_of

    from vembed.training.compiling import compile_layers

    if setting.is_small and shutil.which("c++") is None and shutil.which("g++") is None:
        raise Skipped("compiling for a CPU takes a C++ compiler, and there is none")
    shape = {**bert(64, 2, 256), "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    workload = workload_of(encoder_of(shape, setting), setting, 8 if setting.is_small else 64)
    truth = _chunked_gradients(workload)
    compile_layers(workload.encoder, strict=True)
    error = whole_error(_chunked_gradients(workload), truth)
    figures = {"error against eager": error, "most": SAME_COMPILED}
    yield Finding("gradients, float32", figures, held=error <= SAME_COMPILED)
    encoder = encoder_of(bert(64, 2, 256), setting)
    compile_layers(encoder, strict=True)
    workload = workload_of(encoder, setting, 8 if setting.is_small else 64, torch.bfloat16)
    pool, structure = batch_of(workload)
    drift = engine_of(workload, 512).step([pool], structure).replay_drift  # raises where it is more than rounding
    yield Finding("replay with dropout, bfloat16", {"drift": drift}, held=True)


def retention(setting: Setting) -> Iterator[Finding]:
    """Compare large chunks of which nothing is kept with small ones that keep as much as the same memory takes."""
    import torch

    encoder = encoder_of(shape_of("bert", setting), setting)
    on_gpu = setting.device == "cuda"
    workload = workload_of(encoder, setting, 16 if setting.is_small else 2048, torch.bfloat16 if on_gpu else None)

    def measured(tokens: int, retain: float) -> tuple[float, int]:
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        rounds = 1 if setting.is_small else 3
        seconds, result = _median_step(engine_of(workload, tokens, retain, repairs=False), workload, rounds=rounds)
        return result.tokens / seconds, torch.cuda.max_memory_allocated() if on_gpu else 0

    largest = 512 if setting.is_small else 32768 if torch.cuda.mem_get_info()[0] >= MUCH_MEMORY else 8192
    speed, limit = measured(largest, 0.0)
    yield Finding(f"{largest} tokens, nothing kept", {"tokens/s": speed} | ({"peak_bytes": limit} if on_gpu else {}))
    for tokens in (largest // 2, largest // 4):
        share = 0.5  # a CPU has no peak to hold it against
        if on_gpu:
            # Kept graphs take memory in proportion to their share: two measurements give the line.
            nothing, tenth = (measured(tokens, retain)[1] for retain in (0.0, 0.1))
            share = min(1.0, 0.1 * max(0, limit - nothing) / max(1, tenth - nothing))
        speed, peak = measured(tokens, share)
        figures = {"kept": share, "tokens/s": speed} | ({"peak_bytes": peak} if on_gpu else {})
        yield Finding(f"{tokens} tokens", figures)


def _timed_sweep_step(
    family: str, encoder: Encoder, setting: Setting, tokens: int, autocast: torch.dtype | None
) -> tuple[float, StepResult]:
    rounds = 1 if setting.is_small else 2
    if family != "clip":
        workload = workload_of(encoder, setting, 8 if setting.is_small else 1024, autocast)
        return _median_step(engine_of(workload, tokens, repairs=False), workload, rounds=rounds)
    from memory_cases import Case
    from memory_prediction import make_batch

    case = Case("sweep", {}, pairs=8 if setting.is_small else 1024, tokens=16, pictures=True)
    pools, structure = make_batch(case, encoder, 0)
    engine = engine_of(workload_of(encoder, setting, 1, autocast), tokens, repairs=False)
    return _median(lambda: engine.step(pools, structure), encoder, rounds=rounds)


def repair(setting: Setting) -> Iterator[Finding]:
    """Let a step run out of memory: it must be done again in smaller chunks, with the same gradients."""
    import torch
    from engine_workload import batch_of

    shape = {**shape_of("bert", setting), "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    workload = workload_of(encoder_of(shape, setting), setting, 16 if setting.is_small else 512)
    pool, structure = batch_of(workload)
    tokens = 512 if setting.is_small else 8192
    if setting.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if setting.device == "cuda" else 0
    whole = engine_of(workload, tokens).step([pool], structure)
    truth = take_gradients(workload.encoder)
    if setting.device == "cuda":
        room = torch.cuda.memory_allocated() + (torch.cuda.max_memory_allocated() - before) // 2
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
    else:
        pool = replace(pool, encode=_without_memory(workload.encoder, tokens // 2))
    try:
        result = engine_of(workload, tokens).step([pool], structure)
    finally:
        if setting.device == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)
    error = largest_error(take_gradients(workload.encoder), truth)
    figures = {"repairs": result.num_repairs, "chunks before": whole.num_chunks, "chunks after": result.num_chunks}
    held = result.num_repairs > 0 and error < 1e-3
    yield Finding("half of the memory", {**figures, "gradient error": error}, held=held)


def _without_memory(encoder: Encoder, most_tokens: int) -> Callable[[dict[str, Tensor]], Tensor]:
    """Return an encoder that has no memory for large calls: a CPU has no limit to set."""
    import torch

    def encode(inputs: dict[str, Tensor]) -> Tensor:
        if inputs["input_ids"].numel() > most_tokens:
            raise torch.OutOfMemoryError("this call stands for one that doesn't fit")
        z: Tensor = encoder(inputs)
        return z

    return encode


def one_step_at_8b(setting: Setting) -> Iterator[Finding]:
    """Train a decoder of 8B for a step with LoRA, checkpointing and random weights."""
    import torch
    from engine_workload import batch_of
    from memory_step import ADAMW

    from vembed.training.optimizer import Optimizer, Schedule

    if setting.device != "cuda" or torch.cuda.mem_get_info()[0] < MUCH_MEMORY:
        raise Skipped(f"it takes a GPU with {MUCH_MEMORY / GIB:.0f} GiB free")
    encoder = encoder_of(shape_of("8B", setting), setting, "bfloat16")
    add_lora(encoder)
    encoder.enable_gradient_checkpointing()
    encoder.to(setting.device)
    workload = workload_of(encoder.train(), setting, 128, torch.bfloat16)
    pool, structure = batch_of(workload)
    engine = engine_of(workload, 8192)
    schedule = Schedule(1e-5, "constant", warmup_steps=0, steps=2)
    optimizer = Optimizer(encoder, engine.loss, ADAMW, schedule, loss_scaling=False)
    for number in range(2):
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        result = engine.step([pool], structure)
        norm = float(optimizer.clip_gradients())
        optimizer.step(optimizer.schedule.learning_rate(number))
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        figures = {"step_seconds": seconds, "tokens/s": result.tokens / seconds, "loss": result.loss, "norm": norm}
        figures |= {"peak_bytes": torch.cuda.max_memory_allocated(), "drift": result.replay_drift}
        yield Finding(f"step {number + 1}", figures, held=0 < norm < float("inf"))
