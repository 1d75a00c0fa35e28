"""The text encoder: a Hugging Face transformer, pooling, optional dense layers, normalisation.

It follows sentence-transformers' description of a model first, else the model's family. Rows of a chunk are padded at
the right, whatever side the tokenizer pads: bidirectional attention masks the padding, causal attention never sees it,
and absolute positions start at the first real token. Where the plan says so they lie end to end, without padding.

Shape legend: R rows, T tokens, H hidden dim, E embedding dim.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from vembed.batch import Features, Ragged, texts_of
from vembed.models import attention, packing
from vembed.models.encoder import About, Encoder, Recipe
from vembed.models.families import checked_config, family_of, is_causal, is_decoder_type
from vembed.models.packing import PackedRows
from vembed.models.pooling import pool, pool_packed
from vembed.models.probe import token_inputs
from vembed.models.registry import is_builtin
from vembed.models.sentence_transformers_format import (
    load_dense,
    read_sentence_transformers,
    write_sentence_transformers,
)
from vembed.models.text_spec import TextSpec, check_dense, decide_spec, position_offset
from vembed.models.towers import find_tower, layer_values, transformer_depth, transformer_period

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

    from vembed.batch import Item, Side
    from vembed.models.encoder import Form, Similarity
    from vembed.models.files import ModelFiles
    from vembed.models.probe import TowerInputs
    from vembed.models.sentence_transformers_format import Dense
    from vembed.models.towers import Tower

_BUILT_IN = {"pooling": "built in", "max_seq_length": "built in"}
"""Where an encoder from scratch has its decisions from."""


class TextEncoder(Encoder):
    """A transformer for texts.

    Args:
        backbone: The transformer, returning `last_hidden_state`.
        reads_padding: Whether vectors are made of tokens that no other sees.
    """

    about = About(
        models="Transformers for texts: BERT, BGE, E5, GTE, ModernBERT, Nomic, T5, Qwen3-Embedding, Mistral and others",
        decides="what no other class takes",
        pooling="as its files say; else the last token of a decoder, the mean of others",
        prompts="as its files say; else known by name, see below",
        trainable="all, projection, last_N_layers",
        writes="sentence-transformers, and transformers where its folder says all that counts",
    )
    marker = "config.json"
    modes = MappingProxyType(
        {
            "bert": frozenset(
                {"bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "ernie", "albert", "mpnet"}
                | {"deberta", "deberta-v2", "modernbert", "eurobert", "nomic_bert", "gte"}
            ),
            "bge": frozenset({"bert", "xlm-roberta"}),
            "e5": frozenset({"bert", "xlm-roberta", "mistral"}),
            "qwen": frozenset({"qwen2", "qwen3"}),
        }
    )
    reads = frozenset(
        {"attn_implementation", "pooling_method", "max_seq_length", "query_prompt", "document_prompt"}
        | {"pad_token", "model_revision", "load_in_4bit", "bidirectional"}
    )
    projections: ClassVar[tuple[str, ...]] = ("dense",)  # modules behind the transformer

    def __init__(
        self,
        name: str,
        *,
        backbone: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        spec: TextSpec,
        dense: Sequence[Dense] = (),
        reads_padding: bool = False,
    ) -> None:
        super().__init__()
        attention.spare_masks(backbone, reads_padding=reads_padding)
        self.name = name
        self.backbone = backbone
        self.tokenizer = tokenizer
        self.spec = spec
        self.dense = nn.ModuleList(dense)
        self.max_length: int = spec.max_length
        hidden = int(backbone.config.get_text_config().hidden_size)
        self.dimension = dense[-1].linear.out_features if dense else hidden * len(spec.pooling)
        pad_id = tokenizer.pad_token_id
        assert isinstance(pad_id, int)
        self._pad_id = pad_id
        self._prompt_lengths: dict[str, int] = {}

    @classmethod
    def recognises(cls, files: ModelFiles) -> bool:  # noqa: ARG003
        """Return True: what no other class takes is a transformer for texts, by its folder or its hub id."""
        return True

    @classmethod
    def load(cls, files: ModelFiles, texts: Iterable[str] = ()) -> TextEncoder:  # noqa: ARG003
        """Load a transformer and everything around it."""
        described = read_sentence_transformers(files)
        subfolder = described.transformer_path if described is not None else ""
        config = checked_config(files, subfolder)
        tokenizer = files.tokenizer(subfolder)
        backbone = files.backbone(subfolder, config, family_of(config).auto_class)
        spec = decide_spec(files.keys, described, config, tokenizer)
        # The backbone has its type from loading; .to would also round the rotary frequencies, which stay float32.
        dense = [load_dense(files, path).to(files.dtype) for path in (described.dense_paths if described else ())]
        check_dense(dense, backbone, spec, files.name)
        return TextEncoder(files.name, backbone=backbone, tokenizer=tokenizer, spec=spec, dense=dense)

    @property
    def similarity(self) -> Similarity:
        """The dot product where nothing normalises, else the cosine."""
        return "cosine" if self.spec.normalize else "dot"

    @property
    def prompts(self) -> dict[Side, str]:
        """Text that is put before each side's items."""
        return dict(self.spec.prompts)

    def _replace_prompts(self, prompts: dict[Side, str]) -> bool:
        self.spec = replace(self.spec, prompts=prompts)
        return True

    def featurize(self, items: Sequence[Item], side: Side) -> Features:
        """Tokenize texts behind their side's prompt; cut and count those over `max_length`."""
        prompt = self.spec.prompts[side]
        texts = [prompt + text.strip() for text in texts_of(items)]
        if self.spec.lower_case:
            texts = [text.lower() for text in texts]
        encoded = self.tokenizer(
            texts,
            truncation=True,
            max_length=self.longest_text(side),
            padding=False,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        # A tokenizer without special tokens makes nothing of an empty text; a row needs one token to pool.
        ids = Ragged.from_rows([row or [self._pad_id] for row in encoded["input_ids"]])
        num_truncated = count_truncated(encoded, ids.lengths, self.longest_text(side))
        per_row: dict[str, NDArray[np.int64]] = {}
        if not self.spec.include_prompt:
            per_row["prompt_lengths"] = np.full(len(items), self._prompt_length(prompt), dtype=np.int64)
        return Features({"input_ids": ids}, ids.lengths, per_row, num_truncated)

    def longest_text(self, side: Side) -> int:  # noqa: ARG002
        """Return the tokens that texts of a side are cut to."""
        return self.max_length

    def _prompt_length(self, prompt: str) -> int:
        """Count a prompt's tokens, with special tokens at its start but not at its end."""
        if not prompt:
            return 0
        if prompt not in self._prompt_lengths:
            ids = self.tokenizer(prompt.lower() if self.spec.lower_case else prompt)["input_ids"]
            assert isinstance(ids, list)
            ends_special = ids[-1] in self.tokenizer.all_special_ids
            self._prompt_lengths[prompt] = len(ids) - int(ends_special)
        return self._prompt_lengths[prompt]

    def why_not_packed(self, device: str, dtype: torch.dtype) -> str:
        """Say why rows of texts can't lie end to end; empty where they can."""
        if self.multi_vector:
            return "the encoder gives several vectors for each row"
        config = self.backbone.config.get_text_config()
        return packing.why_not_packed(config) or attention.why_not_packed(self.backbone, device, dtype)

    def pack(self) -> None:
        """Lay the rows of each call end to end from now on."""
        self.packs = True
        self.backbone.config.get_text_config()._attn_implementation = attention.NAME

    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:
        """Lay rows end to end, or pad them at the right, never past `max_length`, with lengths unless all are equal."""
        ids = features.columns["input_ids"].take(rows)
        if self.packs:
            inputs = packing.pack(ids, width, self._pad_id)
        else:
            width = min(width, self.max_length)  # a width rounded up could pass the last position embedding
            inputs = {"input_ids": torch.from_numpy(ids.padded(width, self._pad_id))}
            if (ids.lengths < width).any():
                inputs["lengths"] = torch.from_numpy(ids.lengths.astype(np.int32))
        if "prompt_lengths" in features.per_row:
            inputs["prompt_lengths"] = torch.from_numpy(features.per_row["prompt_lengths"][rows].astype(np.int32))
        return inputs

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return embeddings (R, E); everything behind the transformer runs in at least float32."""
        x = self._packed(inputs["input_ids"].long(), inputs) if "rows" in inputs else self._padded(inputs)
        with torch.autocast(x.device.type, enabled=False):
            for layer in self.dense:
                x = layer(x)
            return F.normalize(x, dim=-1) if self.spec.normalize else x

    def token_states(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Run the transformer on padded rows: return hidden states (R, T, H) and which tokens are real (R, T)."""
        ids_RT = inputs["input_ids"].long()
        real_RT = torch.ones_like(ids_RT, dtype=torch.bool)
        if "lengths" in inputs:
            places_T = torch.arange(ids_RT.shape[1], device=ids_RT.device)
            real_RT = places_T < inputs["lengths"][:, None]
        # A decoder that is given no mask looks for packed rows, which it would have to wait for. The mask is one of
        # numbers: some models calculate with it.
        takes_mask = "lengths" in inputs or is_decoder_type(self.backbone.config)
        mask_RT = real_RT.long() if takes_mask else None
        return self.backbone(input_ids=ids_RT, attention_mask=mask_RT).last_hidden_state, real_RT

    def _padded(self, inputs: dict[str, Tensor]) -> Tensor:
        """Run the transformer on padded rows and pool them."""
        hidden_RTH, real_RT = self.token_states(inputs)
        with torch.autocast(hidden_RTH.device.type, enabled=False):
            return pool(hidden_RTH, self._pooled_tokens(real_RT, inputs), self.spec.pooling)

    def _packed(self, ids_1T: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """Run the transformer on rows that lie end to end and pool them."""
        rows = PackedRows.of(inputs)
        config = self.backbone.config.get_text_config()
        offset = position_offset(config)
        hidden_1TH = self.backbone(
            input_ids=ids_1T,
            attention_mask=attention.packed_mask(self.backbone, rows.segment_T),
            position_ids=rows.positions(ids_1T, offset - 1 if offset else None),
            cu_seq_lens_q=rows.starts_S1,
            max_length_q=rows.longest,
        ).last_hidden_state
        with torch.autocast(hidden_1TH.device.type, enabled=False):
            first_R = rows.first_pooled(inputs.get("prompt_lengths"))
            return pool_packed(hidden_1TH[0], rows.starts_S1, first_R, rows.place_T, self.spec.pooling)

    def _pooled_tokens(self, real_RT: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """Return which tokens are pooled, bool (R, T). A text that its prompt fills up is pooled over all of it."""
        if "prompt_lengths" not in inputs:
            return real_RT
        places_T = torch.arange(real_RT.shape[1], device=real_RT.device)
        beyond_RT = real_RT & (places_T >= inputs["prompt_lengths"][:, None])
        return torch.where(beyond_RT.any(dim=1, keepdim=True), beyond_RT, real_RT)

    def save(self, folder: Path) -> None:
        """Write a folder that sentence-transformers, transformers and vembed load."""
        write_sentence_transformers(self, folder)

    def describe(self) -> dict[str, str]:
        """Return pooling, length, prompts and where they were read."""
        config = self.backbone.config.get_text_config()
        both_ways = is_decoder_type(config) and not is_causal(config)
        facts = {
            "pooling": " + ".join(self.spec.pooling),
            "max_seq_length": str(self.max_length),
            "query_prompt": repr(self.spec.prompts["query"]),
            "document_prompt": repr(self.spec.prompts["document"]),
            "similarity": "cosine" if self.spec.normalize else "dot product",
            "attention": attention.attention_name(self.backbone)
            + (", bidirectional" if both_ways else "")
            + (", rows end to end" if self.packs else ""),
        }
        origin = _BUILT_IN if is_builtin(self.name) else self.spec.origin  # also when it was read back from its run
        return {
            key: f"{value} ({origin[key]})" if key in origin else value for key, value in facts.items()
        } | self.training_facts()

    def towers(self) -> tuple[Tower, ...]:
        """Return the one tower; dense layers behind the pooling are its projection."""
        config = self.backbone.config.get_text_config()
        depth, period = transformer_depth(config), transformer_period(config)
        parts, projection = ("backbone", *self.projections), self.projections
        return (find_tower(self, "text", parts=parts, projection=projection, depth=depth, period=period),)

    def adapter_host(self) -> nn.Module:
        """Return the transformer."""
        return self.backbone

    def profile_inputs(self) -> tuple[TowerInputs, ...]:
        """Return rows of token ids with a mask."""
        return (token_inputs(self.max_length, masked=True),)

    def activation_values(self) -> float:
        """Estimate by the number and the width of the layers."""
        config = self.backbone.config.get_text_config()
        heads = getattr(config, "num_attention_heads", 0)  # none where no token attends to others
        return layer_values(config.num_hidden_layers, config.hidden_size, heads, self.spec.max_length)

    def export_forms(self) -> tuple[Form, ...]:
        """Return sentence-transformers, and transformers alone where its folder says all that counts."""
        return ("sentence-transformers",) if self._lost_in_transformers() else ("sentence-transformers", "transformers")

    def _lost_in_transformers(self) -> list[str]:
        """Return what a folder of transformers alone has no place for, in words; nothing where it says it all."""
        spec, usual = self.spec, family_of(self.backbone.config).pooling
        facts = {
            f"{' + '.join(spec.pooling)} pooling (its family's is {usual})": spec.pooling != (usual,),
            "Dense layers": len(self.dense) > 0,
            "prompts": any(spec.prompts.values()),
            "embeddings that aren't of unit length": not spec.normalize,
            "lower-casing": spec.lower_case,
        }
        return [words for words, holds in facts.items() if holds]

    def why_not(self, form: Form) -> str:
        """Say what a folder of transformers would lose, or that the model is one of sentence-transformers."""
        if form != "transformers":
            return super().why_not(form)
        lost = ", ".join(self._lost_in_transformers())
        return f"a folder of transformers has no place for what {self.name} needs: {lost}"

    def write_form(self, form: Form, folder: Path) -> None:
        """Write a folder of sentence-transformers, which is one of transformers too; without its files for the latter.

        The longest text then stands in the tokenizer's settings.
        """
        self.save(folder)
        if form == "sentence-transformers":
            return
        for module in json.loads((folder / "modules.json").read_text("utf-8")):
            if module["path"]:
                shutil.rmtree(folder / module["path"])
        for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
            (folder / name).unlink()
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text("utf-8")) | {"model_max_length": self.max_length}
        path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", "utf-8")

    def why_no_graph(self) -> str:
        """Say why the encoder can't be written as an ONNX graph; empty where it can."""
        if self.multi_vector:
            return f"{self.name} gives several vectors for each text; a graph gives one"
        if not self.spec.include_prompt:
            return f"{self.name} leaves the tokens of its prompt out of the pooling, which a graph can't know"
        return ""

    def graph(self) -> nn.Module:
        """Return the transformer with what stands behind it, under torch's own attention."""
        self.backbone.config.get_text_config()._attn_implementation = "sdpa"
        return _TextGraph(self)

    def usage(self) -> Recipe | None:
        """Return how transformers alone gives the vectors; None with dense layers or an unusual pooling."""
        spec = self.spec
        is_plain = len(self.dense) == 0 and spec.include_prompt and not spec.lower_case
        if not is_plain or len(spec.pooling) != 1 or spec.pooling[0] not in ("mean", "cls", "lasttoken"):
            return None
        auto_class = family_of(self.backbone.config).auto_class.__name__
        return Recipe("text", auto_class, spec.pooling[0], {"padding": True, "padding_side": "right"})


class _TextGraph(nn.Module):
    """A text encoder as a function of tensors alone."""

    def __init__(self, encoder: TextEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return token states (R, T, H) and vectors (R, E)."""
        spec = self.encoder.spec
        hidden_RTH = self.encoder.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        x = pool(hidden_RTH, attention_mask.bool(), spec.pooling)
        for layer in self.encoder.dense:
            x = layer(x)
        return hidden_RTH, F.normalize(x, dim=-1) if spec.normalize else x


def count_truncated(encoded: BatchEncoding, lengths: NDArray[np.int64], max_length: int) -> int:
    """Return how many of n texts a tokenizer cut."""
    if encoded.encodings is not None:
        return sum(bool(encoding.overflowing) for encoding in encoded.encodings)
    # A tokenizer in Python doesn't say what it cut: texts of just the full length count too.
    return int((lengths == max_length).sum())
