"""The vision-language encoder: a language model that reads texts, pictures, and pictures with a text.

1. An item becomes a conversation: an instruction for its side as the system message, then its pictures and its text as
   the user's, laid out by the model's chat template. An item with nothing in it is the text NULL.
2. Each placeholder of a picture becomes as many tokens as the picture takes, which depends on its size.
3. A row that is too long loses ordinary tokens from its end; special ones stay, and so does every picture.
4. The last token has seen all: its hidden state, of unit length, is the embedding.

Rows are padded at the right. A picture's tokens count in a chunk like those of a text. What differs between models is a
row of `vision_language_families.FAMILIES`.

Source: Qwen3-VL-Embedding's published rule (github.com/QwenLM/Qwen3-VL-Embedding).

Shape legend: R rows, T tokens, H hidden dim, E embedding dim.
"""

from __future__ import annotations

import copy
import json
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import AutoModel

from vembed.batch import Composed, Features, Image, Ragged
from vembed.data.images import ImageError
from vembed.errors import ConfigError, DataError
from vembed.models import attention
from vembed.models.encoder import About, Encoder
from vembed.models.formats import model_type_of
from vembed.models.pictures import DECODED_AT_ONCE, Normalisation, last_step, normalised, process_pictures
from vembed.models.plannable import ROWS, TowerInputs, find_tower, is_within, layer_period, text_inputs, token_inputs
from vembed.models.pooling import pool
from vembed.models.text import token_rows
from vembed.models.vision_language_families import FAMILIES, UNTRAINED, refuse_untrained
from vembed.models.vision_language_spec import SETTINGS_FILE, load_processor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    import PIL.Image
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from vembed.batch import Item, Modality, Side
    from vembed.models.exportable import Form
    from vembed.models.hub import ModelFiles
    from vembed.models.plannable import Tower, TowerName
    from vembed.models.vision_language_family import VisionLanguageFamily
    from vembed.models.vision_language_spec import VisionLanguageSpec

CONVERSATION = 32
"""Tokens of an instruction and of the turns around an item, about."""

READ_BY_VALUE = frozenset({"vision_cu_seqlens", "vision_cu_window_seqlens", "image_sizes", "batch_num_images"})
"""Inputs that networks may read by value: the plan's have values."""

EMPTY = "NULL"
"""The text of an item that has neither a text nor a picture."""


class VisionLanguageEncoder(Encoder):
    """A vision-language model.

    Args:
        backbone: The network, without a head.
        processor: Its tokenizer, image processor and chat template.
    """

    about = About(
        models="Vision-language models",
        decides="model_type, see below",
        pooling="the family's, see below",
        prompts="the instruction of each side",
        trainable="all, text, vision, projection, last_N_layers",
        writes="transformers",
    )
    modalities: frozenset[Modality] = frozenset({"text", "image", "image+text"})
    modes = MappingProxyType(
        {
            "qwen-vl": frozenset(each for each in FAMILIES if each.startswith("qwen")),
            "llava": UNTRAINED | {each for each in FAMILIES if each.startswith("llava")},
        }
    )
    several_pictures = True
    projections: ClassVar[tuple[str, ...]] = ()  # modules behind the language model
    reads = frozenset(
        {"attn_implementation", "pooling_method", "max_seq_length", "query_prompt", "document_prompt"}
        | {"pad_token", "model_revision", "load_in_4bit", "image_background", "max_image_size", "image_tokens"}
    )
    max_length: int

    def __init__(
        self,
        name: str,
        *,
        backbone: PreTrainedModel,
        processor: Any,
        family: VisionLanguageFamily,
        spec: VisionLanguageSpec,
    ) -> None:
        super().__init__()
        if family.causal:
            attention.spare_masks(backbone)
        family.prepare(backbone)
        self.name = name
        self.backbone = backbone
        self.processor = processor
        self.family = family
        self.spec = spec
        self.max_length = spec.max_length
        self.prompts = spec.instructions
        self.dimension = int(backbone.config.get_text_config().hidden_size)
        self._has_processor = hasattr(processor.image_processor, "do_rescale")  # the shape of a model has none
        of_bytes = Normalisation((127.5,) * 3, (127.5,) * 3)
        self.normalisation = last_step(processor.image_processor, name) if self._has_processor else of_bytes
        self._image_id = int(backbone.config.image_token_id)
        placeholders = [getattr(processor, f"{kind}_token", None) for kind in ("image", "video")]
        placeholders.append(self.tokenizer.convert_ids_to_tokens(self._image_id))
        self._placeholders = tuple(dict.fromkeys(each for each in placeholders if each))
        table: Any = backbone.get_input_embeddings()
        self._num_tokens = len(table.weight)
        special_ids = self.tokenizer.all_special_ids
        problem = ""
        if (self.tokenizer.pad_token_id or 0) >= self._num_tokens:
            problem = (
                f"pads with token {self.tokenizer.pad_token_id:,}, and its weights have {self._num_tokens:,} tokens"
            )
        elif None in special_ids:
            problem = "names a special token that its vocabulary lacks"
        if problem:
            raise ConfigError(
                f"{name}: its tokenizer {problem}: tokenizer_config.json is damaged or of another model. Copy the "
                f"folder again"
            )
        self._kept_ids = np.array(sorted({*special_ids, self._image_id}))

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The processor's tokenizer."""
        return self.processor.tokenizer  # type: ignore[no-any-return]

    @classmethod
    def recognises(cls, files: ModelFiles) -> bool:
        """Return whether config.json names one of the families."""
        return model_type_of(files) in FAMILIES.keys() | UNTRAINED

    @classmethod
    def load(cls, files: ModelFiles, texts: Iterable[str] = ()) -> VisionLanguageEncoder:  # noqa: ARG003
        """Load the network and its processor.

        Raises:
            ConfigError: It is of a type that isn't trained here.
        """
        config = files.config()
        refuse_untrained(files.name, config.model_type)
        family = FAMILIES[config.model_type]
        processor, spec = load_processor(files, config, family)
        backbone = files.backbone("", config, AutoModel)
        return cls(files.name, backbone=backbone, processor=processor, family=family, spec=spec)

    def featurize(self, items: Sequence[Item], side: Side) -> Features:
        """Put items into words, and decode and resize their pictures."""
        contents = [pictures_and_text(item) for item in items]
        arrays: list[dict[str, NDArray[Any]]] = []
        texts = []
        for start in range(0, len(contents), DECODED_AT_ONCE):
            for images, text in contents[start : start + DECODED_AT_ONCE]:
                arrays.append(self._processed(images))
                texts.append(self._words(arrays[-1], len(images), text, side))
        starts = self.tokenizer.bos_token is not None and texts[0].startswith(str(self.tokenizer.bos_token))
        encoded = self.tokenizer(
            texts, add_special_tokens=not starts, return_attention_mask=False, return_token_type_ids=False
        )
        packed = token_rows(encoded["input_ids"], self.tokenizer.pad_token_id or 0, self.name, self._num_tokens)
        whole = np.split(packed.values, packed.offsets[1:-1])
        ids = [self._cut(row, images) for row, (images, _) in zip(whole, contents, strict=True)]
        if any(images and self._image_id not in row for row, (images, _) in zip(ids, contents, strict=True)):
            raise ConfigError(
                f"{self.name}: its tokenizer gives no token {self._image_id} for a picture, which its config.json "
                f"says: tokenizer.json or config.json is damaged. Copy the folder again"
            )
        columns = {"input_ids": Ragged.from_rows(ids)}
        for name, known in arrays[0].items():
            columns[name] = Ragged.from_rows([row[name] for row in arrays], dtype=known.dtype.type)
        if arrays[0] and self.family.positions is not None:
            places = [self.family.positions(self.backbone, *row) for row in zip(ids, arrays, strict=True)]
            columns["positions"] = Ragged.from_rows(places)
        num_truncated = sum(len(short) < len(long) for short, long in zip(ids, whole, strict=True))
        return Features(columns, columns["input_ids"].lengths, num_truncated=num_truncated)

    def _processed(self, images: Sequence[Image]) -> dict[str, NDArray[Any]]:
        """Return what the image processor makes of an item's pictures; nothing where it has none."""
        if not images:
            return {}
        in_bytes = self.normalisation is not None

        flattest, left = self.family.flattest, iter(images)

        def process(pictures: list[PIL.Image.Image]) -> dict[str, NDArray[Any]]:
            for picture, image in zip(pictures, left, strict=False):  # block by block
                if flattest is not None and max(picture.size) > flattest * min(picture.size):
                    raise ImageError(
                        image.path,
                        f"{picture.width} x {picture.height} pixels: {self.family.name} takes pictures whose longer "
                        f"side is at most {flattest} times the shorter one; crop it, or leave it out",
                    )
            return self.family.process(self.processor.image_processor, pictures, in_bytes)

        return process_pictures(images, process, self.image_limits, self.image_background)

    def _words(self, arrays: Mapping[str, NDArray[Any]], num_pictures: int, text: str, side: Side) -> str:
        """Return an item as it is read, with a placeholder for each token of its pictures."""
        text = text.strip()
        for each in self._placeholders:  # a user's own would be taken for a picture
            text = text.replace(each, f"{each[0]} {each[1:]}")
        text = text or ("" if num_pictures else EMPTY)
        said = (self.family.wording or _conversation)(self.processor, self.prompts[side], num_pictures, text)
        if not num_pictures:
            return said
        pieces = said.split(self.processor.image_token)
        tokens = [self.family.placeholder(self.processor, arrays, place) for place in range(num_pictures)]
        return "".join(piece + token for piece, token in zip(pieces, [*tokens, ""], strict=True))

    def _cut(self, ids_T: NDArray[np.int32], images: Sequence[Image]) -> NDArray[np.int32]:
        """Leave ordinary tokens out, the last ones first, until a row is short enough."""
        if len(ids_T) <= self.max_length:
            return ids_T
        special_T = np.isin(ids_T, self._kept_ids)
        room = self.max_length - int(special_T.sum())
        if room < 0:
            tokens = f"{int(special_T.sum())} tokens that can't be left out, and a row has {self.max_length}"
            if not images:
                raise DataError(f"a text takes {tokens}; raise max_seq_length")
            what = "1 picture takes" if len(images) == 1 else f"{len(images)} pictures take"
            raise DataError(f"{images[0].path}: {what} {tokens}; lower image_tokens or raise max_seq_length")
        return ids_T[special_T | (np.cumsum(~special_T) <= room)]

    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:
        """Pad rows at the right, with lengths unless all are equal, and lay their pictures one after the other."""
        taken = {name: column.take(rows) for name, column in features.columns.items()}
        ids = taken.pop("input_ids")
        ids_RT = ids.padded(width, int(self.tokenizer.pad_token_id or 0))
        inputs = {"input_ids": torch.from_numpy(ids_RT)}
        if (ids.lengths < width).any():
            inputs["lengths"] = torch.from_numpy(ids.lengths.astype(np.int32))
        if "positions" in taken:
            inputs["positions"] = torch.from_numpy(taken.pop("positions").padded(width, 0))
        if taken:
            inputs["image_places"] = torch.from_numpy(np.flatnonzero(ids_RT == self._image_id))
            inputs |= self.family.pictures(self.backbone, taken)
        return inputs

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return embeddings (R, E) of unit length, at least float32."""
        hidden_RTH, real_RT = self.hidden_states(inputs)
        with torch.autocast(hidden_RTH.device.type, enabled=False):
            return F.normalize(pool(hidden_RTH, real_RT, (self.spec.pooling,)), dim=-1)

    def hidden_states(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the last hidden states (R, T, H), and which tokens are no padding (R, T)."""
        real_RT = torch.ones_like(inputs["input_ids"], dtype=torch.bool)
        if "lengths" in inputs:
            places_T = torch.arange(real_RT.shape[1], device=real_RT.device)
            real_RT = places_T < inputs["lengths"][:, None]
        call = {**inputs, "attention_mask": real_RT.long()}
        if "pixel_values" in inputs:
            call["pixel_values"] = normalised(inputs, self.normalisation).to(self.backbone.dtype)
        return self.family.hidden_states(self.backbone, call), real_RT

    def save(self, folder: Path) -> None:
        """Write a folder that transformers and vembed load."""
        folder.mkdir(parents=True, exist_ok=True)
        self.network().save_pretrained(folder)
        self.processor.save_pretrained(folder)
        (folder / SETTINGS_FILE).write_text(json.dumps(self.settings(), indent=2, ensure_ascii=False) + "\n", "utf-8")

    def network(self) -> PreTrainedModel:
        """Return the network as transformers saves it."""
        return self.backbone

    def settings(self) -> dict[str, Any]:
        """Return how items are read, for the file of ours in the folder."""
        spec = self.spec
        return {
            "instructions": dict(self.prompts),
            "max_seq_length": spec.max_length,
            "image_tokens": spec.image_tokens,
            "pooling": spec.pooling,
        }

    def facts(self) -> dict[str, str]:
        """Return how items are read and summed up."""
        return {
            "family": f"{self.family.name} (config.json)",
            "pooling": self.spec.pooling,
            "max_seq_length": str(self.max_length),
            "pictures": f"at most {self.spec.image_tokens} tokens each",
            "query instruction": repr(self.prompts["query"]),
            "document instruction": repr(self.prompts["document"]),
            "similarity": "cosine",
            "attention": attention.attention_name(self.backbone),
        }

    def towers(self) -> tuple[Tower, ...]:
        """Return the language model, and what sees pictures with the mergers that end in its tokens."""
        config, family = self.backbone.config, self.family
        seeing, merger = f"backbone.{family.vision}", tuple(f"backbone.{part}" for part in family.merger)
        outside = tuple(part for part in merger if not is_within(part, [seeing]))
        stacks: tuple[tuple[TowerName, tuple[str, ...], tuple[str, ...], PreTrainedConfig], ...] = (
            ("text", (f"backbone.{family.language}", *self.projections), self.projections, config.get_text_config()),
            ("vision", (seeing, *outside), merger, config.vision_config),
        )
        taps = len(getattr(self.backbone.get_submodule(family.vision), family.taps)) if family.taps else 0
        return tuple(
            find_tower(
                self,
                name,
                parts=parts,
                projection=projection,
                config=own,
                period=max(taps, layer_period(own)),  # the plan runs no fewer layers than have taps
            )
            for name, parts, projection, own in stacks
        )

    def skeleton(self, num_layers: Mapping[TowerName, int] = MappingProxyType({})) -> Self:
        """Return a copy for the plan to measure; what the language model takes of cut layers it takes of others."""
        copied = super().skeleton(num_layers)
        family = self.family
        if "vision" in num_layers:
            seeing: Any = copied.backbone.get_submodule(family.vision)
            if family.taps:
                setattr(seeing, family.taps, tuple(range(len(getattr(seeing, family.taps)))))
            seeing.config = copy.copy(seeing.config)  # by its depth a layer is counted from the end
            seeing.config.num_hidden_layers = num_layers["vision"]
        return copied

    def profile_inputs(self) -> tuple[TowerInputs, ...]:
        """Return texts, and pictures that pass through both stacks."""
        longest = min(self.max_length, self.spec.image_tokens + CONVERSATION)
        features, patches = self.blank_pictures(), self._patches_per_token()
        width = int(features.lengths[0])

        def make() -> dict[str, Tensor]:
            made = self.collate(features, np.arange(ROWS), width)
            return {
                name: each if name in READ_BY_VALUE or not each.numel() else each.to("meta")
                for name, each in made.items()
            }

        return self.text_probe(), TowerInputs("vision", longest, width, True, make, ("text",), patches)

    def text_probe(self) -> TowerInputs:
        """Return texts, as the plan measures the language model with them."""
        return text_inputs(self) if self._has_processor else token_inputs(self.max_length, masked=True)

    def blank_pictures(self) -> Features:
        """Return rows that are one square picture and a single token each."""
        arrays, tokens = self.family.blank(self.backbone, self.spec.image_tokens)
        ids = np.full(tokens + 1, self._image_id, dtype=np.int32)
        ids[0] = 0
        columns = {"input_ids": ids, **arrays}
        if self.family.positions is not None:
            columns["positions"] = self.family.positions(self.backbone, ids, arrays)
        ragged = {name: Ragged.from_rows([each] * ROWS, dtype=each.dtype.type) for name, each in columns.items()}
        return Features(ragged, ragged["input_ids"].lengths)

    def _patches_per_token(self) -> int:
        """Return the patches that a token of a picture stands for."""
        config: Any = self.backbone.config.vision_config
        arrays, tokens = self.family.blank(self.backbone, self.spec.image_tokens)
        patch = 3 * int(getattr(config, "temporal_patch_size", 1)) * int(config.patch_size) ** 2
        return max(1, round(arrays["pixel_values"].size / patch / tokens))

    def picture_bytes(self) -> int:
        """Return the host memory that the features of the largest picture take."""
        arrays, tokens = self.family.blank(self.backbone, self.spec.image_tokens)
        return int(sum(each.nbytes for each in arrays.values()) * self.spec.image_tokens // tokens)

    def adapter_host(self) -> nn.Module:
        """Return the network of both stacks."""
        return self.backbone

    def forms(self) -> Mapping[Form, str]:
        """Return transformers: the folder is one of its own, with a file of ours beside it."""
        return {"transformers": ""}


def pictures_and_text(item: Item) -> tuple[tuple[Image, ...], str]:
    """Return the pictures of an item, in order, and its text."""
    if isinstance(item, str):
        return (), item
    return (item.images, item.text) if isinstance(item, Composed) else ((item,), "")


def _conversation(processor: Any, instruction: str, num_pictures: int, text: str) -> str:
    """Return an item by the chat template."""
    content: list[dict[str, str]] = [{"type": "image"}] * num_pictures
    if text:
        content = [*content, {"type": "text", "text": text}]
    system = {"role": "system", "content": [{"type": "text", "text": instruction}]}
    messages = [*([system] if instruction else []), {"role": "user", "content": content}]
    said: str = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return said
