import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vembed.gradcache.chunks import ChunkBudget, plan_chunks

PAIRS = 32_768


@pytest.fixture
def lengths() -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.minimum(256, rng.lognormal(np.log(40), 0.7, 500).astype(np.int64) + 1)


@pytest.mark.parametrize("bucketed", [False, True])
@pytest.mark.parametrize("limits", [(7, 10**9), (10**9, 600), (16, 1024), (1, 1), (10**9, 10**9)])
def test_each_row_is_in_exactly_one_chunk_within_the_budget(
    lengths: np.ndarray, limits: tuple[int, int], bucketed: bool
) -> None:
    budget = ChunkBudget(*limits, bucketed)
    chunks = plan_chunks(lengths, budget)
    own = [chunk.rows[: len(chunk.rows) - chunk.num_spare] for chunk in chunks]
    assert sorted(np.concatenate(own)) == list(range(len(lengths)))
    assert [chunk.num_spare for chunk in chunks[:-1]] == [0] * (len(chunks) - 1)
    for chunk in chunks:
        assert len(chunk.rows) <= budget.rows
        assert chunk.num_spare < len(chunk.rows)
        assert chunk.padded_tokens <= budget.tokens or len(chunk.rows) == 1
        longest = lengths[chunk.rows].max()
        assert longest <= chunk.width
        assert chunk.width == longest if not bucketed else chunk.width < max(1.125 * longest, longest + 256 / 64)


@pytest.mark.parametrize("bucketed", [False, True])
def test_widest_chunk_comes_first(lengths: np.ndarray, bucketed: bool) -> None:
    widths = [chunk.width for chunk in plan_chunks(lengths, ChunkBudget(32, 2048, bucketed))]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > widths[-1]


@pytest.mark.parametrize("count", [32, 64])
def test_sorting_leaves_at_most_five_percent_padding(count: int) -> None:
    lengths = np.minimum(256, np.random.default_rng(0).lognormal(np.log(40), 0.7, 4096).astype(np.int64) + 1)
    chunks = plan_chunks(lengths, ChunkBudget(10**9, int(lengths.sum()) // count))
    assert len(chunks) <= 1.25 * count  # not bought with tiny chunks
    in_data_order = sum(len(part) * part.max() for part in np.array_split(lengths, len(lengths) // 32))
    assert sum(chunk.padded_tokens for chunk in chunks) < 1.05 * lengths.sum()
    assert in_data_order > 2 * lengths.sum()


@pytest.mark.parametrize("bucketed", [False, True])
def test_rows_of_no_tokens_still_have_a_chunk_and_are_not_padded(bucketed: bool) -> None:
    (chunk,) = plan_chunks(np.array([0, 0]), ChunkBudget(8, 8, bucketed))
    assert chunk.width == 1
    assert len(chunk.rows) == 2
    first, last = plan_chunks(np.array([0, 3, 0]), ChunkBudget(1, 80, bucketed))[:2]
    assert (first.width, last.width) == (3, 1)


def text_lengths(rng: np.random.Generator) -> np.ndarray:
    """Tokens of 65,536 texts: lognormal, median 40, at most 256."""
    return np.clip(rng.lognormal(np.log(40), 0.7, 2 * PAIRS), 2, 256).astype(np.int64)


def question_lengths(rng: np.random.Generator) -> np.ndarray:
    """Tokens of 32,768 questions and as many passages."""
    queries = np.clip(rng.lognormal(np.log(12), 0.4, PAIRS), 2, 64)
    return np.concatenate([queries, np.clip(rng.lognormal(np.log(120), 0.6, PAIRS), 2, 256)]).astype(np.int64)


def token_lengths(file: Path, *keys: str) -> np.ndarray:
    """Tokens of real texts, four characters each."""
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    return np.minimum(512, np.array([len(row[key]) // 4 + 2 for row in rows for key in keys]))


def shapes_and_padding(
    draw: Callable[[np.random.Generator], np.ndarray], tokens: int, *, steps: int = 100
) -> tuple[int, float]:
    """Count what an accelerator sees in so many steps: distinct shapes, and padded tokens for each real one."""
    rng = np.random.default_rng(0)
    shapes, padded, real = set(), 0, 0
    for _ in range(steps):
        lengths = draw(rng)
        for chunk in plan_chunks(lengths, ChunkBudget(2**14, tokens, bucketed=True)):
            shapes.add((len(chunk.rows), chunk.width))
            padded += chunk.padded_tokens
        real += lengths.sum()
    return len(shapes), padded / real


@pytest.mark.parametrize(
    ("draw", "tokens"),
    [(text_lengths, 16_384), pytest.param(text_lengths, 131_072, marks=pytest.mark.slow), (question_lengths, 32_768)],
)
def test_a_hundred_large_steps_see_few_shapes_and_little_padding(
    draw: Callable[[np.random.Generator], np.ndarray], tokens: int
) -> None:
    count, padding = shapes_and_padding(draw, tokens)
    assert count <= 40
    assert padding <= 1.06


@pytest.mark.slow
def test_large_steps_of_real_texts_see_few_shapes_and_little_padding(real_data: Path) -> None:
    commands = token_lengths(real_data / "tldr" / "train.jsonl", "query", "positive")
    abstracts = token_lengths(real_data / "scifact" / "corpus.jsonl", "text")
    claims = token_lengths(real_data / "scifact" / "queries.jsonl", "text")

    def scifact(rng: np.random.Generator) -> np.ndarray:
        return np.concatenate([rng.choice(abstracts, PAIRS), rng.choice(claims, PAIRS)])

    for draw in (lambda rng: rng.choice(commands, 2 * PAIRS), scifact):
        count, padding = shapes_and_padding(draw, 32_768, steps=50)
        assert count <= 40
        assert padding <= 1.06


@pytest.mark.parametrize("length", [50, 77, 197])
@pytest.mark.parametrize("tokens", [16_384, 131_072])
def test_rows_of_one_length_are_not_padded_and_have_up_to_three_shapes(length: int, tokens: int) -> None:
    count, padding = shapes_and_padding(lambda _: np.full(PAIRS, length), tokens, steps=2)
    assert count <= 3
    assert padding <= 1.02


def test_a_batch_that_fits_one_call_is_one_call_without_spare_rows() -> None:
    lengths = np.array([9, 17, 100, 3])
    (chunk,) = plan_chunks(lengths, ChunkBudget(4, 4 * 104, bucketed=True))
    assert (chunk.rows.tolist(), chunk.width, chunk.num_spare) == ([2, 1, 0, 3], 104, 0)
    assert len(plan_chunks(lengths, ChunkBudget(4, 4 * 104 - 1, bucketed=True))) > 1


def test_a_budget_is_cut_finer_where_chunks_are_few_but_never_to_calls_that_leave_a_fast_device_idle() -> None:
    lengths = text_lengths(np.random.default_rng(0))[:4096]
    largest = [
        max(chunk.padded_tokens for chunk in plan_chunks(lengths, ChunkBudget(2**14, tokens, bucketed=True)))
        for tokens in (8192, 16_384, 32_768, 131_072)
    ]
    assert [round(tokens / 1024) for tokens in largest] == [8, 16, 16, 32]


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0)])
def test_a_budget_of_nothing_is_refused(numbers: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="positive"):
        ChunkBudget(*numbers)


def test_rows_end_to_end_fill_the_budget_with_nothing_between_them(lengths: np.ndarray) -> None:
    chunks = plan_chunks(lengths, ChunkBudget(10**9, 1000), packed=True)
    assert sorted(np.concatenate([chunk.rows for chunk in chunks])) == list(range(len(lengths)))
    assert sum(chunk.padded_tokens for chunk in chunks) == lengths.sum()
    for chunk, following in itertools.pairwise(chunks):
        assert chunk.padded_tokens == chunk.width == lengths[chunk.rows].sum() <= 1000
        assert chunk.width + lengths[following.rows[0]] > 1000
    assert len(chunks) < len(plan_chunks(lengths, ChunkBudget(10**9, 1000)))


def test_rows_end_to_end_are_no_more_than_the_budget_says_and_a_longer_one_is_alone() -> None:
    lengths = np.array([3, 50, 3, 3, 3])
    found = [(chunk.rows.tolist(), chunk.width) for chunk in plan_chunks(lengths, ChunkBudget(3, 10), packed=True)]
    assert found == [([1], 50), ([0, 2, 3], 9), ([4], 3)]


def test_a_hundred_steps_end_to_end_on_an_accelerator_have_few_shapes_and_next_to_no_padding() -> None:
    rng, shapes, padded, tokens = np.random.default_rng(0), set(), 0, 0
    for _ in range(100):
        lengths = np.minimum(256, rng.lognormal(np.log(60), 0.8, 8192).astype(np.int64) + 1)
        for chunk in plan_chunks(lengths, ChunkBudget(512, 16_384, bucketed=True), packed=True):
            assert chunk.width >= lengths[chunk.rows].sum()
            shapes.add(chunk.width)
            padded += chunk.padded_tokens
        tokens += int(lengths.sum())
    assert len(shapes) <= 40
    assert padded <= 1.02 * tokens
