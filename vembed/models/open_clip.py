"""Two towers from open_clip: `open_clip:NAME[:pretrained]`, `open_clip:hf-hub:OWNER/NAME`, or a folder that it wrote.

open_clip's tokenizers pad every text to the context length. Where attention is causal and the tower pools at the end
token, what stands behind that token can't reach the embedding: such texts are cut there, and a chunk is as wide as its
longest text. All other towers see their texts as open_clip pads them.

Shape legend: N texts, R rows of a chunk, T tokens.
"""

from __future__ import annotations

import copy
import difflib
import logging
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import override

from vembed.batch import Features, Ragged
from vembed.errors import ConfigError, MachineError
from vembed.models import checked_files
from vembed.models.composed import TwoTowers
from vembed.models.encoder import About
from vembed.models.hub import PICTURE_SIDE, hub_or_cache, save_weights, tokenizer_facts
from vembed.models.pictures import ASSUMED_PATCH_SIZE, blank_picture, normalised, process_pictures, until_bytes
from vembed.models.plannable import Tower, find_layers, find_tower, layer_values, picture_inputs, token_inputs
from vembed.models.pooling import unit
from vembed.text import first_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import PIL.Image
    from numpy.typing import NDArray

    from vembed.batch import Image, Side
    from vembed.models.exportable import Form
    from vembed.models.hub import ModelFiles
    from vembed.models.plannable import TowerInputs

OPEN_CLIP_PREFIX = "open_clip:"
CONFIG_FILE = "open_clip_config.json"
WEIGHTS_FILE = "open_clip_model.safetensors"
HUB_SCHEME = "hf-hub:"
SCHEMES = (HUB_SCHEME, "local-dir:")

USUAL_LENGTH = 77
"""Tokens of a text where a model's description doesn't say."""


def is_open_clip_folder(folder: Path | None) -> bool:
    """Return whether a folder is one of open_clip and not of transformers too."""
    return folder is not None and (folder / CONFIG_FILE).is_file() and not (folder / "config.json").is_file()


@dataclass(frozen=True, slots=True)
class CausalTexts:
    """A text tower with causal attention, run on no more than it sees: the tokens up to the one that it pools."""

    prefix: str  # where the tower's tensors are in the model
    end_id: int | None  # the id whose first place is pooled; None where the largest id of a text is

    @property
    def padding_id(self) -> int:
        """An id that is never pooled instead of one of the text: neither the end token, nor larger than any."""
        return 1 if self.end_id == 0 else 0

    def cut(self, ids_NT: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return each text up to the token that is pooled; without an end token that is its first, as in open_clip."""
        ends_N = (ids_NT if self.end_id is None else ids_NT == self.end_id).argmax(axis=1)
        return [row[: end + 1] for row, end in zip(ids_NT, ends_N, strict=True)]

    def encode(self, model: nn.Module, ids_RT: Tensor) -> Tensor:
        """Call open_clip's own `encode_text` with the positions and the part of the mask that T tokens need."""
        # `encode_text` adds all positions and the whole mask, which fit rows of the full length only. For this call
        # both are exchanged for their beginnings; gradients flow into the tower's own positions through the slice.
        width = ids_RT.shape[1]
        positions = model.get_parameter(f"{self.prefix}positional_embedding")
        mask = model.get_buffer(f"{self.prefix}attn_mask")
        needed = {"positional_embedding": positions[:width], "attn_mask": mask[:width, :width]}
        tensors = {f"model.{self.prefix}{name}": tensor for name, tensor in needed.items()}
        embeddings: Tensor = functional_call(_EncodeText(model), tensors, (ids_RT,), tie_weights=False)
        return embeddings


class _EncodeText(nn.Module):
    """A model whose forward is `encode_text`, which is what `functional_call` calls."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids_RT: Tensor) -> Tensor:
        embeddings: Tensor = self.model.encode_text(ids_RT)
        return embeddings


def _how_texts_are_read(model: Any, max_length: int) -> tuple[CausalTexts | None, str]:
    """Return how texts are cut, or None where the whole row may reach the embedding, and either way why, in words."""
    import open_clip
    from open_clip.transformer import TextTransformer

    padded = f"padded to {max_length} tokens"
    if type(model) is open_clip.CLIP:  # its text tower is taken apart, and its tensors are the model's own
        tower, prefix, pooled, end_id = model, "", model.text_pool_type, getattr(model, "text_eos_id", None)
    elif type(model) is open_clip.CustomTextCLIP and type(model.text) is TextTransformer:
        tower, prefix = model.text, "text."
        pooled, end_id = tower.pool_type, getattr(tower, "eos_id", None)  # open_clip 2.32 knows no such id
        if tower.cls_emb is not None:
            return None, f"{padded} (the tower pools a class token behind them)"
    else:
        parts = dict.fromkeys((type(model).__name__, type(getattr(model, "text", model)).__name__))
        return None, f"{padded} (the embedding may depend on all of them: {' with '.join(parts)})"
    mask = tower.attn_mask
    if mask is None or not torch.equal(mask, torch.full_like(mask, -torch.inf).triu(1)):
        return None, f"{padded} (attention isn't causal)"
    if pooled not in ("argmax", "eos"):
        return None, f"{padded} (the tower pools {pooled!r}, not the end token)"
    cut = CausalTexts(prefix, end_id if pooled == "eos" else None)
    return cut, f"cut to their own length, at most {max_length} tokens (attention is causal up to the end token)"


class OpenClipEncoder(TwoTowers):
    """A text tower and an image tower that end in one space.

    Args:
        tokenizer: Turns texts into ids of the context length.
        preprocess: Turns a picture into a tensor (3, side, side).
        config: The model_cfg that builds the model.
        weights: Where the weights are from, for the plan.
    """

    about = About(
        models="open_clip models, with EVA-CLIP",
        decides="open_clip:NAME, or a folder of its own",
        pooling="each tower's own",
        prompts="none",
        trainable="all, text, vision, projection, last_N_layers",
        writes="open_clip",
    )
    prefix = OPEN_CLIP_PREFIX
    marker = CONFIG_FILE
    modes = MappingProxyType({"clip": frozenset(), "siglip": frozenset()})
    reads = frozenset({"image_background"})

    def __init__(
        self, name: str, *, model: nn.Module, tokenizer: Any, preprocess: Any, config: dict[str, Any], weights: str
    ) -> None:
        super().__init__()
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self.preprocess, self.normalisation = until_bytes(preprocess)
        self.config = config
        self.weights = weights
        self.max_length = config.get("text_cfg", {}).get("context_length", USUAL_LENGTH)
        self.dimension = int(config["embed_dim"])
        self.causal_texts, self._texts_are_read = _how_texts_are_read(model, self.max_length)
        self.padding_id = 0 if self.causal_texts is None else self.causal_texts.padding_id
        # A blank picture shows the side of any. A picture costs its patches and one more that sums them up.
        side = self._preprocessed([blank_picture()])["pixel_values"].shape[2]
        patch: int = config["vision_cfg"].get("patch_size") or ASSUMED_PATCH_SIZE
        self.picture_tokens = int(side // patch) ** 2 + 1
        for key in ("logit_scale", "logit_bias"):
            parameter = getattr(self.model, key, None)
            if parameter is not None:
                parameter.requires_grad_(requires_grad=False)  # the loss has a temperature of its own

    @classmethod
    @override
    def recognises(cls, files: ModelFiles) -> bool:
        is_shape = "vision_cfg" in files.shape and "model_type" not in files.shape
        return is_shape or files.name.startswith(OPEN_CLIP_PREFIX) or is_open_clip_folder(files.folder)

    @classmethod
    @override
    def load(cls, files: ModelFiles, texts: Iterable[str] = ()) -> OpenClipEncoder:
        try:
            import open_clip
        except ImportError as error:
            raise MachineError(
                f"{files.name} needs open_clip, which is missing: pip install open_clip_torch"
            ) from error
        if not files.reads_items:
            return _without_weights(files)

        # A name of open_clip's own list, with a tag of weights behind a colon, or a scheme and a path. What is refused
        # is refused before open_clip reads anything.
        is_folder = is_open_clip_folder(files.folder)
        name = f"local-dir:{files.folder}" if is_folder else files.name.removeprefix(OPEN_CLIP_PREFIX)
        tag = ""
        if not name.startswith(SCHEMES):
            name, _, tag = name.partition(":")
            _check_name(name, tag, files)
        elif name.startswith("local-dir:"):
            _check_folder(Path(name.removeprefix("local-dir:")), files)
        on_hub = bool(tag) or name.startswith(HUB_SCHEME)
        with _read_by_open_clip(files, on_hub=on_hub), files.device, _quiet_about_weights(files):
            model, _, preprocess = open_clip.create_model_and_transforms(
                name,
                pretrained=tag or None,
                load_weights=files.has_weights,
                device=files.device,
                weights_only=True,
                pretrained_text=False,
            )
            tokenizer = open_clip.get_tokenizer(name)
            config = open_clip.get_model_config(name)

        _fill_masks(model)
        # open_clip may choose a tokenizer by the model's name: from a saved folder it would choose another one.
        is_named = bool(config.get("text_cfg", {}).get("hf_tokenizer_name"))
        if not is_named and not isinstance(tokenizer, open_clip.SimpleTokenizer):
            raise ConfigError(
                f"{files.name} takes {type(tokenizer).__name__}, which its configuration doesn't name: once saved, it "
                f"would load with another tokenizer. Use the model's Hugging Face form"
            )
        random = "" if tag or name.startswith(SCHEMES) else "random: the name has no pretrained tag"
        return cls(
            files.name,
            model=model.to(files.dtype),
            tokenizer=tokenizer,
            preprocess=preprocess,
            config=config,
            weights=random or tag or name,
        )

    @property
    def _parts(self) -> Any:
        """The model, untyped: encode_text, encode_image and visual belong to every model of open_clip."""
        return self.model

    @override
    def featurize_pictures(self, images: Sequence[Image]) -> Features:
        arrays = process_pictures(images, self._preprocessed, self.image_limits, self.image_background, own_mode=True)
        return Features({}, np.full(len(images), self.picture_tokens, dtype=np.int64), arrays)

    def _preprocessed(self, pictures: list[PIL.Image.Image]) -> dict[str, NDArray[Any]]:
        return {"pixel_values": np.stack([np.asarray(self.preprocess(picture)) for picture in pictures])}

    @override
    def featurize_texts(self, texts: list[str], side: Side) -> Features:
        stripped = [text.strip() for text in texts]
        ids_NT = self.tokenizer(stripped, context_length=self.max_length).numpy()
        ids = Ragged.from_rows(list(ids_NT) if self.causal_texts is None else self.causal_texts.cut(ids_NT))

        # open_clip's tokenizers don't say what they cut: a text that was cut fills a row that is one token longer. The
        # empty text in front shows the padding. Where the end of a text looks like it, the place before it tells.
        longer_NT = self.tokenizer(["", *stripped], context_length=self.max_length + 1).numpy()
        padding = longer_NT[0, -1]
        last = self.max_length - 1 if longer_NT[0, 0] == padding else self.max_length
        num_truncated = int((longer_NT[1:, last] != padding).sum())
        return Features({"input_ids": ids}, ids.lengths, num_truncated=num_truncated)

    @override
    def embed_texts(self, inputs: dict[str, Tensor]) -> Tensor:
        ids_RT = inputs["input_ids"].long()
        if self.causal_texts is None:
            return unit(self._parts.encode_text(ids_RT))
        return unit(self.causal_texts.encode(self.model, ids_RT))

    @override
    def embed_pictures(self, inputs: dict[str, Tensor]) -> Tensor:
        dtype = next(self._parts.visual.parameters()).dtype
        return unit(self._parts.encode_image(normalised(inputs, self.normalisation).to(dtype)))

    @override
    def save(self, folder: Path) -> None:
        from open_clip.push_to_hf_hub import save_config_for_hf

        folder.mkdir(parents=True, exist_ok=True)
        save_config_for_hf(self.model, folder / CONFIG_FILE, self.config)
        save_weights(self.model, folder, WEIGHTS_FILE, {"format": "pt"})
        if hasattr(self.tokenizer, "save_pretrained"):  # CLIP's own comes with open_clip
            self.tokenizer.save_pretrained(folder)

    @override
    def facts(self) -> dict[str, str]:
        scale = self._parts.logit_scale.exp().item()
        return {
            "family": "open_clip",
            "weights": self.weights,
            "texts": self._texts_are_read,
            "pictures": f"{self._parts.visual.image_size} pixels, open_clip's own preprocessing for evaluation",
            "logit_scale of the model file": f"{scale:.4g}, not used: the loss has its own",
            "similarity": "cosine",
        }

    @override
    def towers(self) -> tuple[Tower, ...]:
        # Other libraries' towers don't say how many layers they have, and theirs may all be different.
        periods = {
            name: int(isinstance(self.config.get(f"{name}_cfg", {}).get("layers"), int)) for name in ("text", "vision")
        }
        projection = tuple(f"model.visual.{name}" for name in ("proj", "head", "attnpool.c_proj"))
        vision = find_tower(self, "vision", parts=("model.visual",), projection=projection, period=periods["vision"])
        if hasattr(self.model, "text"):
            projection = tuple(f"model.text.{name}" for name in ("text_projection", "proj"))
            text = find_tower(self, "text", parts=("model.text",), projection=projection, period=periods["text"])
            return text, vision
        # Its text tower is taken apart, and not registered in the order in which it runs.
        names = ("token_embedding", "positional_embedding", "transformer", "ln_final", "text_projection")
        parts = tuple(f"model.{name}" for name in names)
        layers = find_layers(self, parts, depth=None)
        text = Tower("text", parts, parts[-1:], layers=layers, behind=parts[-2:], period=periods["text"])
        return text, vision

    @override
    def adapter_host(self) -> nn.Module:
        return self.model

    @override
    def enable_gradient_checkpointing(self) -> None:
        self._parts.set_grad_checkpointing(True)

    @override
    def profile_inputs(self) -> tuple[TowerInputs, ...]:
        return token_inputs(self.max_length, padded=self.causal_texts is None), picture_inputs(self)

    @override
    def activation_values(self) -> float:
        text, vision = self.config.get("text_cfg", {}), self.config["vision_cfg"]
        # What the description omits is ViT-B's.
        layers, width = vision.get("layers", 12), vision.get("width", 768)
        if not isinstance(layers, int):  # a convolutional tower names the blocks of each stage
            layers = sum(layers)
        heads = max(1, width // vision.get("head_width", 64))
        return max(
            layer_values(text.get("layers", 12), text.get("width", 512), text.get("heads", 8), self.max_length),
            layer_values(layers, width, heads, self.picture_tokens),
        )

    @override
    def forms(self) -> Mapping[Form, str]:
        return {"open_clip": ""}


@contextmanager
def _read_by_open_clip(files: ModelFiles, *, on_hub: bool) -> Iterator[None]:
    """Let open_clip read what a model needs; failures name the model.

    Raises:
        MachineError: Something could not be fetched or read.
        ConfigError: Its files hold something unexpected.
    """
    try:
        with hub_or_cache() if on_hub else nullcontext():
            yield
    except Exception as error:  # whatever open_clip makes of a description that it doesn't expect
        if isinstance(error, OSError) or "Failed to download" in str(error):
            raise MachineError(f"{files.name} could not be loaded by open_clip: {first_line(error)}") from error
        raise ConfigError(
            f"{files.name} could not be loaded by open_clip: {type(error).__name__}: {first_line(error)}. If its "
            f"{CONFIG_FILE} or {WEIGHTS_FILE} is damaged, copy the folder again"
        ) from error


def _without_weights(files: ModelFiles) -> OpenClipEncoder:
    """Build a model by its description alone."""
    import open_clip

    config: dict[str, Any] | None = dict(files.shape)
    if not config:
        name = files.name.removeprefix(OPEN_CLIP_PREFIX)
        if is_open_clip_folder(files.folder):
            name = f"local-dir:{files.folder}"
        elif "://" not in name and not name.startswith(SCHEMES):
            name = name.partition(":")[0]
        with _read_by_open_clip(files, on_hub=name.startswith(HUB_SCHEME)):
            config = open_clip.get_model_config(name)
        if config is None:
            raise ConfigError(f"open_clip has no model {name!r}")
    shape = copy.deepcopy(config)
    foreign = "hf_model_name" in shape["text_cfg"]
    if foreign:
        shape["text_cfg"]["hf_model_pretrained"] = False
    # The same choice of a class as open_clip's factory makes, which would fetch a tokenizer and preprocessing too.
    kind = open_clip.CLIP
    if shape.pop("custom_text", False) or foreign:
        kind = open_clip.CoCa if "multimodal_cfg" in shape else open_clip.CustomTextCLIP
    with _read_by_open_clip(files, on_hub=foreign), files.device:  # its text tower's config may lie there
        model = kind(**shape).to(files.dtype)
    _fill_masks(model)
    side = shape["vision_cfg"].get("image_size", PICTURE_SIDE)
    height, width = (side, side) if isinstance(side, int) else side
    return OpenClipEncoder(
        files.name,
        model=model,
        tokenizer=tokenizer_facts(shape["text_cfg"].get("context_length", USUAL_LENGTH)),
        preprocess=lambda _: torch.zeros(3, height, width, dtype=torch.uint8),
        config=config,
        weights="none",
    )


def _check_name(name: str, tag: str, files: ModelFiles) -> None:
    """Refuse a name or a tag that open_clip doesn't know, and weights that are a pickle."""
    import open_clip

    known = open_clip.list_models()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise ConfigError(f"open_clip has no model {name!r}; did you mean {OPEN_CLIP_PREFIX}{close[0]}?")
    if not tag:
        return
    pickled = Path(tag).suffix != ".safetensors"
    if not Path(tag).is_file():
        tags = open_clip.list_pretrained_tags_by_model(name)
        if tag not in tags:
            listed = ", ".join(tags) or "none"
            raise ConfigError(f"open_clip has no weights {tag!r} of {name}; it has: {listed}")
        pickled = not open_clip.get_pretrained_cfg(name, tag).get("hf_hub")
    if pickled and not files.keys.allow_pickle:
        raise ConfigError(
            f"{files.name} has its weights only as a pickle, which can run code when it is read; set "
            f"allow_pickle: true to read it with weights_only"
        )


def _check_folder(folder: Path, files: ModelFiles) -> None:
    """Refuse a folder without a readable description or without weights: open_clip would make random ones."""
    config = checked_files.read_json(folder / CONFIG_FILE)
    checked_files.check_folder(folder, weights=files.has_weights)
    if "model_cfg" not in config:
        raise ConfigError(f"{folder / CONFIG_FILE} has no model_cfg")
    if not isinstance(config.get("preprocess_cfg", {}), dict):  # open_clip would take its own settings in silence
        raise checked_files.broken(folder / CONFIG_FILE, "preprocess_cfg is no object")
    if not files.has_weights or any(folder.glob("*.safetensors")):
        return
    if not any((*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth"))):
        raise ConfigError(f"{folder} holds no weights; {WEIGHTS_FILE} is missing")
    if not files.keys.allow_pickle:
        raise ConfigError(
            f"{folder} has its weights only as a pickle, which can run code when it is read; set allow_pickle: true "
            f"to read it with weights_only, or convert it to safetensors"
        )


@contextmanager
def _quiet_about_weights(files: ModelFiles) -> Iterator[None]:
    """Keep open_clip from warning of random weights where none are wanted."""
    before = logging.root.manager.disable
    logging.disable(before if files.has_weights else logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _fill_masks(model: nn.Module) -> None:
    """Make causal masks that have no values yet: they say whether texts may be cut."""
    for module in model.modules():
        mask = module._buffers.get("attn_mask")
        if mask is not None and mask.is_meta:
            module._buffers["attn_mask"] = torch.full(mask.shape, -torch.inf).triu(1)
