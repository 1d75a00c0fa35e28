"""What a sweep tries: words of `--try`, grids and draws; and what is refused with the house's words."""

from __future__ import annotations

import math

import pytest

from vembed.errors import ConfigError
from vembed.workflows.sweeping.space import Range, corners, drawn, grid, parse_tries


def test_a_grid_has_every_combination_in_order() -> None:
    tried = parse_tries(["learning_rate=1e-5,2e-5", "temperature=0.02,0.05"])
    found = [tuple(choice.values()) for choice in grid(tried)]
    assert found == [("1e-5", "0.02"), ("1e-5", "0.05"), ("2e-5", "0.02"), ("2e-5", "0.05")]


def test_values_with_commas_of_their_own_stay_whole() -> None:
    (tried,) = parse_tries(["mrl_dims=[64,32],[128,64],null"])
    assert tried.values == ("[64,32]", "[128,64]", "null")
    (tried,) = parse_tries(["query_prompt='query, please: ',plain"])
    assert tried.values == ("'query, please: '", "plain")


def test_draws_are_the_same_for_the_same_seed_and_all_different() -> None:
    tried = parse_tries(["learning_rate=1e-6..1e-4", "batch_size=16..64", "temperature=0.02,0.05"])
    found = drawn(tried, 40, seed=3)
    assert found == drawn(tried, 40, seed=3)
    assert found != drawn(tried, 40, seed=4)
    assert len({tuple(choice.values()) for choice in found}) == 40
    assert all(1e-6 <= float(choice["learning_rate"]) <= 1e-4 for choice in found)
    assert all(16 <= int(choice["batch_size"]) <= 64 for choice in found)


def test_a_range_over_decades_is_drawn_by_its_logarithm_and_a_narrow_one_is_not() -> None:
    wide, narrow = parse_tries(["learning_rate=1e-6..1e-4", "temperature=0.02..0.1"])
    assert isinstance(wide.values, Range)
    assert wide.values.is_log
    assert isinstance(narrow.values, Range)
    assert not narrow.values.is_log
    found = [math.log10(float(choice["learning_rate"])) for choice in drawn([wide], 200, seed=0)]
    assert 0.35 < sum(value < -5 for value in found) / len(found) < 0.65


def test_a_range_of_a_key_that_takes_fractions_is_not_drawn_in_whole_numbers() -> None:
    tried = parse_tries(["weight_decay=0..1"])
    assert len(drawn(tried, 8, seed=0)) == 8
    (whole,) = parse_tries(["warmup_steps=0..4"])
    assert isinstance(whole.values, Range)
    assert whole.values.whole


def test_fewer_draws_than_asked_for_are_told(caplog: pytest.LogCaptureFixture) -> None:
    assert len(drawn(parse_tries(["epochs=1..3"]), 8, seed=0)) == 3
    assert "--random 8: there are only 3 different combinations" in caplog.text


def test_fewer_combinations_than_asked_for_are_all_taken() -> None:
    tried = parse_tries(["temperature=0.02,0.05,0.1"])
    assert drawn(tried, 10, seed=0) == grid(tried)


def test_corners_have_every_value_once() -> None:
    tried = parse_tries(["learning_rate=1e-6..1e-4", "temperature=0.02,0.05,0.1"])
    found = list(corners(tried))
    assert [choice["temperature"] for choice in found] == ["0.02", "0.05", "0.1"]
    assert {choice["learning_rate"] for choice in found} == {"1e-06", "0.0001"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["learing_rate=1"], "did you mean learning_rate"),
        (["learning_rate"], "write KEY=VALUE,VALUE"),
        (["=1"], "write KEY=VALUE,VALUE"),
        (["learning_rate=1,,2"], "a value is missing beside a comma"),
        (["learning_rate=1,1"], "listed twice"),
        (["learning_rate=2..1"], "the smaller one first"),
        (["learning_rate=1..1e999"], "the smaller one first"),
        (["learning_rate=e..1"], "a range is two numbers"),
        (["output_dir=a,b"], "--output names the sweep's"),
        (["resume=never"], "give another --output"),
        (["seeds=1"], "--try seed=1,2,3"),
        (["val_data_path=a"], "compared on the same sets"),
        (["test_data_path=a"], "compared on the same sets"),
        (["metric_for_best_model=mrr@10"], "what the trials are compared by"),
        (["lr=1", "learning_rate=2"], "already tried"),
        (["logging_steps=1,2"], "decides nothing about the result"),
        (["cpu_offload=true,false"], "decides nothing about the result"),
    ],
)
def test_words_that_cannot_be_tried_say_what_to_write(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match="--try") as refused:
        parse_tries(words)
    assert told in str(refused.value)


def test_all_wrong_words_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_tries(["learning_rate=1,,2", "nothing=1", "temperature=0.1"])
    assert len(str(refused.value).splitlines()) == 2


def test_a_grid_of_a_range_and_one_too_large_point_to_random() -> None:
    with pytest.raises(ConfigError, match="--random N"):
        grid(parse_tries(["learning_rate=1e-6..1e-4"]))
    values = ",".join(map(str, range(1, 41)))
    with pytest.raises(ConfigError, match="1,600 trials"):
        grid(parse_tries([f"batch_size={values}", f"epochs={values}"]))
