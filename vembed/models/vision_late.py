"""Late interaction on pages: a vision-language model that gives a vector for each token of a text or a picture.

| Folder | What says so | How items are read |
|---|---|---|
| ColPali, ColQwen2 | model_type of config.json | as their processors do: fixed words beside a picture, filled queries |
| one that was written here | the settings file | as its family reads them |
| any vision-language model | pooling_method: none | as its family reads them; the layer behind it is new |

Every token gives a vector, those of the words around a picture too.

Source: Faysse et al., 2024, "ColPali: Efficient Document Retrieval with Vision Language Models".
Shape legend: R rows, V vectors of those rows, E their dim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForPreTraining

from vembed.batch import Ragged
from vembed.models.encoder import About
from vembed.models.formats import Dense, load_dense, model_type_of, write_dense
from vembed.models.late import TokenHead, make_head, refuse_pooling
from vembed.models.vision_language import VisionLanguageEncoder
from vembed.models.vision_language_families import FAMILIES
from vembed.models.vision_language_spec import SETTINGS_FILE, load_processor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from transformers import PreTrainedConfig, PreTrainedModel

    from vembed.batch import Features, Item, Modality, Side
    from vembed.models.exportable import Form
    from vembed.models.hub import ModelFiles
    from vembed.models.plannable import TowerInputs
    from vembed.models.vision_language_family import VisionLanguageFamily

HEAD_FOLDER = "1_Dense"
TOKENS = "token_embeddings"
OWN = "late_interaction"
"""What the settings file holds our choice of vectors under."""

FILLING_TOKENS = 10
"""Tokens at the end of a text that stand for words that it leaves out."""


def _retrieval_words(processor: Any, instruction: str, num_pictures: int, text: str) -> str:
    """Return an item as the processors of ColPali and ColQwen2 word it."""
    bos = processor.tokenizer.bos_token if hasattr(processor, "image_seq_length") else ""
    if num_pictures:
        own = processor.visual_prompt_prefix
        words = str(own.replace("Describe the image.", instruction) if instruction else own)
        return words if processor.image_token in words else f"{processor.image_token}{bos}{words}\n"
    prefix = f"{instruction} " if instruction else processor.query_prefix
    return f"{bos}{prefix}{text}{processor.query_augmentation_token * FILLING_TOKENS}\n"


RETRIEVAL_FAMILIES: Mapping[str, VisionLanguageFamily] = {
    # transformers' ColQwen2 counts positions in a line, whatever the shape of a picture.
    "colpali": replace(FAMILIES["paligemma"], name="ColPali", wording=_retrieval_words),
    "colqwen2": replace(
        FAMILIES["qwen2_vl"], name="ColQwen2", positions=None, wording=_retrieval_words, most_image_tokens=None
    ),
}


class VisionLateEncoder(VisionLanguageEncoder):
    """A vision-language model with a head that makes a vector of each token.

    Args:
        head: What stands behind the language model.
        whole: The config of transformers' class of both, as which the folder is written; None for the network alone.
    """

    about = About(
        models="ColQwen2, and late interaction on any vision-language model",
        decides="model_type, or pooling_method: none",
        pooling="none: a vector for each token",
        prompts="the processor's own",
        trainable="all, text, vision, projection, last_N_layers",
        writes="transformers for ColQwen2, else vembed",
    )
    reads = VisionLanguageEncoder.reads | {"projection_dim", "topk_tokens", "pool_factor"}
    projections: ClassVar[tuple[str, ...]] = ("head",)
    multi_vector = True

    def __init__(self, name: str, *, head: TokenHead, whole: PreTrainedConfig | None = None, **parts: Any) -> None:
        super().__init__(name, **parts)
        self.head = head
        self.new_modules = ("head",) if head.is_new else ()
        self.whole = whole
        self.dimension = head.dimension
        if whole is not None:
            modalities: frozenset[Modality] = frozenset({"text", "image"})
            self.modalities, self.several_pictures = modalities, False

    @classmethod
    def recognises(cls, files: ModelFiles) -> bool:
        """Return whether several vectors are asked for, or the model's files say that it gives them."""
        kind = model_type_of(files)
        own = files.keys.pooling_method == "none" or OWN in files.read_json(SETTINGS_FILE)
        return kind in RETRIEVAL_FAMILIES or (kind in FAMILIES and own)

    @classmethod
    def load(cls, files: ModelFiles, texts: Iterable[str] = ()) -> VisionLateEncoder:  # noqa: ARG003
        """Load the network, its processor and its head; a network that has none gets a new one.

        Raises:
            ConfigError: The user says something else than the model's files.
        """
        refuse_pooling(files)
        config = files.config()
        family = RETRIEVAL_FAMILIES.get(config.model_type)
        own_form = family is None
        family = family or FAMILIES[config.model_type]
        processor, spec = load_processor(files, config, family)
        saved = files.read_json(SETTINGS_FILE).get(OWN)
        backbone: Any = files.backbone("", config, AutoModel if own_form else AutoModelForPreTraining)
        if not own_form:
            backbone, layers = backbone.vlm, [_with_weights_of(backbone.embedding_proj_layer)]
        else:
            layers = [] if saved is None else [load_dense(files, HEAD_FOLDER, of=TOKENS)]
        head = make_head(files, layers, hidden=config.get_text_config().hidden_size, protected=0, saved=saved or {})
        parts = {"backbone": backbone, "processor": processor, "family": family, "spec": spec}
        return cls(files.name, head=head, whole=None if own_form else config, **parts)

    def featurize(self, items: Sequence[Item], side: Side) -> Features:
        """Put items into words, and say that each token gives a vector."""
        return self._with_vectors(super().featurize(items, side), side)

    def blank_pictures(self) -> Features:
        """Return rows that are one square picture and a single token each, all of which give vectors."""
        return self._with_vectors(super().blank_pictures(), "document")

    def text_probe(self) -> TowerInputs:
        """Return texts of which each token gives a vector."""
        texts = super().text_probe()
        return texts if self._has_processor else self.head.measured(texts)

    def _with_vectors(self, features: Features, side: Side) -> Features:
        ids = features.columns["input_ids"]
        places = np.arange(len(ids.values)) - np.repeat(ids.offsets[:-1], ids.lengths)
        return self.head.with_vectors(features, Ragged(places, ids.offsets), side)

    def num_vectors(self, features: Features) -> NDArray[np.int64]:
        """Return how many vectors each row has."""
        return self.head.num_vectors(features)

    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:
        """Pad rows at the right, and say which tokens give vectors."""
        own = {name: column for name, column in features.columns.items() if name not in self.head.inputs}
        inputs = super().collate(replace(features, columns=own), rows, width)
        return inputs | self.head.collate(features, rows, width)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the vectors of all rows, (V, E), of unit length, at least float32."""
        own = {name: tensor for name, tensor in inputs.items() if name not in self.head.inputs}
        hidden_RTH, _ = self.hidden_states(own)
        vectors_VE: Tensor = self.head(hidden_RTH, inputs)
        return vectors_VE

    def save(self, folder: Path) -> None:
        """Write a folder that vembed loads, and transformers where it has a class of the network with its head."""
        super().save(folder)
        if self.whole is None:
            (layer,) = self.head.layers
            assert isinstance(layer, Dense)
            write_dense(layer, folder / HEAD_FOLDER, module_input_name=TOKENS, module_output_name=TOKENS)

    def network(self) -> PreTrainedModel:
        """Return the network with its head where transformers has a class of both, else alone."""
        if self.whole is None:
            return self.backbone
        with torch.device("meta"):
            whole: PreTrainedModel = AutoModelForPreTraining.from_config(self.whole)
        (layer,) = self.head.layers
        whole.vlm, whole.embedding_proj_layer = self.backbone, layer.linear
        return whole

    def settings(self) -> dict[str, Any]:
        """Return how items are read and which of their vectors stay."""
        settings = super().settings()
        if self.family.most_image_tokens is None:
            del settings["image_tokens"]  # the image processor's own files say it
        return settings | {OWN: {"topk_tokens": self.head.topk_tokens, "pool_factor": self.head.pool_factor}}

    def facts(self) -> dict[str, str]:
        """Return what becomes of items."""
        head = self.head
        fewer = [f"at most {head.topk_tokens} an item"] if head.topk_tokens is not None else []
        fewer += [f"one for {head.pool_factor:g} of a document"] if head.pool_factor != 1.0 else []
        return super().facts() | {
            "pooling": f"none: a vector of {self.dimension} values for each token",
            "similarity": "MaxSim: the largest cosine for each vector of the query, added up",
            "vectors": ", ".join(fewer) or "all",
        }

    def forms(self) -> Mapping[Form, str]:
        """Return transformers where it has a class of the network with its head, and no token is left out."""
        whole = self.whole is not None and self.head.topk_tokens is None and self.head.pool_factor == 1.0
        return {"transformers": ""} if whole else {"vembed": ""}


def _with_weights_of(linear: nn.Linear) -> Dense:
    """Return a layer that holds the parameters of a linear one."""
    layer = Dense(1, 1, bias=True, activation=nn.Identity())
    layer.linear = linear
    return layer
