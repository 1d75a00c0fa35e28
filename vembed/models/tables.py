"""Encoders that are one table: a text's vector is the mean of the rows of its pieces. No piece sees another.

They need no accelerator and encode thousands of texts a second.

- `NgramBag` (`builtin:ngram-bag`) is the smallest encoder that learns to retrieve, trained from scratch in seconds. A
  text is cut into words (identifiers also at underscores and capitals); each word gives itself, its pair with the next
  word and its character n-grams. Their hashes index the table, and a learned weight for each n-gram weighs the mean. No
  tokenizer has to be trained, no vocabulary kept.
- `StaticEncoder` has a vector for each token. `builtin:static` starts from scratch with a tokenizer trained on the
  data; a folder or hub model of sentence-transformers whose first module is a StaticEmbedding (those of model2vec
  included) is loaded as that library runs it, and written back in the same form.

Source: subword hashing as in Bojanowski et al., 2017 (fastText), with learned n-gram weights in place of tf-idf;
Tulkens and van Dongen, 2024 (Model2Vec); Aarsen, 2025 ("Train 400x faster Static Embedding Models").
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import zlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import Field
from tokenizers import Tokenizer
from torch import Tensor, nn

from vembed.batch import Features, Ragged, texts_of
from vembed.errors import ConfigError
from vembed.models.checked_files import broken, load_tensors, read_bytes, read_settings
from vembed.models.encoder import NO_PROMPTS, About, Encoder
from vembed.models.formats import (
    GENERAL_FILE,
    Dense,
    dimension_fact,
    is_cosine,
    load_dense,
    module_kinds,
    module_paths,
    read_modules,
    read_prompts,
    read_truncation,
    write_modules,
)
from vembed.models.hub import WEIGHTS_FILE, save_weights
from vembed.models.names import is_builtin
from vembed.models.plannable import ROWS, Tower, TowerInputs
from vembed.models.pooling import unit
from vembed.text import first_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import Item, Side
    from vembed.models.exportable import Form
    from vembed.models.hub import ModelFiles

SAMPLE_PIECES = 7
"""N-grams or tokens of each row in the run that the plan measures."""

# --- A bag of n-grams -------------------------------------------------------------------------------------------------

CONFIG_FILE = "vembed_ngram_bag.json"

Size = Annotated[int, Field(ge=1, le=1 << 24)]
Characters = Annotated[int, Field(ge=1, le=64)]

_WORD = re.compile(r"\w+")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_A-Za-z]+")


@dataclass(frozen=True, slots=True)
class NgramBagConfig:
    """Shape of a bag."""

    dimension: Size = 256
    buckets: Size = 1 << 16  # rows of the table; hashes collide beyond it
    max_words: Size = 256  # words of a text that count; the rest is cut
    shortest: Characters = 3  # characters of the shortest n-gram
    longest: Characters = 5


class NgramBag(Encoder):
    """A table of hashed n-grams with a weight for each."""

    about = About(
        models="A bag of character n-grams, from scratch",
        decides="builtin:ngram-bag",
        pooling="mean of the n-grams",
        prompts="none",
        trainable="all",
        writes="vembed",
    )
    builtin = "ngram-bag"
    marker = CONFIG_FILE

    def __init__(self, config: NgramBagConfig, *, name: str = "builtin:ngram-bag") -> None:
        super().__init__()
        self.config = config
        self.name = name
        self.dimension = config.dimension
        self.max_length = config.max_words
        self.table = nn.Embedding(config.buckets, config.dimension)
        self.weight = nn.Embedding(config.buckets, 1)
        nn.init.normal_(self.table.weight, std=config.dimension**-0.5)
        nn.init.zeros_(self.weight.weight)
        # One cache for each encoder: the grams of a word are asked for in every text that holds it.
        self._grams_of = functools.lru_cache(maxsize=200_000)(self._word_grams)

    def featurize(self, items: Sequence[Item], side: Side) -> Features:  # noqa: ARG002
        """Hash the n-grams of texts; both sides are read alike."""
        rows, num_truncated = [], 0
        for text in texts_of(items):
            words: list[str] = []
            for match in _WORD.findall(text):  # a compound identifier gives its parts, and then itself
                parts = _PART.findall(match)
                words += [part.lower() for part in (*parts, match)] if len(parts) > 1 else [match.lower()]
            num_truncated += len(words) > self.config.max_words
            words = words[: self.config.max_words]
            pairs = [self._bucket(f"{first} {second}") for first, second in itertools.pairwise(words)]
            # A text without any word has the bucket of the empty one: a row of no n-grams would have no mean.
            numbers = np.array(pairs if words else [self._bucket("")], dtype=np.int32)
            rows.append(np.concatenate([*(self._grams_of(word) for word in words), numbers]))
        grams = Ragged.from_rows(rows)
        return Features({"grams": grams}, grams.lengths, num_truncated=num_truncated)

    def _word_grams(self, word: str) -> NDArray[np.int32]:
        marked = f"<{word}>"
        grams = [marked]
        for size in range(self.config.shortest, self.config.longest + 1):
            grams += [marked[start : start + size] for start in range(len(marked) - size + 1)]
        return np.array([self._bucket(gram) for gram in dict.fromkeys(grams)], dtype=np.int32)

    def _bucket(self, gram: str) -> int:
        return zlib.crc32(gram.encode()) % self.config.buckets

    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:  # noqa: ARG002
        """Pack the rows one after the other: a bag needs no padding."""
        grams = features.columns["grams"].take(rows)
        return {
            "grams": torch.from_numpy(grams.values).long(),
            "offsets": torch.from_numpy(grams.offsets[:-1]),
            "rows": torch.from_numpy(np.repeat(np.arange(len(rows)), grams.lengths)),
        }

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the weighted mean of each row's n-grams, of unit length."""
        grams, offsets, rows = inputs["grams"], inputs["offsets"], inputs["rows"]
        weights = self.weight(grams).squeeze(-1).exp()  # positive, and 1 at the start
        totals = weights.new_zeros(len(offsets)).index_add(0, rows, weights)
        table = self.table.weight
        shares = (weights / totals[rows]).to(table.dtype)  # autocast made them float32, and a bag takes one type
        return unit(F.embedding_bag(grams, table, offsets, mode="sum", per_sample_weights=shares))

    @classmethod
    def load(cls, files: ModelFiles, texts: Iterable[str] = ()) -> NgramBag:  # noqa: ARG003
        """Load what `save` wrote, or build a new one."""
        folder = files.folder
        config = NgramBagConfig() if folder is None else read_settings(folder / CONFIG_FILE, NgramBagConfig)
        return files.load_module(lambda: cls(config, name=files.name))

    def save(self, folder: Path) -> None:
        """Write shape and weights; only vembed loads this family."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_FILE).write_text(json.dumps(asdict(self.config), indent=2) + "\n", "utf-8")
        save_weights(self, folder)

    def facts(self) -> dict[str, str]:
        """Return its shape."""
        return {
            "buckets": str(self.config.buckets),
            "max_words": str(self.config.max_words),
            "character n-grams": f"{self.config.shortest} to {self.config.longest}",
            "similarity": "cosine",
        }

    def towers(self) -> tuple[Tower, ...]:
        """Return the one tower."""
        return (Tower("text", parts=("table", "weight")),)

    def profile_inputs(self) -> tuple[TowerInputs, ...]:
        """Return rows of n-grams; there is no limit to them."""
        return (
            TowerInputs("text", None, SAMPLE_PIECES, fixed=False, make=lambda: grams_without_values(SAMPLE_PIECES)),
        )

    @property
    def longest_item(self) -> int | None:
        """None: what is limited is the number of words."""
        return None

    def activation_values(self) -> float:
        """Return what an n-gram keeps in values of 4 bytes: four indices of 8 bytes, a weight and its share."""
        return 10.0


def grams_without_values(count: int) -> dict[str, Tensor]:
    """Return the inputs of a call of rows of `count` n-grams each, on the meta device."""
    grams = torch.empty(ROWS * count, dtype=torch.long, device="meta")
    return {"grams": grams, "offsets": torch.empty(ROWS, dtype=torch.long, device="meta"), "rows": grams}


# --- A vector for each token ------------------------------------------------------------------------------------------

KIND = "StaticEmbedding"
TOKENIZER_FILE = "tokenizer.json"

VOCABULARY_SIZE = 32_768
"""Of an encoder from scratch; few texts give a smaller one."""

DIMENSION = 256
"""Of an encoder from scratch."""


class StaticEncoder(Encoder):
    """A table with one vector for each token, averaged over a text.

    Args:
        tokenizer: Cuts texts into tokens, without special ones; None for an encoder that only the plan measures.
        table: Vectors of the tokens, (vocabulary, dimension).
        dense: Layers behind the average.
        truncate_dim: Leading dimensions of a vector that are kept; None for all.
    """

    about = About(
        models="Static embeddings, a table of token vectors",
        decides="builtin:static, or a modules.json that begins with StaticEmbedding",
        pooling="mean",
        prompts="as its files say",
        trainable="all",
        writes="sentence-transformers",
    )
    builtin = "static"
    packs = True
    reads = frozenset({"max_seq_length", "query_prompt", "document_prompt", "model_revision"})

    def __init__(
        self,
        name: str,
        *,
        tokenizer: Tokenizer | None,
        table: Tensor,
        dense: Sequence[Dense] = (),
        prompts: Mapping[Side, str] | None = None,
        normalize: bool = True,
        truncate_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.tokenizer = tokenizer
        self.table = nn.Embedding.from_pretrained(table, freeze=False)
        self.dense = nn.ModuleList(dense)
        self.normalize = normalize
        self.prompts = {**NO_PROMPTS, **(prompts or {})}
        self.similarity = "cosine" if normalize else "dot"
        self.truncate_dim = truncate_dim
        self._width = int(dense[-1].linear.out_features if dense else table.shape[1])
        self.dimension = min(self._width, truncate_dim or self._width)
        truncation = None if tokenizer is None else tokenizer.truncation
        self.max_length = None if truncation is None else int(truncation["max_length"])

    @classmethod
    def recognises(cls, files: ModelFiles) -> bool:
        """Return whether the first module of a sentence-transformers model is a table of tokens."""
        return module_kinds(files)[:1] == (KIND,)

    @classmethod
    def load(cls, files: ModelFiles, texts: Iterable[str] = ()) -> StaticEncoder:
        """Load a model of sentence-transformers, or train a tokenizer and draw a table by torch's global generator.

        Raises:
            ConfigError: A module or a file is missing, or isn't understood.
        """
        keys = files.keys
        tokenizer: Tokenizer | None
        prompts: dict[Side, str] = {}
        dense, normalize, truncate_dim = [], True, None
        if is_builtin(files.name):
            from vembed.models.from_scratch import train_bpe  # here, as it imports transformers

            # The plan has no texts to train a tokenizer on: it counts with the largest vocabulary.
            tokenizer = train_bpe(texts, VOCABULARY_SIZE) if files.has_weights or texts else None
            num_rows = VOCABULARY_SIZE if tokenizer is None else tokenizer.get_vocab_size()
            table = torch.empty(num_rows, DIMENSION, device=files.device, dtype=files.dtype)
            table.normal_(std=DIMENSION**-0.5)
        else:
            paths = module_paths(read_modules(files), files.name, kinds=(KIND, "Dense", "Normalize"), once=(KIND,))
            prefix = f"{paths[KIND][0]}/".removeprefix("./").removeprefix("/")
            tokenizer_file, weights = files.read(prefix + TOKENIZER_FILE), files.read(prefix + WEIGHTS_FILE)
            if tokenizer_file is None or weights is None:
                missing = TOKENIZER_FILE if tokenizer_file is None else WEIGHTS_FILE
                raise ConfigError(f"{files.name}: its {KIND} has no {prefix}{missing}")
            table = _table(load_tensors(weights), weights).to(device=files.device, dtype=files.dtype)
            general = files.read_json(GENERAL_FILE)
            try:
                tokenizer = Tokenizer.from_str(read_bytes(tokenizer_file).decode())
            except Exception as error:  # the library's only class
                raise broken(tokenizer_file, first_line(error)) from error
            last = max(tokenizer.get_vocab().values(), default=0)
            if last >= len(table):
                raise broken(weights, f"it has {len(table):,} rows, and {TOKENIZER_FILE} a token {last:,}")
            dense = [load_dense(files, path).to(device=files.device, dtype=files.dtype) for path in paths["Dense"]]
            prompts = read_prompts(general, files.name)
            normalize = bool(paths["Normalize"]) or is_cosine(general, files.name)
            truncate_dim = read_truncation(general, files.name, normalized=bool(paths["Normalize"]))
        asked: dict[Side, str | None] = {"query": keys.query_prompt, "document": keys.document_prompt}
        prompts |= {side: prompt for side, prompt in asked.items() if prompt is not None}
        if tokenizer is not None:
            tokenizer.no_padding()
            if keys.max_seq_length != "auto":
                tokenizer.enable_truncation(keys.max_seq_length)
        return cls(
            files.name,
            tokenizer=tokenizer,
            table=table,
            dense=dense,
            prompts=prompts,
            normalize=normalize,
            truncate_dim=truncate_dim,
        )

    def featurize(self, items: Sequence[Item], side: Side) -> Features:
        """Tokenize texts behind their side's prompt; a text without any token has the zero vector."""
        assert self.tokenizer is not None
        texts = [self.prompts[side] + text.strip() for text in texts_of(items)]
        encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        ids = Ragged.from_rows([encoding.ids for encoding in encodings])
        num_truncated = sum(bool(encoding.overflowing) for encoding in encodings)
        return Features({"input_ids": ids}, ids.lengths.clip(min=1), num_truncated=num_truncated)

    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:  # noqa: ARG002
        """Pack the rows one after the other: an average needs no padding."""
        ids = features.columns["input_ids"].take(rows)
        return {"input_ids": torch.from_numpy(ids.values).long(), "offsets": torch.from_numpy(ids.offsets[:-1])}

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the average of each row's vectors, through the dense layers, at least float32."""
        x = F.embedding_bag(inputs["input_ids"], self.table.weight, inputs["offsets"], mode="mean")
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        with torch.autocast(x.device.type, enabled=False):
            for layer in self.dense:
                x = layer(x)
            x = x[:, : self.truncate_dim]  # None keeps all
            return F.normalize(x, dim=-1) if self.normalize else x

    def save(self, folder: Path) -> None:
        """Write a folder that sentence-transformers and vembed load."""
        assert self.tokenizer is not None
        folder.mkdir(parents=True, exist_ok=True)
        weights = {"embedding.weight": self.table.weight.detach().cpu().contiguous()}
        safetensors.torch.save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        self.tokenizer.save(str(folder / TOKENIZER_FILE))
        write_modules(
            folder,
            [(KIND, "")],
            self.dense,
            prompts=self.prompts,
            normalize=self.normalize,
            truncate_dim=self.truncate_dim,
        )

    def facts(self) -> dict[str, str]:
        """Return its shape and how texts are read."""
        vocabulary, width = self.table.weight.shape
        return {
            "pooling": "mean of a table of token vectors",
            "table": f"{vocabulary:,} tokens x {width}",
            **dimension_fact(self.dimension, self._width),
            "max_seq_length": "none" if self.max_length is None else str(self.max_length),
            "query_prompt": repr(self.prompts["query"]),
            "document_prompt": repr(self.prompts["document"]),
            "similarity": "cosine" if self.normalize else "dot product",
        }

    def towers(self) -> tuple[Tower, ...]:
        """Return the one tower; dense layers behind the average are its projection."""
        projection = ("dense",) if len(self.dense) else ()
        return (Tower("text", ("table", *projection), projection, behind=projection),)

    def profile_inputs(self) -> tuple[TowerInputs, ...]:
        """Return rows of token ids without a limit."""

        def make() -> dict[str, Tensor]:
            ids = torch.empty(ROWS * SAMPLE_PIECES, dtype=torch.long, device="meta")
            return {"input_ids": ids, "offsets": torch.empty(ROWS, dtype=torch.long, device="meta")}

        return (TowerInputs("text", self.max_length, SAMPLE_PIECES, fixed=False, make=make),)

    def activation_values(self) -> float:
        """Return what a token keeps in values of 4 bytes: its id and its row, of 8 bytes each."""
        return 4.0

    def forms(self) -> Mapping[Form, str]:
        """Return sentence-transformers, which has the same module."""
        return {"sentence-transformers": ""}


def _table(tensors: Mapping[str, Tensor], path: Path) -> Tensor:
    """Return the vectors of all tokens: of sentence-transformers' form, or of model2vec's, which may share and weight.

    Raises:
        ConfigError: The file holds neither.
    """
    table = tensors.get("embedding.weight", tensors.get("embeddings"))
    if table is None:
        raise ConfigError(f"{path} holds neither embedding.weight nor embeddings, but {list(tensors)}")
    # Some of model2vec's tables are rounded to 8 bits.
    if table.ndim != 2 or 0 in table.shape or not (table.is_floating_point() or table.dtype == torch.int8):
        raise broken(path, f"its table is {table.dtype} {tuple(table.shape)}, and must be (tokens, dims) of floats")
    if "embedding.weight" in tensors:
        return table
    # model2vec lets tokens share rows (`mapping`) and keeps their weights apart: here each token gets its own vector.
    mapping, weights = tensors.get("mapping"), tensors.get("weights")
    if mapping is not None:
        is_list = mapping.ndim == 1 and len(mapping) and not mapping.is_floating_point()
        if not is_list or mapping.min() < 0 or mapping.max() >= len(table):
            raise broken(path, f"its mapping leads out of the {len(table):,} rows of its table")
        table = table[mapping.long()]
    if weights is not None:
        if weights.shape != table.shape[:1] or not weights.is_floating_point():
            raise broken(path, f"its weights are {tuple(weights.shape)} for {len(table):,} tokens")
        table = table.to(torch.promote_types(table.dtype, torch.float32)) * weights[:, None]
    return table
