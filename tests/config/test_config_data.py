"""Keys of the data that depend on the loss: its columns in column_mapping, and what label_kind needs of it."""

from __future__ import annotations

import pytest

from vembed.config.load import load_config
from vembed.data.columns import ExtraColumn
from vembed.errors import ConfigError
from vembed.losses.registry import LossSection
from vembed.registry import LOSSES


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


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["model_name=m", *overrides])
    return str(caught.value)


@pytest.mark.usefixtures("toy_loss")
def test_a_column_may_be_mapped_to_one_of_the_loss_and_to_no_other() -> None:
    config = load_config(None, ["model_name=m", "loss_type=toy", "column_mapping={t: topic, a: query}"]).config
    assert config.column_mapping == {"t": "topic", "a": "query"}
    assert "label, title, weight, topic or null, got 'tpoic'; did you mean topic?" in refusal(
        "column_mapping={t: tpoic}"
    )


def test_a_list_of_dev_sets_is_told_where_further_sets_belong() -> None:
    said = refusal("val_data_path=[a.jsonl, b.jsonl]")
    assert "one set chooses the best checkpoint; name the others in test_data_path, " in said
    assert "or in guard_data, on which the model should lose nothing" in said
    assert load_config(None, ["model_name=m", "guard_data=[a.jsonl, b.jsonl]"]).config.guard_data


def test_without_such_a_loss_the_column_is_unknown() -> None:
    assert "must be query, positive, " in refusal("column_mapping={t: topic}")


def test_our_own_losses_weigh_rows() -> None:
    assert load_config(None, ["model_name=m", "column_mapping={w: weight}"]).config.column_mapping == {"w": "weight"}


@pytest.mark.usefixtures("toy_loss")
@pytest.mark.parametrize("kind", ["pair", "grade"])
def test_scores_need_a_loss_that_takes_listed_pairs(kind: str) -> None:
    message = refusal(f"label_kind={kind}")
    assert f"label_kind {kind} gives pairs a score, and loss_type infonce doesn't take listed pairs; " in message
    assert (
        "; set loss_type to cosent or angle or cosine_mse or margin_mse or kl or toy, or leave the column out with "
        "label_kind: auto and " in message
    )
    assert "column_mapping: {label: null}" in message
    assert load_config(None, ["model_name=m", f"label_kind={kind}", "loss_type=toy"]).config.label_kind == kind


def test_our_own_loss_of_listed_pairs_takes_them_and_a_class_needs_none() -> None:
    assert "set loss_type to cosent or angle or cosine_mse or margin_mse or kl, or leave the column out" in refusal(
        "label_kind=pair"
    )
    assert load_config(None, ["model_name=m", "label_kind=grade", "loss_type=cosent"]).config.label_kind == "grade"
    assert load_config(None, ["model_name=m", "label_kind=class"]).config.label_kind == "class"
