"""Static embeddings: a table with one vector for each token, averaged over a text. No token sees another.

They need no accelerator and encode thousands of texts a second. `builtin:static` starts from scratch with a tokenizer
trained on the data; a folder or hub model of sentence-transformers whose first module is a StaticEmbedding (those of
model2vec included) is loaded as that library runs it, and written back in the same form.

Source: Tulkens and van Dongen, 2024 (Model2Vec); Aarsen, 2025 ("Train 400x faster Static Embedding Models").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import Tokenizer
from torch import Tensor, nn

from vembed.batch import Features, Ragged, texts_of
from vembed.errors import ConfigError
from vembed.models.checked_files import broken, load_tensors, read_bytes
from vembed.models.encoder import NO_PROMPTS, About, Encoder
from vembed.models.files import WEIGHTS_FILE
from vembed.models.formats import (
    Dense,
    is_cosine,
    load_dense,
    module_kinds,
    module_paths,
    read_modules,
    read_prompts,
    write_modules,
)
from vembed.models.from_scratch import train_bpe
from vembed.models.names import is_builtin
from vembed.models.plannable import ROWS, Tower, TowerInputs
from vembed.text import first_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from vembed.batch import Item, Side
    from vembed.models.exportable import Form
    from vembed.models.files import ModelFiles

KIND = "StaticEmbedding"
TOKENIZER_FILE = "tokenizer.json"

VOCABULARY_SIZE = 32_768
"""Of an encoder from scratch; few texts give a smaller one."""

DIMENSION = 256
"""Of an encoder from scratch."""

SAMPLE_TOKENS = 7
"""Tokens of each row in the run that the plan measures."""


class StaticEncoder(Encoder):
    """The encoder.

    Args:
        tokenizer: Cuts texts into tokens, without special ones; None for an encoder that only the plan measures.
        table: Vectors of the tokens, (vocabulary, dimension).
        dense: Layers behind the average.
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
    ) -> None:
        super().__init__()
        self.name = name
        self.tokenizer = tokenizer
        self.table = nn.Embedding.from_pretrained(table, freeze=False)
        self.dense = nn.ModuleList(dense)
        self.normalize = normalize
        self.prompts = {**NO_PROMPTS, **(prompts or {})}
        self.similarity = "cosine" if normalize else "dot"
        self.dimension = int(dense[-1].linear.out_features if dense else table.shape[1])
        truncation = None if tokenizer is None else tokenizer.truncation
        self.max_length = None if truncation is None else int(truncation["max_length"])

    @classmethod
    def recognises(cls, files: ModelFiles) -> bool:
        """Return whether the first module of a sentence-transformers model is a table of tokens."""
        return module_kinds(files)[:1] == (KIND,)

    @classmethod
    def load(cls, files: ModelFiles, texts: Iterable[str] = ()) -> StaticEncoder:
        """Load a model of sentence-transformers, or train a tokenizer and draw a table."""
        keys = files.keys
        parts = _from_scratch(files, texts) if is_builtin(files.name) else _from_folder(files)
        given: dict[Side, str | None] = {"query": keys.query_prompt, "document": keys.document_prompt}
        prompts = {**parts.pop("prompts", {}), **{side: each for side, each in given.items() if each is not None}}
        tokenizer: Tokenizer | None = parts["tokenizer"]
        if tokenizer is not None:
            tokenizer.no_padding()
            if keys.max_seq_length != "auto":
                tokenizer.enable_truncation(keys.max_seq_length)
        return cls(files.name, prompts=prompts, **parts)

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
            return F.normalize(x, dim=-1) if self.normalize else x

    def save(self, folder: Path) -> None:
        """Write a folder that sentence-transformers and vembed load."""
        assert self.tokenizer is not None
        folder.mkdir(parents=True, exist_ok=True)
        weights = {"embedding.weight": self.table.weight.detach().cpu().contiguous()}
        safetensors.torch.save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        self.tokenizer.save(str(folder / TOKENIZER_FILE))
        write_modules(folder, [(KIND, "")], self.dense, prompts=self.prompts, normalize=self.normalize)

    def facts(self) -> dict[str, str]:
        """Return its shape and how texts are read."""
        vocabulary, width = self.table.weight.shape
        return {
            "pooling": "mean of a table of token vectors",
            "table": f"{vocabulary:,} tokens x {width}",
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
            ids = torch.empty(ROWS * SAMPLE_TOKENS, dtype=torch.long, device="meta")
            return {"input_ids": ids, "offsets": torch.empty(ROWS, dtype=torch.long, device="meta")}

        return (TowerInputs("text", self.max_length, SAMPLE_TOKENS, fixed=False, make=make),)

    def activation_values(self) -> float:
        """Return what a token keeps in values of 4 bytes: its id and its row, of 8 bytes each."""
        return 4.0

    def forms(self) -> Mapping[Form, str]:
        """Return sentence-transformers, which has the same module."""
        return {"sentence-transformers": ""}


def _from_scratch(files: ModelFiles, texts: Iterable[str]) -> dict[str, Any]:
    """Train a tokenizer and draw a table (it follows torch's global generator); without texts it is the largest."""
    tokenizer = train_bpe(texts, VOCABULARY_SIZE) if files.has_weights or texts else None
    rows = VOCABULARY_SIZE if tokenizer is None else tokenizer.get_vocab_size()
    table = torch.empty(rows, DIMENSION, device=files.device, dtype=files.dtype).normal_(std=DIMENSION**-0.5)
    return {"tokenizer": tokenizer, "table": table}


def _from_folder(files: ModelFiles) -> dict[str, Any]:
    """Read a model of sentence-transformers.

    Raises:
        ConfigError: A module or a file is missing, or isn't understood.
    """
    paths = module_paths(read_modules(files), files.name, kinds=(KIND, "Dense", "Normalize"), once=(KIND,))
    prefix = f"{paths[KIND][0]}/".removeprefix("./").removeprefix("/")
    found = {file: files.read(prefix + file) for file in (TOKENIZER_FILE, WEIGHTS_FILE)}
    for file, path in found.items():
        if path is None:
            raise ConfigError(f"{files.name}: its {KIND} has no {prefix}{file}")
    weights, tokenizer_file = found[WEIGHTS_FILE], found[TOKENIZER_FILE]
    assert weights is not None
    assert tokenizer_file is not None
    table = _table(load_tensors(weights), weights).to(device=files.device, dtype=files.dtype)
    general = files.read_json("config_sentence_transformers.json")
    try:
        tokenizer = Tokenizer.from_str(read_bytes(tokenizer_file).decode())
    except Exception as error:  # the library's only class
        raise broken(tokenizer_file, first_line(error)) from error
    last = max(tokenizer.get_vocab().values(), default=0)
    if last >= len(table):
        raise broken(weights, f"it has {len(table):,} rows, and {TOKENIZER_FILE} a token {last:,}")
    return {
        "tokenizer": tokenizer,
        "table": table,
        "dense": [load_dense(files, path).to(device=files.device, dtype=files.dtype) for path in paths["Dense"]],
        "prompts": read_prompts(general, files.name),
        "normalize": bool(paths["Normalize"]) or is_cosine(general, files.name),
    }


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
