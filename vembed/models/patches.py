"""Late interaction on pictures: a picture transformer that gives a vector for each patch.

The first token and registers give vectors too: they sum up what no patch shows alone. A folder of transformers holds
the network; what stands behind it lies beside.

Shape legend: R rows of a chunk, T tokens of a picture, V vectors of those rows, E their dim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from transformers import AutoModel

from vembed.batch import Ragged
from vembed.models.encoder import About
from vembed.models.formats import Dense, load_dense, model_type_of, write_dense, write_json
from vembed.models.late import TokenHead, make_head, refuse_pooling
from vembed.models.plannable import picture_inputs
from vembed.models.vision import VisionEncoder

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedModel

    from vembed.batch import Features, Item, Side
    from vembed.models.exportable import Form
    from vembed.models.hub import ModelFiles
    from vembed.models.plannable import TowerInputs

FIRST_TOKENS = {
    **dict.fromkeys(("vit", "vit_mae", "dinov2", "dinov2_with_registers", "dinov3_vit", "clip_vision_model"), 1),
    "siglip_vision_model": 0,
}
"""Tokens that stand before the patches and registers of a family, by the model_type of config.json."""

SETTINGS_FILE = "vembed_patches.json"
HEAD_FOLDER = "1_Dense"


class PatchEncoder(VisionEncoder):
    """A picture transformer with a head that makes a vector of each token.

    Args:
        head: What stands behind the transformer.
    """

    about = About(
        models="Late interaction on pictures",
        decides="a picture model with pooling_method: none",
        pooling="none: a vector for each patch",
        prompts="none",
        trainable="all, vision, projection, last_N_layers",
        writes="vembed",
    )
    marker = SETTINGS_FILE
    reads = VisionEncoder.reads | {"projection_dim", "topk_tokens", "pool_factor"}
    projections: ClassVar[tuple[str, ...]] = ("head",)
    multi_vector = True

    def __init__(self, name: str, *, backbone: PreTrainedModel, image_processor: Any, head: TokenHead) -> None:
        super().__init__(name, backbone=backbone, image_processor=image_processor, pooling=("mean", ""))
        config: Any = backbone.config
        self.head = head
        self.new_modules = ("head",) if head.is_new else ()
        self.dimension = head.dimension
        self._before_patches = FIRST_TOKENS[config.model_type] + getattr(config, "num_register_tokens", 0)

    @classmethod
    def recognises(cls, files: ModelFiles) -> bool:
        """Return whether several vectors are asked of such a family, or the model's files say that it gives them."""
        if model_type_of(files) not in FIRST_TOKENS:
            return False
        return files.keys.pooling_method == "none" or files.read(SETTINGS_FILE) is not None

    @classmethod
    def load(cls, files: ModelFiles, texts: Iterable[str] = ()) -> PatchEncoder:  # noqa: ARG003
        """Load a transformer and its head; a transformer that has none gets a new one.

        Raises:
            ConfigError: The user says something else than the model's files.
        """
        refuse_pooling(files)
        config = files.config()
        if config.model_type == "vit_mae":
            config.mask_ratio = 0.0  # also what is written: transformers alone would hide most of each picture
        if config.model_type == "siglip_vision_model":
            config.vision_use_head = False
        backbone = files.backbone("", config, AutoModel)
        found = files.read_json(SETTINGS_FILE)
        layers = [load_dense(files, HEAD_FOLDER)] if found else []
        first = FIRST_TOKENS[config.model_type]
        head = make_head(files, layers, hidden=config.hidden_size, protected=first, saved=found)
        return cls(files.name, backbone=backbone, image_processor=files.image_processor(), head=head)

    def featurize(self, items: Sequence[Item], side: Side) -> Features:
        """Decode pictures and run the image processor; every token gives a vector."""
        features = super().featurize(items, side)
        counted = Ragged.from_rows([np.arange(self._tokens(cost)) for cost in features.lengths])
        return self.head.with_vectors(features, counted, side)

    def _tokens(self, cost: int) -> int:
        """Return the tokens of a picture that counts as so many: its patches and one."""
        return int(cost) - 1 + self._before_patches

    def num_vectors(self, features: Features) -> NDArray[np.int64]:
        """Return how many vectors each picture has."""
        return self.head.num_vectors(features)

    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:
        """Take the rows, and say which vectors come of them."""
        tokens = self._tokens(int(features.lengths[rows[0]]))
        return super().collate(features, rows, width) | self.head.collate(features, rows, tokens)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the vectors of all pictures, (V, E), of unit length, at least float32."""
        vectors_VE: Tensor = self.head(self.outputs(inputs).last_hidden_state, inputs)
        return vectors_VE

    def save(self, folder: Path) -> None:
        """Write a folder that vembed loads; the network in it is one of transformers."""
        folder.mkdir(parents=True, exist_ok=True)
        self.backbone.save_pretrained(folder)
        self.image_processor.save_pretrained(folder)
        (layer,) = self.head.layers
        assert isinstance(layer, Dense)
        write_dense(layer, folder / HEAD_FOLDER)
        write_json(folder / SETTINGS_FILE, {"topk_tokens": self.head.topk_tokens, "pool_factor": self.head.pool_factor})

    def facts(self) -> dict[str, str]:
        """Return how pictures are read and how many vectors they have."""
        tokens = self._tokens(self.picture_tokens)
        return super().facts() | {
            "pooling": f"none: a vector of {self.dimension} values for each of {tokens} tokens",
            "similarity": "MaxSim: the largest cosine for each vector of the query, added up",
            "vectors": self.head.index_size(tokens),
        }

    def profile_inputs(self) -> tuple[TowerInputs, ...]:
        """Return pictures without values, and which vectors come of them."""
        pictures = picture_inputs(self)
        return (replace(pictures, make=lambda: {name: each.to("meta") for name, each in pictures.make().items()}),)

    def forms(self) -> Mapping[Form, str]:
        """Return vembed's own: sentence-transformers' models of several vectors need a mask that pictures lack."""
        return {"vembed": ""}

    def write_form(self, form: Form, folder: Path) -> None:  # noqa: ARG002
        """Write the one folder that there is."""
        self.save(folder)

    def recipe(self) -> None:
        """Return None: what transformers alone would need is more than a few lines."""
