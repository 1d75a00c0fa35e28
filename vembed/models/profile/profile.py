"""From the description of a model to the ModelSize that the plan computes with.

1. The whole model is built on the meta device, which takes no memory, and its parameters are counted.
2. Each tower is run on fake tensors with one layer and with two (or with one and two periods of its kinds of layers):
   the difference is what a further layer takes. Tables of a vocabulary don't train in these runs; their gradient comes
   last in the backward pass, when the activations are gone, and the plan counts it by itself.
3. The same with gradient checkpointing.

What can't be run so is estimated by a formula, and marked.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torch import nn

from vembed.errors import ConfigError
from vembed.models.adapters.lora import LoraOptions, add_adapters
from vembed.models.adapters.trainable import freeze
from vembed.models.pictures import picture_bytes
from vembed.models.profile.formula import PICTURE_STACK, model_size, picture_stack
from vembed.models.profile.inputs import tower_inputs
from vembed.models.profile.live import ROWS, as_cost
from vembed.models.profile.measure import ProfileTarget, measure_call
from vembed.models.profile.skeleton import blueprint
from vembed.models.registry import load_encoder
from vembed.models.towers import is_within, parameters_within
from vembed.plan.memory import CallCost, ModelSize, TowerSize

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from vembed.models.encoder import Encoder
    from vembed.models.huggingface import ModelOptions
    from vembed.models.profile.skeleton import Blueprint
    from vembed.models.towers import Tower

_log = logging.getLogger(__name__)

TABLE_ROWS = 4096
"""An embedding of at least so many rows is a vocabulary's, not one of positions."""

CANNOT_RUN = (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError, LookupError, AssertionError)
"""What models raise that look at values, which fake tensors and the meta device don't have."""

_known: dict[str, ModelSize] = {}


@dataclass(frozen=True, slots=True)
class Trained:
    """What of an encoder trains.

    Attributes:
        part: "all", "projection", "vision", "text" or "last_N_layers".
        lora: Adapters beside frozen weights, None without.
    """

    part: str = "all"
    lora: LoraOptions | None = None

    def apply(self, encoder: Encoder, *, num_layers: int | None = None) -> None:
        """Freeze what doesn't train, and add adapters.

        Args:
            encoder: The encoder.
            num_layers: Layers that it was cut to, of which the last that may train all do.
        """
        if self.lora is not None:
            add_adapters(encoder, self.lora)
        elif num_layers is not None and self.part.startswith("last_"):
            freeze(encoder, f"last_{num_layers}_layers")
        else:
            freeze(encoder, self.part)

    def depth(self, layers: int) -> int:
        """Return how many layers of a stack keep anything."""
        if self.lora is not None or not self.part.startswith("last_"):
            return layers
        return min(layers, int(self.part.split("_")[1]))


def profile_model(
    options: ModelOptions, target: ProfileTarget, *, trainable: str = "all", lora: LoraOptions | None = None
) -> ModelSize:
    """Measure a model without its weights; a second call in this process returns the same.

    Args:
        options: What the user said about the model. Its name may also be a JSON file with the shape of one.
        target: Where it will run.
        trainable: What trains: "all", "projection", "vision", "text" or "last_N_layers".
        lora: The adapters of `adapted`; None leaves it out.

    Returns:
        Counted parameters, measured activations; `adapted` is the same model with adapters.

    Raises:
        ConfigError: There is no such model, or it lacks the part that would train.
        MachineError: Its description can't be reached.
    """
    path = Path(options.name)
    stamp = path.stat().st_mtime_ns if path.exists() else 0
    key = repr((options, target, trainable, lora, stamp))
    if key not in _known:
        if lora is None:
            _known[key] = _profile(options, target, Trained(trainable))
        else:
            plain = profile_model(options, target, trainable=trainable)
            _known[key] = replace(plain, adapted=_adapted(options, target, lora))
    return _known[key]


def _adapted(options: ModelOptions, target: ProfileTarget, lora: LoraOptions) -> ModelSize | None:
    """Return the size with adapters, None where the model can't have any."""
    try:
        return _profile(options, target, Trained(lora=lora))
    except ConfigError as error:
        _log.debug("%s", error)
        return None


def _profile(options: ModelOptions, target: ProfileTarget, trained: Trained) -> ModelSize:
    plan = blueprint(options)
    compute_dtype = target.autocast_dtype or options.dtype
    try:
        whole = plan.build(None)
    except CANNOT_RUN as error:
        _log.warning(
            "%s can't be built without memory (%s: %s): its activations are estimated by a formula",
            options.name,
            type(error).__name__,
            error,
        )
        return model_size(load_encoder(options), compute_dtype=compute_dtype)
    trained.apply(whole)
    anatomy = [_Tower(plan, whole, tower, target, trained) for tower in whole.towers()]
    try:
        with warnings.catch_warnings():  # the encoder that is built later says the same again
            warnings.simplefilter("ignore")
            measured = [tower.measured() for tower in anatomy]
    except CANNOT_RUN as error:
        _log.warning(
            "%s can't be run without memory (%s: %s): its activations are estimated by a formula",
            options.name,
            type(error).__name__,
            error,
        )
        return model_size(whole, compute_dtype=compute_dtype)
    towers = tuple(tower.sized(*costs) for tower, costs in zip(anatomy, measured, strict=True))
    pictures = picture_stack(whole, compute_dtype.itemsize)
    towers = towers if pictures is None else (*towers, pictures)
    parameters = list(whole.parameters())
    return ModelSize(
        num_parameters=sum(each.numel() for each in parameters),
        num_trainable=sum(each.numel() for each in parameters if each.requires_grad),
        bytes_per_value=options.dtype.itemsize,
        dimension=whole.dimension,
        towers=towers,
        estimated=pictures is not None,
        picture_bytes=picture_bytes(whole),
        checkpointable=all(tower.saved_checkpointed is not tower.saved for tower in towers),
    )


@dataclass(frozen=True, slots=True)
class _Costs:
    """What a call keeps, and what it takes beyond that."""

    saved: CallCost
    transient: CallCost


class _Tower:
    """One tower of a model, and its runs.

    Args:
        plan: How it is built with fewer layers.
        whole: The model on the meta device.
        tower: Its anatomy.
        target: Where it will run.
        trained: What of it trains.
    """

    def __init__(self, plan: Blueprint, whole: Encoder, tower: Tower, target: ProfileTarget, trained: Trained) -> None:
        self._plan, self._whole, self._tower, self._target, self._trained = plan, whole, tower, target, trained
        self._layers = plan.layers.get(tower.name)
        self._inputs = next(each for each in tower_inputs(whole) if each.name == tower.name)

    def measured(self) -> tuple[_Costs, _Costs | None]:
        """Return the costs of a call, and those with gradient checkpointing where there is one."""
        few = self._plan.period
        if self._layers is None or self._layers <= 2 * few:
            return self._run(None), self._run_checkpointed(None)
        depth = self._trained.depth(self._layers)
        plain = _deeper(self._run(few), self._run(2 * few), depth / few)
        one, two = self._run_checkpointed(few), self._run_checkpointed(2 * few)
        return plain, None if one is None or two is None else _deeper(one, two, depth / few)

    def _run(self, num_layers: int | None) -> _Costs:
        """Run the tower with so many layers."""
        return self._costs(lambda: self._encoder(num_layers))

    def _run_checkpointed(self, num_layers: int | None) -> _Costs | None:
        """Run it with gradient checkpointing; None where there is none."""

        def build() -> Encoder:
            encoder = self._encoder(num_layers)
            encoder.enable_gradient_checkpointing()
            return encoder

        try:
            build()
        except ValueError:
            return None
        return self._costs(build)

    def _encoder(self, num_layers: int | None) -> Encoder:
        encoder = self._plan.build(num_layers)
        self._trained.apply(encoder, num_layers=num_layers)
        if self._layers is not None:
            for table in _tables(encoder):
                table.requires_grad_(False)
        return encoder.train()

    def _costs(self, build: Callable[[], Encoder]) -> _Costs:
        inputs = self._inputs
        call = measure_call(build, inputs.make, self._target)
        saved, transient = (
            as_cost(each, rows=ROWS, width=inputs.width, fixed=inputs.fixed) for each in (call.saved, call.transient)
        )
        return _Costs(saved, transient)

    def sized(self, plain: _Costs, checkpointed: _Costs | None) -> TowerSize:
        """Return the tower's size with those costs."""
        checkpointed = checkpointed or plain
        parameters = self._parameters()
        trainable = [each.numel() for each in parameters.values() if each.requires_grad]
        largest_block, outside_blocks = self._blocks()
        return TowerSize(
            name=self._tower.name,
            items=self._items(),
            max_tokens=self._inputs.max_tokens,
            num_parameters=sum(each.numel() for each in parameters.values()),
            num_trainable=sum(trainable),
            largest_block=largest_block,
            outside_blocks=outside_blocks,
            largest_tensor=max(trainable, default=0),
            saved=plain.saved,
            transient=plain.transient,
            saved_checkpointed=checkpointed.saved,
            transient_checkpointed=checkpointed.transient,
            cast_bytes=self._cast_bytes(plain),
            forward_flops=self._flops(),
        )

    def _cast_bytes(self, plain: _Costs) -> int:
        """Return the bytes of the copies that mixed precision makes of weights that train; of frozen ones none stay."""
        mixed = self._target.autocast_dtype is not None and self._trained.lora is None
        return int(plain.saved.per_call) if mixed else 0

    def _parameters(self) -> dict[str, Tensor]:
        """Return the tower's parameters by name, without those of a stack that is counted by itself."""
        found = parameters_within(self._whole, self._tower.parts)
        return {name: each for name, each in found.items() if not is_within(name, [PICTURE_STACK])}

    def _items(self) -> Literal["all", "texts", "pictures"]:
        """Return which items pass through the tower."""
        if len(self._whole.towers()) == 1:
            return "all"
        return "texts" if self._tower.name == "text" else "pictures"

    def _blocks(self) -> tuple[int, int]:
        """Return the parameters of the largest layer, and of all that stands outside of the layers together."""
        total = sum(each.numel() for each in self._parameters().values())
        if self._tower.layers is None:
            return total, 0
        layers = self._whole.get_submodule(self._tower.layers).children()
        sizes = [sum(each.numel() for each in layer.parameters()) for layer in layers]
        return max(sizes), total - sum(sizes)

    def _flops(self) -> CallCost:
        """Return two operations for each weight and token, and those of attention: the field's usual count."""
        parameters = self._parameters()
        tables = sum(each.numel() for each in _tables(self._whole))
        weights = sum(each.numel() for each in parameters.values())
        per_pair = 0.0
        if self._tower.layers is not None:
            layers = list(self._whole.get_submodule(self._tower.layers).children())
            hidden = next(each for each in layers[0].parameters() if each.ndim >= 2).shape[-1]
            per_pair = 4.0 * hidden * len(layers)
        touched = weights - tables * (self._tower.name == "text")
        return CallCost(2.0 * max(self._whole.dimension, touched), per_pair)  # a bag of rows adds one row a token


def _tables(encoder: Encoder) -> list[Tensor]:
    """Return the embeddings of vocabularies."""
    modules = (module for module in encoder.modules() if isinstance(module, nn.Embedding))
    return [module.weight for module in modules if module.num_embeddings >= TABLE_ROWS]


def _deeper(one: _Costs, two: _Costs, times: float) -> _Costs:
    """Return the costs of so many times the layers of the first run, from a second with twice as many."""

    def of(attribute: Literal["per_token", "per_pair", "per_call"]) -> float:
        first, second = getattr(one.saved, attribute), getattr(two.saved, attribute)
        return float(first + (times - 1) * (second - first))

    return _Costs(CallCost(of("per_token"), of("per_pair"), of("per_call")), two.transient)
