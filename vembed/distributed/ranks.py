"""The processes that share a batch, and the few collectives that a step needs.

A step of the replicated strategy makes the same number of collectives whatever its chunks: one gather of embeddings,
what the loss merges, and one reduction of each bucket of gradients. Sums are sums: nothing is divided by the number of
ranks, since every rank's gradients are already those of its rows in the loss of the whole batch.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist

from vembed.distributed.watchdog import host_name
from vembed.errors import ConfigError, MachineError, VembedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from vembed.distributed.watchdog import Watchdog

Made = TypeVar("Made")

BUCKET_BYTES = 128 * 2**20
"""Gradients that are reduced together: large enough that latency doesn't count, small beside the model's memory."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that share a batch. With one rank every operation is the identity."""

    rank: int = 0
    world_size: int = 1
    group: dist.ProcessGroup | None = None  # None is the default one
    bucket_bytes: int = BUCKET_BYTES  # gradients that one collective adds up
    watchdog: Watchdog | None = None  # told of every collective; None where nobody watches

    @classmethod
    def of_this_process(cls) -> Ranks:
        """Return this process in the default process group, or the single rank where there is none."""
        if not dist.is_initialized():
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def is_one(self) -> bool:
        """True when this process is alone."""
        return self.world_size == 1

    @property
    def is_first(self) -> bool:
        """True for the process that writes files and talks to people."""
        return self.rank == 0

    def from_first(self, make: Callable[[], Made]) -> Made:
        """Let the first rank make something, and return it on every rank. An error there is raised on all of them.

        Args:
            make: Called on the first rank only; it must reach no collective. What it returns is pickled.

        Raises:
            VembedError: What it raised.
            OSError: What it raised; for an error of another kind the other ranks get a `MachineError`.
        """
        if self.is_one:
            return make()
        made: Made | None = None
        error: Exception | None = None
        with nullcontext() if self.watchdog is None else self.watchdog.patience():
            if self.is_first:
                try:
                    made = make()
                except Exception as raised:  # noqa: BLE001 - it is raised again, here and on every other rank
                    error = raised
            self._await_first()
        made, shared = self._object_from_first((made, None if error is None else _for_others(error, self.rank)))
        if error is not None:  # the first rank's own, with its traceback
            raise error
        if shared is not None:
            raise shared
        return cast("Made", made)

    def together(self, make: Callable[[], Made]) -> Made:
        """Let every rank make something, and return its own. An error on one rank is raised on all of them.

        A bug, that is an error of another kind than these two, is raised where it happens alone.

        Raises:
            VembedError: What the first rank that failed has raised; the message names it unless it is the first of all.
            OSError: Likewise.
        """
        if self.is_one:
            return make()
        made: Made | None = None
        error: Exception | None = None
        try:
            made = make()
        except (OSError, VembedError) as raised:
            error = _for_others(raised, self.rank)
        # Of several errors all ranks raise the same one, so that they leave, or continue, together.
        first = next((error for error in self.gather_objects(error) if error is not None), None)
        if first is not None:
            raise first
        return cast("Made", made)

    def _count(self) -> None:
        """Let the watchdog know that this process enters a collective."""
        if self.watchdog is not None:
            self.watchdog.num_collectives += 1

    def _await_first(self) -> None:
        if self.watchdog is not None:
            self.watchdog.await_first()

    def _object_from_first(self, value: Any) -> Any:
        """Return the first rank's value on every rank."""
        self._count()
        parcel = [value]
        dist.broadcast_object_list(parcel, group_src=0, group=self.group)
        return parcel[0]

    def gather_objects(self, value: Made) -> list[Made]:
        """Return the values of all ranks, in their order, on every rank. They are pickled: small things only."""
        if self.is_one:
            return [value]
        values: list[Made] = [value] * self.world_size
        self._await_first()
        self._count()
        dist.all_gather_object(values, value, group=self.group)
        return values

    def require_equal(self, facts: Mapping[str, str]) -> None:
        """Refuse to continue where processes differ in settings, data or packages: they would not train one model.

        Args:
            facts: What must be the same on each: name for people -> value.

        Raises:
            ConfigError: A process has other facts than the first; it is named, with every difference.
        """
        everyone = self.gather_objects((host_name(), dict(facts)))
        first_host, first = everyone[0]
        lines = [
            f"\n  {name}: {here.get(name, 'missing')} on rank {rank} ({host}), "
            f"{first.get(name, 'missing')} on rank 0 ({first_host})"
            for rank, (host, here) in enumerate(everyone)
            for name in {**first, **here}
            if here.get(name) != first.get(name)
        ]
        if lines:
            raise ConfigError(
                f"the processes of this run differ:{''.join(lines)}\nGive every machine the same configuration, data "
                f"and packages"
            )

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the values that tensors have on the first one, in place."""
        if self.is_one:
            return
        for tensor in tensors:
            self._count()
            dist.broadcast(tensor.detach(), group_src=0, group=self.group)

    def rows_at_first(self, x_RE: Tensor, counts: Sequence[int]) -> Tensor:
        """Return what `gather_rows` returns on the first rank alone; the others get no rows."""
        if self.is_one:
            return x_RE
        self._count()
        padded = _padded(x_RE, max(counts))
        blocks = [torch.empty_like(padded) for _ in counts] if self.is_first else None
        dist.gather(padded, blocks, group_dst=0, group=self.group)
        if blocks is None:
            return x_RE[:0]
        return torch.cat([rows[:count] for rows, count in zip(blocks, counts, strict=True)])

    def gather_rows(self, x_RE: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the rows of all ranks, those of rank 0 first.

        Args:
            x_RE: This rank's rows (R, E); R may differ between ranks and may be 0.
            counts: Rows of each rank.
        """
        if self.is_one:
            return x_RE
        gathered = self.gather_blocks(x_RE, max(counts))
        if min(counts) == max(counts):
            return gathered
        return torch.cat([rows[:count] for rows, count in zip(gathered.split(max(counts)), counts, strict=True)])

    def gather_blocks(self, x_RE: Tensor, num_rows: int) -> Tensor:
        """Return the rows of all ranks in blocks of `num_rows`, one for each rank; behind its rows stand zeros."""
        self._count()
        block = x_RE.contiguous() if len(x_RE) == num_rows else _padded(x_RE, num_rows)
        gathered = x_RE.new_empty(self.world_size * num_rows, *x_RE.shape[1:])
        dist.all_gather_into_tensor(gathered, block, group=self.group)
        return gathered

    def sum_own_block(self, x_RE: Tensor) -> Tensor:
        """Add blocks of rows up over the ranks and return this rank's: the way back from `gather_blocks`.

        Args:
            x_RE: This rank's share of all blocks; it may be overwritten.
        """
        if self.is_one:
            return x_RE
        num_rows = len(x_RE) // self.world_size
        if x_RE.device.type == "cpu":  # gloo would do the same with a copy of all blocks
            return self.sum_(x_RE)[self.rank * num_rows :][:num_rows].clone()
        self._count()
        summed = x_RE.new_empty(num_rows, *x_RE.shape[1:])
        dist.reduce_scatter_tensor(summed, x_RE, dist.ReduceOp.SUM, group=self.group)
        return summed

    def sum_(self, x: Tensor) -> Tensor:
        """Add a tensor up over the ranks, in place."""
        if not self.is_one:
            self._count()
            dist.all_reduce(x, dist.ReduceOp.SUM, group=self.group)
        return x

    def max_(self, x: Tensor) -> Tensor:
        """Take the elementwise maximum over the ranks, in place."""
        if not self.is_one:
            self._count()
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def any(self, flag: bool, device: torch.device) -> bool:
        """Return whether the flag is set on any rank. Waits for the device where there are several."""
        if self.is_one:
            return flag
        return bool(self.max_(torch.tensor([int(flag)], device=device)).item())

    def agreement(self, device: torch.device) -> Callable[[bool], bool]:
        """Return what tells whether every rank says True; all must call it at the same points."""
        return lambda ok: not self.any(not ok, device)

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Add the gradients of parameters up over the ranks, in at least float32.

        What a rank's rows didn't touch counts as zero there, so that no rank waits for another; what no rank's rows
        touched has no gradient afterwards, as on one rank, so that the optimizer leaves it alone. Their order is the
        same on every rank. The sums have the type that each parameter asks of its gradient (`grad_dtype`).
        """
        if self.is_one:
            return
        idle: list[Tensor] = []  # what this rank's rows didn't touch
        users: list[Tensor] = []  # for each of them, how many ranks' rows did
        for bucket in _buckets(parameters, self.bucket_bytes):
            # At least float32: what one rank adds to the sum of many would be lost in bfloat16's rounding.
            dtype = torch.promote_types(bucket[0].dtype, torch.float32)
            missing = [index for index, weight in enumerate(bucket) if weight.grad is None]
            gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in bucket]
            touched = torch.ones(len(bucket), dtype=dtype, device=bucket[0].device)
            touched[missing] = 0
            flat = torch.cat([*(gradient.to(dtype).flatten() for gradient in gradients), touched])
            self.sum_(flat)
            *sums, counts = flat.split([*(weight.numel() for weight in bucket), len(bucket)])
            for parameter, gradient in zip(bucket, sums, strict=True):
                parameter.grad = gradient.view_as(parameter).to(parameter.grad_dtype)
            idle += [bucket[index] for index in missing]
            users.append(counts[missing])
        if idle:  # read all at once, as reading waits for the device
            for parameter, count in zip(idle, torch.cat(users).tolist(), strict=True):
                if count == 0:
                    parameter.grad = None


def _padded(x_RE: Tensor, num_rows: int) -> Tensor:
    """Return rows with rows of zeros behind them: collectives want as many from each rank."""
    padded = x_RE.new_zeros(num_rows, *x_RE.shape[1:])
    padded[: len(x_RE)] = x_RE
    return padded


def _for_others(error: Exception, rank: int) -> Exception:
    """Return a rank's error as the others raise it; one that may not survive pickling goes by its words."""
    if rank == 0 and isinstance(error, VembedError):
        # It survives where it is made of its message alone, or says itself how it is made again.
        bases = type(error).__mro__[: type(error).__mro__.index(VembedError)]
        if not any("__init__" in vars(base) for base in bases) or any("__reduce__" in vars(base) for base in bases):
            return error
    message = str(error) if rank == 0 else f"process {rank}: {error}"
    if isinstance(error, VembedError):
        kind = next(base for base in type(error).__mro__ if "__init__" not in vars(base))  # takes a message
        return cast("Exception", kind(message))
    if isinstance(error, OSError):
        return OSError(message)
    return MachineError(f"the first process failed: {type(error).__name__}: {message}")


def _buckets(parameters: Sequence[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Yield parameters of one type whose gradients together stay within the size; a larger one stands alone."""
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        num_bytes = parameter.numel() * torch.promote_types(parameter.dtype, torch.float32).itemsize
        if bucket and (size + num_bytes > bucket_bytes or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += num_bytes
    if bucket:
        yield bucket
