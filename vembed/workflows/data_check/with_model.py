"""Findings that need a model: texts that it cuts, and documents that answer a query without a label."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vembed.data.table import BLOCK_ROWS
from vembed.vectors.index import pair_scores
from vembed.vectors.keys import MiningKeys
from vembed.vectors.mining import Miner, MiningTask, shared_model_key, side_vectors
from vembed.workflows.data_check.source import MOST_EXAMPLES, Finding, shown, spread

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import Side
    from vembed.vectors.encode import ItemEncoder
    from vembed.vectors.mining import Mined
    from vembed.workflows.data_check.source import Source

NEAREST = 10
"""Unlabelled documents of a query that are mined; the first is compared with its positives."""


def token_lengths(source: Source, encode: ItemEncoder) -> tuple[dict[str, NDArray[np.int32]], list[Finding]]:
    """Return the tokens of each distinct text by side, prompts included, and findings about texts that are cut."""
    lengths, findings = {}, []
    sides: tuple[tuple[str, Side, NDArray[np.int64]], ...] = (
        ("queries", "query", source.queries),
        ("documents", "document", source.documents),
    )
    for name, side, used in sides:
        numbers, num_cut = used[source.facts.is_text[used]], 0
        parts = [np.zeros(0, np.int32)]  # a side may have no text
        for start in range(0, len(numbers), BLOCK_ROWS):
            features = encode.encoder.featurize(source.table.items.at(numbers[start : start + BLOCK_ROWS]), side)
            parts.append(features.lengths.astype(np.int32))
            num_cut += features.num_truncated
        lengths[name] = np.concatenate(parts)
        if num_cut:
            limit = encode.encoder.longest_text(side)
            longest = numbers[np.argsort(-source.facts.words_I[numbers], kind="stable")[:MOST_EXAMPLES]]
            words = [f"{count:,}" for count in source.facts.words_I[longest].tolist()]
            findings.append(
                Finding(
                    f"cut_{name}",
                    "warning",
                    num_cut,
                    f"{side} longer than the {limit} tokens that the model takes",
                    f"{name} longer than the {limit} tokens that the model takes",
                    "Their ends are cut. Raise max_seq_length if the model allows it, or split them.",
                    ("Row", "Words", "Text"),
                    list(zip(source.places(longest), words, source.shown(longest), strict=True)),
                    len(numbers),
                )
            )
    return lengths, findings


def false_negatives(source: Source, encode: ItemEncoder, folder: Path) -> list[Finding]:
    """Find unlabelled documents, and hard negatives, that the model puts above a query's own positives.

    Cost: every query and document is encoded once, and every query is scored with all documents.

    Args:
        folder: Folder for the vectors.

    Raises:
        VembedError: As `Miner.mine`.
    """
    task = MiningTask.of(source.table)
    nearest = min(NEAREST, len(task.documents))
    keys = MiningKeys(mine_negatives=nearest, mine_range_max=nearest, mine_relative_margin=None)
    mined = Miner(encode, keys, folder).mine(task)
    model = shared_model_key(encode)
    # Mining has stored the vectors: these calls map them, and encode nothing.
    queries_UE, _ = side_vectors(task.queries, "query", encode, model, folder)
    documents_DE, _ = side_vectors(task.documents, "document", encode, model, folder)
    above = np.flatnonzero((mined.rows_Un[:, 0] >= 0) & (mined.scores_Un[:, 0] > mined.positive_U))
    unlabelled = _finding(
        task,
        mined,
        (above, mined.rows_Un[above, 0], mined.scores_Un[above, 0]),
        "probable_false_negatives",
        "query whose positives all score below an unlabelled document",
        "queries whose positives all score below an unlabelled document",
        "As in-batch negatives those push right answers away: try false_negative_filter. A model that knows the field "
        "badly puts wrong documents there too: look at the examples.",
        of=len(task.queries),
    )
    rows, numbers = source.table.numbers("negatives")
    # Hard negatives of the rows are excluded from mining, so their scores are computed here.
    asked, negative = task.query_of_record_N[rows], task.documents.rows_of(source.table.items.ids[numbers])
    of_pair = pair_scores(queries_UE, documents_DE, asked, negative)
    higher = np.flatnonzero(of_pair > mined.positive_U[asked])
    negatives = _finding(
        task,
        mined,
        (asked[higher], negative[higher], of_pair[higher]),
        "negatives_above_positives",
        "hard negative that scores above its positive",
        "hard negatives that score above their positive",
        "Either the model can't tell them apart yet, which is what they are for, or they answer the query. Look at the "
        "examples; vembed mine --replace finds others.",
        of=len(rows),
    )
    return [unlabelled, negatives]


def _finding(
    task: MiningTask,
    mined: Mined,
    pairs_F: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]],
    kind: str,
    one: str,
    many: str,
    advice: str,
    of: int,
) -> Finding:
    """Return a finding about (query, document, score) triples in which the score is above that of the positives."""
    queries_F, documents_F, scores_F = pairs_F
    order = np.argsort(mined.positive_U[queries_F] - scores_F, kind="stable")  # those furthest above come first
    chosen = order[spread(len(order))] if len(order) else order
    examples = [
        (
            shown(task.queries.take(queries_F[[pair]])[0]),
            shown(task.documents.take(mined.positive_rows_U[queries_F[[pair]]])[0]),
            f"{mined.positive_U[queries_F[pair]]:.3f}",
            shown(task.documents.take(documents_F[[pair]])[0]),
            f"{scores_F[pair]:.3f}",
        )
        for pair in chosen.tolist()
    ]
    heads = ("Query", "Its best positive", "Score", "Scores higher", "Score of that")
    return Finding(kind, "warning", len(order), one, many, advice, heads, examples, of)
