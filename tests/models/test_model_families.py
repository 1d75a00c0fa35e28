"""A bare transformer becomes an encoder by what its config.json says, and padding never changes a vector."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from kit.text_models import FAMILY_BUILDERS, POOLING, POSITIONS, TEXTS, edit_json, embed, load, write_model

from vembed.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.models.text import TextEncoder

KINDS = tuple(FAMILY_BUILDERS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {kind: write_model(root / kind.replace(" ", "-"), kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_each_family_has_the_pooling_of_its_attention(folders: dict[str, Path], kind: str) -> None:
    encoder = load(folders[kind])
    assert encoder.spec.pooling == (POOLING[kind],)
    assert ("last token" in encoder.describe()["pooling"]) == (POOLING[kind] == "lasttoken")
    assert encoder.dimension == 32
    assert encoder.max_length == POSITIONS


@pytest.mark.parametrize("kind", ["gpt2", "bert", "t5"])
@pytest.mark.parametrize("pooling", ["mean", "last_token"])
def test_an_empty_text_has_a_vector_that_padding_does_not_change(
    folders: dict[str, Path], kind: str, pooling: str
) -> None:
    encoder = load(folders[kind], pooling_method=pooling)
    alone = embed(encoder, [""])[0]
    assert alone.norm() == pytest.approx(1)
    assert torch.allclose(embed(encoder, ["", "sea"])[0], alone, atol=1e-5)


def test_a_width_rounded_up_does_not_pass_the_last_position(folders: dict[str, Path]) -> None:
    encoder = load(folders["bert"], max_seq_length=POSITIONS - 3)
    features = encoder.featurize(["a " * 100, "b"], "query")
    inputs = encoder.collate(features, torch.arange(2).numpy(), POSITIONS + 8)
    assert inputs["input_ids"].shape == (2, POSITIONS - 3)
    assert encoder(inputs).isfinite().all()


def test_the_family_is_read_from_the_config_and_not_from_the_name(tmp_path: Path) -> None:
    decoder = load(write_model(tmp_path / "bert-base", "qwen3"))
    encoder = load(write_model(tmp_path / "qwen3-llama-gpt2", "bert"))
    assert decoder.spec.pooling == ("lasttoken",)
    assert encoder.spec.pooling == ("mean",)


def test_a_decoder_made_bidirectional_is_averaged_and_sees_both_sides(tmp_path: Path) -> None:
    def first_token(encoder: TextEncoder, text: str) -> torch.Tensor:
        ids = torch.tensor([encoder.tokenizer(text)["input_ids"]])
        hidden: torch.Tensor = encoder.backbone(input_ids=ids).last_hidden_state[0, 0]
        return hidden

    folder = write_model(tmp_path / "both", "bidirectional gemma3")
    both = load(folder)
    edit_json(folder / "config.json", use_bidirectional_attention=False)
    causal = load(folder)
    assert (both.spec.pooling, causal.spec.pooling) == (("mean",), ("lasttoken",))
    with torch.no_grad():
        assert torch.equal(first_token(causal, "ab"), first_token(causal, "ac"))
        assert not torch.equal(first_token(both, "ab"), first_token(both, "ac"))


def test_bert_as_a_decoder_is_pooled_at_its_last_token(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "decoder"
    shutil.copytree(folders["bert"], folder)
    edit_json(folder / "config.json", is_decoder=True)
    assert load(folder).spec.pooling == ("lasttoken",)


def test_only_the_encoder_half_of_t5_is_loaded_from_either_form(folders: dict[str, Path], tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config.from_pretrained(folders["t5"], is_encoder_decoder=True)
    whole = T5ForConditionalGeneration(config)
    folder = write_model(tmp_path / "whole", "t5")  # the tokenizer; its weights are replaced
    whole.save_pretrained(folder)
    encoder = load(folder)
    assert not any("decoder" in name for name, _ in encoder.named_parameters())
    ids = encoder.tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = torch.nn.functional.normalize(whole.eval().encoder(input_ids=ids).last_hidden_state.mean(1), dim=-1)
    assert torch.allclose(embed(encoder, [TEXTS[0]]), expected, atol=1e-6)
    encoder.save(tmp_path / "half")
    assert torch.equal(embed(load(tmp_path / "half")), embed(encoder))


def test_an_encoder_decoder_without_a_half_of_its_own_is_refused(tmp_path: Path) -> None:
    from transformers import BartConfig, BartModel

    folder = write_model(tmp_path / "bart", "roberta")
    shape = {f"{half}_{key}": 2 for half in ("encoder", "decoder") for key in ("layers", "attention_heads", "ffn_dim")}
    BartModel(BartConfig(vocab_size=259, d_model=32, max_position_embeddings=POSITIONS, **shape)).save_pretrained(
        folder
    )
    with pytest.raises(ConfigError, match=r"bart.* is an encoder-decoder"):
        load(folder)


def test_rotary_frequencies_keep_their_precision_in_a_narrow_type(folders: dict[str, Path]) -> None:
    encoder = load(folders["qwen3"], dtype=torch.bfloat16)
    frequencies = [buffer for name, buffer in encoder.named_buffers() if name.endswith("inv_freq")]
    assert frequencies
    assert all(frequency.dtype == torch.float32 for frequency in frequencies)
    assert {parameter.dtype for parameter in encoder.parameters()} == {torch.bfloat16}
    assert embed(encoder).dtype == torch.float32
