"""What every key promises, from the schema alone: a valid default, bounds, a dump that loads, a reader, a document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from vembed.api.keys import TrainKeys
from vembed.config.load import load_config
from vembed.config.messages import key_schemas
from vembed.config.record import dump_config
from vembed.config.schema import Config, default_of, fields, key_names, rules
from vembed.section import ANY, LARGEST_COUNT, facts_of

REFERENCE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text("utf-8")
SIGNS = {"minimum": -1, "exclusiveMinimum": 0, "maximum": 1, "exclusiveMaximum": 0}
"""Bound in a JSON schema -> the step from it to the nearest whole number that it refuses."""

ZERO_IS_NONE = ("topk_tokens", "max_grad_norm", "save_steps")
"""Keys whose 0 stands for null or auto, as other trainers write it."""


def make(**values: object) -> Config:
    return Config.model_validate({"model_name": "some/model", **values})


def alternatives(name: str) -> list[dict[str, Any]]:
    schema: Any = key_schemas()[name]
    return list(schema.get("anyOf", [schema]))


class KeyContract:
    """Every key of the configuration."""

    @pytest.mark.parametrize("name", key_names())
    def test_its_default_is_valid(self, name: str) -> None:
        if fields()[name].is_required():
            with pytest.raises(ValidationError, match=name):
                Config.model_validate({})
        else:
            assert getattr(make(**{name: default_of(name)}), name) == default_of(name)

    @pytest.mark.parametrize("name", key_names())
    def test_a_value_of_no_type_that_it_takes_is_refused_by_its_name(self, name: str, tmp_path: Path) -> None:
        path = tmp_path / "a.yaml"
        path.write_text(f"model_name: m\n{name}: [{{}}]\n" if name != "model_name" else "model_name: [{}]\n")
        with pytest.raises(Exception, match=rf"{name}") as refused:
            load_config(path)
        assert f"a.yaml:{1 if name == 'model_name' else 2}: {name}" in str(refused.value)

    @pytest.mark.parametrize("name", key_names())
    def test_a_number_beyond_its_bound_is_refused(self, name: str) -> None:
        for member in alternatives(name):
            for bound, step in SIGNS.items():
                if bound not in member:
                    continue
                beyond = member[bound] + (step if member["type"] == "integer" else step * 1e-3)
                if beyond == 0 and name in ZERO_IS_NONE:
                    assert getattr(make(**{name: 0}), name) in (None, "auto")
                    continue
                with pytest.raises(ValidationError, match=name):
                    make(**{name: beyond})

    @pytest.mark.parametrize("name", key_names())
    def test_a_word_of_no_choice_is_refused(self, name: str) -> None:
        members = alternatives(name)
        takes_any_text = any(
            member.get("type") == "string" and not {"enum", "const", "pattern", "choices"} & member.keys()
            for member in members
        )
        if not takes_any_text:
            with pytest.raises(ValidationError, match=name):
                make(**{name: "no-such-word"})

    def test_the_bounds_that_the_tests_above_need_are_there(self) -> None:
        bounded = [name for name in key_names() if any(SIGNS.keys() & member.keys() for member in alternatives(name))]
        counts = [name for name in bounded if any(m.get("maximum") == LARGEST_COUNT for m in alternatives(name))]
        assert len(bounded) > 60
        assert len(counts) > 20
        assert {"batch_size", "learning_rate", "seed", "warmup_ratio"} <= {*bounded}

    @pytest.mark.slow
    def test_all_of_them_survive_a_dump(self, tmp_path: Path) -> None:
        """The defaults, and every choice and bound of every key beside what it acts with."""
        path = tmp_path / "config.yaml"
        configs = [make()]
        for name in key_names():
            beside = {}
            for other, values in facts_of(fields()[name]).get("acts_with", {}).items():
                value = values[0] if tuple(values) != ANY else "x"
                beside[other] = value["minimum"] if isinstance(value, dict) else value
            for member in alternatives(name):
                for value in (*member.get("enum", ()), *[member[key] for key in ("const", "minimum") if key in member]):
                    try:
                        configs.append(make(**beside, **{name: value}))
                    except ValidationError:
                        continue  # a rule wants more beside it: test_config_schema.py has its cases
        assert len(configs) > 180
        for config in configs:
            path.write_text(dump_config(config), "utf-8")
            assert load_config(path).config == config

    @pytest.mark.parametrize("name", key_names())
    def test_it_is_documented(self, name: str) -> None:
        assert f"| [`{name}`](" in REFERENCE
        description = key_schemas()[name]["description"]
        assert description.endswith(".")
        assert "\n" not in description
        assert name == "data" or name in TrainKeys.__annotations__


class TestKeys(KeyContract):
    """The keys of this repository; that each one is read stands in test_config_reference.py."""


def test_every_rule_names_keys() -> None:
    assert all(rule.keys and {*rule.keys} <= {*key_names()} for rule in rules())
