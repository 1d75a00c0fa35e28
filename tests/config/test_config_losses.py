"""Keys that depend on the loss: its columns in column_mapping, what label_kind needs of it, what a teacher is for."""

from typing import Any

import pytest

from vembed.config.load import load_config
from vembed.config.schema import Config
from vembed.data.columns import ExtraColumn
from vembed.errors import ConfigError
from vembed.losses.registry import LossSection
from vembed.registry import LOSSES
from vembed.vectors.keys import teacher_gives_scores


@pytest.fixture
def toy_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register a loss that asks for a column and takes listed pairs."""

    class ToyKeys(LossSection):
        loss = "nowhere:Toy"
        name = "toy"
        columns = (ExtraColumn("topic", "number of its topic"),)
        takes = ("pairs", "positives")

    monkeypatch.setitem(LOSSES._entries, "toy", ToyKeys)
    monkeypatch.setitem(LOSSES._plugins, "toy", "nowhere")


def load(*overrides: str) -> Config:
    return load_config(None, ["model_name=m", *overrides]).config


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return str(caught.value)


@pytest.mark.usefixtures("toy_loss")
def test_a_column_may_be_mapped_to_one_of_the_loss_and_to_no_other() -> None:
    config = load("loss_type=toy", "column_mapping={t: topic, a: query}")
    assert config.column_mapping == {"t": "topic", "a": "query"}
    assert refusal("column_mapping={t: tpoic}").endswith("got 'tpoic'; did you mean topic?")


def test_without_such_a_loss_the_column_is_unknown_and_our_own_weigh_rows() -> None:
    assert "must be query, positive, " in refusal("column_mapping={t: topic}")
    assert load("column_mapping={w: weight}").column_mapping == {"w": "weight"}


def test_a_list_of_dev_sets_is_told_where_further_sets_belong() -> None:
    said = refusal("val_data_path=[a.jsonl, b.jsonl]")
    assert "test_data_path" in said
    assert "guard_data" in said
    assert load("guard_data=[a.jsonl, b.jsonl]").guard_data


@pytest.mark.usefixtures("toy_loss")
@pytest.mark.parametrize("kind", ["pair", "grade"])
def test_scores_need_a_loss_that_takes_listed_pairs(kind: str) -> None:
    message = refusal(f"label_kind={kind}")
    assert "set loss_type to cosent, angle, cosine_mse, margin_mse, kl or toy, or leave" in message
    assert "column_mapping: {label: null}" in message
    for loss in ("toy", "cosent"):
        assert load(f"label_kind={kind}", f"loss_type={loss}").label_kind == kind
    assert load("label_kind=class").label_kind == "class"


@pytest.mark.parametrize(
    ("keys", "gives"),
    [
        ({"loss_type": "margin_mse"}, True),
        ({"loss_type": "kl"}, True),
        ({"loss_type": "cosent"}, True),
        ({"loss_type": "cosent", "false_negative_filter": "teacher"}, False),
        ({"added_losses": {"cosent": 0.1}, "false_negative_filter": "teacher"}, False),
        ({"added_losses": {"margin_mse": 0.1}, "false_negative_filter": "teacher"}, True),
        ({"loss_type": "distillation"}, False),
    ],
)
def test_a_loss_that_learns_from_positives_keeps_to_them_beside_another_use_of_the_teacher(
    keys: dict[str, Any], gives: bool
) -> None:
    assert teacher_gives_scores(Config.model_validate({"model_name": "m", "teacher_model_name": "t", **keys})) == gives
