"""Keys of the model: which one, how an item becomes a vector, and which of its weights train."""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, model_validator

from vembed.models.names import COMMIT, PAIR_SIGN
from vembed.registry import BUILTIN_MODELS, ENCODERS
from vembed.section import LARGEST_COUNT, Auto, Count, Name, Positive, Rule, Section, Text, key

MOST_PROJECTION_LAYERS = 8
MOST_LAYERS = 256  # of last_N_layers: more than any encoder has

PARTS = ("all", "projection", "vision", "text", "text+projection", "vision+projection")
WITHOUT_PROJECTION = ("all-projection", "vision-projection", "text-projection")
TRAINABLE = (*PARTS, *WITHOUT_PROJECTION, *(f"last_{n}_layers" for n in range(1, MOST_LAYERS + 1)))

WITH_ADAPTERS = {"use_lora": (True, "auto")}


class ModelKeys(Section):
    """Model, and how it turns a text or a picture into a vector."""

    model_name: Name = key(
        ...,
        "Hub id or local folder of the model, or `builtin:NAME` to train a tiny one from scratch. Leave it out if you "
        "set text_model_name and image_model_name.",
    )
    text_model_name: Name | None = key(
        None, "Text encoder of a model with two towers, beside image_model_name. Both are projected to one space."
    )
    image_model_name: Name | None = key(
        None,
        "Image encoder beside text_model_name. vembed uses only the image tower of a CLIP or SigLIP of Hugging Face.",
    )
    projection_layers: Annotated[int, Field(ge=1, le=MOST_PROJECTION_LAYERS)] = key(
        1, "Linear layers in each projection of composed towers, with a GELU between them."
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
        "Expected family of the model; vembed refuses a model whose files say another one. auto: read the family from "
        "the files. bge (English) and e5 add their prompts if neither the model's files nor its name give any.",
    )
    model_revision: Name | None = key(
        None, "Branch, tag or commit of a hub model. null: the hub's default branch.", load="reads"
    )
    trust_remote_code: bool = key(
        False, "Run Python code from the model's repository. Needs a commit as model_revision.", load="reads"
    )
    allow_pickle: bool = key(
        False,
        "Read pickled weights (with `weights_only`) when the model has no safetensors file.",
        load="reads",
    )
    torch_dtype: Literal["float32", "float64", "bfloat16"] = key(
        "float32",
        "Dtype of the weights and the optimizer state. Adapters use at least float32; without them, bfloat16 weights "
        "lose small updates to rounding. Some models compute their norms in float32 even in float64 (Qwen3, Gemma3).",
    )
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = key(
        "auto", "Attention kernel.", load="reads"
    )
    pooling_method: Literal["auto", "mean", "cls", "last_token", "head", "none"] = key(
        "auto",
        "Pooling of the token vectors into one vector. head: the pooling layer of an image encoder. none: keep one "
        "vector per token (late interaction). auto: as in the model's files.",
        load="vectors",
    )
    projection_dim: Auto | Count = key(
        "auto",
        "Dimension of the shared space (composed towers) or of each vector (late interaction). auto: as in the "
        "model's files. If they give none, late interaction uses 128, and composed towers use the image tower's "
        "dimension.",
        load="vectors",
    )
    topk_tokens: Auto | Count = key(
        "auto",
        "Largest number of vectors per item in late interaction; the longest before normalisation are kept. auto: as "
        "in the model's files, else all.",
        load="vectors",
    )
    pool_factor: Auto | Annotated[float, Field(ge=1)] = key(
        "auto",
        "Merge similar vectors of a document in late interaction, on average this many into one. auto: as in the "
        "model's files, else 1. 1: merge none.",
        load="vectors",
    )
    query_length: Auto | Annotated[int, Field(ge=4, le=LARGEST_COUNT)] = key(
        "auto",
        "Number of tokens per query in late interaction on texts. Longer queries are truncated and counted; "
        "query_expansion fills up shorter ones. auto: as in the model's files, else 32.",
        unit="tokens",
        load="vectors",
    )
    query_expansion: Auto | bool = key(
        "auto",
        "Fill up queries to query_length with mask tokens, which get vectors too, as in ColBERT. auto: as in the "
        "model's files, else true.",
        load="vectors",
    )
    bidirectional: bool = key(
        False,
        "Let each token of a decoder attend to later tokens too. The default pooling becomes the mean; the model's "
        "files and `pooling_method` override it. false: keep attention as in the model's files.",
        load="vectors",
    )
    max_seq_length: Auto | Annotated[int, Field(ge=4, le=LARGEST_COUNT)] = key(
        "auto",
        "Length limit; longer texts are truncated and counted. auto: the model's limit.",
        unit="tokens",
        load="vectors",
    )
    query_prompt: Text | None = key(
        None,
        "Text put before each query. '': none. null: as in the model's files, else the publisher's prompt if the "
        "model's name is known (E5, English BGE, Nomic, Qwen3-Embedding, EmbeddingGemma). The plan shows which one.",
        load="vectors",
    )
    document_prompt: Text | None = key(
        None, "Text put before each document. '' and null: as for query_prompt.", load="vectors"
    )
    pad_token: Name | None = key(None, "Padding token. null: the tokenizer's.", load="vectors")
    image_background: Literal["auto", "white", "black", "none"] = key(
        "auto",
        "Background behind transparent parts of pictures. none: pass pictures on unchanged; the model's own library "
        "drops transparency and converts CMYK its own way. auto: the background of the model's training if its folder "
        "names it, else white.",
        load="vectors",
    )
    image_tokens: Auto | Count = key(
        "auto",
        "Largest number of tokens per picture in a vision-language model. Larger pictures are shrunk and keep their "
        "aspect ratio, except very flat ones. auto: the publisher's limit.",
        unit="tokens",
        load="vectors",
    )
    max_image_size: Count | None = key(
        None,
        "Shrink pictures of a vision-language model that are larger than a square of this side; they keep their "
        "aspect ratio. null: only `image_tokens` limits them.",
        unit="pixels",
        load="vectors",
    )
    freeze_batch_norm: bool = key(
        False,
        "Keep the mean and variance of batch normalisation as in the model's files; scale and shift still train. "
        "Models with batch normalisation need this for gradient caching.",
    )
    gradient_checkpointing: Auto | bool = key(
        "auto",
        "Recompute activations in the backward pass: less memory, more time. auto: on if a step doesn't fit otherwise.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "`text_model_name` and `image_model_name` must be set together; `model_name` may replace one of them.",
            ("text_model_name", "image_model_name", "model_name"),
            lambda config: _wrong_towers(config.text_model_name, config.image_model_name, config.model_name),
        ),
        Rule(
            "`model_revision` must be null with `text_model_name`.",
            ("text_model_name", "model_revision"),
            lambda config: config.text_model_name is not None and config.model_revision is not None,
            "model_revision belongs to one model, but two are named; leave it out, or name local folders of those "
            "commits",
        ),
        Rule(
            "`encoder_mode` must be auto or composed with `text_model_name`.",
            ("encoder_mode", "text_model_name"),
            lambda config: config.text_model_name is not None and config.encoder_mode not in ("auto", "composed"),
            "encoder_mode {encoder_mode} belongs to one model, but two are named; leave encoder_mode out",
        ),
        Rule(
            "`builtin:NAME` must name a built-in model, or one of a plugin, in `model_name` and for towers.",
            ("model_name", "text_model_name", "image_model_name"),
            lambda config: _unknown_builtin(model_names(config)),
        ),
        Rule(
            "`trust_remote_code: true` needs `model_revision` to be a commit of 40 hex digits.",
            ("trust_remote_code", "model_revision"),
            lambda config: config.trust_remote_code and not COMMIT.fullmatch(config.model_revision or ""),
            "trust_remote_code runs the repository's code, so model_revision must pin it to a commit of 40 lower-case "
            "hex digits; copy the commit that you have read from the model's page, or set trust_remote_code to false",
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _name_the_pair(cls, values: Any) -> Any:
        """Let `model_name` stand for the tower without a name, and call a pair by both names."""
        if not isinstance(values, Mapping):
            return values
        text, image, name = (values.get(key) for key in ("text_model_name", "image_model_name", "model_name"))
        if not any(isinstance(tower, str) for tower in (text, image)):
            return values
        text, image = (name if text is None else text), (name if image is None else image)
        if not isinstance(text, str) or not isinstance(image, str):
            # One tower is missing or no text: a rule says so, once model_name is there.
            return {"model_name": text if isinstance(text, str) else image, **values}
        names_a_pair = name in (None, text, image) or (isinstance(name, str) and PAIR_SIGN in name)
        whole = f"{text}{PAIR_SIGN}{image}" if names_a_pair else name
        return {**values, "model_name": whole, "text_model_name": text, "image_model_name": image}


class AdapterKeys(Section):
    """Weights that train: all, a part of them, or small adapters beside frozen ones."""

    trainable: str = key(
        "all",
        "Part of the model that trains. The rest is frozen: no gradient, no optimizer state, no dropout. projection: "
        "the layers that map a tower to the embedding, in vision-language models to the language model. "
        "last_4_layers: the last 4 layers of each tower and everything after them. text+projection: all but the image "
        "tower. all-projection: all but the projections.",
        choices=TRAINABLE,
        form=f"{', '.join((*PARTS, *WITHOUT_PROJECTION))}, last_N_layers (N: 1 to {MOST_LAYERS})",
    )
    use_lora: Auto | bool = key(
        "auto",
        "Freeze the model and train low-rank adapters (LoRA). auto: on only for sharded models of 8B parameters or "
        "more.",
    )
    lora_r: Count = key(16, "Rank of the adapters.", acts_with=WITH_ADAPTERS)
    lora_alpha: Positive | None = key(
        None,
        "Scale of the adapters: their output is multiplied by lora_alpha / lora_r. null: twice lora_r, so a new rank "
        "alone keeps this factor and the learning rate that suits it.",
        acts_with=WITH_ADAPTERS,
    )
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = key(
        0.0, "Dropout before each adapter.", acts_with=WITH_ADAPTERS
    )
    lora_target_modules: Auto | Annotated[list[Name], Field(min_length=1)] = key(
        "auto",
        "Names of the linear layers that get adapters, such as q_proj. auto: the linear layers of every transformer "
        "layer.",
        acts_with=WITH_ADAPTERS,
    )
    lora_towers: str = key(
        "all",
        "Towers whose transformer layers get adapters; the rest is frozen. projection: the projection's linear "
        "layers, alone or with a tower.",
        choices=PARTS,
        acts_with=WITH_ADAPTERS,
    )
    load_in_4bit: bool = key(
        False, "Hold the frozen weights in 4 bits (QLoRA). Needs use_lora, a CUDA device and bitsandbytes."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "`trainable` must be all with `use_lora: true`.",
            ("trainable", "use_lora"),
            lambda config: (
                config.use_lora is True
                and config.trainable != "all"
                and f"trainable {config.trainable} trains the model's weights, but use_lora true freezes them all and "
                "trains adapters; set "
                + (f"lora_towers to {config.trainable}" if config.trainable in PARTS else "trainable to all")
                + ", or use_lora to false"
            ),
        ),
        Rule(
            "`load_in_4bit: true` needs `use_lora: true`.",
            ("load_in_4bit", "use_lora"),
            lambda config: config.load_in_4bit and config.use_lora is not True,
            "load_in_4bit freezes the model, because 4-bit weights can't be trained; set use_lora to true",
        ),
        Rule(
            "`load_in_4bit: true` can't be combined with `torch_dtype: float64`.",
            ("load_in_4bit", "torch_dtype"),
            lambda config: config.load_in_4bit and config.torch_dtype == "float64",
            "load_in_4bit would undo torch_dtype float64; set torch_dtype to bfloat16 or float32, or load_in_4bit to "
            "false",
        ),
        Rule(
            "`load_in_4bit: true` can't be combined with `use_fsdp: true`.",
            ("load_in_4bit", "use_fsdp"),
            lambda config: config.load_in_4bit and config.use_fsdp is True,
            "load_in_4bit keeps a whole copy of the model on each device; set use_fsdp to false, or load_in_4bit to "
            "false",
        ),
    )


Keys = TypeVar("Keys", bound=ModelKeys)


def renamed(keys: Keys, name: str) -> Keys:
    """Return keys with one model in place of all that they name."""
    return keys.model_copy(update={"model_name": name, "text_model_name": None, "image_model_name": None})


def model_names(keys: ModelKeys) -> tuple[str, ...]:
    """Return the models that a configuration names: one, or the text tower and the image tower."""
    if keys.text_model_name is None or keys.image_model_name is None:
        return (keys.model_name,)
    return keys.text_model_name, keys.image_model_name


def _wrong_towers(text: str | None, image: str | None, name: str) -> str:
    if text is None and image is None:
        return ""
    if text is None or image is None:
        missing = "text_model_name" if text is None else "image_model_name"
        return f"a model of two towers needs both names; set {missing}, or only model_name"
    if name == f"{text}{PAIR_SIGN}{image}":
        return ""
    return f"model_name {name} is neither the text tower nor the image tower; leave model_name out"


def _unknown_builtin(names: tuple[str, ...]) -> str:
    for model in names:
        kind, _, name = model.partition(":")
        if kind == "builtin":
            ENCODERS.find(name)  # an installed package may bring it
        known = (*BUILTIN_MODELS, *(entry for entry in ENCODERS.plugins() if ENCODERS.load(entry).builtin == entry))
        if kind == "builtin" and name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            return f"no built-in model {model!r}; did you mean builtin:{nearest}?"
    return ""
