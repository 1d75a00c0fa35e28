"""The vision-language encoder: a language model that reads texts, pictures, and pictures with a text.

1. An item becomes a conversation: an instruction for its side as the system message, then its pictures and its text as
   the user's, laid out by the model's chat template. An item with nothing in it is the text NULL.
2. Each placeholder of a picture becomes as many tokens as the picture takes, which depends on its size.
3. A row that is too long loses ordinary tokens from its end; special ones stay, and so does every picture.
4. The last token has seen all: its hidden state, of unit length, is the embedding.

Rows are padded at the right. A picture's tokens count in a chunk like those of a text. What differs between models is a
class of `vision_language_families`. How items are read is decided by the user's word, else by the model's folder, else
by its family (`load_processor`).

Source: Qwen3-VL-Embedding's published rule (github.com/QwenLM/Qwen3-VL-Embedding).

Shape legend: R rows, T tokens, H hidden dim, E embedding dim.
"""

from __future__ import annotations

import copy
import json
import unicodedata
from dataclasses import dataclass, replace
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import AutoModel
from typing_extensions import override

from vembed.batch import Composed, Features, Image, Ragged
from vembed.data.images import ImageError
from vembed.errors import ConfigError, DataError
from vembed.models import attention
from vembed.models.checked_files import unreadable
from vembed.models.encoder import About, Encoder
from vembed.models.formats import (
    GENERAL_FILE,
    MODULES_FILE,
    TRANSFORMER_FILE,
    model_type_of,
    module_paths,
    pooling_modes,
    read_modules,
    read_prompts,
    refuse_truncation,
)
from vembed.models.hub import PICTURE_SIDE, tokenizer_facts
from vembed.models.pictures import Normalisation, blank_picture, last_step, normalised, process_pictures, side_of
from vembed.models.plannable import ROWS, TowerInputs, find_tower, is_within, layer_period, text_inputs, token_inputs
from vembed.models.pooling import pool
from vembed.models.text_spec import asked_pooling
from vembed.models.token_rows import token_rows
from vembed.models.vision_language_families import UNTRAINED, square_tokens
from vembed.registry import FAMILIES

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
    from vembed.models.pooling import PoolingMode
    from vembed.models.vision_language_families import VisionLanguageFamily

SETTINGS_FILE = "vembed_vision_language.json"
"""Holds what transformers' own files have no place for: instructions, longest row, tokens of a picture, pooling."""

MOST_TOKENS = 8192
"""Of a row, unless the user or the model's files say less: Qwen3-VL-Embedding's own."""

CONVERSATION = 32
"""Tokens of an instruction and of the turns around an item, about."""

USUAL_SQUARES = 4
"""Squares along a side of the largest picture, as Idefics3's and SmolVLM's own processors cut it."""

EMPTY = "NULL"
"""The text of an item that has neither a text nor a picture."""


# --- How items are read -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VisionLanguageSpec:
    """The decisions on how items are read, each by the user, else by the model's folder, else by its family."""

    instructions: Mapping[Side, str]  # system message of each side's items; empty for none
    max_length: int  # tokens of a row, those of pictures included
    image_tokens: int  # most tokens of a picture
    pooling: PoolingMode


def load_processor(
    files: ModelFiles, config: PreTrainedConfig, family: VisionLanguageFamily
) -> tuple[Any, VisionLanguageSpec]:
    """Load tokenizer, image processor and chat template, and decide how items are read.

    Raises:
        ConfigError: There is no chat template, a picture wouldn't fit a row, or a prompt holds what stands for one.
    """
    keys, saved = files.keys, files.read_json(SETTINGS_FILE)
    processor = _stand_in(config) if files.shape else files.processor(pads_count=family.pads_count)
    if family.needs_chat_template and not getattr(processor, "chat_template", None):
        raise ConfigError(
            f"{files.name} has no chat template: its chat_template.jinja is missing; copy the folder again"
        )
    most = saved.get("image_tokens", family.most_image_tokens)
    wanted = most if keys.image_tokens == "auto" else keys.image_tokens
    image_tokens = family.limit_images(processor, wanted, keys.max_image_size)

    network = getattr(config, "vlm_config", config)  # ColPali's and ColQwen2's is within theirs
    prompts: dict[Side, str | None] = {"query": keys.query_prompt, "document": keys.document_prompt}
    saved_instructions = saved.get("instructions", {})
    chosen = {
        side: saved_instructions.get(side, family.instruction) if prompt is None else prompt
        for side, prompt in prompts.items()
    }
    instructions = as_instructions(chosen, family, placeholders_of(processor, network.image_token_id))

    limits = (
        processor.tokenizer.model_max_length,
        getattr(config.get_text_config(), "max_position_embeddings", MOST_TOKENS),
    )
    longest = min(int(saved.get("max_seq_length", MOST_TOKENS)), *limits)
    max_length = longest if keys.max_seq_length == "auto" else keys.max_seq_length
    if image_tokens >= max_length:
        raise ConfigError(
            f"{files.name}: a picture of {image_tokens} tokens doesn't fit rows of {max_length}, and none is cut; "
            f"set max_seq_length above it, or image_tokens to at most {max_length // 2}"
        )
    if not files.shape:
        try:
            kept = _kept_beside_a_full_picture(processor, family, instructions, network.image_token_id, image_tokens)
        except ConfigError:
            raise
        except Exception as error:  # of a library, or of a template that the model brings along
            raise unreadable(files.name, "image", error) from error
        if kept > max_length:
            raise ConfigError(
                f"{files.name}: a row with a picture of {image_tokens} tokens takes {kept} tokens that can't be left "
                f"out, and a row has {max_length}; lower image_tokens or raise max_seq_length"
            )
    pooling: PoolingMode = asked_pooling(keys) or saved.get("pooling", family.pooling)
    return processor, VisionLanguageSpec(instructions, max_length, image_tokens, pooling)


def _kept_beside_a_full_picture(
    processor: Any,
    family: VisionLanguageFamily,
    instructions: Mapping[Side, str],
    image_token_id: int,
    image_tokens: int,
) -> int:
    """Return the tokens that no cut takes out of a row with one picture of the most tokens: its own, and special ones.

    A blank picture may take fewer tokens than that; those around it, of the template and of the picture, are the same.
    """
    arrays = family.process(processor.image_processor, [blank_picture()], in_bytes=False)
    placeholder = family.placeholder(processor, arrays, 0)
    kept_ids = uncut_ids(processor.tokenizer, image_token_id)

    def num_kept(text: str, *, is_row: bool) -> int:
        return sum(token_id in kept_ids for token_id in tokenized(processor.tokenizer, [text], is_row=is_row)[0])

    rows = [
        family.words(processor, instruction, 1, "").replace(processor.image_token, placeholder)
        for instruction in instructions.values()
    ]
    missing = max(0, image_tokens - num_kept(placeholder, is_row=False))
    return max(num_kept(row, is_row=True) for row in rows) + missing


def tokenized(tokenizer: PreTrainedTokenizerBase, texts: list[str], *, is_row: bool = True) -> list[list[int]]:
    """Return the token ids of texts; of whole rows with the special tokens at their ends that a tokenizer adds."""
    # A template may write the start of a row itself: the tokenizer would write it twice.
    starts = tokenizer.bos_token is not None and texts[0].startswith(str(tokenizer.bos_token))
    encoded: Any = tokenizer(
        texts, add_special_tokens=is_row and not starts, return_attention_mask=False, return_token_type_ids=False
    )
    ids: list[list[int]] = encoded["input_ids"]
    return ids


def uncut_ids(tokenizer: PreTrainedTokenizerBase, image_token_id: int) -> set[int]:
    """Return the ids that no cut takes out of a row: those of pictures, and special ones."""
    # A tokenizer marks more as special than it names: Gemma3's turns.
    marked = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {*tokenizer.all_special_ids, *marked, image_token_id}


def placeholders_of(processor: Any, image_token_id: int) -> tuple[str, ...]:
    """Return what stands for a picture in the words of a template, and for each of its tokens: often the same."""
    written = getattr(processor, "image_token", None)
    token = str(processor.tokenizer.convert_ids_to_tokens(image_token_id))
    return (token,) if written in (None, token) else (written, token)


def as_instructions(
    prompts: Mapping[Side, str], family: VisionLanguageFamily, placeholders: Sequence[str]
) -> dict[Side, str]:
    """Return prompts as a family wants its instructions, with punctuation at their end.

    Args:
        placeholders: What stands for a picture: in a prompt it would be taken for one.

    Raises:
        ConfigError: A prompt holds one.
    """
    instructions: dict[Side, str] = {}
    for side, prompt in prompts.items():
        for placeholder in placeholders:
            if placeholder in prompt:
                raise ConfigError(f"{side}_prompt holds {placeholder}, which stands for a picture; leave it out")
        words = prompt.strip()
        ends = not words or unicodedata.category(words[-1]).startswith("P")
        instructions[side] = words if ends or not family.ends_instruction else f"{words}."
    return instructions


def _as_its_library(
    files: ModelFiles, spec: VisionLanguageSpec, family: VisionLanguageFamily, processor: Any
) -> VisionLanguageSpec:
    """Return how items are read with pooling and prompts of a folder of sentence-transformers, where no key says more.

    Raises:
        ConfigError: The folder has a module or a setting that vembed doesn't follow.
    """
    keys, general = files.keys, files.read_json(GENERAL_FILE)
    refuse_truncation(general, files.name)
    paths = module_paths(read_modules(files), files.name, kinds=("Transformer", "Pooling", "Normalize"))
    (mode, *others) = pooling_modes(files.read_json(f"{paths['Pooling'][0]}/config.json"), files.name)
    processing = files.read_json(TRANSFORMER_FILE).get("processing_kwargs") or {}
    # vembed ends each conversation with the turn of the assistant; the library does where the folder says so, and where
    # the template writes it anyway.
    turn = (processing.get("chat_template") or {}).get("add_generation_prompt", False)
    message = [{"role": "user", "content": [{"type": "text", "text": EMPTY}]}]
    ours, theirs = (
        processor.apply_chat_template(message, tokenize=False, add_generation_prompt=wanted)
        if family.needs_chat_template
        else ""
        for wanted in (True, bool(turn))
    )
    if others or ours != theirs:
        unlike = "several modes of pooling" if others else f"no add_generation_prompt in {TRANSFORMER_FILE}"
        raise ConfigError(
            f"{files.name}: it has {unlike}, which vembed doesn't follow for {family.name}; its vectors would be "
            f"others. Delete {MODULES_FILE} in its folder to read it by the family's own rule"
        )
    said = {"query": keys.query_prompt, "document": keys.document_prompt}
    named = {side: prompt for side, prompt in read_prompts(general, files.name).items() if said[side] is None}
    pooling = mode if keys.pooling_method == "auto" else spec.pooling
    return replace(spec, instructions={**spec.instructions, **named}, pooling=pooling)


def _stand_in(config: PreTrainedConfig) -> Any:
    """Return what encoders and families read of a processor, for the shape of a model, which has no files."""
    network: Any = getattr(config, "vlm_config", config)
    vision, tokenizer = network.vision_config, tokenizer_facts(MOST_TOKENS)
    tokenizer.all_special_ids, tokenizer.added_tokens_decoder, tokenizer.convert_ids_to_tokens = (), {}, str
    side = side_of(getattr(vision, "image_size", PICTURE_SIDE))  # Qwen's have none: they take any
    tokens = square_tokens(network) if hasattr(vision, "image_size") else 0
    images = SimpleNamespace(
        patch_size=vision.patch_size,
        merge_size=getattr(vision, "spatial_merge_size", 1),
        size={"height": side, "longest_edge": USUAL_SQUARES * side},
        max_image_size={"longest_edge": side},
        do_image_splitting=True,
        image_grid_pinpoints=getattr(network, "image_grid_pinpoints", ()),
    )
    return SimpleNamespace(
        tokenizer=tokenizer,
        image_processor=images,
        chat_template="none is read",
        image_seq_length=tokens,
        image_seq_len=tokens,
        num_image_tokens=tokens,
        vision_aspect_ratio=getattr(network, "vision_aspect_ratio", ""),
    )


# --- The encoder ------------------------------------------------------------------------------------------------------


class VisionLanguageEncoder(Encoder):
    """A vision-language model.

    Args:
        backbone: The network, without a head.
        processor: Its tokenizer, image processor and chat template.
    """

    about = About(
        models="Vision-language models",
        decides="model_type, see below",
        pooling="as its files say; else the family's, see below",
        prompts="as its files say; else the family's instruction",
        trainable="all, text, vision, projection, last_N_layers",
        writes="transformers",
    )
    modalities: frozenset[Modality] = frozenset({"text", "image", "image+text"})
    modes = MappingProxyType(
        {
            "qwen-vl": frozenset(kind for kind in FAMILIES.names() if kind.startswith("qwen")),
            "llava": UNTRAINED | {kind for kind in FAMILIES.names() if kind.startswith("llava")},
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
        self._placeholders = placeholders_of(processor, self._image_id)

        # A damaged tokenizer is named here: later its ids would lie outside the table, or be sorted with None.
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
        self._kept_ids = np.array(sorted(uncut_ids(self.tokenizer, self._image_id)))

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The processor's tokenizer."""
        return self.processor.tokenizer  # type: ignore[no-any-return]

    @override
    def with_prompts(self, prompts: Mapping[Side, str]) -> Self:
        return super().with_prompts(as_instructions(prompts, self.family, self._placeholders))

    @classmethod
    @override
    def recognises(cls, files: ModelFiles) -> bool:
        kind = model_type_of(files)
        return kind in FAMILIES or kind in UNTRAINED

    @classmethod
    @override
    def load(cls, files: ModelFiles, texts: Iterable[str] = ()) -> VisionLanguageEncoder:
        config = files.config()
        kind = config.model_type
        if kind not in FAMILIES:
            families = ", ".join(FAMILIES.load(name).name for name in FAMILIES.names())
            raise ConfigError(f"{files.name}: models of type {kind} don't train here; take one of {families}")
        family = FAMILIES.load(kind)()
        processor, spec = load_processor(files, config, family)
        if files.read(MODULES_FILE) is not None:
            spec = _as_its_library(files, spec, family, processor)
        backbone = files.backbone("", config, AutoModel)
        return cls(files.name, backbone=backbone, processor=processor, family=family, spec=spec)

    @override
    def featurize(self, items: Sequence[Item], side: Side) -> Features:
        # Pictures first: how many tokens each takes decides the words. Decoded ones are dropped item by item.
        contents = [pictures_and_text(item) for item in items]
        arrays: list[dict[str, NDArray[Any]]] = []
        texts = []
        for images, text in contents:
            arrays.append(self._processed(images))
            texts.append(self._words(arrays[-1], len(images), text, side))

        ids_by_row = tokenized(self.tokenizer, texts)
        packed = token_rows(ids_by_row, self.tokenizer.pad_token_id or 0, self.name, self._num_tokens)
        whole = np.split(packed.values, packed.offsets[1:-1])
        ids = [self._cut(row, images) for row, (images, _) in zip(whole, contents, strict=True)]
        if any(images and self._image_id not in row for row, (images, _) in zip(ids, contents, strict=True)):
            raise ConfigError(
                f"{self.name}: its tokenizer gives no token {self._image_id} for a picture, which its config.json "
                f"says: tokenizer.json or config.json is damaged. Copy the folder again"
            )

        columns = {"input_ids": Ragged.from_rows(ids)}
        for name, first in arrays[0].items():
            columns[name] = Ragged.from_rows([row[name] for row in arrays], dtype=first.dtype.type)
        if arrays[0]:
            positions = [self.family.positions(self.backbone, *row) for row in zip(ids, arrays, strict=True)]
            known = [row for row in positions if row is not None]  # all of them, or none: it is a family's word
            if known:
                columns["positions"] = Ragged.from_rows(known)
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
            return self.family.process(self.processor.image_processor, pictures, in_bytes=in_bytes)

        return process_pictures(images, process, self.image_limits, self.image_background)

    def _words(self, arrays: Mapping[str, NDArray[Any]], num_pictures: int, text: str, side: Side) -> str:
        """Return an item as it is read, with a placeholder for each token of its pictures."""
        text = text.strip()
        # A user's own would be taken for a picture, or for a video.
        for token in filter(None, (*self._placeholders, getattr(self.processor, "video_token", None))):
            text = text.replace(token, f"{token[0]} {token[1:]}")
        text = text or ("" if num_pictures else EMPTY)
        words = self.family.words(self.processor, self.prompts[side], num_pictures, text)
        if not num_pictures:
            return words
        # The template has one placeholder for each picture; in its place go those of all its tokens.
        pieces = words.split(self.processor.image_token)
        tokens = [self.family.placeholder(self.processor, arrays, index) for index in range(num_pictures)]
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

    @override
    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:
        # Rows are padded at the right, with lengths unless all are full. Their pictures lie one after the other,
        # whatever row they are of: `image_places` says where in the padded rows each of their tokens is.
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

    @override
    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
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

    @override
    def save(self, folder: Path) -> None:
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

    @override
    def facts(self) -> dict[str, str]:
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

    @override
    def towers(self) -> tuple[Tower, ...]:
        # The mergers end in tokens of the language model: they are the projection of the tower that sees pictures,
        # within its module or beside it.
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
                config=stack_config,
                period=max(taps, layer_period(stack_config)),  # the plan runs no fewer layers than have taps
            )
            for name, parts, projection, stack_config in stacks
        )

    @override
    def skeleton(self, num_layers: Mapping[TowerName, int] = MappingProxyType({})) -> Self:
        copied = super().skeleton(num_layers)
        family = self.family
        if "vision" in num_layers:
            seeing: Any = copied.backbone.get_submodule(family.vision)
            if family.taps:  # what the language model takes of layers that are cut it takes of the first ones
                setattr(seeing, family.taps, tuple(range(len(getattr(seeing, family.taps)))))
            seeing.config = copy.copy(seeing.config)  # by its depth a layer is counted from the end
            seeing.config.num_hidden_layers = num_layers["vision"]
        return copied

    # --- The plan's inputs --------------------------------------------------------------------------------------------

    @override
    def profile_inputs(self) -> tuple[TowerInputs, ...]:
        # A call of pictures passes through both stacks. The tower of pictures sees several patches for each token.
        longest = min(self.max_length, self.spec.image_tokens + CONVERSATION)
        features = self.blank_pictures()
        width = int(features.lengths[0])
        config: Any = self.backbone.config.vision_config
        arrays, tokens = self.family.blank(self.backbone, self.spec.image_tokens)
        values_per_patch = 3 * int(getattr(config, "temporal_patch_size", 1)) * side_of(config.patch_size) ** 2
        patches = max(1, round(arrays["pixel_values"].size / values_per_patch / tokens))

        def make() -> dict[str, Tensor]:
            made = self.collate(features, np.arange(ROWS), width)
            return {
                name: tensor if name in self.family.read_by_value or not tensor.numel() else tensor.to("meta")
                for name, tensor in made.items()
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
        positions = self.family.positions(self.backbone, ids, arrays)
        if positions is not None:
            columns["positions"] = positions
        ragged = {name: Ragged.from_rows([values] * ROWS, dtype=values.dtype.type) for name, values in columns.items()}
        return Features(ragged, ragged["input_ids"].lengths)

    @override
    def picture_bytes(self) -> int:
        # Of the largest picture, in proportion to its tokens.
        arrays, tokens = self.family.blank(self.backbone, self.spec.image_tokens)
        return int(sum(values.nbytes for values in arrays.values()) * self.spec.image_tokens // tokens)

    @override
    def adapter_host(self) -> nn.Module:
        return self.backbone

    @override
    def forms(self) -> Mapping[Form, str]:
        return {"transformers": ""}  # the folder is one of its own, with a file of ours beside it


def pictures_and_text(item: Item) -> tuple[tuple[Image, ...], str]:
    """Return the pictures of an item, in order, and its text."""
    if isinstance(item, str):
        return (), item
    return (item.images, item.text) if isinstance(item, Composed) else ((item,), "")
