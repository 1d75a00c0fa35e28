"""Small models from scratch, which train on a CPU in a minute or two: `builtin:tiny-transformer`, `-clip`, `-qwen3-vl`.

| Class | Network | Folder |
|---|---|---|
| `TinyTransformer` | BERT of 4 layers x 256 | that of any text encoder |
| `TinyClip` | a bag of hashed n-grams and a few convolutions | vembed's own |
| `TinyVisionLanguage` | Qwen3-VL of 3 layers x 128, with the processor of the large ones | that of any Qwen3-VL |

Tokenizers are trained on the data that a model will see. They are byte-level BPEs: no text holds an unknown token, and
the same texts always give the same vocabulary. (The library's WordPiece trainer numbers the pieces inside of words in
the order of a randomly seeded hash table, and breaks ties by those numbers.)

transformers, which takes seconds to import, is asked for only by the models that are made of it.

Shape legend: R rows of a chunk, C channels, S side in pixels, E embedding dim.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import PIL.Image
import torch
from pydantic import Field
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from typing_extensions import override

from vembed.batch import Features
from vembed.errors import ConfigError
from vembed.models.checked_files import read_json, read_settings
from vembed.models.composed import TwoTowers
from vembed.models.encoder import About, Encoder
from vembed.models.formats import TextSpec
from vembed.models.hub import prepare_backbone, save_weights, tokenizer_facts
from vembed.models.pictures import process_pictures, rows_of
from vembed.models.plannable import Tower, TowerInputs, picture_inputs
from vembed.models.pooling import unit
from vembed.models.tables import SAMPLE_PIECES, NgramBag, NgramBagConfig, Size, grams_without_values

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import Image, Modality, Side
    from vembed.models.hub import ModelFiles
    from vembed.models.text import TextEncoder
    from vembed.models.vision_language import VisionLanguageEncoder

BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
BERT_VOCABULARY = 8192
BERT_LENGTH = 128


def train_bpe(texts: Iterable[str], vocabulary_size: int, special_tokens: Sequence[str] = BERT_TOKENS) -> Tokenizer:
    """Train a byte-level BPE on texts, lower-cased, with special tokens in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class FromScratch(Encoder):
    """A model that is of another class once it is built, and is loaded by that class from the folder it is saved in."""

    @classmethod
    @override
    def recognises(cls, files: ModelFiles) -> bool:
        return False


class TinyTransformer(FromScratch):
    """A small BERT."""

    about = About(
        models="A small BERT, from scratch",
        decides="builtin:tiny-transformer",
        pooling="mean",
        prompts="none",
        trainable="all, last_N_layers",
        writes="sentence-transformers, transformers",
    )
    builtin = "tiny-transformer"
    modes = MappingProxyType({"bert": frozenset({"bert"})})

    @classmethod
    @override
    def load(cls, files: ModelFiles, texts: Iterable[str] = ()) -> TextEncoder:
        from transformers import BertConfig, BertModel

        from vembed.models.text import TextEncoder

        tokenizer = bert_tokenizer(texts) if files.has_weights else tokenizer_facts(BERT_LENGTH)
        vocabulary_size = len(tokenizer) if files.has_weights else BERT_VOCABULARY  # few texts give a smaller one
        config = BertConfig(
            vocab_size=vocabulary_size,
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=1024,
            max_position_embeddings=BERT_LENGTH,
            pad_token_id=tokenizer.pad_token_id,
        )
        with files.device:  # the weights follow torch's global generator
            backbone: Any = BertModel(config, add_pooling_layer=False)
        if not files.has_weights:
            prepare_backbone(backbone)  # or transformers warns of what no encoder does
        spec = TextSpec(pooling=("mean",), max_length=BERT_LENGTH)
        return TextEncoder(files.name, backbone=backbone, tokenizer=tokenizer, spec=spec).to(files.dtype)


def bert_tokenizer(texts: Iterable[str]) -> Any:
    """Train the tokenizer of a BERT on texts."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = train_bpe(texts, BERT_VOCABULARY)
    ids = {token: index for index, token in enumerate(BERT_TOKENS)}  # the trainer numbers them first
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=BERT_LENGTH,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


TINY_CLIP_FILE = "vembed_tiny_clip.json"

PATCH_SIDE = 8
"""A picture costs one token for each square of so many pixels a side."""

GRAMS_PER_TOKEN = 16
"""A text costs one token for so many n-grams, about those of one word."""

NORM_GROUPS = 8
"""Groups of channels that are normalised together."""

ARCHITECTURE = 2
"""Written beside the weights; grows when the same weights would no longer mean the same."""

CACHED_PICTURES = 8192
"""Resized pictures that are kept from one epoch to the next: 100 MB at 64 pixels a side."""

VALUES_PER_OUTPUT = 7
"""Values that backward keeps for each output of a block: the four that were pooled, the largest of them and its place,
and what is behind the activation."""


@dataclass(frozen=True, slots=True)
class TinyClipConfig:
    """Shape of a `TinyClip`."""

    dimension: Size = 256
    image_size: Annotated[int, Field(ge=1, le=1 << 12)] = 64  # side to which pictures are resized, in pixels
    # Side of the squares that become one place each in the first block, in pixels; even.
    patch_size: Annotated[int, Field(ge=2, le=1 << 12)] = 4
    # Of each block; the side halves in each but the first.
    channels: Annotated[tuple[Size, ...], Field(min_length=1, max_length=16)] = (32, 96, 192)
    buckets: Size = 1 << 14  # rows of the n-gram table
    max_words: Size = 64  # words of a text that count; the rest is cut

    def __post_init__(self) -> None:
        if self.patch_size % 2:
            raise ValueError(f"patch_size {self.patch_size} is odd; the pool of the first block halves it")

    @property
    def sides(self) -> tuple[int, ...]:
        """Sides of the maps that come out of the blocks."""
        first = self.image_size // self.patch_size
        return tuple(math.ceil(first / 2**index) for index in range(len(self.channels)))


class TinyClip(TwoTowers):
    """A small encoder of texts and pictures.

    Pictures go through a few convolutions, each followed by a pool that halves the side, and one linear layer that sees
    where things are; texts through the bag of hashed n-grams. Both end in one space. Groups of channels are normalised,
    never batches: a batch norm would see chunks instead of batches, and gradient caching would no longer be exact.
    """

    about = About(
        models="A small CLIP, from scratch",
        decides="builtin:tiny-clip",
        pooling="each tower's own",
        prompts="none",
        trainable="all, text, vision",
        writes="vembed",
    )
    builtin = "tiny-clip"
    marker = TINY_CLIP_FILE
    modes = MappingProxyType({"clip": frozenset()})
    reads = frozenset({"image_background"})
    text_inputs = frozenset({"grams", "offsets", "rows"})

    def __init__(self, config: TinyClipConfig, *, name: str = "builtin:tiny-clip") -> None:
        super().__init__()
        self.config = config
        self.name = name
        self.dimension = config.dimension
        self.max_length = config.max_words
        self.picture_tokens = math.ceil(config.image_size / PATCH_SIDE) ** 2
        bag = NgramBagConfig(dimension=config.dimension, buckets=config.buckets, max_words=config.max_words)
        self.text = NgramBag(bag, name=name)

        # Blocks that halve the picture, of which the first is pooled before the others: they have a quarter of the
        # work. The last layer sees each place on its own, so that left and right are two things.
        layers: list[nn.Module] = []
        before, half = 3, config.patch_size // 2  # colours; the stride of the first block
        for channels in config.channels:
            convolution = (
                nn.Conv2d(before, channels, 3, padding=1, bias=False)
                if layers
                else nn.Conv2d(before, channels, 2 * half + 1, stride=half, padding=half, bias=False)
            )
            nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
            layers += [convolution, nn.MaxPool2d(2, ceil_mode=True), nn.GroupNorm(NORM_GROUPS, channels), nn.ReLU()]
            before = channels
        projection = nn.Linear(before * config.sides[-1] ** 2, config.dimension)
        nn.init.orthogonal_(projection.weight)
        nn.init.zeros_(projection.bias)
        self.vision = nn.Sequential(*layers, nn.Flatten(), projection)
        self._pixels: OrderedDict[Image, NDArray[np.uint8]] = OrderedDict()

    @classmethod
    @override
    def load(cls, files: ModelFiles, texts: Iterable[str] = ()) -> TinyClip:
        config = TinyClipConfig()
        if files.folder is not None:
            path = files.folder / TINY_CLIP_FILE
            architecture = read_json(path).get("architecture", 1)
            if architecture != ARCHITECTURE:
                raise ConfigError(
                    f"{path}: the model is of architecture {architecture}, and this version of vembed has "
                    f"{ARCHITECTURE}, which computes otherwise; train it again, or load it with the version that "
                    f"wrote it"
                )
            config = read_settings(path, TinyClipConfig, beside=frozenset({"architecture"}))
        return files.load_module(lambda: cls(config, name=files.name))

    @override
    def featurize_texts(self, texts: list[str], side: Side) -> Features:
        # A text costs about its words: what the n-grams of one take is the unit.
        features = self.text.featurize(texts, side)
        tokens = np.ceil(features.lengths / GRAMS_PER_TOKEN).astype(np.int64)
        return replace(features, lengths=np.minimum(tokens, self.config.max_words))

    @override
    def featurize_pictures(self, images: Sequence[Image]) -> Features:
        # Resized pictures, (n, S, S, 3). Those that came lately are kept: they come back in every epoch, and decoding
        # takes longer than the network.
        pixels = {image: self._pixels[image] for image in dict.fromkeys(images) if image in self._pixels}
        missing = [image for image in dict.fromkeys(images) if image not in pixels]
        if missing:
            made = process_pictures(missing, self._resized, self.image_limits, self.image_background)
            pixels |= dict(zip(missing, made["pixels"], strict=True))
        for image, resized in pixels.items():
            if image.augmentation is None:  # one that is changed doesn't come back
                self._pixels[image] = resized
                self._pixels.move_to_end(image)
        while len(self._pixels) > CACHED_PICTURES:
            self._pixels.popitem(last=False)
        lengths = np.full(len(images), self.picture_tokens, dtype=np.int64)
        return Features({}, lengths, {"pixels": np.stack([pixels[image] for image in images])})

    def _resized(self, pictures: list[PIL.Image.Image]) -> dict[str, NDArray[Any]]:
        size = (self.config.image_size, self.config.image_size)
        # Pillow averages over the pixels that it leaves out.
        resized = [np.asarray(picture.resize(size, PIL.Image.Resampling.BICUBIC)) for picture in pictures]
        return {"pixels": np.stack(resized)}

    @override
    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:
        # Rows of texts lie one after the other, and pictures are of one size: neither is padded.
        inputs = {name: rows_of(values, rows) for name, values in features.per_row.items()}
        return inputs | self.text.collate(features, rows, width) if features.columns else inputs

    @override
    def embed_texts(self, inputs: dict[str, Tensor]) -> Tensor:
        x: Tensor = self.text(inputs)
        return x

    @override
    def embed_pictures(self, inputs: dict[str, Tensor]) -> Tensor:
        # Bytes until here: a quarter of the float32 that the device makes of them.
        pixels_RSS3 = inputs["pixels"].to(next(self.vision.parameters()).dtype)
        x = (pixels_RSS3 / 127.5 - 1).permute(0, 3, 1, 2)
        if x.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            x = x.contiguous()  # channels last is faster in float32 but takes half as long again in bfloat16
        return unit(self.vision(x))

    @override
    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        content = {"architecture": ARCHITECTURE, **asdict(self.config)}
        (folder / TINY_CLIP_FILE).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
        save_weights(self, folder)

    @override
    def facts(self) -> dict[str, str]:
        return {
            "pictures": f"{self.config.image_size} x {self.config.image_size} pixels",
            "channels": ", ".join(map(str, self.config.channels)),
            "buckets": str(self.config.buckets),
            "max_words": str(self.config.max_words),
            "similarity": "cosine",
        }

    @override
    def towers(self) -> tuple[Tower, ...]:
        projection = f"vision.{len(self.vision) - 1}"
        return Tower("text", parts=("text",)), Tower("vision", parts=("vision",), projection=(projection,))

    @override
    def profile_inputs(self) -> tuple[TowerInputs, ...]:

        def make() -> dict[str, Tensor]:  # so many n-grams for each token
            return grams_without_values(SAMPLE_PIECES * GRAMS_PER_TOKEN)

        return TowerInputs("text", self.max_length, SAMPLE_PIECES, fixed=False, make=make), picture_inputs(self)

    @override
    def activation_values(self) -> float:
        # What backward keeps of a picture, shared out over its tokens. A text's token keeps far less.
        outputs = sum(
            channels * side**2 for channels, side in zip(self.config.channels, self.config.sides, strict=True)
        )
        values = 3 * self.config.image_size**2 + VALUES_PER_OUTPUT * outputs
        return math.ceil(values / self.picture_tokens)


_PADDING, _IMAGE, _VIDEO = "<|endoftext|>", "<|image_pad|>", "<|video_pad|>"
_AROUND = ("<|vision_start|>", "<|vision_end|>")
QWEN_TOKENS = (_PADDING, "<|im_start|>", "<|im_end|>", *_AROUND, _IMAGE, _VIDEO)
QWEN_VOCABULARY = 4096
QWEN_LENGTH, IMAGE_TOKENS = 512, 64
QWEN_PATCH, QWEN_MERGE = 8, 2  # a token stands for 2 x 2 patches of 8 x 8 pixels
QWEN_SPREAD = 0.2
"""Of initial weights: the usual 0.02 is for layers a hundred times as wide, and gives all items nearly one vector."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Of a system message and one of the user with pictures and texts, the same as Qwen3-VL's own."""


class TinyVisionLanguage(FromScratch):
    """A small Qwen3-VL.

    Network, processor and chat template are those of the large models, so that a configuration for one of them is
    tried anywhere.
    """

    about = About(
        models="A tiny Qwen3-VL, from scratch",
        decides="builtin:tiny-qwen3-vl",
        pooling="last token",
        prompts="the instruction of each side",
        trainable="all, text, vision, projection, last_N_layers",
        writes="transformers",
    )
    builtin = "tiny-qwen3-vl"
    modalities: frozenset[Modality] = frozenset({"text", "image", "image+text"})
    modes = MappingProxyType({"qwen-vl": frozenset({"qwen3_vl"})})
    reads = frozenset({"image_background"})

    @classmethod
    @override
    def load(cls, files: ModelFiles, texts: Iterable[str] = ()) -> VisionLanguageEncoder:
        from transformers import (
            PreTrainedTokenizerFast,
            Qwen2VLImageProcessor,
            Qwen3VLConfig,
            Qwen3VLModel,
            Qwen3VLProcessor,
            Qwen3VLVideoProcessor,
        )

        from vembed.models.vision_language import VisionLanguageEncoder, VisionLanguageSpec
        from vembed.models.vision_language_families import Qwen3VL

        tokenizer: Any = PreTrainedTokenizerFast(
            tokenizer_object=train_bpe(texts if files.has_weights else (), QWEN_VOCABULARY, QWEN_TOKENS),
            model_max_length=QWEN_LENGTH,
            pad_token=_PADDING,
            additional_special_tokens=list(QWEN_TOKENS[1:]),
        )
        halves = [0.5] * 3
        images = Qwen2VLImageProcessor(
            patch_size=QWEN_PATCH, merge_size=QWEN_MERGE, image_mean=halves, image_std=halves
        )
        processor = Qwen3VLProcessor(images, tokenizer, Qwen3VLVideoProcessor(), chat_template=CHAT_TEMPLATE)

        named = {"image_token": _IMAGE, "video_token": _VIDEO}
        named |= {"vision_start_token": _AROUND[0], "vision_end_token": _AROUND[1]}
        config = Qwen3VLConfig(
            text_config={
                # Few texts give a smaller vocabulary; the plan, which has none, counts with the largest.
                "vocab_size": len(tokenizer) if files.has_weights else QWEN_VOCABULARY,
                "hidden_size": 128,
                "intermediate_size": 256,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "initializer_range": QWEN_SPREAD,
                "max_position_embeddings": QWEN_LENGTH,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 4, 4]},
                "pad_token_id": tokenizer.pad_token_id,
                "bos_token_id": None,
                "eos_token_id": None,
            },
            vision_config={
                "depth": 2,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_heads": 2,
                "initializer_range": QWEN_SPREAD,
                "patch_size": QWEN_PATCH,
                "spatial_merge_size": QWEN_MERGE,
                "out_hidden_size": 128,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0],
            },
            **{f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in named.items()},
        )
        with files.device:  # the weights follow torch's global generator
            backbone = Qwen3VLModel(config)
        if not files.has_weights:
            prepare_backbone(backbone)  # or transformers warns of what no encoder does

        family = Qwen3VL()
        family.limit_images(processor, IMAGE_TOKENS, None)
        instructions: dict[Side, str] = {"query": family.instruction, "document": family.instruction}
        spec = VisionLanguageSpec(instructions, QWEN_LENGTH, IMAGE_TOKENS, family.pooling)
        encoder = VisionLanguageEncoder(files.name, backbone=backbone, processor=processor, family=family, spec=spec)
        return encoder.to(files.dtype)
