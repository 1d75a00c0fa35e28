"""AdamW over an encoder and its loss: the rate of a step, clipping, the loss scale of float16, the new weights.

The loop calls three methods per step: `clip_gradients`, then `step` unless the gradients are rejected, then
`zero_grad`. Everything here is equal on all ranks, except that a sharded parameter and its moments are a rank's part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from vembed.checkpoint.optimizer_state import pack_optimizer, unpack_optimizer
from vembed.distributed.ranks import Ranks
from vembed.distributed.shards import clip_gradients, local_part, total_norm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vembed.checkpoint.format import JSON
    from vembed.checkpoint.tensors import Saved
    from vembed.losses.base import BatchLoss
    from vembed.models.encoder import Encoder
    from vembed.plan.keys import OptimisationKeys


FIRST_SCALE = 2.0**16
GROWTH_STEPS = 2000  # steps in a row without an overflow, after which the scale doubles
LEAST_SCALE = 1.0  # gradients that overflow without any scaling mean a broken run, not a badly chosen scale


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate as a pure function of the step: nothing to save, nothing to restore."""

    peak: float  # after the warmup
    kind: Literal["cosine", "linear", "constant"]  # after the peak: a half cosine or a line down to 0, or the peak
    warmup_steps: int  # steps over which the rate rises linearly
    steps: int

    def learning_rate(self, step: int) -> float:
        """Return the rate of a step, counted from 0; as in transformers, the first step of a warmup has rate 0."""
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        if self.kind == "linear":
            return self.peak * (1 - progress)
        return self.peak * (1 + math.cos(math.pi * progress)) / 2


class LossScale:
    """Factor on all gradients of a float16 step: a number in this process, the same on every rank.

    torch's GradScaler keeps its factor on the device and looks for overflows in the gradients that a rank holds. Here
    the global gradient norm shows them: it is known before any weight changes, and all ranks have the same one.

    Source: Micikevicius et al., 2018, "Mixed Precision Training"; the constants are those of GradScaler.

    Attributes:
        value: The factor, a power of two, so that it rounds nothing; always 1 unless `enabled`.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.value = FIRST_SCALE if enabled else 1.0
        self._good_steps = 0

    def overflowed(self, grad_norm: float) -> bool:
        """Return whether a norm that isn't finite can be an overflow, which a smaller scale would cure."""
        return self.enabled and not math.isfinite(grad_norm) and self.value > LEAST_SCALE

    def update(self, *, overflowed: bool) -> None:
        """Halve the scale after an overflow; double it after `GROWTH_STEPS` steps without one."""
        if not self.enabled:
            return
        self._good_steps = 0 if overflowed else self._good_steps + 1
        if overflowed:
            self.value = max(LEAST_SCALE, self.value / 2)
        elif self._good_steps == GROWTH_STEPS:
            self.value, self._good_steps = 2 * self.value, 0

    def state(self) -> dict[str, JSON]:
        """Return the state to save, under the names that GradScaler uses; empty without scaling."""
        return {"scale": self.value, "_growth_tracker": self._good_steps} if self.enabled else {}

    def restore(self, state: Mapping[str, JSON]) -> None:
        """Continue from what `state` returned."""
        if not self.enabled:
            return
        scale, good_steps = state["scale"], state["_growth_tracker"]
        assert isinstance(scale, float | int)
        assert isinstance(good_steps, int)
        self.value, self._good_steps = float(scale), good_steps


class Optimizer:
    """AdamW over the trainable parameters of an encoder and a loss.

    Args:
        keys: AdamW's settings. Matrices decay; biases, norms and the logit scale don't.
        ranks: The ranks among which parameters are sharded, if any are.

    Attributes:
        schedule: Learning rate of each step; a callback may have set another one (`RunState.learning_rate`).
        scale: Factor that the engine must put on all gradients.
    """

    def __init__(
        self,
        encoder: Encoder,
        loss: BatchLoss,
        keys: OptimisationKeys,
        schedule: Schedule,
        *,
        loss_scaling: bool,
        ranks: Ranks | None = None,
    ) -> None:
        self.schedule = schedule
        self.scale = LossScale(enabled=loss_scaling)
        self._max_grad_norm = keys.max_grad_norm
        self._loss = loss
        self._ranks = ranks or Ranks()
        self._names: dict[Tensor, str] = {
            **{parameter: f"encoder.{name}" for name, parameter in encoder.named_parameters()},
            **{parameter: f"loss.{name}" for name, parameter in loss.named_parameters()},
        }
        self.parameters = [parameter for parameter in self._names if parameter.requires_grad]
        matrices = [parameter for parameter in self.parameters if parameter.ndim >= 2]
        vectors = [parameter for parameter in self.parameters if parameter.ndim == 1]
        # Scalars are never sharded, and one fused kernel can't update both whole tensors and shards.
        scalars = [parameter for parameter in self.parameters if parameter.ndim == 0]
        self.adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": keys.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
                {"params": scalars, "weight_decay": 0.0},
            ],
            lr=schedule.peak,
            betas=(keys.adam_beta1, keys.adam_beta2),
            eps=keys.adam_epsilon,
            fused=True,
        )

    def clip_gradients(self) -> float:
        """Unscale the gradients, clip them by their global L2 norm, and return that norm as it was before clipping.

        A collective where parameters are sharded. Waits for the device, because the caller decides by the number.
        """
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if self.scale.enabled:
            torch._foreach_mul_([local_part(gradient) for gradient in gradients], 1 / self.scale.value)
        norm = total_norm(gradients, self._ranks)
        value = norm.item()
        # A norm that isn't finite would turn every gradient into NaN, and the report of the step could no longer say
        # in which module the bad number was.
        if self._max_grad_norm is not None and math.isfinite(value):
            clip_gradients(self.parameters, self._max_grad_norm, norm)
        return value

    def step(self, learning_rate: float) -> None:
        """Update the weights from `.grad` of every parameter."""
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        self._loss.constrain()  # a learned temperature stays within its bounds

    def zero_grad(self) -> None:
        """Drop the gradients and free their memory."""
        self.adamw.zero_grad(set_to_none=True)

    def module_norms(self) -> Mapping[str, float]:
        """Return module -> L2 norm of its gradients, to report a bad step; all ranks must call it."""
        gradients: dict[str, list[Tensor]] = {}
        for parameter, name in self._names.items():
            if parameter.grad is not None:
                gradients.setdefault(name.rpartition(".")[0], []).append(parameter.grad)
        # In float64, in which no square overflows; a module at a time, as all of them at once may not fit the device.
        return {
            module: total_norm([part.double() for part in parts], self._ranks).item()
            for module, parts in gradients.items()
        }

    def state(self) -> tuple[dict[str, Tensor], dict[str, JSON]]:
        """Return the state to save: tensors and JSON."""
        tensors, packed = pack_optimizer(self.adamw, self._names)
        return tensors, {"optimizer": packed, "scaler": self.scale.state()}

    def restore(self, tensors: Mapping[str, Saved], packed: Mapping[str, JSON]) -> None:
        """Continue from what `state` returned."""
        optimizer, scaler = packed["optimizer"], packed["scaler"]
        assert isinstance(optimizer, dict)
        assert isinstance(scaler, dict)
        unpack_optimizer(self.adamw, self._names, tensors=tensors, packed=optimizer)
        self.scale.restore(scaler)
