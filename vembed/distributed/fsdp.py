"""Sharding: every rank keeps a part of each weight, of its gradient and of its optimizer state (FSDP2).

A unit is what is gathered at once: a block of a transformer, or what the blocks leave over. Three modes say what is
whole on each rank during a step, in which every unit is used by n chunks in two passes:

| mode    | weights                | gradients     | gathers of a unit | reductions of a unit |
|---------|------------------------|---------------|-------------------|----------------------|
| fast    | whole                  | whole         | 1                 | 1                    |
| lean    | whole while in use     | whole         | up to 3n          | 1                    |
| sharded | whole while in use     | sharded       | up to 3n          | up to n              |

Whatever the mode, sums are sums, as in `Ranks`: a rank's gradients are already those of its rows in the loss of the
whole batch. fast gathers before the first chunk and reduces after the last, so that ranks may differ in their chunks,
and one that runs out of memory leaves no other one waiting. In the other modes every encoder call is a collective.

A step has many backwards and torch cleans up at the end of each; what a rank's rows don't touch it leaves out of its
reduction. So a step ends with a closing call: the units are called once more, with forwards that compute nothing, and
its backward reduces what the others have left. In it, every weight that some rank's rows have touched gets a gradient
of zero; one that no rank has touched gets none, as on one device. All of it is public: hooks run around whatever
`forward` a module has.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from vembed.distributed.runtime import gathers_narrow
from vembed.distributed.shards import keep_asked_dtype, reshard
from vembed.distributed.starting_weights import receive
from vembed.errors import MachineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from vembed.distributed.ranks import Ranks
    from vembed.plan.problem import Way

ShardingMode: TypeAlias = Literal["fast", "lean", "sharded"]


class ShardedEncoder:
    """The handle of a sharded encoder: what a step does before its first chunk and after its last.

    Attributes:
        encoder: The same object; calling it computes as before.
        parameters: Its trainable parameters: shards (DTensor), and scalars, which stay whole.
    """

    def __init__(self, encoder: nn.Module, mode: ShardingMode, ranks: Ranks, device: torch.device) -> None:
        self.encoder = encoder
        self.mode = mode
        self.ranks = ranks
        self.parameters: list[Tensor] = [weight for weight in encoder.parameters() if weight.requires_grad]
        self._root = cast("FSDPModule", encoder)
        self._units = [module for module in encoder.modules() if isinstance(module, FSDPModule)]  # the root is first
        self._whole = [weight for weight in self.parameters if not isinstance(weight, DTensor)]
        self._start = torch.zeros((), device=device)  # input of calls that compute nothing
        self._unsharded: list[Tensor] = []  # fast: the whole weights that train, in the same order on all ranks
        self._touched: set[int] = set()  # which of them this rank's rows have given a gradient in this step

    @property
    def needs_equal_calls(self) -> bool:
        """True when every rank must make the same encoder calls in the same order, as each is a collective."""
        return self.mode != "fast"

    @property
    def num_units(self) -> int:
        """Parts that are gathered at once."""
        return len(self._units)

    def allocate(self) -> None:
        """Make the tensors that whole weights live in: made in an evaluation, they could not be trained."""
        with torch.no_grad():
            self._call_units(self._start)  # tells torch which unit is the root
        for unit in self._units:
            unit.unshard()
            if self.mode == "fast":
                weights = cast("nn.Module", unit).parameters()
                self._unsharded += [each for each in weights if each.requires_grad and not isinstance(each, DTensor)]
            unit.reshard()
        touched = self._touched  # a hook that held this object, or the weights, would keep them alive for ever
        for index, weight in enumerate(self._unsharded):
            weight.register_post_accumulate_grad_hook(lambda _, index=index: touched.add(index))

    def begin(self) -> None:
        """Get ready for the chunks of a step; the parameters hold no gradient."""
        self._root.set_requires_gradient_sync(self.mode == "sharded")
        self._root.set_is_last_backward(is_last_backward=False)
        if self.mode == "fast":
            self._touched.clear()
            # Before the chunks rather than in the first of them: all ranks gather alike, whatever they encode.
            self.reshard()
            for unit in self._units:
                unit.unshard()

    def backward(self, z_RE: Tensor, u_RE: Tensor) -> None:
        """Backward an encoder call from the gradient of its embeddings.

        A backward that fails leaves torch's notes on it open, and there is no public call to clear them. They belong to
        the outermost backward, so the call's runs within one that always ends well.
        """
        if self.needs_equal_calls:  # a failure ends the run: the other ranks are in a collective
            torch.autograd.backward(z_RE, u_RE)
            return
        errors: list[Exception] = []

        def run() -> None:
            try:
                torch.autograd.backward(z_RE, u_RE)
            except Exception as error:  # noqa: BLE001 - it is raised below
                errors.append(error)

        outer = _InBackward.apply(self._start.clone().requires_grad_(), run)
        self._call_units(outer).backward()
        if errors:
            raise errors.pop()  # which leaves no cycle that would keep the tensors of its traceback

    def finish(self) -> None:
        """Add up the gradients of all ranks; those of the shards are in `.grad` of `parameters`."""
        self._root.set_requires_gradient_sync(requires_gradient_sync=True)
        self._root.set_is_last_backward(is_last_backward=True)
        touched: set[Tensor] | None = None
        if self.mode == "fast":
            flags = [float(index in self._touched) for index in range(len(self._unsharded))]
            num_ranks = self.ranks.sum_(torch.tensor(flags, device=self._start.device)).tolist()
            touched = {weight for weight, number in zip(self._unsharded, num_ranks, strict=True) if number}
        self._call_units(self._start.clone().requires_grad_(), touched).backward()
        self.reshard()
        self.ranks.sum_gradients(self._whole)

    def abandon(self) -> None:
        """Drop everything that the chunks of a failed attempt left, on all ranks alike."""
        self.finish()  # gradients of chunks lie where only a reduction reaches them
        for parameter in self.parameters:
            parameter.grad = None

    def reshard(self) -> None:
        """Free whole weights, so that the encoder's parameters are the shards."""
        reshard(self.encoder)

    def _call_units(self, x: Tensor, touched: set[Tensor] | None = None) -> Tensor:
        """Call the root, or all units, with forwards that return a scalar as it came.

        Args:
            touched: Whole weights that get a gradient of zero, a unit's at a time; None calls the root alone.
        """
        root, blocks = self._units[0], [] if touched is None else self._units[1:]
        in_blocks = {module for block in blocks for module in cast("nn.Module", block).modules()}

        def pass_on(unit: Any) -> Callable[[Tensor], Tensor]:
            # Called by torch between its hooks, so the unit's parameters are whole here, as in its real forward.
            def forward(x: Tensor) -> Tensor:
                for block in blocks if unit is root else []:
                    x = nn.Module.__call__(cast("nn.Module", block), x)  # a layer may checkpoint in its own __call__
                if touched is None:
                    return x
                for module in unit.modules():
                    if unit is root and module in in_blocks:
                        continue  # the block's own call gives its weights their gradient
                    for weight in module.parameters(recurse=False):
                        if weight in touched:
                            x = x + weight.flatten()[:0].sum()  # adds 0, and a gradient of zero in the weight's shape
                return x

            return forward

        with ExitStack() as stack:
            for unit in (root, *blocks):
                stack.enter_context(_replaced_forward(cast("nn.Module", unit), pass_on(unit)))
            # A compiled layer would compile this forward, which runs once a step.
            is_compiled = "torch._dynamo" in sys.modules
            stack.enter_context(torch.compiler.set_stance("force_eager") if is_compiled else nullcontext())
            return cast("Tensor", nn.Module.__call__(self.encoder, x))


class _InBackward(torch.autograd.Function):
    """An action that runs in the backward of a tensor that it passes on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, action: Callable[[], None]) -> Tensor:
        ctx.action = action
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.action()
        return gradients[0], None


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Give a module another forward within the block."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def shard_encoder(
    encoder: nn.Module, way: Way, ranks: Ranks, *, device: torch.device, compute_dtype: torch.dtype | None = None
) -> ShardedEncoder:
    """Shard an encoder in place over all ranks, with the weights of the first one.

    It may be on the CPU there and on the meta device elsewhere: units get to the devices one by one. From now on it
    must be called through its `forward` alone, on all ranks equally often unless the mode is fast. The optimizer must
    be made afterwards.

    Args:
        encoder: The encoder.
        way: What is whole during a step, how many ranks share a copy, and whether shards live in the host's memory.
        ranks: All of them.
        device: Where this rank computes.
        compute_dtype: Type that the matrices of blocks are gathered in; None is their own.

    Raises:
        MachineError: The number of ranks isn't a multiple of the factor, or gradients would be lost in rounding.
    """
    if ranks.is_one or ranks.group is not None:
        raise ValueError("an encoder is sharded over the default process group")
    assert way.mode is not None
    # The sharded mode adds up the reduced gradients of all chunks in the type of the weights.
    for name, parameter in encoder.named_parameters() if way.mode == "sharded" else ():
        if parameter.requires_grad and parameter.dtype.itemsize < torch.float32.itemsize:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise MachineError(
                f"fsdp_mode sharded adds up the gradients of each chunk in the type of the weights, and {name} is "
                f"{dtype}: hundreds of chunks would be lost in rounding. Set torch_dtype: float32 or fsdp_mode: lean"
            )
    if way.cpu_offload and device.type == "cpu":
        raise MachineError("cpu_offload keeps weights off an accelerator, and this run has none; set it to false")
    # Nothing here changes the output of a layer in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
    settings: dict[str, Any] = {
        "mesh": _mesh(device, way.sharding_factor, ranks.world_size),
        "offload_policy": CPUOffloadPolicy() if way.cpu_offload else OffloadPolicy(),
        # A scalar can't be cut: it stays whole, and its gradient is summed like those of the replicated strategy.
        "ignored_params": {parameter for parameter in encoder.parameters() if parameter.ndim == 0},
    }
    receive((scalar for scalar in encoder.parameters() if scalar.ndim == 0), ranks, device)
    precision = _precision(encoder, compute_dtype)
    # Block by block, inner units first: no device ever holds more than one block beside its shards.
    for block in transformer_blocks(encoder):
        keep_asked_dtype(block)
        receive((*block.parameters(), *block.buffers()), ranks, device)
        fully_shard(block, **settings, mp_policy=precision, reshard_after_forward=way.mode != "fast")
    rest = (tensor for tensor in (*encoder.parameters(), *encoder.buffers()) if not isinstance(tensor, DTensor))
    receive(rest, ranks, device)
    # What the blocks leave over is in use from the first layer to the last: it stays whole from forward to backward.
    root = fully_shard(
        encoder,
        **settings,
        mp_policy=MixedPrecisionPolicy(reduce_dtype=precision.reduce_dtype, cast_forward_inputs=False),
        reshard_after_forward=False if way.mode == "fast" else None,
    )
    root.set_reshard_after_backward(reshard_after_backward=way.mode != "fast")
    for unit in encoder.modules():
        if isinstance(unit, FSDPModule):  # neither of these two recurses
            unit.set_gradient_divide_factor(1.0)  # sums, not torch's average over the ranks
            unit.set_force_sum_reduction_for_comms(enable=True)
    handle = ShardedEncoder(encoder, way.mode, ranks, device)
    handle.allocate()
    return handle


def transformer_blocks(encoder: nn.Module) -> list[nn.Module]:
    """Return the modules that are gathered one at a time: the outermost transformer layers.

    These are what a model says must not be split over devices, else the members of its lists of equal layers. A model
    without either is one unit.
    """
    names: set[str] = set()
    for module in encoder.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    names = {name for name in names if not name.endswith("Embeddings")}  # listed too, but no layers
    blocks: list[nn.Module] = []
    within: set[nn.Module] = set()  # modules of blocks, which are not cut again
    for module in encoder.modules():
        if module in within:
            continue
        candidates: list[nn.Module] = []
        if type(module).__name__ in names:
            candidates = [module]
        elif isinstance(module, nn.ModuleList | nn.Sequential) and len(module) >= 2:
            layers = list(module)
            # Of one class, and made of parts: a list of linear layers is no list of blocks.
            if len({type(layer) for layer in layers}) == 1 and any(True for _ in layers[0].children()):
                candidates = layers
        for block in candidates:
            if block not in within and any(True for _ in block.parameters()):
                blocks.append(block)
                within.update(block.modules())
    return blocks


def _mesh(device: torch.device, factor: int, world: int) -> DeviceMesh:
    if world % factor != 0:
        divisors = [number for number in range(1, world + 1) if world % number == 0]
        nearest = min(divisors, key=lambda divisor: abs(divisor - factor))
        raise MachineError(f"sharding_factor {factor} doesn't divide the {world} processes; set it to {nearest}")
    if factor == world:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    mesh = init_device_mesh(device.type, (world // factor, factor), mesh_dim_names=("replicate", "shard"))
    everyone = dist.group.WORLD
    assert everyone is not None, "the processes have met"
    timeout = everyone._get_backend(device).options._timeout  # which new groups don't take over
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # torch 2.11's name of it
    for group in mesh.get_all_groups():
        set_timeout(timeout, group)
    return mesh


def _precision(encoder: nn.Module, compute_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return the types of a block: its matrices travel in the type of the products, gradients in at least float32.

    Norms and biases keep their own type, and so does all that the blocks leave over, embeddings above all: autocast
    wouldn't round them either, and the residual stream stays in float32. Inputs are not cast, as autocast sees to that.
    A torch that has one type for all weights of a block gathers them in their own.
    """
    widest = torch.float32
    for parameter in encoder.parameters():
        if parameter.requires_grad:
            widest = torch.promote_types(widest, parameter.dtype)
    narrowing: dict[str, Any] = {}
    if gathers_narrow():
        narrowing["param_dtype"] = compute_dtype
        narrowing["param_dtype_override_fn"] = lambda parameter: parameter.dtype if parameter.ndim < 2 else None
    return MixedPrecisionPolicy(reduce_dtype=widest, cast_forward_inputs=False, **narrowing)
