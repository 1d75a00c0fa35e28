"""A teacher: a model that doesn't train, asked once about all training items before the first step.

1. `find_teacher` looks at the model without its weights and says in the plan what asking it will cost.
2. `Teacher.answers` encodes every distinct item on all ranks and keeps the vectors on disk by content (`VectorStore`);
   of a cross-encoder it keeps the scores of each row's query with its own documents. What a run before has asked, whole
   or not, is read. The model is gone by the first step.
3. `Answers` give a batch what the teacher says of its items. They depend on the batch alone, so any number of ranks and
   of data workers, and a resumed run, see the same.

A picture that is changed at random is known to the teacher as it is in the data.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf
from typing import TYPE_CHECKING, Protocol, TypeAlias, get_args

import numpy as np
import torch
from torch import nn

from vembed.batch import modality_words, texts_of
from vembed.data.table import ItemColumn
from vembed.errors import ConfigError
from vembed.models.load import load_encoder
from vembed.models.st_library import CrossEncoder
from vembed.plan.cost import PEAK_SHARE
from vembed.text import show_bytes, show_count
from vembed.vectors.encode import Encoded, ItemEncoder, encoding_budget, refuse_several_vectors
from vembed.vectors.items import ItemVectors, StoredSide, distinct_items
from vembed.vectors.provenance import digest, model_key
from vembed.vectors.store import VectorStore

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import ContrastiveBatch, ImageLimits
    from vembed.data.table import RecordTable
    from vembed.distributed.ranks import Ranks
    from vembed.models.encoder import Encoder
    from vembed.models.keys import ModelKeys
    from vembed.plan.devices import Devices
    from vembed.vectors.provenance import Key

ROWS_AT_ONCE = 256
"""Most items of an encoder call."""

PAIRS_AT_ONCE = 4096
"""Pairs that a cross-encoder scores before it looks for a signal."""

SAMPLE_ITEMS = 64
"""Items of each kind that are tokenized for the plan, to know how long they are."""

Answers: TypeAlias = "Callable[[ContrastiveBatch, NDArray[np.int64]], ContrastiveBatch]"
"""Return a batch with the teacher's answers about its items. The second argument is the number of each row's own
documents, which stand one row's behind the other's."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TeacherUse:
    """Answers of a teacher that a run's loss reads."""

    vectors: bool  # of all items
    scores: bool  # of each row's query with its own documents
    score_bounds: tuple[float, float] = (-inf, inf)  # the least and the most that the loss takes as a score


class Teacher(Protocol):
    """A model that is asked once."""

    note: str  # for the plan: what asking it costs
    num_bytes: int  # of what it will have said

    def identity(self, ranks: Ranks, autocast_dtype: torch.dtype | None) -> Key:
        """Return what its answers depend on beside the items: hashes of its weights, settings and preprocessing.

        All ranks call it; the first one reads the weights, which stay until it has answered.

        Raises:
            ConfigError: It can't be loaded.
        """

    def answers(
        self, device: torch.device, ranks: Ranks, autocast_dtype: torch.dtype | None, poll: Callable[[], None]
    ) -> Answers:
        """Return its answers about all training data, from disk where they are still true.

        Args:
            ranks: All of them ask, together.
            poll: Called between encoder calls; may raise.

        Raises:
            ConfigError: It can't be loaded.
            MachineError: The answers can't be written.
            NonFiniteError: One is NaN or infinite.
        """


def find_teacher(
    keys: ModelKeys, records: RecordTable, use: TeacherUse, folder: Path, *, limits: ImageLimits, devices: Devices
) -> Teacher:
    """Return the teacher of a run, not asked yet.

    Args:
        keys: Its name, and how it is loaded.
        records: The training data.
        folder: Where its answers are kept.
        devices: Of the run: they ask it together.

    Raises:
        ConfigError: There is no such model, or it can't say what the loss reads.
        MachineError: It can't be reached.
    """
    if CrossEncoder.is_meant(keys):
        if use.vectors:
            raise ConfigError(
                f"teacher_model_name {keys.model_name} is a cross-encoder, which scores pairs, and the loss reads "
                f"vectors; name an encoder"
            )
        low, high = use.score_bounds
        if (low, high) != (-inf, inf):
            raise ConfigError(
                f"teacher_model_name {keys.model_name} is a cross-encoder, whose scores have no bounds, and the loss "
                f"takes scores from {low:g} to {high:g}; name an encoder, or set loss_type to cosent, kl or margin_mse"
            )
        return PairTeacher(keys, records, folder)
    return EmbeddingTeacher(keys, records, use, folder, limits=limits, devices=devices)


class EmbeddingTeacher:
    """An encoder as a teacher."""

    def __init__(
        self,
        keys: ModelKeys,
        records: RecordTable,
        use: TeacherUse,
        folder: Path,
        *,
        limits: ImageLimits,
        devices: Devices,
    ) -> None:
        self._keys, self._records, self._use, self._folder, self._limits = keys, records, use, folder, limits
        self._items = distinct_items(records)
        self._load = cache(lambda: load_encoder(keys, image_limits=limits))
        self._sides: list[StoredSide] = []  # once it is known what it is
        outline = load_encoder(keys, image_limits=limits, with_weights=False)
        refuse_several_vectors(outline)
        if strange := {items.modality for items in self._items} - outline.modalities:
            raise ConfigError(
                f"teacher_model_name: {outline.name} takes {modality_words(outline.modalities)}, and the training data "
                f"hold {modality_words(strange)}; name a teacher that takes both"
            )
        self.num_bytes = 4 * outline.dimension * sum(map(len, self._items))
        self.note = self._cost(outline, devices)

    def answers(
        self, device: torch.device, ranks: Ranks, autocast_dtype: torch.dtype | None, poll: Callable[[], None]
    ) -> Answers:
        """Return vectors of all items."""

        def encoder() -> ItemEncoder:
            model = self._load().to(device)
            return ItemEncoder(model, encoding_budget(model, device, ROWS_AT_ONCE), device, autocast_dtype, poll, ranks)

        vectors = ItemVectors.get(self._stored(ranks, autocast_dtype), encoder, ranks)
        self._load.cache_clear()  # its memory is the step's from here on
        return partial(_give_vectors, vectors, self._use)

    def identity(self, ranks: Ranks, autocast_dtype: torch.dtype | None) -> Key:
        """Return the key of its vectors, without the side that an item is on."""
        keys = [side.store.key for side in self._stored(ranks, autocast_dtype)]
        of_model = {name: part for name, part in keys[0].items() if name != "side"}
        return {**of_model, "preprocessing": digest([key["preprocessing"] for key in keys])}

    def _stored(self, ranks: Ranks, autocast_dtype: torch.dtype | None) -> list[StoredSide]:
        """Return the items and the stores of their vectors."""
        if not self._sides:
            # The first rank needs the weights to know; the others load it if there is something to encode.
            key = ranks.from_first(lambda: model_key(self._load()))
            key["precision"] = str(autocast_dtype or self._keys.torch_dtype)
            words = {"what": "the teacher's vectors", "advice": "set teacher_cache to a folder on another disk"}
            outline = load_encoder(self._keys, image_limits=self._limits, with_weights=False)
            self._sides = [StoredSide.of(part, outline, key, self._folder, **words) for part in self._items]
        return self._sides

    def _cost(self, outline: Encoder, devices: Devices) -> str:
        num_tokens = 0.0
        # 2 operations for each weight and token, at the share of peak that training reaches.
        for part in self._items:
            num_tokens += len(part) * outline.featurize(part.sample(SAMPLE_ITEMS), part.side).lengths.mean()
        layers = sum(layer.weight.numel() for layer in outline.modules() if isinstance(layer, nn.Linear))
        seconds = 2 * layers * num_tokens / (devices.count * PEAK_SHARE * devices.tflops * 1e12)
        items = " and ".join(part.counted for part in self._items)
        num_weights = sum(weight.numel() for weight in outline.parameters())
        num_bytes = sum(weight.nbytes for weight in outline.parameters())
        return (
            f"the teacher {self._keys.model_name} ({show_count(num_weights)} parameters, "
            f"{show_bytes(num_bytes)} on each device until step 1) encodes {items} once, "
            f"before step 1: {show_count(num_tokens)} tokens, roughly {seconds:.0f} s; {show_bytes(self.num_bytes)} of "
            f"vectors go to {self._folder}"
        )


def _give_vectors(
    vectors: ItemVectors, use: TeacherUse, batch: ContrastiveBatch, documents_Q: NDArray[np.int64]
) -> ContrastiveBatch:
    """Give a batch unit vectors, and cosines as scores of each row's own documents."""
    q_QT = _unit(vectors.take(batch.queries, batch.query_ids_Q, "query"))
    d_DT = _unit(vectors.take(batch.documents, batch.document_ids_D, "document"))
    if use.vectors:
        batch = replace(batch, teacher_Q=q_QT, teacher_D=d_DT)
    if use.scores:
        pairs_P2 = _own_pairs(documents_Q)
        scores_P = np.einsum("pt,pt->p", q_QT[pairs_P2[:, 0]], d_DT[pairs_P2[:, 1]], dtype=np.float64)
        batch = replace(batch, listed_P2=pairs_P2, listed_scores_P=scores_P)
    return batch


class PairTeacher:
    """A cross-encoder as a teacher."""

    def __init__(self, keys: ModelKeys, records: RecordTable, folder: Path) -> None:
        self._keys, self._folder = keys, folder
        self._load = cache(lambda: CrossEncoder(keys))
        self._key: Key = {}  # once it is known
        if {part.modality for part in distinct_items(records)} != {"text"}:
            raise ConfigError(
                f"teacher_model_name: the cross-encoder {keys.model_name} reads texts, and the data hold more"
            )
        # Distinct pairs of a query and one of its row's documents, ids ascending. `ids` and `take` make them `Items` of
        # a store.
        (_, queries), (rows, positives), (more, negatives) = map(records.numbers, get_args(ItemColumn))
        numbers = np.stack([queries[np.concatenate([rows, more])], np.concatenate([positives, negatives])], axis=1)
        self._items = records.items
        self.ids, first_N = np.unique(_pair_ids(*records.items.ids[numbers].T), return_index=True)
        self._numbers_N2 = numbers[first_N]  # of query and document in the table of items
        self.num_bytes = 4 * len(self.ids)
        self.note = (
            f"the teacher {keys.model_name}, a cross-encoder, scores {len(self.ids):,} pairs of a query and "
            f"one of its row's documents once, before step 1; {show_bytes(self.num_bytes)} of scores go to {folder}"
        )

    def answers(
        self, device: torch.device, ranks: Ranks, autocast_dtype: torch.dtype | None, poll: Callable[[], None]
    ) -> Answers:
        """Return the scores of each row's query with its own documents."""
        key = self.identity(ranks, autocast_dtype)

        def score(lists: Iterable[Sequence[tuple[str, str]]]) -> Generator[Encoded]:
            model = self._load().to(device)
            for pairs in lists:
                scores_N1 = np.zeros((len(pairs), 1), dtype=np.float32)
                # In pieces, so that a signal is seen soon. Every rank scores every n-th pair of a piece.
                for start in range(0, len(pairs), PAIRS_AT_ONCE):
                    poll()
                    piece = pairs[start : start + PAIRS_AT_ONCE]
                    shares = [np.arange(rank, len(piece), ranks.world_size) for rank in range(ranks.world_size)]
                    scores_P = model.scores([piece[row] for row in shares[ranks.rank].tolist()], autocast_dtype)
                    gathered = ranks.rows_at_first(scores_P[:, None], [len(share) for share in shares])
                    if ranks.is_first:
                        scores_N1[start + np.concatenate(shares)] = gathered.cpu().numpy()
                yield Encoded(scores_N1, 0)

        words = "the teacher's scores", "set teacher_cache to a folder on another disk"
        scores_N1 = VectorStore(self._folder, "pairs", key, *words, shared=True).get(self, score, ranks)
        self._load.cache_clear()
        return partial(_give_scores, self.ids, scores_N1[:, 0])

    def take(self, rows: NDArray[np.int64]) -> list[tuple[str, str]]:
        """Return the texts of some pairs."""
        queries, documents = (texts_of(self._items.at(numbers)) for numbers in self._numbers_N2[rows].T)
        return list(zip(queries, documents, strict=True))

    def identity(self, ranks: Ranks, autocast_dtype: torch.dtype | None) -> Key:
        """Return the key of its scores."""
        if not self._key:
            precision = str(autocast_dtype or self._keys.torch_dtype)
            self._key = {**ranks.from_first(lambda: self._load().key()), "precision": precision}
        return self._key


def _give_scores(
    ids_N: NDArray[np.int64], scores_N: NDArray[np.float32], batch: ContrastiveBatch, documents_Q: NDArray[np.int64]
) -> ContrastiveBatch:
    """Give a batch the scores of each row's own documents.

    Args:
        ids_N: Identities of all pairs, ascending, which the scores belong to.
    """
    pairs_P2 = _own_pairs(documents_Q)
    # Pairs that two rows share were scored once, so a pair is looked up by its contents.
    ids_P = _pair_ids(batch.query_ids_Q[pairs_P2[:, 0]], batch.document_ids_D[pairs_P2[:, 1]])
    rows_P = np.searchsorted(ids_N, ids_P)
    assert (ids_N[rows_P] == ids_P).all(), "all pairs of the training records were scored"
    return replace(batch, listed_P2=pairs_P2, listed_scores_P=scores_N[rows_P].astype(np.float64))


def _own_pairs(documents_Q: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each row's query with each of its own documents, (P, 2)."""
    rows = np.repeat(np.arange(len(documents_Q)), documents_Q)
    return np.stack([rows, np.arange(len(rows))], axis=1)


def _pair_ids(query_ids_P: NDArray[np.int64], document_ids_P: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the identity of each pair: those of items are hashes already, so that a product and a sum will do."""
    # An odd factor (of Knuth's MMIX generator) permutes the 64 bits, and (q, d) differs from (d, q).
    return query_ids_P * np.int64(6364136223846793005) + document_ids_P


def _unit(vectors_NT: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return vectors of length 1."""
    norms_N1 = np.linalg.norm(vectors_NT, axis=1, keepdims=True)
    unit_NT: NDArray[np.float32] = vectors_NT / np.maximum(norms_N1, np.finfo(np.float32).tiny)
    return unit_NT
