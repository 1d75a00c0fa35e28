"""Keys of what trains: the whole model, a part of it, or adapters beside it."""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from vembed.config.fields import Auto, Count, Name, Positive, Section, key, rule

if TYPE_CHECKING:
    from vembed.config.schema import Config

MOST_LAYERS = 256
"""Of `last_N_layers`: more than any encoder has."""

PARTS = ("all", "projection", "vision", "text", "text+projection", "vision+projection")
"""Of a model, as keys name them."""

WITHOUT_PROJECTION = ("all-projection", "vision-projection", "text-projection")
"""The same less the projection of each tower."""

TRAINABLE = (*PARTS, *WITHOUT_PROJECTION, *(f"last_{n}_layers" for n in range(1, MOST_LAYERS + 1)))
"""What may train when no adapters do."""

WITH_ADAPTERS = {"use_lora": (True, "auto")}


class AdapterKeys(Section):
    """Which weights train: all, a part of them, or small adapters beside frozen ones."""

    trainable: str = key(
        "all",
        "Part of the model that trains; the rest is frozen: no gradient, no optimizer state, no dropout. projection is "
        "what maps a tower to the embedding, in vision-language models to the language model; last_4_layers the last 4 "
        "layers of each tower and what is behind them. text+projection freezes the image tower alone, all-projection "
        "the projections alone.",
        choices=TRAINABLE,
        form=f"{', '.join((*PARTS, *WITHOUT_PROJECTION))}, last_N_layers (N: 1 to {MOST_LAYERS})",
    )
    use_lora: Auto | bool = key(
        "auto",
        "Freeze the model and train low-rank adapters (LoRA); auto is off but for sharded models of 8B and over.",
    )
    lora_r: Count = key(16, "Rank of the adapters.", acts_with=WITH_ADAPTERS)
    lora_alpha: Positive | None = key(
        None,
        "An adapter's output is multiplied by lora_alpha / lora_r; null is twice lora_r, so that a change of the rank "
        "alone leaves the factor, and the learning rate that suits it, as they are.",
        acts_with=WITH_ADAPTERS,
    )
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = key(
        0.0, "Dropout before each adapter.", acts_with=WITH_ADAPTERS
    )
    lora_target_modules: Auto | Annotated[list[Name], Field(min_length=1)] = key(
        "auto",
        "Names of the linear layers that get adapters, such as q_proj; auto is those of every transformer layer.",
        acts_with=WITH_ADAPTERS,
    )
    lora_towers: str = key(
        "all",
        "Towers that get adapters, in their transformer layers; with projection the linear layers of it too, or alone. "
        "The rest is frozen.",
        choices=PARTS,
        acts_with=WITH_ADAPTERS,
    )
    load_in_4bit: bool = key(
        False, "Hold the frozen weights in 4 bits (QLoRA); needs use_lora, a CUDA device and bitsandbytes."
    )


@rule("trainable", "use_lora")
def _one_choice_of_what_trains(config: "Config") -> str | None:
    """`trainable` must be all with `use_lora: true`."""
    if config.use_lora is not True or config.trainable == "all":
        return None
    fix = f"set lora_towers to {config.trainable}" if config.trainable in PARTS else "set trainable to all"
    return (
        f"trainable {config.trainable} trains weights of the model, and use_lora true freezes them all and trains "
        f"adapters; {fix}, or use_lora to false"
    )


@rule("load_in_4bit", "use_lora")
def _four_bits_need_adapters(config: "Config") -> str | None:
    """`load_in_4bit: true` needs `use_lora: true`."""
    if not config.load_in_4bit or config.use_lora is True:
        return None
    return "load_in_4bit freezes the model, as weights of 4 bits can't be trained; set use_lora to true"


@rule("load_in_4bit", "torch_dtype")
def _four_bits_are_no_doubles(config: "Config") -> str | None:
    """`load_in_4bit: true` must not stand with `torch_dtype: float64`."""
    if not config.load_in_4bit or config.torch_dtype != "float64":
        return None
    return (
        "load_in_4bit would undo torch_dtype float64; set torch_dtype to bfloat16 or float32, or load_in_4bit to false"
    )


@rule("load_in_4bit", "use_fsdp")
def _four_bits_are_not_sharded(config: "Config") -> str | None:
    """`load_in_4bit: true` must not stand with `use_fsdp: true`."""
    if not config.load_in_4bit or config.use_fsdp is not True:
        return None
    return (
        "load_in_4bit keeps a whole copy of the model on each device; set use_fsdp to false, or load_in_4bit to false"
    )
