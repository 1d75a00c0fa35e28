import numpy as np
import pytest

from vembed.gradcache.chunking import ChunkBudget, plan_chunks


@pytest.fixture
def lengths() -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.minimum(256, rng.lognormal(np.log(40), 0.7, 500).astype(np.int64) + 1)


@pytest.mark.parametrize(
    "budget", [ChunkBudget(7, 10**9), ChunkBudget(10**9, 600), ChunkBudget(16, 1024, 8), ChunkBudget(1, 1)]
)
def test_each_row_is_in_exactly_one_chunk_within_the_budget(lengths: np.ndarray, budget: ChunkBudget) -> None:
    chunks = plan_chunks(lengths, budget)
    assert sorted(np.concatenate([chunk.rows for chunk in chunks])) == list(range(len(lengths)))
    for chunk in chunks:
        assert len(chunk.rows) <= budget.rows
        assert chunk.padded_tokens <= budget.tokens or len(chunk.rows) == 1
        assert chunk.width % budget.width_multiple == 0
        assert lengths[chunk.rows].max() <= chunk.width < lengths[chunk.rows].max() + budget.width_multiple


def test_widest_chunk_comes_first(lengths: np.ndarray) -> None:
    widths = [chunk.width for chunk in plan_chunks(lengths, ChunkBudget(32, 2048))]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > widths[-1]


def test_sorting_leaves_at_most_five_percent_padding() -> None:
    lengths = np.minimum(256, np.random.default_rng(0).lognormal(np.log(40), 0.7, 4096).astype(np.int64) + 1)
    chunks = plan_chunks(lengths, ChunkBudget(10**9, int(lengths.sum()) // 32))
    in_data_order = sum(len(part) * part.max() for part in np.array_split(lengths, len(lengths) // 32))
    assert sum(chunk.padded_tokens for chunk in chunks) < 1.05 * lengths.sum()
    assert in_data_order > 2 * lengths.sum()


@pytest.mark.parametrize("multiple", [1, 8])
def test_rows_of_no_tokens_still_have_a_chunk_and_are_not_padded(multiple: int) -> None:
    (chunk,) = plan_chunks(np.array([0, 0]), ChunkBudget(8, 8, multiple))
    assert chunk.width == 1
    assert len(chunk.rows) == 2
    first, last = plan_chunks(np.array([0, 3, 0]), ChunkBudget(1, 80, multiple))[:2]
    assert (first.width, last.width) == (-(-3 // multiple) * multiple, 1)


@pytest.mark.parametrize("numbers", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_budget_of_nothing_is_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="positive"):
        ChunkBudget(*numbers)
