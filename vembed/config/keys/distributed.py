"""Keys of several processes: how many, what each of them holds, how they talk."""

from typing import TYPE_CHECKING, Literal

from vembed.config.fields import Auto, Count, Section, key, rule

if TYPE_CHECKING:
    from vembed.config.schema import Config


WITH_SHARDING = {"use_fsdp": (True, "auto"), "sharding_factor": ("auto", {"minimum": 2})}


class DistributedKeys(Section):
    """Several devices: their number, what is sharded over them, and how they talk."""

    # The strategy, its mode and the number of processes stand in every checkpoint's stamp and are judged there.
    num_processes: Auto | Count = key(
        "auto",
        "Training processes on this machine; auto is one for each accelerator, and one on a machine without.",
        unit="processes",
        on_resume="harmless",
    )
    use_fsdp: Auto | bool = key(
        "auto",
        "Shard the weights, gradients and optimizer state over the devices; auto does where a whole copy doesn't fit.",
        on_resume="harmless",
    )
    sharding_factor: Auto | Count = key(
        "auto",
        "Devices that share one copy of the model: 1 replicates it, the number of all devices shards it fully, a "
        "divisor between shards it in groups that replicate each other.",
        unit="devices",
        on_resume="harmless",
    )
    fsdp_mode: Auto | Literal["fast", "lean", "sharded"] = key(
        "auto",
        "What stays whole on each device during a step. fast: weights and gradients, only the optimizer is sharded; "
        "lean: gradients; sharded: nothing.",
        on_resume="harmless",
        acts_with=WITH_SHARDING,
    )
    cpu_offload: Auto | bool = key(
        "auto",
        "With sharding: keep the shards of weights and optimizer state in the host's memory and update them there; "
        "auto does where nothing else fits.",
        on_resume="harmless",
        acts_with=WITH_SHARDING,
    )
    nccl_timeout: Count = key(
        600,
        "A collective that waits longer than this ends the run and names who is missing; also with other backends.",
        unit="seconds",
        on_resume="harmless",
    )
    ddp_bucket_cap_mb: Count = key(128, "Gradients that one collective of a replicated run adds up.", unit="MiB")
    ddp_broadcast_buffers: bool = key(
        True, "Start every process of a replicated run with the buffers of the first, as with its weights."
    )
    ddp_find_unused_parameters: bool = key(
        False,
        "Known from other trainers and never needed: what a process didn't use counts as zero. true adds a line to the "
        "plan.",
        on_resume="harmless",
    )
    dataloader_pin_memory: bool = key(
        True,
        "Hold what data workers make in page-locked memory, from which an accelerator copies faster; nothing on a CPU.",
        on_resume="harmless",
    )


@rule("sharding_factor", "use_fsdp")
def _sharding_is_on(config: "Config") -> str | None:
    """`sharding_factor` over 1 is refused with `use_fsdp: false`, and 1 with `use_fsdp: true`."""
    factor, sharded = config.sharding_factor, config.use_fsdp
    if factor == "auto" or sharded == "auto" or (factor > 1) == sharded:
        return None
    if sharded:
        return "sharding_factor 1 replicates the model while use_fsdp is true; set sharding_factor to auto or 2 or more"
    return f"sharding_factor {factor} shards the model while use_fsdp is false; set use_fsdp to auto or true"
