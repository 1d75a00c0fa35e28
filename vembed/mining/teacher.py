"""Teachers: a better model's scores of pairs, to tell candidates that answer a query after all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vembed.batch import texts_of
from vembed.errors import MachineError
from vembed.mining.mine import pair_scores, shared_model_key, side_vectors
from vembed.vectors.encode import refuse_several_vectors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.distributed.ranks import Ranks
    from vembed.mining.task import MiningTask
    from vembed.models.cross_encoder import CrossEncoder
    from vembed.vectors.encode import ItemEncoder
    from vembed.vectors.provenance import Key

TEXTS_BLOCK = 4096
"""Pairs of texts that a cross-encoder scores before it looks whether it is to stop."""


@dataclass(frozen=True, eq=False)
class EncoderTeacher:
    """Scores of a model with one vector for each item: their inner product."""

    queries_UE: NDArray[np.float32]
    documents_DE: NDArray[np.float32]
    key: Key  # what its scores are made of

    @classmethod
    def of(cls, encode: ItemEncoder, task: MiningTask, folder: Path) -> EncoderTeacher:
        """Encode everything with the teacher, or read what was encoded before; all ranks must call it."""
        task.require(encode.encoder)
        refuse_several_vectors(encode.encoder)
        model = shared_model_key(encode)
        documents_DE, documents_key = side_vectors(task.documents, "document", encode, model, folder)
        queries_UE, queries_key = side_vectors(task.queries, "query", encode, model, folder)
        return cls(queries_UE, documents_DE, {"queries": queries_key, "documents": documents_key})

    def scores(
        self,
        task: MiningTask,  # noqa: ARG002 - the vectors stand for its items
        queries_P: NDArray[np.int64],
        documents_P: NDArray[np.int64],
    ) -> NDArray[np.float32]:
        """Return a score for each pair of rows."""
        return pair_scores(self.queries_UE, self.documents_DE, queries_P, documents_P)


@dataclass(frozen=True, eq=False)
class CrossEncoderTeacher:
    """Scores of a cross-encoder, which reads query and document together: between 0 and 1, as margins need them."""

    model: CrossEncoder
    poll: Callable[[], None] = lambda: None  # called now and then; may raise to stop

    @classmethod
    def of(
        cls, model: CrossEncoder, task: MiningTask, *, ranks: Ranks, poll: Callable[[], None]
    ) -> CrossEncoderTeacher:
        """Return a teacher of a task.

        Args:
            ranks: The processes that ask it.
            poll: Called now and then where one alone asks; may raise to stop.

        Raises:
            DataError: The data hold more than texts.
        """
        task.require(model)
        if ranks.world_size > 1:  # they have different numbers of pairs, and agree on stopping after each block
            return cls(model)
        return cls(model, poll)

    @property
    def key(self) -> Key:
        """What its scores are made of."""
        return dict(self.model.key())

    def scores(
        self, task: MiningTask, queries_P: NDArray[np.int64], documents_P: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Return a score for each pair of rows.

        Raises:
            MachineError: A score isn't finite.
        """
        found = [np.zeros(0, dtype=np.float32)]
        for start in range(0, len(queries_P), TEXTS_BLOCK):
            self.poll()
            own = slice(start, start + TEXTS_BLOCK)
            queries, documents = (
                texts_of(items.take(rows[own]))
                for items, rows in ((task.queries, queries_P), (task.documents, documents_P))
            )
            logits_P = self.model.scores(list(zip(queries, documents, strict=True)))
            found.append(logits_P.sigmoid().cpu().numpy())
        scores_P = np.concatenate(found)
        if not np.isfinite(scores_P).all():
            raise MachineError(f"{self.model.name} gives scores that aren't finite")
        return scores_P
