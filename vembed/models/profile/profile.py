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
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from torch import nn

from vembed.errors import ConfigError
from vembed.models.adapters.lora import add_adapters, takes_adapters
from vembed.models.adapters.narrow import narrow_frozen
from vembed.models.adapters.trainable import freeze
from vembed.models.exportable import sample_vectors
from vembed.models.files import DTYPES
from vembed.models.keys import AdapterKeys, ModelKeys
from vembed.models.load import load_encoder, load_skeleton
from vembed.models.plannable import WORDS, one_picture, parameters_within
from vembed.models.profile.measure import CallCosts, ProfileTarget, measure_call
from vembed.plan.memory import CallCost, ModelSize, TowerSize
from vembed.registry import plugin_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor

    from vembed.batch import Side
    from vembed.models.encoder import Encoder
    from vembed.models.plannable import Tower, TowerInputs, TowerName

_log = logging.getLogger(__name__)

TABLE_ROWS = 4096
"""An embedding of at least so many rows is a vocabulary's, not one of positions."""

CANNOT_RUN = (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError, LookupError, AssertionError)
"""What models raise that look at values, which fake tensors and the meta device don't have."""

_known: dict[str, ModelSize] = {}


@dataclass(frozen=True, slots=True)
class _Trained:
    """What of an encoder trains: a part, or adapters beside frozen weights."""

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
    said = [getattr(keys, name) for name in ModelKeys.model_fields]
    adapters = None if lora is None else [getattr(lora, name) for name in AdapterKeys.model_fields]
    known = repr((said, target, trainable, adapters, stamp))
    if known not in _known:
        if lora is None:
            _known[known] = _profile(keys, target, _Trained(trainable))
        else:
            plain = profile_model(keys, target, trainable=trainable)
            _known[known] = replace(plain, adapted=_adapted(keys, target, lora))
    return _known[known]


def _adapted(keys: ModelKeys, target: ProfileTarget, lora: AdapterKeys) -> ModelSize | None:
    """Return the size with adapters, None where the model can't have any."""
    try:
        return _profile(keys, target, _Trained(adapters=lora))
    except ConfigError as error:
        _log.debug("%s", error)
        return None


def _profile(keys: ModelKeys, target: ProfileTarget, trained: _Trained) -> ModelSize:
    compute_dtype = target.autocast_dtype or DTYPES[keys.torch_dtype]
    try:
        bare = load_skeleton(keys)
    except CANNOT_RUN as error:
        return _by_formula(keys, _with_weights(keys), compute_dtype, f"can't be built without memory ({_told(error)})")
    whole = bare.skeleton()
    trained.apply(whole)
    narrowed = narrow_frozen(whole, target.autocast_dtype)
    try:
        with warnings.catch_warnings():  # the encoder that is built later says the same again
            warnings.simplefilter("ignore")
            inputs = {each.name: each for each in whole.profile_inputs()}
            sizes: dict[str, TowerSize] = {}
            for tower in whole.towers():
                runs = _Tower(bare, whole, tower, inputs[tower.name], target, trained)
                sizes[tower.name] = runs.sized([sizes[name] for name in inputs[tower.name].through])
    except CANNOT_RUN as error:
        _refuse_broken_plugin(keys, whole)
        return _by_formula(keys, whole, compute_dtype, f"can't be run without memory ({_told(error)})")
    parameters = list(whole.parameters())
    return ModelSize(
        num_parameters=sum(each.numel() for each in parameters),
        num_trainable=sum(each.numel() for each in parameters if each.requires_grad),
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


def _told(error: Exception) -> str:
    """Return an error with its type, on one line."""
    return f"{type(error).__name__}: {error}"


def _with_weights(keys: ModelKeys) -> Encoder:
    """Load an encoder as training would, without its data."""
    try:
        return load_encoder(keys)
    except CANNOT_RUN as error:
        raise ConfigError(
            f"{keys.model_name}: the plan needs the size of the encoder, and its class can't build one without "
            f"training texts ({_told(error)}); let its load take none"
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
        own = [f"{each.filename}:{each.lineno}: " for each in frames if each.filename == sys.modules[module].__file__]
        raise ConfigError(
            f"plugins: {type(encoder).__name__} of {module} can't encode sample items: "
            f"{own[-1] if own else ''}{_told(error)}"
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


class _Tower:
    """One tower of a model, and its runs.

    Args:
        bare: The model on the meta device, from which shorter ones are cut.
        whole: The same with what trains decided.
    """

    def __init__(
        self,
        bare: Encoder,
        whole: Encoder,
        tower: Tower,
        inputs: TowerInputs,
        target: ProfileTarget,
        trained: _Trained,
    ) -> None:
        self._bare, self._whole, self._tower, self._inputs = bare, whole, tower, inputs
        self._target, self._trained = target, trained

    def _measured(self) -> tuple[CallCosts, CallCosts | None]:
        """Return the costs of a call, and those with gradient checkpointing where there is one."""
        passed = (self._tower.name, *self._inputs.through)
        stacks = {tower.name: (tower.period, len(self._layers(tower))) for tower in self._whole.towers()}
        cut = {name: few for name, (few, layers) in stacks.items() if name in passed and 0 < 2 * few < layers}
        times = {name: self._trained.depth(stacks[name][1]) / few for name, few in cut.items()}
        costs: list[CallCosts | None] = []
        for checkpointed in (False, True):
            first = self._run(cut, checkpointed=checkpointed)
            deeper = {name: self._run(cut | {name: 2 * few}, checkpointed=checkpointed) for name, few in cut.items()}
            costs.append(_deeper(first, deeper, times))
        plain, recomputed = costs
        assert plain is not None
        return plain, recomputed

    def _layers(self, tower: Tower) -> list[nn.Module]:
        return [] if tower.layers is None else list(self._whole.get_submodule(tower.layers).children())

    def _run(self, cut: dict[TowerName, int], *, checkpointed: bool) -> CallCosts | None:
        """Run a call with the layers of some towers cut; None where it can't recompute."""

        def build() -> Encoder:
            encoder = self._encoder(cut)
            if checkpointed:
                encoder.enable_gradient_checkpointing()
            return encoder

        if checkpointed:
            try:
                build()
            except ValueError:
                return None
        return measure_call(build, self._inputs, self._target)

    def _encoder(self, cut: dict[TowerName, int]) -> Encoder:
        encoder = self._bare.skeleton(cut)
        self._trained.apply(encoder, cut=cut)
        narrow_frozen(encoder, self._target.autocast_dtype)
        if takes_adapters(encoder):  # a transformer: its table isn't what its steps are about
            for table in _tables(encoder):
                table.requires_grad_(False)
        return encoder.train()

    def sized(self, through: Sequence[TowerSize]) -> TowerSize:
        """Run the tower and return its size.

        Args:
            through: The other towers that its calls pass through.
        """
        plain, checkpointed = self._measured()
        # Copies that mixed precision makes of weights that train are shared by the calls of a step; of frozen ones each
        # call makes its own.
        shares_casts = self._target.autocast_dtype is not None and self._trained.adapters is None
        cast_bytes = int(plain.saved.per_call) if shares_casts else 0
        plain = replace(plain, saved=replace(plain.saved, per_call=plain.saved.per_call - cast_bytes))
        cast_bytes = max(0, cast_bytes - sum(each.cast_bytes for each in through))
        checkpointed = checkpointed or plain
        parameters = parameters_within(self._whole, self._tower.parts)
        trainable = [each.numel() for each in parameters.values() if each.requires_grad]
        total = sum(each.numel() for each in parameters.values())
        blocks = [sum(each.numel() for each in layer.parameters()) for layer in self._layers(self._tower)]
        return TowerSize(
            name=self._tower.name,
            items=self._items(),
            through=tuple(each.name for each in through),
            cuts=self._tower.name != "vision",
            max_tokens=self._inputs.max_tokens,
            num_parameters=total,
            num_trainable=sum(trainable),
            largest_block=max(blocks, default=total),
            outside_blocks=total - sum(blocks) if blocks else 0,
            largest_tensor=max(trainable, default=0),
            saved=plain.saved,
            transient=plain.transient,
            saved_checkpointed=checkpointed.saved,
            transient_checkpointed=checkpointed.transient,
            cast_bytes=cast_bytes,
            forward_flops=self._flops(total, through),
        )

    def _items(self) -> Literal["all", "texts", "pictures"]:
        """Return which items pass through the tower."""
        if len(self._whole.towers()) == 1:
            return "all"
        return "texts" if self._tower.name == "text" else "pictures"

    def _flops(self, num_parameters: int, through: Sequence[TowerSize]) -> CallCost:
        """Return two operations for each weight and token, and those of attention: the field's usual count."""
        patches = self._inputs.patches
        tables = sum(each.numel() for each in _tables(self._whole))
        layers, per_pair = self._layers(self._tower), 0.0
        if layers:
            hidden = next(each for each in layers[0].parameters() if each.ndim >= 2).shape[-1]
            per_pair = 4.0 * hidden * len(layers)
        touched = num_parameters - tables * (self._tower.name == "text")
        own = 2.0 * max(self._whole.dimension, touched) * patches  # a bag of rows adds one row a token
        costs = (CallCost(own, per_pair * patches**2), *(each.forward_flops for each in through))
        return CallCost(sum(each.per_token for each in costs), sum(each.per_pair for each in costs))


def _tables(encoder: Encoder) -> list[Tensor]:
    """Return the embeddings of vocabularies."""
    modules = (module for module in encoder.modules() if isinstance(module, nn.Embedding))
    return [module.weight for module in modules if module.num_embeddings >= TABLE_ROWS]


def _deeper(
    one: CallCosts | None, deeper: Mapping[TowerName, CallCosts | None], times: Mapping[TowerName, float]
) -> CallCosts | None:
    """Return the costs of so many times the layers of the first run, from one more for each tower with twice as many.

    Those that can't be run are None, and so is what would be made of them.
    """
    runs = [(run, times[name] - 1) for name, run in deeper.items() if run is not None]
    if one is None or len(runs) < len(deeper):
        return None
    base = one.saved

    def of(attribute: Literal["per_token", "per_pair", "per_call"]) -> float:
        first = getattr(base, attribute)
        return float(first + sum(more * (getattr(run.saved, attribute) - first) for run, more in runs))

    transient = runs[-1][0].transient if runs else one.transient
    return CallCosts(CallCost(of("per_token"), of("per_pair"), of("per_call")), transient)
