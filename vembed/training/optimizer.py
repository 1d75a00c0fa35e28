"""From accumulated gradients to new weights: learning rate, clipping, loss scaling, AdamW."""

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
    from vembed.config.keys.optimisation import OptimisationKeys
    from vembed.losses.base import BatchLoss
    from vembed.models.encoder import Encoder


FIRST_SCALE = 2.0**16
GROWTH_STEPS = 2000
"""The scale doubles after so many steps in a row without an overflow."""

LEAST_SCALE = 1.0
"""Below this, float16 gradients overflow without any scaling: the run is broken, not merely badly scaled."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate as a pure function of the step: nothing to save, nothing to restore."""

    peak: float  # learning rate after the warmup
    kind: Literal["cosine", "linear", "constant"]  # what follows: a half cosine or a line down to 0, or nothing
    warmup_steps: int  # steps over which the rate rises linearly
    steps: int

    def learning_rate(self, step: int) -> float:
        """Return the rate of a step.

        Args:
            step: Steps done before it, 0 for the first. As with transformers' schedulers, the rate of the first step of
                a warmup is 0.
        """
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        if self.kind == "linear":
            return self.peak * (1 - progress)
        return self.peak * (1 + math.cos(math.pi * progress)) / 2


class LossScale:
    """The factor on all gradients of a step in float16 training: a number in this process, the same on every rank.

    torch's GradScaler keeps it on the device and looks for overflows in the gradients that a rank holds. Here the
    global gradient norm tells of them: it is known before any weight changes, and all ranks have the same one.

    Source: Micikevicius et al., 2018, "Mixed Precision Training"; the numbers are those of torch's GradScaler.

    Args:
        enabled: Without, it is 1 and stays so.

    Attributes:
        value: The factor, a power of two: it rounds nothing.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.value = FIRST_SCALE if enabled else 1.0
        self._good_steps = 0

    def update(self, *, overflowed: bool) -> None:
        """Halve it after an overflow, and double it after long enough without one."""
        if not self.enabled:
            return
        self._good_steps = 0 if overflowed else self._good_steps + 1
        if overflowed:
            self.value = max(LEAST_SCALE, self.value / 2)
        elif self._good_steps == GROWTH_STEPS:
            self.value, self._good_steps = 2 * self.value, 0

    def state(self) -> dict[str, JSON]:
        """Return what to save, by the names that torch's GradScaler gives it; nothing without scaling."""
        return {"scale": self.value, "_growth_tracker": self._good_steps} if self.enabled else {}

    def restore(self, state: Mapping[str, JSON]) -> None:
        """Go on from what `state` returned."""
        if not self.enabled:
            return
        scale, good_steps = state["scale"], state["_growth_tracker"]
        assert isinstance(scale, float | int)
        assert isinstance(good_steps, int)
        self.value, self._good_steps = float(scale), good_steps


class Updater:
    """Owns the optimizer of an encoder and a loss.

    Args:
        keys: AdamW's settings. Matrices decay; biases, norms and the logit scale don't.
        ranks: Who shares the parameters, where any are shards.
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
        self.own_rate: float | None = None  # in place of the schedule's, where a callback set one
        self.loss_scaling = loss_scaling
        self._ranks = ranks or Ranks()
        self._max_grad_norm = keys.max_grad_norm
        self._loss = loss
        self._names: dict[Tensor, str] = {
            **{parameter: f"encoder.{name}" for name, parameter in encoder.named_parameters()},
            **{parameter: f"loss.{name}" for name, parameter in loss.named_parameters()},
        }
        trainable = [parameter for parameter in self._names if parameter.requires_grad]
        decayed = [parameter for parameter in trainable if parameter.ndim >= 2]
        plain = [parameter for parameter in trainable if parameter.ndim == 1]
        # Scalars are never sharded, and one kernel can't update both whole tensors and shards.
        scalars = [parameter for parameter in trainable if parameter.ndim == 0]
        self.parameters = trainable
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": keys.weight_decay},
                {"params": plain, "weight_decay": 0.0},
                {"params": scalars, "weight_decay": 0.0},
            ],
            lr=schedule.peak,
            betas=(keys.adam_beta1, keys.adam_beta2),
            eps=keys.adam_epsilon,
            fused=True,
        )
        self._scale = LossScale(enabled=loss_scaling)
        self._overflowed = False

    @property
    def gradient_scale(self) -> float:
        """Factor that the engine puts on all gradients; 1.0 without loss scaling."""
        return self._scale.value

    def learning_rate(self, step: int) -> float:
        """Return the rate of a step, counted from 0."""
        return self.schedule.learning_rate(step) if self.own_rate is None else self.own_rate

    def gradient_norm(self) -> float:
        """Take the scale off the gradients, clip them, and return their global L2 norm before clipping.

        Once a step, before `update` or `discard`. The norm is the same on every rank. Gradients whose norm isn't finite
        stay as they are: clipping would make all of them NaN, and the report of the step could no longer say which
        module was at fault.
        """
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if self.loss_scaling:
            torch._foreach_mul_([local_part(gradient) for gradient in gradients], 1 / self.gradient_scale)
        norm = total_norm(gradients, self._ranks)
        value = norm.item()
        self._overflowed = self.loss_scaling and not math.isfinite(value)
        if self._max_grad_norm is not None and math.isfinite(value):
            clip_gradients(self.parameters, self._max_grad_norm, norm)
        return value

    def overflowed(self, grad_norm: float) -> bool:
        """Return whether a non-finite norm is float16's overflow at the present scale, which halving it cures."""
        return self.loss_scaling and not math.isfinite(grad_norm) and self.gradient_scale > LEAST_SCALE

    def update(self, step: int) -> None:
        """Change the weights (unless float16 overflowed), and let go of the gradients.

        Args:
            step: Steps done before this one.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        if not self._overflowed:
            self.optimizer.step()
        self._scale.update(overflowed=self._overflowed)
        self._loss.constrain()
        self.optimizer.zero_grad(set_to_none=True)

    def discard(self) -> None:
        """Let go of the gradients without using them."""
        self._scale.update(overflowed=self._overflowed)
        self.optimizer.zero_grad(set_to_none=True)

    def module_norms(self) -> Mapping[str, float]:
        """Return the L2 norm of the gradients of each module, for the report of a bad step; all ranks must call it."""
        gradients: dict[str, list[Tensor]] = {}
        for parameter, name in self._names.items():
            if parameter.grad is not None:
                gradients.setdefault(name.rpartition(".")[0], []).append(parameter.grad.double())
        return {module: total_norm(own, self._ranks).item() for module, own in gradients.items()}

    def state(self) -> tuple[dict[str, Tensor], dict[str, JSON]]:
        """Return everything to save: tensors and JSON."""
        tensors, packed = pack_optimizer(self.optimizer, self._names)
        return tensors, {"optimizer": packed, "scaler": self._scale.state()}

    def restore(self, tensors: Mapping[str, Saved], packed: Mapping[str, JSON]) -> None:
        """Go on from what `state` returned."""
        optimizer, scaler = packed["optimizer"], packed["scaler"]
        assert isinstance(optimizer, dict)
        assert isinstance(scaler, dict)
        unpack_optimizer(self.optimizer, self._names, tensors=tensors, packed=optimizer)
        self._scale.restore(scaler)
