"""What every encoder can do; the rest of the program knows no more than this.

An encoder works in three steps, so that each can run where it is cheapest: `featurize` (CPU, once per item: a
tokenizer), `collate` (CPU, once per chunk: padding) and `forward` (device: the network). All else that differs between
families is told by the class too: which model names mean it, how it is loaded and saved, what the plan measures it
with, which folders it can be written as. A class that states no more than the abstract methods gets sensible answers.

Shape legend: R rows of a chunk, V vectors of those rows (R where each has one), E embedding dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vembed.batch import MODALITY_WORDS, Composed, modality_of
from vembed.data.images import Background, ImageLimits
from vembed.errors import ConfigError, DataError
from vembed.models.probe import picture_bytes, picture_inputs, text_inputs
from vembed.models.towers import copy_modules

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import Features, Item, Modality, Side
    from vembed.models.files import ModelFiles
    from vembed.models.pictures import Normalisation
    from vembed.models.probe import TowerInputs
    from vembed.models.towers import Tower, TowerName

Similarity: TypeAlias = Literal["cosine", "dot"]
"""How two embeddings are compared. Both are inner products: those of cosine models have unit length."""

Form: TypeAlias = Literal["sentence-transformers", "transformers", "open_clip", "pylate", "vembed"]
"""The library that a folder is written for. Every one of them is loaded by vembed too."""

FORMS: tuple[Form, ...] = get_args(Form)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a program that uses transformers alone must do to get an encoder's vectors."""

    kind: Literal["text", "dual", "vision"]
    auto_class: str  # the class of transformers that loads it
    pooling: str  # "mean", "cls", "lasttoken" or "head"; "" for both towers' own projection
    text_padding: Mapping[str, object] = field(default_factory=dict)  # arguments of the tokenizer


@dataclass(frozen=True, slots=True)
class About:
    """What docs/models.md says of a class."""

    models: str
    decides: str  # what of a name or of the files means this class
    pooling: str
    prompts: str
    trainable: str  # values of the key
    writes: str  # libraries that `model/` is for


class Encoder(nn.Module, ABC):
    """A network that turns items into embeddings, with everything that it needs around it."""

    about: ClassVar[About | None] = None
    builtin: ClassVar[str] = ""  # `model_name: builtin:NAME` trains one from scratch
    prefix: ClassVar[str] = ""  # what model names of this class begin with, such as "open_clip:"
    marker: ClassVar[str] = ""  # a file that `save` writes and that no other class does
    reads: ClassVar[frozenset[str]] = frozenset()  # keys of the model that only some classes have a use for
    modes: ClassVar[Mapping[str, frozenset[str]]] = {}  # encoder_mode -> model_types of config.json; empty: any model
    reads_by_parts: ClassVar[bool] = False  # whether `load` loads other encoders, which read the keys

    name: str  # what the model was loaded by
    dimension: int  # E
    max_length: int | None  # longest text in tokens; None where there is no limit, or no text tower
    modalities: frozenset[Modality] = frozenset({"text"})
    several_pictures: bool = False  # whether an item may have more than one
    multi_vector: bool = False  # whether `forward` gives several vectors for each row
    image_limits: ImageLimits = ImageLimits()
    image_background: Background = "white"  # behind transparent parts of pictures
    normalisation: Normalisation | None = None  # of pixels that are bytes until `forward`; None: none are, or by itself
    eval_only: tuple[nn.Module, ...] = ()  # run in evaluation mode while the rest trains: what is frozen drops nothing
    freeze_batch_norm: bool = False  # whether batch normalisation keeps the statistics of the files in training
    keeps_base: bool = False  # whether some weights stay those of the files, so that checkpoints leave them out
    base: str | None = None  # fingerprint of those weights
    narrowed_bytes: int = 0  # that those weights take less here than in a file, as mixed precision multiplies them
    packs: bool = False  # whether `collate` lays rows end to end, so that no row is padded
    trains: str = ""  # what of it trains, for people; empty until that is decided
    beside_adapters: tuple[str, ...] = ()  # modules that were never trained before: all of them trains beside adapters

    @classmethod
    def recognises(cls, files: ModelFiles) -> bool:
        """Return whether a model name that isn't `builtin:NAME` means this class."""
        begins = bool(cls.prefix) and files.name.startswith(cls.prefix)
        return begins or (bool(cls.marker) and files.in_folder(cls.marker))

    @classmethod
    @abstractmethod
    def load(cls, files: ModelFiles, texts: Iterable[str] = ()) -> Encoder:
        """Build an encoder, with the weights of its files where there are any.

        Args:
            texts: Training texts, for a class that trains a tokenizer. The plan builds encoders without any.

        Raises:
            ConfigError: The model can't be loaded as the user wants it.
            MachineError: The hub can't be reached, or a package is missing.
        """

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all modules but those of `eval_only`, and of batch normalisation that is frozen."""
        super().train(mode)
        for module in (*self.eval_only, *(self.batch_norms() if self.freeze_batch_norm else ())):
            module.eval()
        return self

    def batch_norms(self) -> tuple[nn.Module, ...]:
        """Return the layers of batch normalisation."""
        return tuple(module for module in self.modules() if isinstance(module, _BatchNorm))

    def mixes_rows(self) -> bool:
        """Return whether an embedding depends on the other rows of its chunk while training, by batch normalisation."""
        still = set(self.batch_norms()) if self.freeze_batch_norm else set()
        still |= {module for each in self.eval_only for module in each.modules()}
        return any(norm not in still or norm.running_mean is None for norm in self.batch_norms())

    @abstractmethod
    def towers(self) -> tuple[Tower, ...]:
        """Return what it consists of, one tower for each modality."""

    def parts(self) -> Mapping[str, Encoder]:
        """Return the encoders that it is made of, by the subfolders that they are saved in; by default itself."""
        return {"": self}

    def adapter_host(self) -> nn.Module | None:
        """Return the network whose layers may get low-rank adapters; None where there is none."""
        return None

    def training_facts(self) -> dict[str, str]:
        """Return what trains, and on what background pictures stand where that isn't white, for `describe`."""
        own = {"image_background": self.image_background} if self.image_background != "white" else {}
        return own | ({"trains": self.trains} if self.trains else {})

    def by_modality(self, items: Sequence[Item]) -> list[tuple[Modality, NDArray[np.int64]]]:
        """Return the places of the items of each modality that occurs.

        Raises:
            DataError: An item is of a modality that this encoder doesn't take, or has more pictures.
        """
        places: dict[Modality, list[int]] = {}
        for place, item in enumerate(items):
            places.setdefault(modality_of(item), []).append(place)
        strange = sorted(places.keys() - self.modalities)
        if strange:
            raise DataError(
                f"{self.name} takes {' and '.join(sorted(self.modalities))}, and {len(places[strange[0]])} items of "
                f"the data are {MODALITY_WORDS[strange[0]][1]}: choose a model for both, or map other columns"
            )
        if not self.several_pictures:
            many = [item for item in items if isinstance(item, Composed) and len(item.images) > 1]
            if many:
                raise DataError(
                    f"{self.name} takes one picture in an item, and {len(many)} items of the data have several (the "
                    f"first one {len(many[0].images)}): choose a vision-language model, or make each picture an item"
                )
        return [(modality, np.array(places[modality], dtype=np.int64)) for modality in sorted(places)]

    @property
    def similarity(self) -> Similarity:
        """How embeddings of this encoder are compared."""
        return "cosine"

    @property
    def prompts(self) -> dict[Side, str]:
        """Text that is put before each side's items."""
        return {"query": "", "document": ""}

    def with_prompts(self, prompts: Mapping[Side, str]) -> Self:
        """Return the encoder with other prompts, for `featurize` alone; everything else is shared.

        Raises:
            ConfigError: The encoder puts nothing before its items.
        """
        other = copy(self)
        if not other._replace_prompts({**self.prompts, **prompts}):
            raise ConfigError(
                f"{self.name} takes no prompts: leave query_prompt and document_prompt out of the entries of data"
            )
        return other

    def _replace_prompts(self, prompts: dict[Side, str]) -> bool:  # noqa: ARG002
        """Take other prompts; False where the encoder has none."""
        return False

    @abstractmethod
    def featurize(self, items: Sequence[Item], side: Side) -> Features:
        """Tokenize texts (prompts added, over-long ones cut and counted) or decode and resize pictures.

        All items are of one modality; each becomes a row.
        """

    def why_not_packed(self, device: str, dtype: torch.dtype) -> str:  # noqa: ARG002
        """Say why rows can't lie end to end on a device, computed in a type; empty where `pack` makes them."""
        return "this encoder doesn't support it"

    def pack(self) -> None:
        """Lay the rows of each call end to end from now on."""
        raise NotImplementedError(f"{self.name} has no form for rows that lie end to end")

    @abstractmethod
    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:
        """Make the inputs of one call to `forward`, while the call before it may still compute.

        Args:
            features: Features of any number of items.
            rows: The R rows that the call sees.
            width: Padded length, at least the longest of those rows; tokens of the call where rows are packed.

        Returns:
            Tensors on the CPU, first dimension R unless the encoder packs rows.
        """

    @abstractmethod
    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return embeddings (R, E), at least float32, of unit length unless the model is one for dot products.

        With `multi_vector` the vectors of all rows, one row after the other: (V, E), V the sum of `num_vectors`.
        """

    def num_vectors(self, features: Features) -> NDArray[np.int64] | None:  # noqa: ARG002
        """Return how many vectors `forward` gives for each row, at least 1, (n,); None where each has one."""
        return None

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the encoder into a folder from which `load_encoder` and the family's own library load it."""

    def describe(self) -> dict[str, str]:
        """Return what was decided about this encoder and from which file, for the plan and the report."""
        return {"similarity": self.similarity, **self.training_facts()}

    def enable_gradient_checkpointing(self) -> None:
        """Recompute activations in backward instead of keeping them, by the own switch of transformers' models.

        Non-reentrant, which is exact with dropout and with gradient caching.

        Raises:
            ValueError: When this encoder can't.
        """
        host: Any = self.adapter_host()
        if not getattr(host, "supports_gradient_checkpointing", False):
            raise ValueError(f"{self.name} has no gradient checkpointing; set gradient_checkpointing: false")
        # The second name is that of older transformers.
        enable = getattr(host, "activation_checkpointing_enable", None) or host.gradient_checkpointing_enable
        enable({"use_reentrant": False})

    def skeleton(self, num_layers: Mapping[TowerName, int] = MappingProxyType({})) -> Self:
        """Return a copy for the plan to measure, with the layers of some towers cut; tokenizers are shared."""
        towers = self.towers()
        lengths = {each.layers: num_layers[each.name] for each in towers if each.layers and each.name in num_layers}
        copied = cast("Self", copy_modules(self, lengths))
        copied.towers = lambda: towers  # type: ignore[method-assign]  # layers are found by a number that isn't theirs
        return copied

    def profile_inputs(self) -> tuple[TowerInputs, ...]:
        """Return what each tower is measured with, without data; by default what `collate` makes of sample items."""
        texts = (text_inputs(self),) if "text" in self.modalities else ()
        return (*texts, picture_inputs(self)) if "image" in self.modalities else texts

    def longest_text(self, side: Side) -> int | None:  # noqa: ARG002
        """Return the tokens that texts of a side are cut to; None where there is no limit."""
        return self.max_length

    @property
    def longest_item(self) -> int | None:
        """Tokens of the longest item, a text or a picture; None where there is no limit."""
        return self.max_length

    def activation_values(self) -> float:
        """Estimate the values that a token keeps for the backward pass, where the plan can't run the encoder."""
        layers = [module for module in self.modules() if isinstance(module, nn.Linear)]
        return self.dimension + 2.0 * sum(layer.in_features + layer.out_features for layer in layers)

    def picture_bytes(self) -> int:
        """Return the host memory that the features of one picture take; 0 for an encoder of texts."""
        return picture_bytes(self)

    def export_forms(self) -> tuple[Form, ...]:
        """Return the libraries that a folder of the same vectors can be written for, that of `save` first."""
        return ("vembed",)

    def why_not(self, form: Form) -> str:  # noqa: ARG002
        """Say why the encoder can't be written in a form that isn't one of `export_forms`."""
        return f"{self.name} is a model of {self.export_forms()[0]}"

    def write_form(self, form: Form, folder: Path) -> None:  # noqa: ARG002
        """Write the encoder for one of the libraries of `export_forms`."""
        self.save(folder)

    def why_no_graph(self) -> str:
        """Say why the encoder can't be written as an ONNX graph; empty where it can."""
        kind = f" ({self.about.models})" if self.about is not None else ""
        return f"{self.name}{kind} is no transformer that gives one vector for each text"

    def graph(self) -> nn.Module:
        """Return the network from token ids and mask (R, T) to token states (R, T, H) and vectors (R, E)."""
        raise NotImplementedError(self.why_no_graph())

    def usage(self) -> Recipe | None:
        """Return how transformers alone gives the encoder's vectors; None where that takes more than a few lines."""
        return None
