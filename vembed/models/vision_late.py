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
from typing_extensions import override

from vembed.batch import Ragged
from vembed.models.encoder import About
from vembed.models.formats import Dense, load_dense, model_type_of, write_dense
from vembed.models.late import TokenHead, make_head, refuse_pooling
from vembed.models.vision_language import SETTINGS_FILE, VisionLanguageEncoder, load_processor
from vembed.models.vision_language_families import PaliGemma, Qwen2VL
from vembed.registry import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from transformers import PreTrainedConfig, PreTrainedModel

    from vembed.batch import Features, Item, Modality, Side
    from vembed.models.exportable import Form
    from vembed.models.hub import ModelFiles
    from vembed.models.plannable import TowerInputs
    from vembed.models.vision_language_families import Arrays, VisionLanguageFamily

HEAD_FOLDER = "1_Dense"
TOKENS = "token_embeddings"
OWN = "late_interaction"
"""Key of the settings file with the choice of vectors."""

FILLING_TOKENS = 10
"""Tokens at the end of a text that stand for words that it leaves out."""


def _retrieval_words(processor: Any, instruction: str, num_pictures: int, text: str) -> str:
    """Return an item as the processors of ColPali and ColQwen2 word it."""
    bos = processor.tokenizer.bos_token if hasattr(processor, "image_seq_length") else ""  # ColPali's has a length
    if num_pictures:
        # Both processors put a fixed request beside a picture; an instruction takes its place. ColQwen2's words hold
        # the placeholder, ColPali's stand behind it.
        prompt = processor.visual_prompt_prefix
        words = str(prompt.replace("Describe the image.", instruction) if instruction else prompt)
        return words if processor.image_token in words else f"{processor.image_token}{bos}{words}\n"
    # A text ends in tokens that the model was trained to fill with words that the text leaves out.
    prefix = f"{instruction} " if instruction else processor.query_prefix
    return f"{bos}{prefix}{text}{processor.query_augmentation_token * FILLING_TOKENS}\n"


class ColPali(PaliGemma):
    """ColPali: PaliGemma with a linear layer behind each token."""

    model_type = "colpali"
    name = "ColPali"
    pads_count = True

    @override
    def words(self, processor: Any, instruction: str, num_pictures: int, text: str) -> str:
        return _retrieval_words(processor, instruction, num_pictures, text)


class ColQwen2(Qwen2VL):
    """ColQwen2: Qwen2-VL with a linear layer behind each token."""

    model_type = "colqwen2"
    name = "ColQwen2"
    most_image_tokens = None
    needs_chat_template = False
    pads_count = True

    @override
    def words(self, processor: Any, instruction: str, num_pictures: int, text: str) -> str:
        return _retrieval_words(processor, instruction, num_pictures, text)

    @override
    def positions(self, network: Any, ids_T: NDArray[np.int32], arrays: Arrays) -> NDArray[np.int32] | None:
        return None  # transformers' ColQwen2 counts positions in a line, whatever the shape of a picture


RETRIEVAL_FAMILIES: Mapping[str, type[VisionLanguageFamily]] = {"colpali": ColPali, "colqwen2": ColQwen2}
"""Families whose files hold the head too, by the model_type of config.json."""


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
    @override
    def recognises(cls, files: ModelFiles) -> bool:
        kind = model_type_of(files)
        is_wanted = files.keys.pooling_method == "none" or OWN in files.read_json(SETTINGS_FILE)
        return kind in RETRIEVAL_FAMILIES or (kind in FAMILIES and is_wanted)

    @classmethod
    @override
    def load(cls, files: ModelFiles, texts: Iterable[str] = ()) -> VisionLateEncoder:
        refuse_pooling(files)
        config = files.config()
        whole = config.model_type in RETRIEVAL_FAMILIES  # its class of transformers has the head too
        family_class = RETRIEVAL_FAMILIES[config.model_type] if whole else FAMILIES.load(config.model_type)
        family: VisionLanguageFamily = family_class()
        processor, spec = load_processor(files, config, family)
        saved = files.read_json(SETTINGS_FILE).get(OWN)
        backbone: Any = files.backbone("", config, AutoModelForPreTraining if whole else AutoModel)
        if whole:
            layer = Dense(1, 1, bias=True, activation=nn.Identity())
            layer.linear = backbone.embedding_proj_layer  # which has the weights, and sizes of its own
            backbone, layers = backbone.vlm, [layer]
        else:
            layers = [] if saved is None else [load_dense(files, HEAD_FOLDER, of=TOKENS)]
        head = make_head(files, layers, hidden=config.get_text_config().hidden_size, protected=0, saved=saved or {})
        parts = {"backbone": backbone, "processor": processor, "family": family, "spec": spec}
        return cls(files.name, head=head, whole=config if whole else None, **parts)

    @override
    def featurize(self, items: Sequence[Item], side: Side) -> Features:
        return self._with_vectors(super().featurize(items, side), side)

    @override
    def blank_pictures(self) -> Features:
        return self._with_vectors(super().blank_pictures(), "document")

    @override
    def text_probe(self) -> TowerInputs:
        texts = super().text_probe()
        return texts if self._has_processor else self.head.measured(texts)

    def _with_vectors(self, features: Features, side: Side) -> Features:
        # All tokens of a row count, those of the words around a picture too: 0, 1, 2, ... of each row.
        ids = features.columns["input_ids"]
        places = np.arange(len(ids.values)) - np.repeat(ids.offsets[:-1], ids.lengths)
        return self.head.with_vectors(features, Ragged(places, ids.offsets), side)

    @override
    def num_vectors(self, features: Features) -> NDArray[np.int64]:
        return self.head.num_vectors(features)

    @override
    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:
        # The head's column says which tokens give vectors; the encoder's `collate` would take it for one of pictures.
        columns = {name: column for name, column in features.columns.items() if name not in self.head.inputs}
        inputs = super().collate(replace(features, columns=columns), rows, width)
        return inputs | self.head.collate(features, rows, width)

    @override
    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        of_network = {name: tensor for name, tensor in inputs.items() if name not in self.head.inputs}
        hidden_RTH, _ = self.hidden_states(of_network)
        vectors_VE: Tensor = self.head(hidden_RTH, inputs)
        return vectors_VE

    @override
    def save(self, folder: Path) -> None:
        super().save(folder)
        if self.whole is None:
            (layer,) = self.head.layers
            assert isinstance(layer, Dense)
            write_dense(layer, folder / HEAD_FOLDER, module_input_name=TOKENS, module_output_name=TOKENS)

    @override
    def network(self) -> PreTrainedModel:
        if self.whole is None:
            return self.backbone
        with torch.device("meta"):  # only its class and its names: both parts are put in as they are
            whole: PreTrainedModel = AutoModelForPreTraining.from_config(self.whole)
        (layer,) = self.head.layers
        whole.vlm, whole.embedding_proj_layer = self.backbone, layer.linear
        return whole

    @override
    def settings(self) -> dict[str, Any]:
        settings = super().settings()
        if self.family.most_image_tokens is None:
            del settings["image_tokens"]  # the image processor's own files say it
        return settings | {OWN: {"topk_tokens": self.head.topk_tokens, "pool_factor": self.head.pool_factor}}

    @override
    def facts(self) -> dict[str, str]:
        head = self.head
        fewer = [f"at most {head.topk_tokens} an item"] if head.topk_tokens is not None else []
        fewer += [f"one for {head.pool_factor:g} of a document"] if head.pool_factor != 1.0 else []
        return super().facts() | {
            "pooling": f"none: a vector of {self.dimension} values for each token",
            "similarity": "MaxSim: the largest cosine for each vector of the query, added up",
            "vectors": ", ".join(fewer) or "all",
        }

    @override
    def forms(self) -> Mapping[Form, str]:
        whole = self.whole is not None and self.head.topk_tokens is None and self.head.pool_factor == 1.0
        return {"transformers": ""} if whole else {"vembed": ""}
