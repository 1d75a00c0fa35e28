"""Two towers from open_clip: `open_clip:NAME[:pretrained]`, `open_clip:hf-hub:OWNER/NAME`, or a folder that it wrote.

Texts are always padded to the context length, as open_clip's own tokenizers do: its models may pool anywhere.

Shape legend: R rows of a chunk, E embedding dim.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from vembed.batch import Features, Ragged, modality_of, texts_of
from vembed.errors import ConfigError, MachineError
from vembed.models.encoder import Encoder
from vembed.models.pictures import blank_picture, pictures_of, process_pictures

if TYPE_CHECKING:
    from collections.abc import Sequence

    import PIL.Image
    from numpy.typing import NDArray

    from vembed.batch import Item, Modality, Side
    from vembed.data.images import ImageLimits
    from vembed.models.huggingface import ModelOptions

OPEN_CLIP_PREFIX = "open_clip:"
CONFIG_FILE = "open_clip_config.json"
WEIGHTS_FILE = "open_clip_model.safetensors"
SCHEMES = ("hf-hub:", "local-dir:")

ASSUMED_PATCH_SIZE = 16
"""In pixels, for image towers that don't say one, as convolutional ones."""


@dataclass(frozen=True, slots=True)
class OpenClipParts:
    """What open_clip makes of a name.

    Attributes:
        model: Both towers with their projections.
        tokenizer: Turns texts into ids of the context length.
        preprocess: Turns a picture into a tensor (3, side, side).
        config: The model_cfg that builds the model.
        weights: Where the weights are from, for the plan.
    """

    model: Any
    tokenizer: Any
    preprocess: Any
    config: dict[str, Any]
    weights: str


class OpenClipEncoder(Encoder):
    """A text tower and an image tower that end in one space.

    Args:
        name: What it was loaded by.
        parts: What open_clip made of it.
        image_limits: What a picture may be.
    """

    modalities: frozenset[Modality] = frozenset({"text", "image"})

    def __init__(self, name: str, *, parts: OpenClipParts, image_limits: ImageLimits) -> None:
        super().__init__()
        self.name = name
        self.parts = parts
        self.model: nn.Module = parts.model
        self.image_limits = image_limits
        self.max_length: int = parts.config.get("text_cfg", {}).get("context_length", 77)
        self.dimension = int(parts.config["embed_dim"])
        self.picture_tokens = self._count_picture_tokens()
        for key in ("logit_scale", "logit_bias"):
            parameter = getattr(self.model, key, None)
            if parameter is not None:
                parameter.requires_grad_(requires_grad=False)  # the loss has a temperature of its own

    def _count_picture_tokens(self) -> int:
        size = self._preprocessed([blank_picture()])["pixel_values"].shape[2]
        patch: int = self.parts.config["vision_cfg"].get("patch_size") or ASSUMED_PATCH_SIZE
        return int(size // patch) ** 2 + 1

    def tower_shapes(self) -> list[tuple[int, int, int, int]]:
        """Return layers, width, heads and tokens of each tower; what its description leaves open is ViT-B's."""
        text, vision = self.parts.config.get("text_cfg", {}), self.parts.config["vision_cfg"]
        layers, width = vision.get("layers", 12), vision.get("width", 768)
        if not isinstance(layers, int):  # a convolutional tower names the blocks of each stage
            layers = sum(layers)
        heads = max(1, width // vision.get("head_width", 64))
        return [
            (text.get("layers", 12), text.get("width", 512), text.get("heads", 8), self.max_length),
            (layers, width, heads, self.picture_tokens),
        ]

    def featurize(self, items: Sequence[Item], side: Side) -> Features:  # noqa: ARG002
        """Tokenize texts, or decode and preprocess pictures; both sides are read alike."""
        if modality_of(items[0]) == "text":
            return self._tokenized([text.strip() for text in texts_of(items)])
        arrays = process_pictures(pictures_of(items), self._preprocessed, self.image_limits)
        return Features({}, np.full(len(items), self.picture_tokens, dtype=np.int64), arrays)

    def _preprocessed(self, pictures: list[PIL.Image.Image]) -> dict[str, NDArray[Any]]:
        return {"pixel_values": np.stack([self.parts.preprocess(picture).numpy() for picture in pictures])}

    def _tokenized(self, texts: list[str]) -> Features:
        ids_NT = self.parts.tokenizer(texts, context_length=self.max_length).numpy()
        ids = Ragged.from_rows(list(ids_NT))
        return Features({"input_ids": ids}, ids.lengths, num_truncated=self._count_truncated(texts))

    def _count_truncated(self, texts: list[str]) -> int:
        """Count the texts that fill a row that is one token longer: open_clip's tokenizers don't say what they cut."""
        longer_NT = self.parts.tokenizer(["", *texts], context_length=self.max_length + 1).numpy()
        padding = longer_NT[0, -1]
        # Where the end of a text looks like padding, the place before it tells.
        place = self.max_length - 1 if longer_NT[0, 0] == padding else self.max_length
        return int((longer_NT[1:, place] != padding).sum())

    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:  # noqa: ARG002
        """Take the rows; texts are of one length already, and so are pictures."""
        if features.per_row:
            return {"pixel_values": torch.from_numpy(features.per_row["pixel_values"][rows])}
        ids = features.columns["input_ids"].take(rows)
        return {"input_ids": torch.from_numpy(ids.padded(self.max_length, 0)).long()}

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return embeddings (R, E) of texts or of pictures, of unit length, at least float32."""
        if "input_ids" in inputs:
            x: Tensor = self.parts.model.encode_text(inputs["input_ids"])
        else:
            dtype = next(self.parts.model.visual.parameters()).dtype
            x = self.parts.model.encode_image(inputs["pixel_values"].to(dtype))
        return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)

    def save(self, folder: Path) -> None:
        """Write a folder that open_clip (`local-dir:`) and vembed load."""
        from open_clip.push_to_hf_hub import save_config_for_hf

        folder.mkdir(parents=True, exist_ok=True)
        save_config_for_hf(self.parts.model, folder / CONFIG_FILE, self.parts.config)
        weights = {key: tensor.detach().cpu().contiguous() for key, tensor in self.model.state_dict().items()}
        safetensors.torch.save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        if hasattr(self.parts.tokenizer, "save_pretrained"):  # CLIP's own comes with open_clip
            self.parts.tokenizer.save_pretrained(folder)

    def describe(self) -> dict[str, str]:
        """Return where it is from and how it reads its items."""
        scale = self.parts.model.logit_scale.exp().item()
        return {
            "family": "open_clip",
            "weights": self.parts.weights,
            "texts": f"padded to {self.max_length} tokens ({CONFIG_FILE})",
            "pictures": f"{self.parts.model.visual.image_size} pixels, open_clip's own preprocessing for evaluation",
            "logit_scale of the model file": f"{scale:.4g}, not used: the loss has its own",
            "similarity": "cosine",
        }

    def enable_gradient_checkpointing(self) -> None:
        """Recompute each layer of both towers in backward, by open_clip's own switch."""
        self.parts.model.set_grad_checkpointing(True)


def is_open_clip_folder(folder: Path) -> bool:
    """Return whether a folder is one of open_clip and not of transformers too."""
    return (folder / CONFIG_FILE).is_file() and not (folder / "config.json").is_file()


def load_open_clip(options: ModelOptions) -> OpenClipEncoder:
    """Load a model by its open_clip name, or a folder.

    Raises:
        ConfigError: When there is no such model or tag, or its weights are a pickle that isn't allowed.
        MachineError: When open_clip isn't installed or the weights can't be fetched.
    """
    try:
        import open_clip
    except ImportError as error:
        raise MachineError(f"{options.name} needs open_clip, which is missing: pip install open_clip_torch") from error
    folder = Path(options.name)
    name = f"local-dir:{folder}" if is_open_clip_folder(folder) else options.name.removeprefix(OPEN_CLIP_PREFIX)
    tag = ""
    if not name.startswith(SCHEMES):
        name, _, tag = name.partition(":")
        _check_name(open_clip, name, tag, options)
    elif name.startswith("local-dir:"):
        _check_folder(Path(name.removeprefix("local-dir:")), options)
    try:
        model, _, preprocess = open_clip.create_model_and_transforms(
            name, pretrained=tag or None, weights_only=True, pretrained_text=False
        )
        tokenizer = open_clip.get_tokenizer(name)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        message = str(error).strip().partition("\n")[0]
        raise MachineError(f"{options.name} could not be loaded by open_clip: {message}") from error
    random = "" if tag or name.startswith(SCHEMES) else "random: the name has no pretrained tag"
    config = open_clip.get_model_config(name)
    _check_tokenizer(open_clip, tokenizer, config, options)
    parts = OpenClipParts(model.to(options.dtype), tokenizer, preprocess, config, random or tag or name)
    return OpenClipEncoder(options.name, parts=parts, image_limits=options.image_limits)


def _check_tokenizer(open_clip: Any, tokenizer: Any, config: dict[str, Any], options: ModelOptions) -> None:
    """Refuse a tokenizer that open_clip chose by the model's name: from a saved folder it would choose another one."""
    named = config.get("text_cfg", {}).get("hf_tokenizer_name")
    if not named and not isinstance(tokenizer, open_clip.SimpleTokenizer):
        raise ConfigError(
            f"{options.name} takes {type(tokenizer).__name__}, which its configuration doesn't name: once saved, it "
            f"would load with another tokenizer. Use the model's Hugging Face form"
        )


def _check_name(open_clip: Any, name: str, tag: str, options: ModelOptions) -> None:
    """Refuse a name or a tag that open_clip doesn't know, and weights that are a pickle."""
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
    if pickled and not options.allow_pickle:
        raise ConfigError(
            f"{options.name} has its weights only as a pickle, which can run code when it is read; set "
            f"allow_pickle: true to read it with weights_only"
        )


def _check_folder(folder: Path, options: ModelOptions) -> None:
    """Refuse a folder without a readable description or without weights: open_clip would make random ones."""
    try:
        config = json.loads((folder / CONFIG_FILE).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / CONFIG_FILE} can't be read: {error}") from error
    if "model_cfg" not in config:
        raise ConfigError(f"{folder / CONFIG_FILE} has no model_cfg")
    if any(folder.glob("*.safetensors")):
        return
    if not any((*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth"))):
        raise ConfigError(f"{folder} holds no weights; {WEIGHTS_FILE} is missing")
    if not options.allow_pickle:
        raise ConfigError(
            f"{folder} has its weights only as a pickle, which can run code when it is read; set allow_pickle: true "
            f"to read it with weights_only, or convert it to safetensors"
        )
