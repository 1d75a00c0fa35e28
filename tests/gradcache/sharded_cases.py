"""Encoders to shard, in float64, and steps with them on every rank."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from engine_cases import VOCABULARY, Case, make_case, random_batch, random_features
from test_engine import CPU
from test_engine_losses import make
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import CLIPConfig, CLIPModel

from vembed.batch import Features
from vembed.distributed.fsdp import ShardedEncoder, shard_encoder
from vembed.distributed.ranks import Ranks
from vembed.gradcache.chunks import ChunkBudget, Pool, RowAssignment
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.losses.base import BatchStructure
from vembed.models.open_clip import CausalTexts
from vembed.plan.problem import Way

SIDE = 8

LAYERS: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


class TwoTowers(torch.nn.Module):
    """What two towers share: texts and pictures go through one forward."""

    def collate(self, features: Features, rows: Any, width: int) -> dict[str, torch.Tensor]:
        if "pixels" in features.per_row:
            return {"pixels": torch.from_numpy(features.per_row["pixels"][rows])}
        ids = features.columns["input_ids"].take(rows)
        return {"ids": torch.from_numpy(ids.padded(width, 0)).long()}


class SmallClip(TwoTowers):
    """CLIP of 2 + 2 layers x 16; its own temperature is a frozen scalar."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        text = {**LAYERS, "vocab_size": VOCABULARY, "max_position_embeddings": 40, "bos_token_id": 2, "eos_token_id": 3}
        vision = {**LAYERS, "image_size": SIDE, "patch_size": 4}
        both = {"attention_dropout": dropout, "projection_dim": 8}
        self.model = CLIPModel(
            CLIPConfig(text_config={**text, **both}, vision_config={**vision, **both}, projection_dim=8)
        )
        self.model.logit_scale.requires_grad_(requires_grad=False)

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        if "pixels" in inputs:
            found = self.model.get_image_features(pixel_values=inputs["pixels"])
        else:
            found = self.model.get_text_features(input_ids=inputs["ids"])
        return torch.nn.functional.normalize(found.pooler_output, dim=-1)


class SmallOpenClip(TwoTowers):
    """open_clip's CLIP of 2 + 2 layers x 16, its texts cut to what they need."""

    def __init__(self, dropout: float) -> None:
        import open_clip

        super().__init__()
        assert dropout == 0
        self.model = open_clip.CLIP(
            embed_dim=8,
            vision_cfg={"image_size": SIDE, "layers": 2, "width": 16, "head_width": 8, "patch_size": 4},
            text_cfg={"context_length": 40, "vocab_size": VOCABULARY, "width": 16, "heads": 2, "layers": 2},
        )
        self.model.logit_scale.requires_grad_(requires_grad=False)

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        if "pixels" in inputs:
            found = self.model.encode_image(inputs["pixels"].to(self.model.visual.conv1.weight.dtype))
        else:
            found = CausalTexts("", None).encode(self.model, inputs["ids"])
        return torch.nn.functional.normalize(found, dim=-1)


@dataclass(frozen=True)
class Sharded:
    """One way to run a step.

    Attributes:
        mode: None is replicated.
        assignment: How the rows of the batch are split over two ranks.
        freeze: Parameters whose name holds this are frozen.
        mixed: Mixed precision in bfloat16 over weights of float32.
    """

    mode: Any = "fast"
    encoder: str = "bert"
    factor: int | None = None
    retain: float = 0.0
    dropout: float = 0.0
    chunk_rows: int = 4
    assignment: str = "uneven"
    freeze: str = ""
    checkpointing: bool = False
    replay: bool = True
    steps: int = 1
    mixed: bool = False


def case_of(setting: Sharded) -> Case:
    """Return the batch with an encoder of float64."""
    if setting.encoder in ("bert", "lora"):
        case = make_case(dropout=setting.dropout, negatives=[0, 3, 1, 7, 0, 0, 2, 1, 1])
        case.encoder = case.encoder[0]
        if setting.encoder == "lora":
            from peft import LoraConfig, inject_adapter_in_model

            torch.manual_seed(2)
            config = LoraConfig(r=4, target_modules=["query", "value"], lora_dropout=setting.dropout)
            case.encoder.requires_grad_(requires_grad=False)
            inject_adapter_in_model(config, case.encoder.bert)
            for name, parameter in case.encoder.named_parameters():
                if "lora_B" in name:  # zero at first: the gradient of A would be too
                    torch.nn.init.normal_(parameter, std=0.1)
            case.encoder.double().train()
    else:
        case = _captions(setting)
    if setting.checkpointing:
        bert = case.encoder.bert
        # The oldest transformers that we take know the other name alone.
        enable = getattr(bert, "activation_checkpointing_enable", None) or bert.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    if setting.mixed:
        case.encoder.float()
    for name, parameter in case.encoder.named_parameters():
        if setting.freeze and setting.freeze in name:
            parameter.requires_grad_(requires_grad=False)
    return case


def _captions(setting: Sharded) -> Case:
    """Return texts as queries and pictures as documents."""
    torch.manual_seed(0)
    rng = np.random.default_rng(1)
    batch = random_batch(9, [1] * 9, rng)
    encoder = {"clip": SmallClip, "open_clip": SmallOpenClip}[setting.encoder](setting.dropout).double().train()
    texts = random_features(9, rng)
    pixels = rng.standard_normal((len(batch.documents), 3, SIDE, SIDE))
    pictures = Features({}, np.full(len(pixels), (SIDE // 4) ** 2 + 1), {"pixels": pixels})
    slots = np.arange(9), 9 + np.arange(len(pixels))
    pools = [Pool(encoder, encoder.collate, *part) for part in zip((texts, pictures), slots, strict=True)]
    return Case(encoder, pools, BatchStructure.of(batch))


def assignment_of(case: Case, how: str) -> RowAssignment:
    """Split rows over two ranks; queries and their documents don't stay together."""
    num_queries = case.structure.num_queries
    rows = np.arange(num_queries + case.structure.num_documents)
    first = {
        "even": rows % 2 == 0,
        "uneven": rows % 4 == 1,
        "queries apart": rows < num_queries,
        "nothing": rows < 0,
    }[how]
    return RowAssignment((rows[first], rows[~first]))


def pools_of(case: Case, own: Any, *, spare: bool) -> list[Pool]:
    """Keep a rank's rows of each pool; where it has none, one spare row or no pool at all."""
    pools = []
    for pool in case.pools:
        mine = np.flatnonzero(np.isin(pool.slots, own))
        if len(mine):
            pools.append(replace(pool, features=pool.features.take(mine), slots=pool.slots[mine]))
        elif spare:
            pools.append(replace(pool, features=pool.features.take(np.array([2])), slots=np.array([-1])))
    return pools


def whole_gradients(*modules: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Take the gradients out of modules, whole on every rank, and clear them."""
    found = {}
    for index, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                found[f"{index}.{name}"] = whole.clone()
    return found


def sharded(case: Case, setting: Sharded) -> ShardedEncoder | None:
    """Shard the encoder of a case."""
    if setting.mode is None:
        return None
    compute_dtype = torch.bfloat16 if setting.mixed else None
    ranks = Ranks.of_this_process()
    way = Way("fsdp", mode=setting.mode, sharding_factor=setting.factor or ranks.world_size)
    return shard_encoder(case.encoder, way, ranks, device=CPU, compute_dtype=compute_dtype)


def engine_of(case: Case, setting: Sharded, loss: Any) -> GradCacheEngine:
    """Return the engine over all ranks."""
    handle = sharded(case, setting)
    options = EngineOptions(
        ChunkBudget(setting.chunk_rows, 10**6),
        CPU,
        retain=setting.retain,
        autocast_dtype=torch.bfloat16 if setting.mixed else None,
        replay_rng=setting.replay,
        ranks=Ranks.of_this_process(),
    )
    trainable = [parameter for parameter in case.encoder.parameters() if parameter.requires_grad]
    return GradCacheEngine(loss, options, trainable, sharded=handle)


def step_on(
    rank: int, setting: Sharded, *, counts: bool = False
) -> tuple[Any, dict[str, torch.Tensor], dict[str, int]]:
    """Do a step and return its result, the gradients and the collectives."""
    case = case_of(setting)
    loss = make("both directions", 3)
    engine = engine_of(case, setting, loss)
    assignment = assignment_of(case, setting.assignment)
    # Where nothing in a chunk is a collective, a rank needs no spare row beside rows of its own.
    needs_spare = setting.mode in ("lean", "sharded") or setting.assignment == "nothing"
    pools = pools_of(case, assignment.slots[rank], spare=needs_spare)
    communication = CommDebugMode()
    for _ in range(setting.steps):
        whole_gradients(case.encoder, loss)
        torch.manual_seed(5 + rank)
        with communication if counts else nullcontext():
            result = engine.step(pools, case.structure, assignment=assignment)
    counted = {str(name): number for name, number in communication.get_comm_counts().items()}
    return result, whole_gradients(case.encoder, loss), counted


def steps_on(rank: int, settings: list[Sharded]) -> list[Any]:
    """Do one step for each setting."""
    return [step_on(rank, setting) for setting in settings]
