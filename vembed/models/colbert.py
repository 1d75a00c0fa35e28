"""Late interaction on texts: ColBERT on any transformer of the text encoder.

1. A text begins with the marker of its side, [Q] or [D], a token that trains with the rest.
2. Queries are filled up to one length with mask tokens, which give vectors too: they stand for words that the query
   leaves out. Unless the model says otherwise the other tokens don't see them.
3. Each token of a query becomes a vector, and each of a document but punctuation (`TokenHead`).

Source: Khattab & Zaharia, 2020, "ColBERT"; Santhanam et al., 2022, "ColBERTv2"; PyLate and sentence-transformers for
the settings and the folders.
Shape legend: R rows, V vectors of those rows, E their dim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from tokenizers import AddedToken
from torch import Tensor
from typing_extensions import override

from vembed.batch import Features, Ragged
from vembed.errors import ConfigError
from vembed.models.encoder import NO_PROMPTS, About
from vembed.models.late import make_head, refuse_pooling
from vembed.models.late_formats import (
    DOCUMENT_LENGTH,
    LateSpec,
    fits_pylate,
    is_late,
    load_layers,
    read_late,
    turn_to_pylate,
    write_late,
)
from vembed.models.plannable import TowerInputs, token_inputs
from vembed.models.text import TextEncoder
from vembed.models.text_spec import checked_config, decide_spec, family_of, position_limit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from vembed.batch import Item, Side
    from vembed.models.exportable import Form, Recipe
    from vembed.models.formats import TextSpec
    from vembed.models.hub import ModelFiles
    from vembed.models.keys import ModelKeys
    from vembed.models.late import TokenHead
    from vembed.models.late_formats import LateFolder

SEEN = "seen_tokens"
"""Column of features: the tokens at the beginning of each row that the others see, without those that fill it up."""


class ColbertEncoder(TextEncoder):
    """A transformer that gives a vector for each token of a text.

    Args:
        late: Lengths, filling and choice of vectors.
        head: The layers behind the transformer.
    """

    about = About(
        models="ColBERT and other late interaction on texts",
        decides="pooling_method: none, or the files of PyLate or sentence-transformers",
        pooling="none: a vector for each token",
        prompts="as its files say; [Q] and [D] markers",
        trainable="all, text, projection, last_N_layers",
        writes="sentence-transformers; with topk_tokens vembed",
    )
    marker = "config.json"
    reads = TextEncoder.reads | {"projection_dim", "topk_tokens", "pool_factor", "query_length", "query_expansion"}
    projections: ClassVar[tuple[str, ...]] = ("head",)
    multi_vector = True

    def __init__(
        self,
        name: str,
        *,
        backbone: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        spec: TextSpec,
        late: LateSpec,
        head: TokenHead,
        prompts: Mapping[Side, str] = NO_PROMPTS,
    ) -> None:
        reads_padding = late.expand_to > 0 and not late.attends
        super().__init__(
            name, backbone=backbone, tokenizer=tokenizer, spec=spec, prompts=prompts, reads_padding=reads_padding
        )
        self.late = late
        self.head = head
        self.new_modules = ("head",) if head.is_new else ()
        self.dimension = head.dimension
        self.max_length = max(spec.max_length, late.query_length)
        self._filling_id = _filling_id(tokenizer, late)
        self._skipped_ids = _skipped_ids(tokenizer, late)

    @classmethod
    @override
    def recognises(cls, files: ModelFiles) -> bool:
        """Return whether several vectors are asked for, or the model's files say that it gives them."""
        return files.keys.pooling_method == "none" or is_late(files)

    @classmethod
    @override
    def load(cls, files: ModelFiles, texts: Iterable[str] = ()) -> ColbertEncoder:
        """Load a transformer, its head and its settings; a transformer that has none gets the usual ones.

        Raises:
            ConfigError: Its files say something that vembed doesn't follow, or the user something else than they.
        """
        refuse_pooling(files)
        keys = files.keys
        folder = read_late(files)
        subfolder = folder.text.transformer_path if folder.text is not None else ""
        config = checked_config(files, subfolder)
        tokenizer = files.tokenizer(subfolder)
        spec, prompts = decide_spec(keys, folder.text, config, tokenizer, known_by_name=False)
        spec, prompts, late = _decide_late(keys, folder, spec, prompts, position_limit(config))
        if late.expand_to and not late.attends and keys.attn_implementation == "flash_attention_2":
            raise ConfigError(
                f"attn_implementation flash_attention_2 leaves out the tokens that fill queries up, as the others "
                f"don't see them in {keys.model_name}; take sdpa, or set query_expansion: false"
            )
        backbone = files.backbone(subfolder, config, family_of(config).auto_class)
        if late.markers and not files.shape:
            add_markers(backbone, tokenizer, late.markers.values())
        head = make_head(
            files,
            load_layers(files, folder),
            hidden=config.get_text_config().hidden_size,
            saved={"topk_tokens": late.topk_tokens, "pool_factor": late.pool_factor},
            protected=late.protected,
        )
        return ColbertEncoder(
            files.name, backbone=backbone, tokenizer=tokenizer, spec=spec, prompts=prompts, late=late, head=head
        )

    @override
    def with_prompts(self, prompts: Mapping[Side, str]) -> Self:
        return super().with_prompts(marked(prompts, self.late.markers))

    @override
    def longest_text(self, side: Side) -> int:
        return self.late.query_length if side == "query" else self.spec.max_length

    @override
    def featurize(self, items: Sequence[Item], side: Side) -> Features:
        """Tokenize texts, fill queries up, and say which tokens give vectors."""
        features = super().featurize(items, side)
        ids, seen = features.columns["input_ids"], features.lengths
        if side == "query" and self.late.expand_to:
            # All rows at once: each row's ids are copied to its place in an array of the filling token.
            lengths = np.maximum(ids.lengths, self.late.expand_to)
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            values = np.full(int(offsets[-1]), self._filling_id, dtype=ids.values.dtype)
            values[np.repeat(offsets[:-1], ids.lengths) + _positions(ids)] = ids.values
            ids = Ragged(values, offsets)
            seen = ids.lengths if self.late.attends else seen
        counts = np.ones(len(ids.values), dtype=bool)
        if side == "document":
            counts = ~np.isin(ids.values, self._skipped_ids)
            counts[ids.offsets[:-1][_sums(counts, ids) == 0]] = True  # a text of punctuation alone keeps a vector
        counted = Ragged(_positions(ids)[counts], np.concatenate([[0], np.cumsum(_sums(counts, ids))]))
        filled = Features({"input_ids": ids}, ids.lengths, {SEEN: seen}, features.num_truncated)
        return self.head.with_vectors(filled, counted, side)

    @override
    def num_vectors(self, features: Features) -> NDArray[np.int64]:
        return self.head.num_vectors(features)

    @override
    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:
        """Pad rows at the right, with how many tokens of each the others see unless that is all of them."""
        inputs = super().collate(features, rows, width)
        seen, width = features.per_row[SEEN][rows], inputs["input_ids"].shape[1]
        if (seen < width).any():
            inputs["lengths"] = torch.from_numpy(seen.astype(np.int32))
        return inputs | self.head.collate(features, rows, width)

    @override
    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the vectors of all rows, (V, E), of unit length, at least float32."""
        hidden_RTH, _ = self.token_states(inputs)
        vectors_VE: Tensor = self.head(hidden_RTH, inputs)
        return vectors_VE

    @override
    def save(self, folder: Path) -> None:
        """Write a folder that sentence-transformers' MultiVectorEncoder, transformers and vembed load."""
        write_late(self, folder)

    @override
    def facts(self) -> dict[str, str]:
        """Return what becomes of queries and documents."""
        late = self.late
        filled = "" if not late.expand_to else f", filled up to {late.expand_to}"
        seen = " and seen by the others" if late.attends else ""
        fewer = [f"the {late.topk_tokens} longest"] if late.topk_tokens is not None else []
        fewer += [f"one for {late.pool_factor:g} of a document"] if late.pool_factor != 1.0 else []
        skipped = f"{len(self._skipped_ids)} tokens of documents give none"
        return super().facts() | {
            "pooling": f"none: a vector of {self.dimension} values for each token",
            "max_seq_length": f"{self.spec.max_length} of documents, {late.query_length} of queries{filled}{seen}",
            "similarity": "MaxSim: the largest cosine for each vector of the query, added up",
            "vectors": ", ".join([self.head.index_size(self.spec.max_length), skipped, *fewer]),
        }

    @override
    def profile_inputs(self) -> tuple[TowerInputs, ...]:
        """Return rows of token ids with a mask, each of which gives a vector."""
        return (self.head.measured(token_inputs(self.max_length, masked=True)),)

    @override
    def why_not_packed(self, device: str, dtype: torch.dtype) -> str:
        return "the encoder gives several vectors for each row"

    @override
    def why_no_graph(self) -> str:
        return f"{self.name} gives several vectors for each text; a graph gives one"

    @override
    def forms(self) -> Mapping[Form, str]:
        """Return sentence-transformers and PyLate, where they have a place for what decides the vectors."""
        if self.late.topk_tokens is not None:
            return {"vembed": ""}
        lost = f"PyLate's files have no place for what {self.name} does to its texts or vectors"
        several = f"{self.name} gives several vectors for each text: it is a model of sentence-transformers"
        return {"sentence-transformers": "", "pylate": "" if fits_pylate(self) else lost, "transformers": several}

    @override
    def write_form(self, form: Form, folder: Path) -> None:
        """Write a folder of sentence-transformers, or turn it into one of PyLate."""
        self.save(folder)
        if form == "pylate":
            turn_to_pylate(self, folder)

    @override
    def recipe(self) -> Recipe | None:
        return None  # what transformers alone would need is more than a few lines


def _decide_late(
    keys: ModelKeys, folder: LateFolder, spec: TextSpec, prompts: Mapping[Side, str], limit: int | None
) -> tuple[TextSpec, dict[Side, str], LateSpec]:
    """Decide markers, lengths and the choice of vectors: the user's word, else the model's files."""
    late = folder.spec
    origin = {name: file for name, file in spec.origin.items() if name == "max_seq_length"}
    if folder.is_new and keys.max_seq_length == "auto" and spec.max_length > DOCUMENT_LENGTH:
        spec = replace(spec, max_length=DOCUMENT_LENGTH)
        origin["max_seq_length"] = "usual in late interaction"
    expands = bool(late.expand_to) if keys.query_expansion == "auto" else keys.query_expansion
    length = late.query_length or spec.max_length
    if keys.query_length != "auto":
        length = keys.query_length
        late = replace(late, expand_to=length)
    if limit is not None and length > limit:
        raise ConfigError(
            f"query_length {length} is over the {limit} positions that {keys.model_name} was built with; set "
            f"query_length: {limit} or less"
        )
    late = replace(late, query_length=length, expand_to=(late.expand_to or length) if expands else 0)
    if keys.topk_tokens != "auto":
        late = replace(late, topk_tokens=keys.topk_tokens)
    if keys.pool_factor != "auto":
        late = replace(late, pool_factor=keys.pool_factor)
    return replace(spec, origin=origin, truncate_dim=None), marked(prompts, late.markers), late


def marked(prompts: Mapping[Side, str], markers: Mapping[Side, str]) -> dict[Side, str]:
    """Return prompts behind the marker of their side, unless they begin with it."""
    return {
        side: marker + prompt.removeprefix(marker)
        for side, prompt in prompts.items()
        for marker in [markers.get(side, "")]
    }


def add_markers(backbone: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, markers: Iterable[str]) -> None:
    """Let markers be one token each, whatever the tokenizer does to a text.

    A token that the model hasn't yet gets a row of its table: the mean of the others and a little noise, the same in
    every process and run.
    """
    vocabulary = tokenizer.get_vocab()
    # What stands in the vocabulary without the space behind it is that token, such as [unused0].
    tokens = [
        marker.strip() if marker not in vocabulary and marker.strip() in vocabulary else marker for marker in markers
    ]
    added: list[Any] = [
        AddedToken(token, normalized=False, special=True) for token in tokens if tokenizer.tokenize(token) != [token]
    ]
    tokenizer.add_special_tokens({"additional_special_tokens": added}, replace_extra_special_tokens=False)
    table: Any = backbone.get_input_embeddings()
    num_rows = len(table.weight)
    if len(tokenizer) <= num_rows:
        return
    backbone.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    table = backbone.get_input_embeddings()
    weight = table.weight
    if weight.is_meta:
        return
    # Rows like those of the tables' other tokens, so that a marker begins as a word and not as an outlier.
    with torch.no_grad():
        old = weight[:num_rows].float()
        noise = torch.randn(len(weight) - num_rows, old.shape[1], generator=torch.Generator().manual_seed(0))
        weight[num_rows:] = old.mean(dim=0) + old.std(dim=0) * noise


def _filling_id(tokenizer: PreTrainedTokenizerBase, late: LateSpec) -> int:
    """Return the token that fills queries up; that of padding where none does, or nothing is tokenized."""
    if not late.expand_to or not hasattr(tokenizer, "mask_token_id"):
        return int(tokenizer.pad_token_id or 0)
    if late.filling is not None:
        token = tokenizer.convert_tokens_to_ids(late.filling)
    else:
        token = tokenizer.mask_token_id if tokenizer.mask_token_id is not None else tokenizer.eos_token_id
    if not isinstance(token, int):
        raise ConfigError(
            "the tokenizer has neither a mask token nor an end token to fill queries up with; set query_expansion: "
            "false"
        )
    return token


def _skipped_ids(tokenizer: PreTrainedTokenizerBase, late: LateSpec) -> NDArray[np.int64]:
    """Return the ids of tokens that give no vector; a word that is no token of the vocabulary is left out."""
    if not hasattr(tokenizer, "get_vocab"):
        return np.zeros(0, dtype=np.int64)
    vocabulary = tokenizer.get_vocab()
    return np.array([vocabulary[word] for word in late.skipped if word in vocabulary], dtype=np.int64)


def _positions(ids: Ragged) -> NDArray[np.int64]:
    """Return the position of each token in its row."""
    positions: NDArray[np.int64] = np.arange(len(ids.values)) - np.repeat(ids.offsets[:-1], ids.lengths)
    return positions


def _sums(counts: NDArray[np.bool_], ids: Ragged) -> NDArray[np.int64]:
    """Return how many tokens of each row count; no row is empty."""
    sums: NDArray[np.int64] = np.add.reduceat(counts.astype(np.int64), ids.offsets[:-1])
    return sums
