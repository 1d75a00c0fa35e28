"""Encoders without weights: everything is built as usual, but the parameters lie on the meta device.

A skeleton may have fewer layers than its model: what a layer takes is then measured on one or two. Built on a real
device instead, it is the same model with random weights, which is what a prediction is compared with.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, BertModel

from vembed.errors import ConfigError
from vembed.models import ngram_bag, tiny_clip
from vembed.models.huggingface import ModelFiles, prepare_backbone
from vembed.models.ngram_bag import NgramBag, NgramBagConfig
from vembed.models.open_clip_encoder import OPEN_CLIP_PREFIX, OpenClipEncoder, OpenClipParts, is_open_clip_folder
from vembed.models.registry import BUILTIN_PREFIX, builtin_kind, load_from_hugging_face
from vembed.models.text import TextEncoder, TextSpec
from vembed.models.tiny_clip import TinyClip, TinyClipConfig
from vembed.models.tiny_transformer import MAX_LENGTH, tiny_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedConfig, PreTrainedModel

    from vembed.models.encoder import Encoder
    from vembed.models.huggingface import ModelOptions

DEFAULT_PICTURE_SIDE = 224
"""In pixels, where the config of an image tower names none."""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """How a model is built with any number of layers.

    Attributes:
        build: Returns the encoder on the meta device, each stack cut to so many layers; None builds all of them.
        layers: Layers of each stack by its tower's name; without an entry a tower is always built whole.
        period: Layers after which a stack repeats itself.
    """

    build: Callable[[int | None], Encoder]
    layers: dict[str, int]
    period: int = 1


def blueprint(options: ModelOptions, *, device: str = "meta") -> Blueprint:
    """Return how to build a model without its weights.

    Args:
        options: What the user said about the model. Its name may also be a JSON file with the shape of one: the
            config.json of a transformers model, or the model_cfg of open_clip.
        device: Where parameters are made; on another than "meta" they are random numbers.

    Raises:
        ConfigError: There is no such model, or it needs what isn't allowed.
        MachineError: Its description can't be reached.
    """
    return _Blueprints(options, device).of_name()


class _Blueprints:
    """Finds out what kind of model a name stands for."""

    def __init__(self, options: ModelOptions, device: str) -> None:
        self.options, self.device = options, device

    def of_name(self) -> Blueprint:
        """Return how the model is built."""
        name, folder = self.options.name, Path(self.options.name)
        if name.startswith(BUILTIN_PREFIX):
            return self._builtin(builtin_kind(name))
        if (folder / ngram_bag.CONFIG_FILE).is_file():
            bag = NgramBagConfig(**json.loads((folder / ngram_bag.CONFIG_FILE).read_text("utf-8")))
            return self._whole(lambda: NgramBag(bag, name=name))
        if (folder / tiny_clip.CONFIG_FILE).is_file():
            content = json.loads((folder / tiny_clip.CONFIG_FILE).read_text("utf-8"))
            content.pop("architecture", None)
            shape = TinyClipConfig(**{**content, "channels": tuple(content["channels"])})
            return self._whole(lambda: TinyClip(shape, name=name))
        if folder.suffix == ".json" and folder.is_file():
            return self._of_shape(json.loads(folder.read_text("utf-8")))
        if name.startswith(OPEN_CLIP_PREFIX) or is_open_clip_folder(folder):
            return self._open_clip(_open_clip_config(self.options))
        return self._hugging_face(_MetaFiles(self.options, self.device))

    def _of_shape(self, content: dict[str, Any]) -> Blueprint:
        if "model_type" in content:
            return self._hugging_face(_ShapeFiles(self.options, self.device, content))
        if "vision_cfg" in content:
            return self._open_clip(content)
        raise ConfigError(
            f"{self.options.name} is no shape of a model: it has neither model_type (transformers) nor vision_cfg "
            f"(open_clip)"
        )

    def _builtin(self, kind: str) -> Blueprint:
        if kind == "ngram-bag":
            return self._whole(lambda: NgramBag(NgramBagConfig(), name=self.options.name))
        if kind == "tiny-clip":
            return self._whole(lambda: TinyClip(TinyClipConfig(), name=self.options.name))
        assert kind == "tiny-transformer", kind
        return Blueprint(self._tiny_transformer, {"text": tiny_config().num_hidden_layers})

    def _whole(self, make: Callable[[], Encoder]) -> Blueprint:
        def build(_: int | None) -> Encoder:
            with torch.device(self.device):
                return make().to(self.options.dtype)

        return Blueprint(build, {})

    def _tiny_transformer(self, num_layers: int | None) -> Encoder:
        config = tiny_config()
        config.num_hidden_layers = num_layers or config.num_hidden_layers
        with torch.device(self.device):
            backbone: Any = BertModel(config, add_pooling_layer=False)
        prepare_backbone(backbone.to(self.options.dtype))
        spec = TextSpec(pooling=("mean",), max_length=MAX_LENGTH)
        return TextEncoder(self.options.name, backbone=backbone, tokenizer=_tokenizer(MAX_LENGTH), spec=spec)

    def _hugging_face(self, files: _MetaFiles) -> Blueprint:
        stacks = _stacks(files.config(_subfolder(files)))

        def build(num_layers: int | None) -> Encoder:
            files.num_layers = num_layers
            return load_from_hugging_face(self.options, files)

        depths = {name: getattr(stack, "num_hidden_layers", None) for name, stack in stacks.items()}
        period = max(_period(getattr(stack, "layer_types", None)) for stack in stacks.values())
        return Blueprint(build, {name: depth for name, depth in depths.items() if isinstance(depth, int)}, period)

    def _open_clip(self, config: dict[str, Any]) -> Blueprint:
        keys = {"text": "text_cfg", "vision": "vision_cfg"}
        depths = {tower: config.get(key, {}).get("layers") for tower, key in keys.items()}
        layers = {tower: depth for tower, depth in depths.items() if isinstance(depth, int)}

        def build(num_layers: int | None) -> Encoder:
            shape = copy.deepcopy(config)
            for tower in layers if num_layers is not None else ():
                shape[keys[tower]]["layers"] = num_layers
            return _open_clip_encoder(self.options, shape, self.device)

        return Blueprint(build, layers)


def _tokenizer(max_length: int) -> Any:
    """Return what encoders read of a tokenizer; nothing is tokenized here."""
    return SimpleNamespace(pad_token_id=0, model_max_length=max_length, padding_side="right")


class _MetaFiles(ModelFiles):
    """The files of a model, whose weights are left where they are. What is small is read once."""

    def __init__(self, options: ModelOptions, device: str) -> None:
        super().__init__(options)
        self.device = device
        self.num_layers: int | None = None
        self._read: dict[str, Any] = {}

    def config(self, subfolder: str) -> PreTrainedConfig:
        """Return config.json, read once."""
        config: PreTrainedConfig = self._once(f"config {subfolder}", lambda: super(_MetaFiles, self).config(subfolder))
        return config

    def tokenizer(self, subfolder: str) -> Any:
        """Return the tokenizer, read once."""
        return self._once(f"tokenizer {subfolder}", lambda: super(_MetaFiles, self).tokenizer(subfolder))

    def image_processor(self) -> Any:
        """Return the image processor, read once."""
        return self._once("image processor", super().image_processor)

    def _once(self, name: str, read: Callable[[], Any]) -> Any:
        if name not in self._read:
            self._read[name] = read()
        return self._read[name]

    def backbone(self, subfolder: str, config: PreTrainedConfig, auto_class: Any) -> PreTrainedModel:  # noqa: ARG002
        """Build the transformer without memory, with `num_layers` of its layers."""
        config = copy.deepcopy(config)
        if self.num_layers is not None:
            for stack in _stacks(config).values():
                if not hasattr(stack, "depth"):  # a language model's picture stack: as short, it would pass for its own
                    _shorten(stack, self.num_layers)
        attention = self.options.attn_implementation
        extra = {} if attention is None else {"attn_implementation": attention}
        with torch.device(self.device):
            backbone: PreTrainedModel = auto_class.from_config(
                config, dtype=self.options.dtype, trust_remote_code=self.options.trust_remote_code, **extra
            )
        prepare_backbone(backbone)
        return backbone


class _ShapeFiles(_MetaFiles):
    """A model of which only the config is known."""

    def __init__(self, options: ModelOptions, device: str, content: dict[str, Any]) -> None:
        super().__init__(options, device)
        self._content = content

    def read(self, file: str) -> Path | None:  # noqa: ARG002
        """Return None: there are no files."""
        return None

    def config(self, subfolder: str) -> PreTrainedConfig:  # noqa: ARG002
        """Return the config that the shape is."""
        content = dict(self._content)
        try:
            config: PreTrainedConfig = AutoConfig.for_model(content.pop("model_type"), **content)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{self.options.name} is no config of transformers: {error}") from error
        return config

    def tokenizer(self, subfolder: str) -> Any:  # noqa: ARG002
        """Return what encoders read of a tokenizer."""
        return _tokenizer(int(1e30))

    def image_processor(self) -> Any:
        """Return what makes pictures of the size that the config names."""
        side = getattr(_stacks(self.config("")).get("vision"), "image_size", DEFAULT_PICTURE_SIDE)

        def process(images: list[Any], return_tensors: str) -> dict[str, torch.Tensor]:  # noqa: ARG001
            return {"pixel_values": torch.zeros(len(images), 3, side, side)}

        return process


def _stacks(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the config of each stack of layers, by its tower's name."""
    vision = getattr(config, "vision_config", None)
    text = getattr(config, "text_config", None)
    if vision is None:
        pictures = hasattr(config, "patch_size") and not hasattr(config, "vocab_size")
        return {"vision": config} if pictures else {"text": config.get_text_config()}
    return {"vision": vision} if text is None else {"text": text, "vision": vision}


def _shorten(config: Any, num_layers: int) -> None:
    """Cut a stack to its first layers."""
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = list(config.layer_types)[:num_layers]


def _period(layer_types: list[str] | None) -> int:
    """Return after how many layers the types of a stack come again."""
    if not layer_types:
        return 1
    for period in range(1, len(layer_types)):
        if layer_types[period:] == layer_types[:-period]:
            return period
    return len(layer_types)


def _subfolder(files: ModelFiles) -> str:
    """Return where a sentence-transformers folder keeps its transformer."""
    modules = files.read("modules.json")
    if modules is None:
        return ""
    described: list[dict[str, Any]] = json.loads(modules.read_text("utf-8"))
    return str(described[0].get("path", "")) if described else ""


def _open_clip_config(options: ModelOptions) -> dict[str, Any]:
    import open_clip

    folder = Path(options.name)
    name = options.name.removeprefix(OPEN_CLIP_PREFIX)
    if is_open_clip_folder(folder):
        name = f"local-dir:{folder}"
    elif "://" not in name and not name.startswith(("hf-hub:", "local-dir:")):
        name = name.partition(":")[0]
    config: dict[str, Any] | None = open_clip.get_model_config(name)
    if config is None:
        raise ConfigError(f"open_clip has no model {name!r}")
    return config


def _open_clip_encoder(options: ModelOptions, config: dict[str, Any], device: str) -> Encoder:
    import open_clip

    shape = copy.deepcopy(config)
    foreign = "hf_model_name" in shape["text_cfg"]
    if foreign:
        shape["text_cfg"]["hf_model_pretrained"] = False
    kind = open_clip.CLIP
    if shape.pop("custom_text", False) or foreign:
        kind = open_clip.CoCa if "multimodal_cfg" in shape else open_clip.CustomTextCLIP
    with torch.device(device):
        model = kind(**shape).to(options.dtype)
    for module in model.modules():
        mask = module._buffers.get("attn_mask")
        if mask is not None and mask.is_meta:  # its values say whether texts may be cut
            module._buffers["attn_mask"] = torch.full(mask.shape, -torch.inf).triu(1)
    side = shape["vision_cfg"].get("image_size", DEFAULT_PICTURE_SIDE)
    height, width = (side, side) if isinstance(side, int) else side
    parts = OpenClipParts(
        model=model,
        tokenizer=_tokenizer(shape["text_cfg"].get("context_length", 77)),
        preprocess=lambda _: torch.zeros(3, height, width),
        config=config,
        weights="none",
    )
    return OpenClipEncoder(options.name, parts=parts, image_limits=options.image_limits)
