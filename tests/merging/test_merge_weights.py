"""Mixtures of weights: equal to their formulas, and refused between models that don't belong together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from kit.text_models import FAMILY_BUILDERS
from torch.testing import assert_close

from vembed.errors import ConfigError
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder
from vembed.models.tables import NgramBag, NgramBagConfig
from vembed.plugins.merge.choose import grid, shown_weights
from vembed.plugins.merge.weights import Mixture, mixed

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from vembed.models.encoder import Encoder


def made(seed: int, *, dimension: int = 16, buckets: int = 64) -> NgramBag:
    torch.manual_seed(seed)
    return NgramBag(NgramBagConfig(dimension=dimension, buckets=buckets, max_words=8)).eval()


def pair(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    one, other = torch.randn(2, 5, 7, dtype=torch.float64, generator=generator)
    return one, other


def test_a_linear_mixture_is_the_weighted_mean() -> None:
    one, other = pair()
    assert_close(mixed([(0.3, one), (0.7, other)], "linear"), 0.3 * one + 0.7 * other)


def test_slerp_keeps_the_length_and_divides_the_angle() -> None:
    one, other = (each / each.norm() for each in pair())
    angle = math.acos(float((one * other).sum()))
    found = mixed([(0.25, one), (0.75, other)], "slerp")
    assert float(found.norm()) == pytest.approx(1.0, abs=1e-12)
    assert math.acos(float((one * found).sum())) == pytest.approx(0.75 * angle, abs=1e-9)
    assert math.acos(float((found * other).sum())) == pytest.approx(0.25 * angle, abs=1e-9)


def test_slerp_of_three_takes_them_one_after_the_other() -> None:
    (one, two), (three, _) = pair(0), pair(1)
    first = mixed([(0.2, one), (0.3, two)], "slerp")
    assert_close(mixed([(0.2, one), (0.3, two), (0.5, three)], "slerp"), mixed([(0.5, first), (0.5, three)], "slerp"))


@pytest.mark.parametrize("other", [torch.zeros(4), -torch.ones(4), torch.ones(4) * (1 + 1e-9)])
def test_slerp_without_an_arc_is_a_line(other: Tensor) -> None:
    one = torch.ones(4)
    assert_close(mixed([(0.5, one), (0.5, other)], "slerp"), (one + other) / 2)


@pytest.mark.parametrize("method", ["linear", "slerp"])
def test_weight_one_is_the_model_itself_to_the_bit_and_counters_stay(method: str) -> None:
    models = [made(0), made(1)]
    wanted = [{name: tensor.clone() for name, tensor in each.state_dict().items()} for each in models]
    mixture = Mixture(models, ["a", "b"])
    for place, weights in ((1, (0.0, 1.0)), (0, (1.0, 0.0))):
        mixture.take((0.5, 0.5), "linear")
        mixture.take(weights, "slerp" if method == "slerp" else "linear")
        for name, tensor in mixture.encoder.state_dict().items():
            assert torch.equal(tensor, wanted[place][name])
    assert torch.equal(mixed([(0.5, torch.tensor([3])), (0.5, torch.tensor([5]))], "linear"), torch.tensor([3]))


@pytest.mark.parametrize("differs", ["shape", "query prompt", "pooling"])
def test_models_that_differ_are_refused_by_what_differs(differs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = made(0), made(1, buckets=32 if differs == "shape" else 64)
    if differs == "pooling":
        monkeypatch.setattr(NgramBag, "describe", lambda self: {"pooling": "cls" if self is other else "mean"})
    elif differs == "query prompt":
        prompts = property(lambda self: {"query": "find: " if self is other else "", "document": ""})
        monkeypatch.setattr(NgramBag, "prompts", prompts)
    with pytest.raises(ConfigError, match=rf"a and b.*{differs}"):
        Mixture([one, other], ["a", "b"])


@pytest.mark.parametrize("differs", ["heads", "attention"])
def test_models_of_equal_shapes_that_compute_otherwise_are_refused(differs: str, tmp_path: Path) -> None:
    for name in ("one", "other"):
        torch.manual_seed(0)
        model, tokenizer = FAMILY_BUILDERS["bert" if differs == "heads" else "llama"]()
        if differs == "heads" and name == "other":
            model.config.num_attention_heads *= 2
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)

    def loaded(name: str) -> Encoder:
        reads_ahead = differs == "attention" and name == "other"
        path = str(tmp_path / name)
        return load_encoder(ModelKeys(model_name=path, pooling_method="mean", bidirectional=reads_ahead)).eval()

    Mixture([loaded("one"), loaded("one")], ["a", "a"])
    with pytest.raises(ConfigError, match=r"a and b can't be merged: with equal weights they give other vectors"):
        Mixture([loaded("one"), loaded("other")], ["a", "b"])


def test_the_grid_starts_with_the_first_model_and_holds_every_mixture_once() -> None:
    assert grid(2, 4) == [(1.0, 0.0), (0.75, 0.25), (0.5, 0.5), (0.25, 0.75), (0.0, 1.0)]
    three = grid(3, 4)
    assert three[0] == (1.0, 0.0, 0.0)
    assert len(set(three)) == len(three) == 15
    assert all(sum(weights) == 1.0 for weights in three)
    assert shown_weights(three[1]) == "0.75+0.25+0"
    with pytest.raises(ConfigError, match="--steps 10"):
        grid(4, 20)
