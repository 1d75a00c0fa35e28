"""Picture transformers: ViT, MAE, DINOv2, DINOv3, the image towers of CLIP and SigLIP, timm.

| Class | Gives | Folder |
|---|---|---|
| `VisionEncoder` | one vector of a picture, pooled from its tokens or by the model's head | transformers' own |
| `PatchEncoder` | a vector of each token, for late interaction | transformers' own, the head beside it |

A pooling that isn't the family's own is written as sentence-transformers' description beside the transformers files,
and read back from there. MAE sees all patches, in their own order: nothing is masked and nothing is drawn at random.

Shape legend: R rows of a chunk, T tokens of a picture (first token, registers, patches), H hidden dim, V vectors of
those rows, E embedding dim.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModel
from typing_extensions import override

from vembed.batch import Features, Ragged
from vembed.errors import ConfigError
from vembed.models.encoder import About, Encoder
from vembed.models.exportable import Recipe
from vembed.models.formats import (
    MODULES_FILE,
    Dense,
    Pipeline,
    load_dense,
    model_type_of,
    read_modules,
    write_dense,
    write_json,
)
from vembed.models.late import TokenHead, make_head, refuse_pooling
from vembed.models.pictures import (
    ASSUMED_PATCH_SIZE,
    last_step,
    normalised,
    picture_lengths,
    pictures_of,
    process_pictures,
    refuse_less_than_a_patch,
    refuse_other_size,
    rows_of,
    run_processor,
    sample_pixels,
    side_of,
)
from vembed.models.plannable import find_tower, layer_values, picture_inputs
from vembed.models.pooling import unit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import Literal

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from vembed.batch import Item, Modality, Side
    from vembed.models.exportable import Form
    from vembed.models.hub import ModelFiles
    from vembed.models.plannable import Tower, TowerInputs

    VisionPooling = Literal["cls", "head", "mean"]


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """The facts of a family of picture transformers that its config.json doesn't state."""

    poolings: tuple[VisionPooling, ...]  # all that it has; the first suits it best
    reason: str  # why the first one does, for the plan
    one_size: bool = False  # takes pictures of one size; the others interpolate their positions
    first_tokens: int | None = None  # tokens before patches and registers; None: no late interaction


_FIRST = "the first token was trained to sum the picture up"
_HEAD = "the model's own head sums the picture up"
_UNTRAINED = "nothing trained the first token to sum the picture up: all tokens are averaged"

VISION_FAMILIES: dict[str, VisionFamily] = {
    "vit": VisionFamily(("cls", "mean", "head"), _FIRST, one_size=True, first_tokens=1),
    "vit_mae": VisionFamily(("mean", "cls"), _UNTRAINED, one_size=True, first_tokens=1),
    "dinov2": VisionFamily(("cls", "mean"), _FIRST, first_tokens=1),
    "dinov2_with_registers": VisionFamily(("cls", "mean"), _FIRST, first_tokens=1),
    "dinov3_vit": VisionFamily(("cls", "mean"), _FIRST, first_tokens=1),
    "dinov3_convnext": VisionFamily(("cls", "mean"), "the first token is the average of all places"),
    "clip_vision_model": VisionFamily(("head",), _HEAD, one_size=True, first_tokens=1),
    "siglip_vision_model": VisionFamily(("head", "mean"), _HEAD, one_size=True, first_tokens=0),
    "timm_wrapper": VisionFamily(("head",), "timm's own pooling sums the picture up"),
}
"""Families by the model_type of config.json.

The mean is one over all tokens, as sentence-transformers has it: the first one and registers included.
"""

PATCHES_FILE = "vembed_patches.json"
"""The settings of late interaction beside a folder of transformers."""

HEAD_FOLDER = "1_Dense"


class TransformersPictures(Encoder):
    """A model of transformers with an image tower, which sentence-transformers (5.4 and later) runs too."""

    marker = "config.json"
    reads = frozenset({"attn_implementation", "model_revision", "load_in_4bit", "image_background"})

    @abstractmethod
    def pipeline(self) -> Pipeline:
        """Return the steps by which sentence-transformers gives the encoder's vectors."""

    @override
    def forms(self) -> Mapping[Form, str]:
        return {"transformers": "", "sentence-transformers": ""}

    @override
    def write_form(self, form: Form, folder: Path) -> None:
        self.save(folder)
        if form == "sentence-transformers":
            self.pipeline().write(folder, dimension=self.dimension, prompts=self.prompts)


class VisionEncoder(TransformersPictures):
    """A picture transformer that gives one vector.

    Args:
        backbone: The transformer, returning `last_hidden_state` and, where it has a head, `pooler_output`.
        pooling: How it sums a picture up, and why; None for what suits its family.
    """

    about = About(
        models="ViT, DINOv2, DINOv3, MAE, image towers of CLIP and SigLIP, timm",
        decides="model_type",
        pooling="cls, mean or the model's head, by family; pooling_method chooses another",
        prompts="none",
        trainable="all, vision, last_N_layers",
        writes="transformers, sentence-transformers",
    )
    modalities: frozenset[Modality] = frozenset({"image"})
    modes = MappingProxyType(
        {
            "vit": frozenset({"vit"}),
            "dino": frozenset({"vit", "dinov2", "dinov2_with_registers", "dinov3_vit", "dinov3_convnext"}),
            "dinov2": frozenset({"dinov2", "dinov2_with_registers"}),
            "dinov3": frozenset({"dinov3_vit", "dinov3_convnext"}),
            "mae": frozenset({"vit_mae"}),
            "clip": frozenset({"clip_vision_model"}),
            "siglip": frozenset({"siglip_vision_model"}),
        }
    )

    reads = TransformersPictures.reads | {"pooling_method"}
    projections: ClassVar[tuple[str, ...]] = ()  # modules behind the transformer

    def __init__(
        self,
        name: str,
        *,
        backbone: PreTrainedModel,
        image_processor: Any,
        pooling: tuple[VisionPooling, str] | None = None,
    ) -> None:
        super().__init__()
        config: Any = backbone.config
        self.name = name
        self.backbone = backbone
        self.image_processor = image_processor
        self.max_length = None
        self.pooling, self._reason = pooling or usual_pooling(config)

        # E is the width of what is pooled, and a patch is a square of so many pixels a side. timm's configs state
        # neither, its modules do; convolutional towers have no patches and count by the usual ones.
        patches = config
        if config.model_type == "timm_wrapper":
            timm_model: Any = backbone.timm_model
            self.dimension = int(timm_model.head_hidden_size)
            patches = getattr(timm_model, "patch_embed", None)
        else:  # stages of convolutions widen: the last one counts
            self.dimension = int(config.hidden_sizes[-1] if hasattr(config, "hidden_sizes") else config.hidden_size)
        self._patch_size = side_of(getattr(patches, "patch_size", ASSUMED_PATCH_SIZE))

        self.normalisation = last_step(image_processor, name)
        sample = sample_pixels(name, image_processor)
        if VISION_FAMILIES[config.model_type].one_size:
            refuse_other_size(name, sample, config)
        refuse_less_than_a_patch(name, sample, config)
        self.picture_tokens = int(picture_lengths(sample, self._patch_size)[0])

        pooler = getattr(backbone, "pooler", None)
        if self.pooling == "head" and isinstance(pooler, nn.Module):
            pooler.requires_grad_(requires_grad=True)
        # A mask token is of pre-training: no picture is masked here. MAE's positions are sines that its class never
        # trains, which loading forgets.
        still = ("mask_token", "position_embeddings") if config.model_type == "vit_mae" else ("mask_token",)
        for parameter_name, parameter in backbone.named_parameters():
            if parameter_name.endswith(still):
                parameter.requires_grad_(False)

    @classmethod
    @override
    def recognises(cls, files: ModelFiles) -> bool:
        return model_type_of(files) in VISION_FAMILIES

    @classmethod
    @override
    def load(cls, files: ModelFiles, texts: Iterable[str] = ()) -> VisionEncoder:
        config = files.config()
        pooling = _decide_pooling(files, config)
        if config.model_type == "vit_mae":
            config.mask_ratio = 0.0  # also what is written: transformers alone would hide most of each picture
        if config.model_type == "siglip_vision_model":
            config.vision_use_head = pooling[0] == "head"
        backbone = files.backbone("", config, AutoModel)
        if pooling[0] == "head" and getattr(backbone, "pooler", backbone) is None:
            raise ConfigError(f"{files.name}: pooling_method head: its files hold no such layer")
        return cls(files.name, backbone=backbone, image_processor=files.image_processor(), pooling=pooling)

    @override
    def featurize(self, items: Sequence[Item], side: Side) -> Features:
        process = partial(run_processor, self.image_processor, in_bytes=self.normalisation is not None)
        arrays = process_pictures(pictures_of(items), process, self.image_limits, self.image_background)
        lengths = picture_lengths(arrays["pixel_values"], self._patch_size)
        return Features({}, lengths, {"pixel_values": arrays["pixel_values"]})

    @override
    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:
        # Pictures are of one size, so no row is padded; rows that follow each other aren't even copied.
        return {"pixel_values": rows_of(features.per_row["pixel_values"], rows)}

    def outputs(self, inputs: dict[str, Tensor]) -> Any:
        """Run the transformer; its `last_hidden_state` is (R, T, H)."""
        pixels = normalised(inputs, self.normalisation).to(self.backbone.dtype)
        order: dict[str, Tensor] = {}
        if self.backbone.config.model_type == "vit_mae":
            # MAE sorts its patches by random numbers before it masks some. Ascending ones leave them in order.
            order_T = torch.arange(self.picture_tokens - 1, device=self.backbone.device)
            order = {"noise": order_T.expand(len(pixels), -1)}
        return self.backbone(pixel_values=pixels, **order)

    @override
    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        outputs = self.outputs(inputs)
        if self.pooling == "head":
            return unit(outputs.pooler_output)
        hidden_RTH = outputs.last_hidden_state
        return unit(hidden_RTH[:, 0] if self.pooling == "cls" else hidden_RTH.mean(dim=1))

    @override
    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.backbone.save_pretrained(folder)
        if self.backbone.config.model_type != "timm_wrapper":  # its preprocessing stands in config.json
            self.image_processor.save_pretrained(folder)
        if self.pooling != usual_pooling(self.backbone.config)[0]:
            self.pipeline().write(folder, dimension=self.dimension, prompts=self.prompts)

    @override
    def facts(self) -> dict[str, str]:
        return {
            "family": f"{self.backbone.config.model_type} (config.json)",
            "pooling": f"{self.pooling} ({self._reason})",
            "pictures": f"{type(self.image_processor).__name__} (preprocessor_config.json)",
            "similarity": "cosine",
            "attention": str(self.backbone.config._attn_implementation),
        }

    @override
    def towers(self) -> tuple[Tower, ...]:
        parts = ("backbone", *self.projections)
        return (find_tower(self, "vision", parts=parts, projection=self.projections, config=self.backbone.config),)

    @override
    def adapter_host(self) -> nn.Module:
        return self.backbone

    @property
    @override
    def longest_item(self) -> int:
        return self.picture_tokens

    @override
    def activation_values(self) -> float:
        config = self.backbone.config
        if getattr(config, "num_hidden_layers", None) is None:  # convolutions
            return super().activation_values()
        return layer_values(
            config.num_hidden_layers, config.hidden_size, config.num_attention_heads, self.picture_tokens
        )

    @override
    def pipeline(self) -> Pipeline:
        return _pipeline(self.pooling)

    @override
    def recipe(self) -> Recipe | None:
        return Recipe("vision", "AutoModel", self.pooling)


def usual_pooling(config: Any) -> tuple[VisionPooling, str]:
    """Return the pooling that suits a model by its config, and why."""
    if not getattr(config, "vision_use_head", True):
        return "mean", "the model has neither a first token nor a head: all patches are averaged"
    family = VISION_FAMILIES[config.model_type]
    return family.poolings[0], family.reason


def _decide_pooling(files: ModelFiles, config: Any) -> tuple[VisionPooling, str]:
    """Decide how pictures are summed up: the user's word, else sentence-transformers' files, else the family.

    Raises:
        ConfigError: This family has no such pooling, or the files describe what vembed doesn't run.
    """
    usual, reason = usual_pooling(config)
    described: str | None = None
    if files.read(MODULES_FILE) is not None:
        # Without a pooling module the description takes `pooler_output`, which is the head's.
        path = next((module["path"] for module in read_modules(files) if module["type"].endswith(".Pooling")), None)
        described = "head" if path is None else str(files.read_json(f"{path}/config.json").get("pooling_mode"))
    _pipeline(described or usual).refuse_other(files)
    wanted: str = usual
    if files.keys.pooling_method != "auto":
        wanted, reason = files.keys.pooling_method, "pooling_method"
    elif described:
        wanted, reason = described, MODULES_FILE
    possible = VISION_FAMILIES[config.model_type].poolings
    pooling = next((name for name in possible if name == wanted), None)
    if pooling is None:
        raise ConfigError(
            f"{files.name}: pooling {wanted} ({reason}) is none of those for {config.model_type}: {', '.join(possible)}"
        )
    return pooling, reason


def _pipeline(pooling: str) -> Pipeline:
    output = "pooler_output" if pooling == "head" else "last_hidden_state"
    return Pipeline({"image": ("forward", output)}, pooling=None if pooling == "head" else pooling)


class PatchEncoder(VisionEncoder):
    """A picture transformer with a head that makes a vector of each token.

    The first token and registers give vectors too: they sum up what no patch shows alone.

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
    marker = PATCHES_FILE
    reads = VisionEncoder.reads | {"projection_dim", "topk_tokens", "pool_factor"}
    projections: ClassVar[tuple[str, ...]] = ("head",)
    multi_vector = True

    def __init__(self, name: str, *, backbone: PreTrainedModel, image_processor: Any, head: TokenHead) -> None:
        super().__init__(name, backbone=backbone, image_processor=image_processor, pooling=("mean", ""))
        config: Any = backbone.config
        self.head = head
        self.new_modules = ("head",) if head.is_new else ()
        self.dimension = head.dimension
        first_tokens = VISION_FAMILIES[config.model_type].first_tokens
        assert first_tokens is not None
        self._before_patches = first_tokens + getattr(config, "num_register_tokens", 0)
        if config.model_type == "clip_vision_model":  # its last norm stands behind the tokens, for the head alone
            backbone.get_submodule("post_layernorm").requires_grad_(requires_grad=False)

    @classmethod
    @override
    def recognises(cls, files: ModelFiles) -> bool:
        family = VISION_FAMILIES.get(model_type_of(files))
        if family is None or family.first_tokens is None:
            return False
        return files.keys.pooling_method == "none" or files.read(PATCHES_FILE) is not None

    @classmethod
    @override
    def load(cls, files: ModelFiles, texts: Iterable[str] = ()) -> PatchEncoder:
        refuse_pooling(files)
        config = files.config()
        if config.model_type == "vit_mae":
            config.mask_ratio = 0.0  # also what is written: transformers alone would hide most of each picture
        if config.model_type == "siglip_vision_model":
            config.vision_use_head = False  # it would reach no vector
        backbone = files.backbone("", config, AutoModel)
        saved = files.read_json(PATCHES_FILE)
        layers = [load_dense(files, HEAD_FOLDER)] if saved else []
        # The first token, where there is one, is never merged with patches.
        protected = VISION_FAMILIES[config.model_type].first_tokens or 0
        head = make_head(files, layers, hidden=config.hidden_size, protected=protected, saved=saved)
        return cls(files.name, backbone=backbone, image_processor=files.image_processor(), head=head)

    @override
    def featurize(self, items: Sequence[Item], side: Side) -> Features:
        features = super().featurize(items, side)
        counted = Ragged.from_rows([np.arange(self._tokens(cost)) for cost in features.lengths])
        return self.head.with_vectors(features, counted, side)

    def _tokens(self, cost: int) -> int:
        """Return T of a picture by its cost in a chunk, which is its patches and one, whatever stands before them."""
        return int(cost) - 1 + self._before_patches

    @override
    def num_vectors(self, features: Features) -> NDArray[np.int64]:
        return self.head.num_vectors(features)

    @override
    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:
        tokens = self._tokens(int(features.lengths[rows[0]]))
        return super().collate(features, rows, width) | self.head.collate(features, rows, tokens)

    @override
    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        vectors_VE: Tensor = self.head(self.outputs(inputs).last_hidden_state, inputs)
        return vectors_VE

    @override
    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.backbone.save_pretrained(folder)
        self.image_processor.save_pretrained(folder)
        (layer,) = self.head.layers
        assert isinstance(layer, Dense)
        write_dense(layer, folder / HEAD_FOLDER)
        write_json(folder / PATCHES_FILE, {"topk_tokens": self.head.topk_tokens, "pool_factor": self.head.pool_factor})

    @override
    def facts(self) -> dict[str, str]:
        tokens = self._tokens(self.picture_tokens)
        return super().facts() | {
            "pooling": f"none: a vector of {self.dimension} values for each of {tokens} tokens",
            "similarity": "MaxSim: the largest cosine for each vector of the query, added up",
            "vectors": self.head.index_size(tokens),
        }

    @override
    def profile_inputs(self) -> tuple[TowerInputs, ...]:
        pictures = picture_inputs(self)

        def make() -> dict[str, Tensor]:  # nothing of the head's inputs is read by value: all may go without
            return {name: tensor.to("meta") for name, tensor in pictures.make().items()}

        return (replace(pictures, make=make),)

    @override
    def forms(self) -> Mapping[Form, str]:
        # sentence-transformers' models of several vectors need a mask that pictures lack.
        return {"vembed": ""}

    @override
    def write_form(self, form: Form, folder: Path) -> None:
        self.save(folder)

    @override
    def recipe(self) -> None:
        return None  # what transformers alone would need is more than a few lines
