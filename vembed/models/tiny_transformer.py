"""A small BERT from scratch, with a tokenizer trained on the data it will see.

It is an ordinary transformers model: what is exported loads anywhere. The tokenizer is a byte-level BPE: no text holds
an unknown token, and the same texts always give the same vocabulary. (The library's WordPiece trainer numbers the
pieces inside of words in the order of a randomly seeded hash table, and breaks ties by those numbers.)
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from vembed.models.encoder import About
from vembed.models.formats import TextSpec
from vembed.models.hub import prepare_backbone, tokenizer_facts
from vembed.models.text import TextEncoder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vembed.models.hub import ModelFiles

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCABULARY_SIZE = 8192
MAX_LENGTH = 128


class TinyTransformer(TextEncoder):
    """A small BERT that starts from scratch; once saved, its folder is that of any text encoder."""

    about = About(
        models="A small BERT, from scratch",
        decides="builtin:tiny-transformer",
        pooling="mean",
        prompts="none",
        trainable="all, last_N_layers",
        writes="sentence-transformers, transformers",
    )
    builtin = "tiny-transformer"
    marker = ""
    modes = MappingProxyType({"bert": frozenset({"bert"})})
    reads = frozenset()

    @classmethod
    def recognises(cls, files: ModelFiles) -> bool:  # noqa: ARG003
        """Return False: it has no folders of its own."""
        return False

    @classmethod
    def load(cls, files: ModelFiles, texts: Iterable[str] = ()) -> TextEncoder:
        """Train a tokenizer on the texts and initialise 4 layers x 256; weights follow torch's global generator."""
        tokenizer: Any = tokenizer_facts(MAX_LENGTH)
        vocabulary_size = VOCABULARY_SIZE
        if files.has_weights:
            bpe = train_bpe(texts, VOCABULARY_SIZE)
            ids = {token: index for index, token in enumerate(SPECIAL_TOKENS)}  # the trainer numbers them first
            bpe.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
            tokenizer = PreTrainedTokenizerFast(
                tokenizer_object=bpe,
                model_max_length=MAX_LENGTH,
                pad_token="[PAD]",
                unk_token="[UNK]",
                cls_token="[CLS]",
                sep_token="[SEP]",
                mask_token="[MASK]",
            )
            vocabulary_size = len(tokenizer)  # few texts give a smaller one
        config = BertConfig(
            vocab_size=vocabulary_size,
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=1024,
            max_position_embeddings=MAX_LENGTH,
            pad_token_id=tokenizer.pad_token_id,
        )
        with files.device:
            backbone: Any = BertModel(config, add_pooling_layer=False)
        if not files.has_weights:
            prepare_backbone(backbone)  # or transformers warns of what no encoder does
        spec = TextSpec(pooling=("mean",), max_length=MAX_LENGTH)
        return TextEncoder(files.name, backbone=backbone, tokenizer=tokenizer, spec=spec).to(files.dtype)


def train_bpe(texts: Iterable[str], vocabulary_size: int, special_tokens: Sequence[str] = SPECIAL_TOKENS) -> Tokenizer:
    """Train a byte-level BPE on texts, lower-cased, with special tokens in front."""
    # All 256 bytes are in the alphabet, so that a text of any script is tokens, whatever it was trained on.
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
