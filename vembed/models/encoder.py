"""The contract of an encoder: items in, embeddings out.

1. `load` builds it from a model's files; `recognises` tells whether a model name means its class.
2. `featurize` (CPU, once per item) tokenizes a text, or decodes and resizes a picture.
3. `collate` (CPU, once per call) takes some rows and pads them.
4. `forward` (device, twice per chunk under gradient caching) runs the network.
5. `towers` (plannable.py) names the parts that can train by themselves; `save` (exportable.py) writes a folder that
   `load` reads.

A new encoder states these, a name and a dimension (CONTRIBUTING.md has one in 40 lines). Everything else has a default:
facts that hold for all models of a class are class attributes here, the plan's questions stand in `Plannable`, the
exporter's in `Exportable`. An encoder knows neither chunks nor losses nor the configuration of a run.

Shape legend: R rows of a call, V vectors of those rows (R where each has one), E embedding dim.
"""

from __future__ import annotations

from abc import abstractmethod
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self, TypeAlias

import numpy as np
from torch.nn.modules.batchnorm import _BatchNorm

from vembed.batch import MODALITY_WORDS, Background, Composed, ImageLimits, modality_of
from vembed.errors import ConfigError, DataError
from vembed.models.exportable import Exportable
from vembed.models.plannable import Plannable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from vembed.batch import Features, Item, Modality, Side
    from vembed.models.hub import ModelFiles
    from vembed.models.pictures import Normalisation

Similarity: TypeAlias = Literal["cosine", "dot"]
"""Comparison of two embeddings. Both are inner products: embeddings of cosine models have unit length."""

NO_PROMPTS: Mapping[Side, str] = {"query": "", "document": ""}  # no proxy: encoders are copied and pickled


@dataclass(frozen=True, slots=True)
class About:
    """One row of docs/models.md."""

    models: str
    decides: str  # what in a name or in the files means this class
    pooling: str
    prompts: str
    trainable: str  # values of the key
    writes: str  # libraries that `model/` is for


@dataclass(frozen=True, slots=True)
class TrainedPart:
    """The part of an encoder that trains, and what follows for the frozen rest. Set by `freeze` and `add_adapters`."""

    words: str = ""  # for people, with counts; empty until decided
    eval_only: tuple[nn.Module, ...] = ()  # frozen modules that stay in evaluation mode: they drop nothing
    keeps_base: bool = False  # frozen weights stay those of the files, so checkpoints leave them out
    base: str | None = None  # fingerprint of those weights
    narrowed_bytes: int = 0  # bytes that they take less in memory than in a file (adapters.py)


class Encoder(Plannable, Exportable):
    """A network that turns items into embeddings, with its tokenizer and image processor."""

    # Which models it is for. `builtin:NAME` trains one from scratch, `prefix` ("open_clip:") begins a model name, and
    # `marker` is a file that `save` writes and no other class does.
    about: ClassVar[About | None] = None
    builtin: ClassVar[str] = ""
    prefix: ClassVar[str] = ""
    marker: ClassVar[str] = ""
    modes: ClassVar[Mapping[str, frozenset[str]]] = {}  # encoder_mode -> model_types of config.json; empty set: any
    reads: ClassVar[frozenset[str]] = frozenset()  # keys of the model that not every class reads (load.COMMON_KEYS)

    # Inputs and outputs.
    name: str  # what it was loaded by
    dimension: int  # E
    max_length: int | None  # tokens of the longest text; None without a limit or a text tower
    modalities: frozenset[Modality] = frozenset({"text"})
    several_pictures: bool = False  # an item may have more than one
    multi_vector: bool = False  # late interaction: several vectors per row
    prompts: Mapping[Side, str] = NO_PROMPTS  # put before each side's items
    similarity: Similarity = "cosine"
    image_limits: ImageLimits = ImageLimits()
    image_background: Background = "white"  # behind transparent parts of pictures
    normalisation: Normalisation | None = None  # of pixels that stay bytes until `forward`; None: there are none

    # How it trains and runs.
    trained: TrainedPart = TrainedPart()
    new_modules: tuple[str, ...] = ()  # without weights in any file: they train in full, even beside adapters
    freeze_batch_norm: bool = False  # batch normalisation keeps the statistics of the files
    packs: bool = False  # `collate` lays rows end to end, so none is padded

    @classmethod
    def recognises(cls, files: ModelFiles) -> bool:
        """Return whether a model name other than `builtin:NAME` means this class."""
        has_prefix = bool(cls.prefix) and files.name.startswith(cls.prefix)
        return has_prefix or (bool(cls.marker) and files.in_folder(cls.marker))

    @classmethod
    @abstractmethod
    def load(cls, files: ModelFiles, texts: Iterable[str] = ()) -> Encoder:
        """Build an encoder, with the weights of its files where there are any.

        Args:
            texts: Training texts, for classes that train a tokenizer. The plan builds encoders without any.

        Raises:
            ConfigError: The model can't be loaded as the user wants it.
            MachineError: The hub can't be reached, or a package is missing.
        """

    @abstractmethod
    def featurize(self, items: Sequence[Item], side: Side) -> Features:
        """Return one row of features per item; all items are of one modality.

        Texts get their side's prompt. Over-long ones are truncated and counted in `num_truncated`.
        """

    @abstractmethod
    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:
        """Return the inputs of one `forward`, on the CPU, while the call before it may still compute.

        Args:
            features: Features of any number of items.
            rows: The R rows of the call.
            width: Padded length, at least the longest of these rows; with `packs` the tokens of the whole call.

        Returns:
            Tensors of R rows, unless the encoder packs them.
        """

    @abstractmethod
    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return embeddings (R, E), at least float32; of unit length unless `similarity` is the dot product.

        With `multi_vector` the vectors of all rows, one row after the other, (V, E): V is the sum of `num_vectors`.
        """

    def num_vectors(self, features: Features) -> NDArray[np.int64] | None:  # noqa: ARG002
        """Return the vectors that `forward` gives per row, at least 1, (n,); None where each row has one."""
        return None

    def longest_text(self, side: Side) -> int | None:  # noqa: ARG002
        """Return the number of tokens that texts of a side are truncated to, None without a limit."""
        return self.max_length

    def parts(self) -> Mapping[str, Encoder]:
        """Return the encoders that it is made of by the subfolders that they are saved in; by default itself."""
        return {"": self}

    def facts(self) -> dict[str, str]:
        """Return each decision about the model with the file that made it, for the plan, the report and the card."""
        return {"similarity": self.similarity}

    def describe(self) -> dict[str, str]:
        """Return the facts and the part that trains, for the plan and the log."""
        background = {} if self.image_background == "white" else {"image_background": self.image_background}
        return self.facts() | background | ({"trains": self.trained.words} if self.trained.words else {})

    def with_prompts(self, prompts: Mapping[Side, str]) -> Self:
        """Return the encoder with other prompts for `featurize`; weights and all else are shared.

        Raises:
            ConfigError: The encoder puts nothing before its items.
        """
        if "query_prompt" not in self.reads:
            raise ConfigError(
                f"{self.name} takes no prompts: leave query_prompt and document_prompt out of the entries of data"
            )
        twin = copy(self)
        twin.prompts = {**self.prompts, **prompts}
        return twin

    def by_modality(self, items: Sequence[Item]) -> list[tuple[Modality, NDArray[np.int64]]]:
        """Return the indices of the items of each modality that occurs.

        Raises:
            DataError: An item is of a modality that this encoder doesn't take, or has more pictures.
        """
        indices: dict[Modality, list[int]] = {}
        for index, item in enumerate(items):
            indices.setdefault(modality_of(item), []).append(index)
        refused = sorted(indices.keys() - self.modalities)
        if refused:
            raise DataError(
                f"{self.name} takes {' and '.join(sorted(self.modalities))}, and {len(indices[refused[0]])} items of "
                f"the data are {MODALITY_WORDS[refused[0]][1]}: choose a model for both, or map other columns"
            )
        if not self.several_pictures:
            many = [item for item in items if isinstance(item, Composed) and len(item.images) > 1]
            if many:
                raise DataError(
                    f"{self.name} takes one picture in an item, and {len(many)} items of the data have several (the "
                    f"first one {len(many[0].images)}): choose a vision-language model, or make each picture an item"
                )
        return [(modality, np.array(indices[modality], dtype=np.int64)) for modality in sorted(indices)]

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all modules but frozen ones, and of batch normalisation unless that is frozen."""
        super().train(mode)
        for module in (*self.trained.eval_only, *(self.batch_norms() if self.freeze_batch_norm else ())):
            module.eval()
        return self

    def batch_norms(self) -> tuple[nn.Module, ...]:
        """Return the layers of batch normalisation."""
        return tuple(module for module in self.modules() if isinstance(module, _BatchNorm))

    def mixes_rows(self) -> bool:
        """Return whether batch normalisation lets an embedding depend on the other rows of its call in training."""
        frozen_norms = set(self.batch_norms()) if self.freeze_batch_norm else set()
        frozen_norms |= {module for frozen in self.trained.eval_only for module in frozen.modules()}
        # One without running statistics takes those of the call even in evaluation mode.
        return any(norm not in frozen_norms or norm.running_mean is None for norm in self.batch_norms())
