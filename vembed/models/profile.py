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
import math
import sys
import traceback
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from torch import nn

from vembed.errors import ConfigError
from vembed.models.adapters import add_adapters, freeze, narrow_frozen, takes_adapters
from vembed.models.exportable import sample_vectors
from vembed.models.hub import DTYPES
from vembed.models.keys import AdapterKeys, ModelKeys
from vembed.models.load import load_encoder, load_skeleton
from vembed.models.measure import CallCosts, ProfileTarget, measure_call, measure_saved
from vembed.models.plannable import WORDS, one_picture, parameters_within
from vembed.plan.memory import CallCost, ModelSize, TowerSize
from vembed.registry import plugin_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import Tensor

    from vembed.batch import Side
    from vembed.models.encoder import Encoder
    from vembed.models.plannable import Tower, TowerInputs, TowerName

_log = logging.getLogger(__name__)

TABLE_ROWS = 4096
"""An embedding of at least so many rows is a vocabulary's, not one of positions."""

CANNOT_RUN = (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError, LookupError, AssertionError)
"""Errors of models that look at values, which fake tensors and the meta device don't have."""

_known: dict[str, ModelSize] = {}


@dataclass(frozen=True, slots=True)
class _Trained:
    """The part of an encoder that trains, or adapters beside frozen weights."""

    part: str = "all"
    adapters: AdapterKeys | None = None

    def apply(self, encoder: Encoder, *, cut: Mapping[TowerName, int] = MappingProxyType({})) -> None:
        """Freeze what doesn't train, and add adapters.

        Args:
            cut: Layers that towers were cut to, of which the last that may train all do.
        """
        if self.adapters is not None:
            add_adapters(encoder, self.adapters)
        elif cut and self.part.startswith("last_"):
            # "last_6_layers" of a tower cut to one layer is that layer. Towers cut to unequal depths have no common N.
            numbers = set(cut.values())
            freeze(encoder, f"last_{numbers.pop()}_layers" if len(numbers) == 1 else "all")
        else:
            freeze(encoder, self.part)

    def depth(self, layers: int) -> int:
        """Return how many layers of a stack keep anything."""
        if self.adapters is not None or not self.part.startswith("last_"):
            return layers
        return min(layers, int(self.part.split("_")[1]))


def profile_model(
    keys: ModelKeys, target: ProfileTarget, *, trainable: str = "all", lora: AdapterKeys | None = None
) -> ModelSize:
    """Measure a model without its weights; a second call in this process returns the same.

    Args:
        keys: What the user said about the model. Its name may also be a JSON file with the shape of one.
        trainable: What trains: "all", "projection", "vision", "text" or "last_N_layers".
        lora: The adapters of `adapted`; None leaves it out.

    Returns:
        Counted parameters, measured activations; `adapted` is the same model with adapters.

    Raises:
        ConfigError: There is no such model, or it lacks the part that would train.
        MachineError: Its description can't be reached.
    """
    paths = [Path(name) for name in (keys.model_name, keys.text_model_name, keys.image_model_name) if name]
    stamp = [path.stat().st_mtime_ns for path in paths if path.exists()]
    values = [getattr(keys, name) for name in ModelKeys.model_fields]
    adapters = None if lora is None else [getattr(lora, name) for name in AdapterKeys.model_fields]
    known = repr((values, target, trainable, adapters, stamp))
    if known not in _known:
        if lora is None:
            _known[known] = _profile(keys, target, _Trained(trainable))
        else:
            plain, adapted = profile_model(keys, target, trainable=trainable), None
            try:
                adapted = _profile(keys, target, _Trained(adapters=lora))
            except ConfigError as error:  # the model can't have any
                _log.debug("%s", error)
            _known[known] = replace(plain, adapted=adapted)
    return _known[known]


def _profile(keys: ModelKeys, target: ProfileTarget, trained: _Trained) -> ModelSize:
    compute_dtype = target.autocast_dtype or DTYPES[keys.torch_dtype]
    try:
        bare = load_skeleton(keys)
    except CANNOT_RUN as error:
        reason = f"can't be built without memory ({_described(error)})"
        return _by_formula(keys, _with_weights(keys), compute_dtype, reason)
    whole = bare.skeleton()
    trained.apply(whole)
    narrowed = narrow_frozen(whole, target.autocast_dtype)
    try:
        with warnings.catch_warnings():  # the encoder that is built later says the same again
            warnings.simplefilter("ignore")
            inputs = {tower_inputs.name: tower_inputs for tower_inputs in whole.profile_inputs()}
            sizes: dict[str, TowerSize] = {}
            for tower in whole.towers():
                plain, checkpointed = _tower_costs(bare, whole, tower, inputs[tower.name], target, trained)
                # Copies that mixed precision makes of weights that train are shared by the calls of a step; of frozen
                # ones each call makes its own.
                shares_casts = target.autocast_dtype is not None and trained.adapters is None
                cast_bytes = int(plain.saved.per_call) if shares_casts else 0
                plain = replace(plain, saved=replace(plain.saved, per_call=plain.saved.per_call - cast_bytes))
                through = [sizes[name] for name in inputs[tower.name].through]
                sizes[tower.name] = _tower_size(
                    whole, tower, inputs[tower.name], through, plain, checkpointed or plain, cast_bytes
                )
    except CANNOT_RUN as error:
        _refuse_broken_plugin(keys, whole)
        return _by_formula(keys, whole, compute_dtype, f"can't be run without memory ({_described(error)})")
    parameters = list(whole.parameters())
    return ModelSize(
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        bytes_per_value=DTYPES[keys.torch_dtype].itemsize,
        dimension=whole.dimension,
        narrowed=narrowed,
        towers=tuple(sizes.values()),
        estimated=False,
        picture_bytes=whole.picture_bytes(),
        checkpointable=all(size.saved_checkpointed is not size.saved for size in sizes.values()),
        vectors=_vectors(whole, "document"),
        most_of_query=_most_of_query(whole),
        why_not_packed=whole.why_not_packed(target.device, compute_dtype),
        modalities=whole.modalities,
    )


def _vectors(encoder: Encoder, side: Side) -> tuple[float, float]:
    """Return the embeddings of a row, and those more for each token, by what two sample texts have."""
    if not encoder.multi_vector:
        return 1.0, 0.0
    if "text" not in encoder.modalities:
        of_picture = encoder.num_vectors(one_picture(encoder))
        return (1.0 if of_picture is None else float(of_picture[0])), 0.0
    # Straight through a short and a long text: the special tokens of a row, and what each further token adds.
    try:
        features = encoder.featurize([WORDS[0], " ".join(WORDS)], side)
    except CANNOT_RUN:
        return 0.0, 1.0  # of a shape alone there is no tokenizer: a vector for each token
    counts, (short, long) = encoder.num_vectors(features), features.lengths.tolist()
    if counts is None:
        return 1.0, 0.0
    of_token = float(counts[1] - counts[0]) / (long - short) if long > short else 0.0
    return float(counts[0]) - of_token * short, of_token


def _most_of_query(encoder: Encoder) -> int:
    """Return the embeddings of the longest query, where queries are cut to fewer tokens than documents; else 0."""
    longest = encoder.longest_text("query")
    if not encoder.multi_vector or longest is None or longest == encoder.longest_text("document"):
        return 0
    of_row, of_token = _vectors(encoder, "query")
    return math.ceil(of_row + of_token * longest)


def _described(error: Exception) -> str:
    """Return an error with its type, on one line."""
    return f"{type(error).__name__}: {error}"


def _with_weights(keys: ModelKeys) -> Encoder:
    """Load an encoder as training would, without its data."""
    try:
        return load_encoder(keys)
    except CANNOT_RUN as error:
        raise ConfigError(
            f"{keys.model_name}: the plan needs the size of the encoder, and its class can't build one without "
            f"training texts ({_described(error)}); let its load take none"
        ) from error


def _refuse_broken_plugin(keys: ModelKeys, encoder: Encoder) -> None:
    """Run an encoder of a plugin on real tensors: what fails there too is a fault of its code, and no formula's case.

    Raises:
        ConfigError: It fails; the message says where in the plugin.
    """
    module = plugin_of(encoder)
    if not module:
        return
    try:
        sample_vectors(_with_weights(keys).eval())
    except CANNOT_RUN as error:
        frames = traceback.extract_tb(error.__traceback__)
        file = sys.modules[module].__file__
        lines = [f"{frame.filename}:{frame.lineno}: " for frame in frames if frame.filename == file]
        raise ConfigError(
            f"plugins: {type(encoder).__name__} of {module} can't encode sample items: "
            f"{lines[-1] if lines else ''}{_described(error)}"
        ) from error


def _by_formula(keys: ModelKeys, encoder: Encoder, compute_dtype: torch.dtype, reason: str) -> ModelSize:
    """Return the size without a run, and say why."""
    _log.warning("%s %s: its activations are estimated by a formula", keys.model_name, reason)
    return model_size(encoder, compute_dtype=compute_dtype)


def model_size(encoder: Encoder, *, compute_dtype: torch.dtype) -> ModelSize:
    """Return counted parameters and activations by the encoder's own estimate, in the type that it computes in."""
    parameters = list(encoder.parameters())
    size = ModelSize.by_formula(
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        bytes_per_value=parameters[0].element_size(),
        dimension=encoder.dimension,
        max_length=encoder.longest_item,
        activation_bytes_per_token=int(encoder.activation_values() * compute_dtype.itemsize),
    )
    vectors, most_of_query = _vectors(encoder, "document"), _most_of_query(encoder)
    return replace(size, vectors=vectors, most_of_query=most_of_query, modalities=encoder.modalities)


def _tower_costs(
    bare: Encoder, whole: Encoder, tower: Tower, inputs: TowerInputs, target: ProfileTarget, trained: _Trained
) -> tuple[CallCosts, CallCosts | None]:
    """Return the costs of a call of a tower, and those with gradient checkpointing, None where there is none.

    Args:
        bare: The model on the meta device, from which shorter ones are cut.
        whole: The same with what trains decided.
    """
    # Every tower that the call passes through is cut, so that no run takes longer for a deeper model.
    passed = (tower.name, *inputs.through)
    depths = {stack.name: (stack.period, len(_layers(whole, stack))) for stack in whole.towers()}
    cut = {name: few for name, (few, depth) in depths.items() if name in passed and 0 < 2 * few < depth}

    def build(layers: Mapping[TowerName, int], *, checkpointed: bool) -> Encoder:
        encoder = bare.skeleton(layers)
        trained.apply(encoder, cut=layers)
        narrow_frozen(encoder, target.autocast_dtype)
        if takes_adapters(encoder):  # a transformer: its table isn't what its steps are about
            for table in _tables(encoder):
                table.requires_grad_(False)
        encoder.train()
        if checkpointed:
            encoder.enable_gradient_checkpointing()
        return encoder

    def costs(*, checkpointed: bool) -> CallCosts:
        def cut_to(layers: Mapping[TowerName, int]) -> Callable[[], Encoder]:
            return partial(build, layers, checkpointed=checkpointed)

        # All towers short, then one tower deeper at a time. Beyond what is kept, a call takes what its hungriest layer
        # takes: two layers show as much as all of them, so only the last run has a backward pass.
        *others, last = [cut, *(cut | {name: 2 * few} for name, few in cut.items())]
        whole_call = measure_call(cut_to(last), inputs, target)
        shallow, *deep = [*(measure_saved(cut_to(layers), inputs, target) for layers in others), whole_call.saved]
        saved = {}
        for unit in ("per_token", "per_pair", "per_call"):
            first = getattr(shallow, unit)
            # The shallow run has one period of layers; `depth / few` periods keep something, of which one is counted.
            saved[unit] = float(
                first
                + sum(
                    (trained.depth(depths[name][1]) / few - 1) * (getattr(deeper, unit) - first)
                    for (name, few), deeper in zip(cut.items(), deep, strict=True)
                )
            )
        return CallCosts(CallCost(**saved), whole_call.transient)

    plain = costs(checkpointed=False)
    try:
        build(cut, checkpointed=True)
    except ValueError:  # the encoder can't recompute
        return plain, None
    return plain, costs(checkpointed=True)


def _tower_size(
    whole: Encoder,
    tower: Tower,
    inputs: TowerInputs,
    through: Sequence[TowerSize],
    plain: CallCosts,
    checkpointed: CallCosts,
    cast_bytes: int,
) -> TowerSize:
    """Return counted parameters, operations and costs of a tower.

    Args:
        through: The other towers that its calls pass through.
        cast_bytes: Copies of weights that all calls of a step share, those of `through` included.
    """
    parameters = parameters_within(whole, tower.parts)
    trainable = [parameter.numel() for parameter in parameters.values() if parameter.requires_grad]
    total = sum(parameter.numel() for parameter in parameters.values())
    layers = _layers(whole, tower)
    blocks = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]

    # Two operations for each weight and token, and those of attention for each pair of tokens: the field's usual count.
    per_pair = 0.0
    if layers:
        hidden = next(parameter for parameter in layers[0].parameters() if parameter.ndim >= 2).shape[-1]
        per_pair = 4.0 * hidden * len(layers)
    # A token multiplies no more than its row of a table. A bag of rows has nothing else: one row a token.
    tables = sum(table.numel() for table in _tables(whole)) if tower.name == "text" else 0
    per_token = 2.0 * max(whole.dimension, total - tables) * inputs.patches
    flops = [CallCost(per_token, per_pair * inputs.patches**2), *(other.forward_flops for other in through)]

    items: Literal["all", "texts", "pictures"] = "texts" if tower.name == "text" else "pictures"
    return TowerSize(
        name=tower.name,
        items="all" if len(whole.towers()) == 1 else items,
        through=tuple(other.name for other in through),
        cuts=tower.name != "vision",
        max_tokens=inputs.max_tokens,
        num_parameters=total,
        num_trainable=sum(trainable),
        largest_block=max(blocks, default=total),
        outside_blocks=total - sum(blocks) if blocks else 0,
        largest_tensor=max(trainable, default=0),
        saved=plain.saved,
        transient=plain.transient,
        saved_checkpointed=checkpointed.saved,
        transient_checkpointed=checkpointed.transient,
        cast_bytes=max(0, cast_bytes - sum(other.cast_bytes for other in through)),
        forward_flops=CallCost(sum(cost.per_token for cost in flops), sum(cost.per_pair for cost in flops)),
    )


def _layers(encoder: Encoder, tower: Tower) -> list[nn.Module]:
    return [] if tower.layers is None else list(encoder.get_submodule(tower.layers).children())


def _tables(encoder: Encoder) -> list[Tensor]:
    """Return the embeddings of vocabularies."""
    modules = (module for module in encoder.modules() if isinstance(module, nn.Embedding))
    return [module.weight for module in modules if module.num_embeddings >= TABLE_ROWS]
