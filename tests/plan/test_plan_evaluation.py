"""Encoder calls of an evaluation: on an accelerator larger than training's, within the memory; on a CPU the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_make_plan import GPU, MINILM, plan, reason

from vembed.plan.chunks import EVALUATION_SECONDS, EVALUATION_SHARE, call_tokens
from vembed.plan.devices import GIB


def test_a_call_is_as_large_as_work_and_memory_ask_for() -> None:
    by_work = EVALUATION_SECONDS * 989e12 / 44e6
    assert call_tokens(1e15, 10_000, 44e6, 989) == int(by_work)
    assert call_tokens(40e9, 10_000, 44e6, 989) == int(EVALUATION_SHARE * 40e9 / 10_000) < by_work
    assert call_tokens(-1.0, 10_000, 44e6, 989) == 1


def test_on_an_accelerator_calls_are_larger_than_those_of_training_and_the_plan_says_so() -> None:
    made = plan(machine=GPU)
    assert made.eval_tokens is not None
    assert made.eval_tokens > made.chunks.tokens
    assert made.eval_rows == made.eval_tokens, "short texts aren't cut by a number of rows"
    assert f"takes at most {made.eval_tokens} tokens" in reason(made, "evaluation: ")
    small = plan(machine=replace(GPU, memory_bytes=8 * GIB))
    assert small.eval_tokens is not None
    assert small.chunks.tokens <= small.eval_tokens < made.eval_tokens


def test_calls_leave_room_for_weights_and_optimizer() -> None:
    large = replace(MINILM, num_parameters=6 * 10**9, num_trainable=6 * 10**9)
    made, full = plan(machine=GPU), plan("use_lora=false", machine=GPU, model=large)
    assert made.eval_tokens is not None
    assert full.eval_tokens is not None
    assert full.eval_tokens < made.eval_tokens


@pytest.mark.parametrize("overrides", [[], ["use_gradient_cache=false"], ["gradient_cache_chunk_tokens=99"]])
def test_on_a_cpu_calls_have_the_tokens_of_training(overrides: list[str]) -> None:
    made = plan(*overrides)
    assert (made.eval_rows, made.eval_tokens) == (256, None)
    assert not any(each.startswith("evaluation: ") for each in made.reasons)


def test_one_call_of_a_whole_batch_is_none_of_an_evaluation() -> None:
    whole, cached = plan("use_gradient_cache=false", machine=GPU), plan(machine=GPU)
    assert whole.eval_tokens == cached.eval_tokens


@pytest.mark.parametrize("machine", [GPU, replace(GPU, device="cpu")])
def test_the_rows_that_the_user_asks_for_stand(machine: object) -> None:
    assert plan("eval_batch_size=7", machine=machine).eval_rows == 7  # type: ignore[arg-type]
