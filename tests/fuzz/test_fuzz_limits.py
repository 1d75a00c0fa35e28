"""The limits of the other tests of this folder can fail."""

import itertools
import mmap
import time

import fuzz_limits
import pytest
from fuzz_limits import fuzzed, within_limits
from hypothesis import given
from hypothesis import strategies as st


def test_what_takes_too_much_memory_fails_and_the_next_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_limits, "MOST_BYTES", 50 * 10**6)

    def take(num_bytes: int) -> None:  # past the allocator, which may still hold what an earlier test gave back
        with mmap.mmap(-1, num_bytes) as memory:
            for _ in range(num_bytes // 10**6):
                memory.write(bytes(10**6))

    with pytest.raises(AssertionError, match=r"took [67]\d MB"), within_limits():
        take(60 * 10**6)
    with within_limits():
        take(20 * 10**6)


def test_what_takes_too_much_time_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_limits, "MOST_CPU_SECONDS", 0.02)
    with pytest.raises(pytest.fail.Exception, match="still running"), within_limits():
        all(number >= 0 for number in itertools.count())
    monkeypatch.setattr(fuzz_limits, "MOST_SECONDS", 0.02)
    with pytest.raises(pytest.fail.Exception, match="still running"), within_limits():
        time.sleep(60)


def test_examples_come_from_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def examples(seed: str | None) -> list[int]:
        monkeypatch.setenv("VEMBED_FUZZ_EXAMPLES", "120")
        monkeypatch.delenv("VEMBED_FUZZ_SEED", raising=False)
        if seed is not None:
            monkeypatch.setenv("VEMBED_FUZZ_SEED", seed)
        seen: list[int] = []

        @fuzzed(0.5)
        @given(st.integers(0, 10**9))
        def collect(value: int) -> None:
            seen.append(value)

        collect()
        return seen

    assert len(examples(None)) == 4
    assert examples(None) == examples(None)
    assert examples("1") == examples("1") != examples(None)
    assert examples("2") != examples("1")
