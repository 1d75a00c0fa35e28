"""Keys of the model."""

import difflib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field, model_validator

from vembed.config.fields import LARGEST_COUNT, Auto, Count, Name, Section, Text, key, rule
from vembed.registry import BUILTIN_MODELS, ENCODERS

if TYPE_CHECKING:
    from vembed.config.schema import Config

PAIR_SIGN = " + "
"""Stands between the names of two towers where both are called by one name."""

MOST_PROJECTION_LAYERS = 8


class ModelKeys(Section):
    """The model and how a text or a picture becomes a vector."""

    model_name: Name = key(
        ...,
        "Hub id or local folder of the model, or `builtin:NAME` to train a tiny one from scratch. Left out where "
        "text_model_name and image_model_name are set.",
    )
    text_model_name: Name | None = key(
        None, "Model that reads texts, where another one reads pictures; both are projected to one space."
    )
    image_model_name: Name | None = key(
        None,
        "Model that reads pictures beside text_model_name: an image encoder, or a CLIP or SigLIP of Hugging Face, "
        "whose image tower is taken.",
    )
    projection_layers: Annotated[int, Field(ge=1, le=MOST_PROJECTION_LAYERS)] = key(
        1, "Linear layers of each projection of composed towers; between two stands a GELU."
    )
    encoder_mode: Literal[
        "auto",
        "clip",
        "siglip",
        "vit",
        "dino",
        "dinov2",
        "dinov3",
        "mae",
        "bert",
        "bge",
        "e5",
        "qwen",
        "qwen-vl",
        "llava",
        "composed",
    ] = key(
        "auto",
        "Family that the model must be of; one whose files say another family is refused. auto takes what they say. "
        "bge (English) and e5 bring their prompts where neither the model's files nor its name do.",
    )
    model_revision: Name | None = key(None, "Branch, tag or commit of a hub model; null is the hub's default branch.")
    trust_remote_code: bool = key(False, "Run Python code that the model's repository holds; needs a pinned commit.")
    allow_pickle: bool = key(
        False, "Read pickled weights (with `weights_only`) when the model has no safetensors file."
    )
    torch_dtype: Literal["float32", "float64", "bfloat16"] = key(
        "float32",
        "Dtype of the weights and of the optimizer state. Adapters are float32 at least; without them bfloat16 weights "
        "lose small updates to rounding. Some models compute their norms in float32 even in float64 (Qwen3, Gemma3).",
    )
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = key("auto", "Attention kernel.")
    pooling_method: Literal["auto", "mean", "cls", "last_token", "head", "none"] = key(
        "auto",
        "How token vectors become one vector; head is the pooling layer of a picture encoder; none keeps a vector of "
        "each token (late interaction); auto is what the model's own files say.",
    )
    projection_dim: Auto | Count = key(
        "auto",
        "Dimension of the shared space (composed towers), or of each vector (late interaction). auto is that of the "
        "model's own files; where they have none, late interaction takes 128, and composed towers that of the image "
        "tower.",
    )
    topk_tokens: Auto | Count = key(
        "auto",
        "Most vectors that an item keeps in late interaction: those that are longest before they get unit length. auto "
        "is what the model's own files say, else all.",
    )
    pool_factor: Auto | Annotated[float, Field(ge=1)] = key(
        "auto",
        "Late interaction merges the vectors of a document that are near each other, until one stands for so many. "
        "auto is what the model's own files say, else 1, which merges none.",
    )
    query_length: Auto | Annotated[int, Field(ge=4, le=LARGEST_COUNT)] = key(
        "auto",
        "Tokens of a query in late interaction on texts: longer ones are truncated and counted, shorter ones filled up "
        "(query_expansion). auto is what the model's own files say, else 32.",
        unit="tokens",
    )
    query_expansion: Auto | bool = key(
        "auto",
        "Fill queries up to query_length with mask tokens that give vectors too, as ColBERT does. auto is what the "
        "model's own files say, else true.",
    )
    bidirectional: bool = key(
        False,
        "Let each token of a decoder see those behind it too. Its tokens are then averaged where neither its files nor "
        "`pooling_method` name another pooling. false leaves attention as the model's files have it.",
    )
    max_seq_length: Auto | Annotated[int, Field(ge=4, le=LARGEST_COUNT)] = key(
        "auto", "Longer texts are truncated and counted; auto is the model's own limit.", unit="tokens"
    )
    query_prompt: Text | None = key(
        None,
        "Text put before each query; '' is none. null is what the model's files say, else what its publisher asks for "
        "where the name says enough (E5, English BGE, Nomic, Qwen3-Embedding, EmbeddingGemma); the plan says which.",
    )
    document_prompt: Text | None = key(None, "Text put before each document; null and '' are as for queries.")
    pad_token: Name | None = key(None, "Padding token; null is the tokenizer's own.")
    image_background: Literal["auto", "white", "black", "none"] = key(
        "auto",
        "What stands behind transparent parts of pictures. none gives pictures to the model's own library as they are, "
        "which drops transparency and converts CMYK its own way. auto is what the model's folder says it was trained "
        "with, else white.",
    )
    image_tokens: Auto | Count = key(
        "auto",
        "Most tokens of a picture of a vision-language model; larger pictures are shrunk in their shape, very flat "
        "ones out of it. auto is what the model's publisher uses.",
        unit="tokens",
    )
    max_image_size: Count | None = key(
        None,
        "A picture of a vision-language model that is larger than a square of this side is shrunk in its shape; null "
        "leaves the limit to `image_tokens`.",
        unit="pixels",
    )
    freeze_batch_norm: bool = key(
        False,
        "Keep the mean and variance of each batch normalisation as the model's files have them; its scale and shift "
        "train like other weights. Such models need it for gradient caching.",
    )
    gradient_checkpointing: Auto | bool = key(
        "auto",
        "Recompute activations in the backward pass: less memory, more time; auto does where a step wouldn't fit "
        "without.",
    )

    @model_validator(mode="before")
    @classmethod
    def _name_the_pair(cls, values: Any) -> Any:
        """Let model_name stand for the tower that has no name, and call a pair by both names."""
        if not isinstance(values, Mapping):
            return values
        text, image, name = (values.get(each) for each in ("text_model_name", "image_model_name", "model_name"))
        if not any(isinstance(each, str) for each in (text, image)):
            return values
        text, image = (name if text is None else text), (name if image is None else image)
        if not isinstance(text, str) or not isinstance(image, str):
            return {"model_name": text if isinstance(text, str) else image, **values}  # a rule says what is missing
        is_pair = name in (None, text, image) or (isinstance(name, str) and PAIR_SIGN in name)
        own = f"{text}{PAIR_SIGN}{image}" if is_pair else name
        return {**values, "model_name": own, "text_model_name": text, "image_model_name": image}


Keys = TypeVar("Keys", bound=ModelKeys)


def renamed(keys: Keys, name: str) -> Keys:
    """Return keys with one model in the place of all that they name."""
    return keys.model_copy(update={"model_name": name, "text_model_name": None, "image_model_name": None})


def model_names(keys: ModelKeys) -> tuple[str, ...]:
    """Return the models that a configuration names: one, or that of texts and that of pictures."""
    if keys.text_model_name is None or keys.image_model_name is None:
        return (keys.model_name,)
    return keys.text_model_name, keys.image_model_name


@rule("text_model_name", "image_model_name", "model_name")
def _both_towers_are_named(config: "Config") -> str | None:
    """`text_model_name` and `image_model_name` stand together; `model_name` may stand for one of them."""
    text, image = config.text_model_name, config.image_model_name
    if text is None and image is None:
        return None
    if text is None or image is None:
        lacking = "text_model_name" if text is None else "image_model_name"
        return f"a model of two towers needs both names; set {lacking}, or only model_name"
    if config.model_name == f"{text}{PAIR_SIGN}{image}":
        return None
    return f"model_name {config.model_name} is neither the text tower nor the image tower; leave model_name out"


@rule("text_model_name", "model_revision")
def _no_revision_of_two_models(config: "Config") -> str | None:
    """`model_revision` must be null with `text_model_name`."""
    if config.text_model_name is None or config.model_revision is None:
        return None
    return "model_revision is of one model, and two are named; leave it out, or name local folders of those commits"


@rule("encoder_mode", "text_model_name")
def _composed_has_two_models(config: "Config") -> str | None:
    """`encoder_mode` must be auto or composed with `text_model_name`."""
    if config.text_model_name is None or config.encoder_mode in ("auto", "composed"):
        return None
    return f"encoder_mode {config.encoder_mode} is of one model, and two are named; leave encoder_mode out"


@rule("model_name", "text_model_name", "image_model_name")
def _builtin_model_is_known(config: "Config") -> str | None:
    """`model_name: builtin:NAME` names a built-in model, or that of a plugin; so do the names of two towers."""
    for given in model_names(config):
        kind, _, name = given.partition(":")
        known = (*BUILTIN_MODELS, *(each for each in ENCODERS.plugins() if ENCODERS.load(each).builtin == each))
        if kind == "builtin" and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            return f"no built-in model {given!r}; did you mean builtin:{near[0]}?"
    return None


@rule("trust_remote_code", "model_revision")
def _remote_code_is_pinned(config: "Config") -> str | None:
    """`trust_remote_code: true` needs `model_revision` to be a commit of 40 hex digits."""
    if not config.trust_remote_code or re.fullmatch(r"[0-9a-f]{40}", config.model_revision or ""):
        return None
    return (
        "trust_remote_code runs the repository's code, so model_revision must pin it to a commit of 40 lower-case hex "
        "digits; copy the commit that you have read from the model's page, or set trust_remote_code to false"
    )
