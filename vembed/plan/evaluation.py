"""How much one encoder call of an evaluation sees: it keeps no graph, so that it may be larger than one of training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.text import show_bytes

if TYPE_CHECKING:
    from vembed.plan.cost_model import Candidate
    from vembed.plan.problem import PlanningProblem

CPU_ROWS = 256

CALL_SECONDS = 0.08
"""Work of the largest calls at the peak of an accelerator. Items of unequal lengths come in quarters of it, and even
beside those the cost of launching doesn't count."""

ROOM_SHARE = 0.25
"""Of the memory beside weights and optimizer, what a call may take."""


def evaluation_calls(problem: PlanningProblem, chosen: Candidate) -> tuple[int, int | None, tuple[str, ...]]:
    """Return the most rows and padded tokens of an encoder call in evaluation, and why; None takes training's tokens.

    Small calls stay in the caches of a CPU, as in training.
    """
    asked = problem.config.eval_batch_size
    if problem.machine.device == "cpu":
        return CPU_ROWS if asked == "auto" else asked, None, ()
    parts, model = chosen.bytes_per_device, problem.sized(chosen.way)
    room = problem.limit_bytes(chosen.way) - parts.parameters - parts.gradients - parts.optimizer - parts.sharding
    # A call whose layers are computed again in the backward pass holds at least what one without a graph holds.
    each = model.call_bytes_per_token(checkpointed=model.checkpointable)
    work = min(tower.forward_flops.of(1, tower.max_tokens or 1) / (tower.max_tokens or 1) for tower in model.towers)
    tokens = call_tokens(room, each, work, problem.devices.tflops)
    if problem.config.use_gradient_cache is not False:
        tokens = max(tokens, chosen.chunks.tokens)
    reason = f"evaluation: an encoder call takes at most {tokens} tokens, {show_bytes(tokens * each)} without a graph"
    return tokens if asked == "auto" else asked, tokens, (reason,)


def call_tokens(room_bytes: float, bytes_per_token: float, flops_per_token: float, tflops: float) -> int:
    """Return the padded tokens that keep an accelerator busy for a while and take no more than their share of memory.

    Args:
        room_bytes: Memory beside the weights.
        tflops: The device's peak, 10^12 operations a second.
    """
    fitting = ROOM_SHARE * room_bytes / bytes_per_token
    return max(1, int(min(fitting, CALL_SECONDS * tflops * 1e12 / max(1.0, flops_per_token))))
