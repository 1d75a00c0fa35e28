"""Rows end to end have the vectors and gradients of padded ones, in steps of the engine and on two ranks too."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from adapter_cases import make_loss, trainable_of, wake
from packing_cases import (
    LENGTHS,
    PAD,
    PAIRS,
    POSITIONS,
    SHAPES,
    batch,
    build,
    encode,
    largest_difference,
    rows,
    with_gradients,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from vembed.batch import Features
from vembed.distributed.ranks import Ranks
from vembed.gradcache.chunks import ChunkBudget, Pool, RowAssignment
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.gradcache.reference import reference_step
from vembed.models import attention
from vembed.models.adapters import add_adapters
from vembed.models.attention import PACKED_TYPES
from vembed.models.keys import AdapterKeys
from vembed.models.measure import ProfileTarget, become_fake
from vembed.models.measure import _autocast as autocast
from vembed.models.pooling import POOLING_MODES
from vembed.models.text import TextEncoder

if TYPE_CHECKING:
    from pathlib import Path

    from kit.ranks import RankPool

    from vembed.batch import Features


@pytest.fixture(autouse=True)
def no_operators_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither flash-attn nor the GPU that this machine may have decides what is tested."""
    monkeypatch.setattr(attention, "why_no_flash_attn", lambda: "isn't installed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def difference(encoder: TextEncoder, features: Features, **changes: Any) -> float:
    """Return the largest relative difference of vectors and gradients between padded and packed rows."""
    padded = with_gradients(encode(encoder, features, packed=False), encoder)
    packed = with_gradients(encode(encoder, features, packed=True, **changes), encoder)
    return largest_difference(padded, packed)


def test_every_type_that_is_packed_is_proven_here() -> None:
    assert SHAPES.keys() == PACKED_TYPES


@pytest.mark.parametrize("kind", SHAPES)
def test_vectors_and_gradients_are_those_of_padded_rows(kind: str) -> None:
    encoder, features = build(kind), rows()
    assert encoder.why_not_packed("cpu", torch.float64) == ""
    assert difference(encoder, features) <= 1e-10
    names = {name for name, parameter in encoder.named_parameters() if parameter.grad is not None}
    assert {name.removeprefix("backbone.") for name in names} > {"embeddings.word_embeddings.weight"} or len(names) > 9


@pytest.mark.parametrize("kind", ["bert", "modernbert", "qwen3", "gemma3_text", "mistral"])
def test_the_comparison_sees_a_row_that_looks_into_the_next_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    all_of_them = torch.ones(1, 1, sum(LENGTHS), sum(LENGTHS), dtype=torch.bool)
    monkeypatch.setattr(attention, "packed_mask", lambda *_: all_of_them)
    assert difference(build(kind), rows()) > 1e-3


@pytest.mark.parametrize("kind", ["modernbert", "qwen3", "gemma3_text", "mistral"])
def test_the_comparison_sees_a_window_that_is_not_kept(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_window(*args: Any, sliding_window: int | None = None, **others: Any) -> Any:
        return attention.attend(*args, **others)

    monkeypatch.setitem(AttentionInterface._global_mapping, attention.NAME, without_window)
    assert difference(build(kind), rows()) > 1e-3


@pytest.mark.parametrize("mode", POOLING_MODES)
@pytest.mark.parametrize("prompts", [None, (2, 17, 1, 8, 3, 0)])
def test_every_pooling_goes_by_rows_and_leaves_prompts_out(mode: Any, prompts: Any) -> None:
    encoder = build("bert", pooling=(mode,), include_prompt=prompts is None)
    assert difference(encoder, rows(prompts=prompts), width=96) <= 1e-10
    if prompts is not None and mode != "lasttoken":
        with_prompts = encode(encoder, rows(), packed=True)
        assert (encode(encoder, rows(prompts=prompts), packed=True) - with_prompts).abs().max() > 1e-3


def test_several_poolings_and_vectors_of_any_length_stay_as_they_are() -> None:
    encoder = build("qwen3", pooling=("mean", "lasttoken", "max"), normalize=False)
    assert difference(encoder, rows()) <= 1e-10
    assert encode(encoder, rows(), packed=True).shape == (len(LENGTHS), 96)


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert", "qwen3"])
def test_filling_up_a_call_changes_nothing(kind: str) -> None:
    encoder, features = build(kind, dtype=torch.float64), rows()
    encoder.pack()
    inputs = encoder.collate(features, np.arange(len(LENGTHS)), 256)
    assert inputs["input_ids"].shape == (1, 256)
    assert (inputs["input_ids"][0, sum(LENGTHS) :] == PAD).all()
    assert inputs["lengths"].tolist() == [*LENGTHS, 256 - sum(LENGTHS)]  # longer than the model has positions
    assert 256 - sum(LENGTHS) > POSITIONS + 2
    assert difference(encoder, features, width=256) <= 1e-10


@pytest.mark.parametrize(
    ("kind", "rope"),
    [
        ("qwen3", {"rope_type": "yarn", "factor": 4.0}),
        ("llama", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ("modernbert", {}),
    ],
)
def test_long_rows_beside_short_ones_are_exact_too(kind: str, rope: dict[str, Any]) -> None:
    rope = rope and {**rope, "rope_theta": 10_000.0, "original_max_position_embeddings": 256}
    changes = {"rope_parameters": rope} if rope else {}
    encoder = build(kind, max_position_embeddings=1024, max_length=1024, **changes)
    assert difference(encoder, rows((3, 600, 1, 400))) <= 1e-10


@pytest.mark.parametrize("lengths", [(7,), (1,), (1, 1, 1)])
def test_a_row_alone_and_rows_of_one_token_are_packed_too(lengths: tuple[int, ...]) -> None:
    assert difference(build("bert"), rows(lengths)) <= 1e-10


@pytest.mark.parametrize("kind", ["bert", "modernbert", "qwen3"])
def test_gradient_checkpointing_computes_the_same(kind: str) -> None:
    encoder, features = build(kind).train(), rows()
    plain = with_gradients(encode(encoder, features, packed=True), encoder)
    encoder.enable_gradient_checkpointing()
    again = with_gradients(encode(encoder, features, packed=True), encoder)
    assert largest_difference(plain, again) == 0
    assert largest_difference(with_gradients(encode(encoder, features, packed=False), encoder), again) <= 1e-10


@pytest.mark.parametrize("kind", ["bert", "modernbert", "qwen3"])
def test_adapters_have_the_gradients_of_padded_rows(kind: str) -> None:
    encoder = build(kind)
    add_adapters(encoder, AdapterKeys(lora_r=2, lora_dropout=0.0))
    wake(encoder)
    assert difference(encoder, rows()) <= 1e-10
    assert all("lora_" in name for name, each in encoder.named_parameters() if each.grad is not None)


def test_dropped_attention_weights_are_drawn_again_from_the_same_state() -> None:
    encoder = build("bert", attention_probs_dropout_prob=0.3, hidden_dropout_prob=0.1).train()
    vectors = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        vectors.append(encode(encoder, rows(), packed=True))
    assert torch.equal(vectors[0], vectors[1])
    assert not torch.equal(vectors[0], vectors[2])


@pytest.mark.parametrize(
    ("kind", "changes", "device", "dtype", "words"),
    [
        ("mpnet", {}, "cpu", torch.float32, "isn't tested for mpnet models"),
        ("bert", {"attn_implementation": "eager"}, "cpu", torch.float32, "attn_implementation eager"),
        ("bert", {}, "cuda", torch.float32, "half precision, and the run computes in float32"),
        ("bert", {}, "mps", torch.bfloat16, "no operator for it is known on mps"),
        ("qwen3", {"head_dim": 20}, "cuda", torch.bfloat16, "heads of 20 dims"),
        ("bert", {"attention_probs_dropout_prob": 0.1}, "cuda", torch.bfloat16, "drops 0.1 of its attention weights"),
        ("distilbert", {"attention_dropout": 0.2}, "cuda", torch.bfloat16, "drops 0.2"),
    ],
)
def test_what_cannot_be_packed_says_why(kind: str, changes: Any, device: str, dtype: torch.dtype, words: str) -> None:
    assert words in build(kind, **changes).why_not_packed(device, dtype)


def test_packing_leaves_the_attention_its_name() -> None:
    made = build("bert")
    made.backbone.config._attn_implementation = "flash_attention_2"
    encoder = TextEncoder("bert", backbone=made.backbone, tokenizer=made.tokenizer, spec=made.spec)
    before = encoder.facts()["attention"]
    encoder.pack()
    assert (before, encoder.facts()["attention"]) == ("flash_attention_2", "flash_attention_2, rows end to end")


def by_segments(
    query_THD: torch.Tensor,
    key_THD: torch.Tensor,
    value_THD: torch.Tensor,
    starts_S1: torch.Tensor,
    longest: int,
    *,
    dropout: float,
    scaling: float | None,
    window: tuple[int, int],
) -> torch.Tensor:
    """Attend to packed rows, one after the other, as the operators of accelerators say that they do."""
    assert starts_S1.dtype == torch.int32
    assert int(starts_S1.diff().max()) <= longest
    assert dropout == 0
    groups = query_THD.shape[1] // key_THD.shape[1]
    out = []
    for start, end in itertools.pairwise(starts_S1.tolist()):
        q, k, v = (each[start:end].transpose(0, 1) for each in (query_THD, key_THD, value_THD))
        back = torch.arange(end - start)[:, None] - torch.arange(end - start)
        left, right = (end if reach < 0 else reach for reach in window)
        weights = (q @ k.repeat_interleave(groups, 0).mT * scaling).masked_fill(
            (back > left) | (-back > right), -torch.inf
        )
        out.append((weights.softmax(-1) @ v.repeat_interleave(groups, 0)).transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("kind", SHAPES)
def test_what_an_operator_is_told_gives_the_vectors_and_gradients_of_padded_rows(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "packed_mask", lambda *_: torch.ones(1, 1, 1, 1, dtype=torch.bool))
    monkeypatch.setattr(attention, "_varlen_attn", by_segments)
    assert difference(build(kind), rows(), width=96) <= 1e-10


def test_flash_attn_goes_before_torchs_operator_and_can_drop_attention_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def flash_attn_varlen_func(*args: Any, **kwargs: Any) -> torch.Tensor:
        told.append(kwargs)
        query_THD, key_THD, value_THD, starts_S1, _, longest, _ = args
        scaling, window = kwargs["softmax_scale"], kwargs["window_size"]
        return by_segments(query_THD, key_THD, value_THD, starts_S1, longest, dropout=0, scaling=scaling, window=window)

    package = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(attention, "why_no_flash_attn", lambda: "")
    monkeypatch.setattr(attention, "packed_mask", lambda *_: torch.ones(1, 1, 1, 1, dtype=torch.bool))
    encoder = build("qwen3", attention_dropout=0.25)
    assert encoder.why_not_packed("cuda", torch.bfloat16) == ""
    assert difference(encoder, rows()) <= 1e-10
    assert [(each["causal"], each["window_size"], each["dropout_p"]) for each in told] == [
        (True, (-1, 0), 0.0),
        (True, (4, 0), 0.0),
    ]
    encode(encoder.train(), rows(), packed=True)
    assert {each["dropout_p"] for each in told[2:]} == {0.25}


def test_a_flash_attn_that_does_not_import_counts_as_missing_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # what stands in for the machine hides the question
    (tmp_path / "flash_attn.py").write_text("raise ImportError('flash_attn_2_cuda.so: undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    attention.why_no_flash_attn.cache_clear()
    try:
        why = build("bert", attention_probs_dropout_prob=0.1).why_not_packed("cuda", torch.bfloat16)
    finally:
        attention.why_no_flash_attn.cache_clear()
    assert why.endswith("flash-attn can, and it doesn't import (flash_attn_2_cuda.so: undefined symbol)")


@pytest.mark.parametrize("takes_gqa", [True, False])
def test_keys_are_repeated_for_an_operator_that_takes_no_fewer_of_them_than_queries(
    takes_gqa: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads: set[tuple[int, int, bool]] = set()

    def older(
        q: Any, k: Any, v: Any, starts: Any, _: Any, longest: int, *args: Any, scale: Any, window_size: Any
    ) -> Any:
        return newer(q, k, v, starts, _, longest, *args, scale=scale, window_size=window_size)

    def newer(
        q: Any, k: Any, v: Any, starts: Any, _: Any, longest: int, *args: Any,
        scale: Any, window_size: Any, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        heads.add((q.shape[1], k.shape[1], enable_gqa))
        return by_segments(q, k, v, starts, longest, dropout=0, scaling=scale, window=window_size)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", newer if takes_gqa else older)
    monkeypatch.setattr(attention, "packed_mask", lambda *_: torch.ones(1, 1, 1, 1, dtype=torch.bool))
    encoder = build("qwen3")
    assert encoder.why_not_packed("cuda", torch.bfloat16) == ""
    assert difference(encoder, rows(), width=96) <= 1e-10
    assert heads == {(2, 1, True) if takes_gqa else (2, 2, False)}


class Calls(TorchDispatchMode):
    """Collects the operations that run, with the shape and type of what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append((function.name(), args))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("kind", "windows"),
    [
        ("bert", [[-1, -1]] * 2),
        ("modernbert", [[-1, -1], [4, 4]]),
        ("qwen3", [[-1, 0], [4, 0]]),
        ("llama", [[-1, 0]] * 2),
    ],
)
def test_a_gpu_that_is_not_there_gets_torchs_operator_in_half_precision_without_a_wait(kind: str, windows: Any) -> None:
    encoder = build(kind, dtype=torch.float32)
    encoder.pack()
    made = encoder.collate(rows(), np.arange(len(LENGTHS)), 256)
    with FakeTensorMode(allow_non_fake_inputs=True), sdpa_kernel(SDPBackend.FLASH_ATTENTION), Calls() as calls:
        become_fake(encoder, "cuda")
        inputs = {name: torch.empty(each.shape, dtype=each.dtype, device="cuda") for name, each in made.items()}
        with autocast(ProfileTarget("cuda", torch.bfloat16)):
            z_RE = encoder(inputs)
    assert (z_RE.shape, z_RE.dtype, z_RE.device.type) == ((len(LENGTHS), 32), torch.float32, "cuda")
    attended = [args for name, args in calls.found if name == "torch_attn::_varlen_attn"]
    assert [args[9] for args in attended] == windows
    assert all(args[0].shape == (256, 2, 16) and args[5] == 256 for args in attended)
    assert {each.dtype for args in attended for each in args[:3]} == {torch.bfloat16}
    assert not any(each in name for name, _ in calls.found for each in ("_local_scalar_dense", "nonzero", "scaled_dot"))


@pytest.mark.parametrize("kind", SHAPES)
def test_the_dropout_of_attention_that_a_plan_hears_of_is_the_one_that_layers_ask_for(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[float] = set()

    def record(*args: Any, dropout: float, **kwargs: Any) -> Any:
        asked.add(dropout)
        return attend(*args, dropout=dropout, **kwargs)

    attend = attention.sdpa_attention_forward
    monkeypatch.setattr(attention, "sdpa_attention_forward", record)
    encoder = build(kind, attention_probs_dropout_prob=0.2, attention_dropout=0.2).train()
    encode(encoder, rows(), packed=True)
    assert asked == {0.2}
    assert attention.attention_dropout(encoder.backbone) == 0.2
    assert attention.attention_dropout(build(kind).backbone) == 0


def test_hidden_dropout_and_half_precision_are_no_obstacle_on_a_gpu() -> None:
    assert build("bert", hidden_dropout_prob=0.1).why_not_packed("cuda", torch.bfloat16) == ""


BUDGET = ChunkBudget(rows=5, tokens=48)
STEPPED = ("bert", "modernbert", "qwen3")


def pool_of(encoder: TextEncoder, slots: np.ndarray | None = None) -> Pool:
    features, _ = batch()
    slots = np.arange(len(features)) if slots is None else slots
    return Pool(encoder, encoder.collate, features.take(slots), slots, packs=encoder.packs)


def step(kind: str, *, packed: bool, retain: float = 0.0, budget: ChunkBudget = BUDGET, **changes: Any) -> Any:
    """Do one step of the engine; return the result, and the gradients by parameter."""
    encoder, loss = build(kind, **changes).train(), make_loss()
    if packed:
        encoder.pack()
    torch.manual_seed(5)
    engine = GradCacheEngine(
        loss, EngineOptions(budget, torch.device("cpu"), retain=retain), list(encoder.parameters())
    )
    result = engine.step([pool_of(encoder)], batch()[1])
    found = {name: each.grad for name, each in encoder.named_parameters() if each.grad is not None}
    return result, {**found, "log_scale": loss.log_scale.grad}


@pytest.mark.parametrize("retain", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", STEPPED)
def test_a_step_end_to_end_is_that_of_padded_rows_without_padding_or_drift(kind: str, retain: float) -> None:
    padded, expected = step(kind, packed=False, retain=retain)
    packed, found = step(kind, packed=True, retain=retain)
    assert packed.loss == pytest.approx(padded.loss, rel=1e-12)
    assert packed.replay_drift == 0
    assert packed.padded_tokens == packed.tokens == padded.tokens < padded.padded_tokens
    assert packed.num_chunks < padded.num_chunks
    assert largest_difference(expected, found) <= 1e-10


@pytest.mark.parametrize("kind", STEPPED)
def test_calls_filled_up_as_on_an_accelerator_change_nothing(kind: str) -> None:
    _, expected = step(kind, packed=False)
    filled, found = step(kind, packed=True, budget=ChunkBudget(5, 300, bucketed=True))
    assert filled.padded_tokens > filled.tokens
    assert filled.replay_drift == 0
    assert largest_difference(expected, found) <= 1e-10


@pytest.mark.parametrize("kind", SHAPES)
def test_dropout_is_replayed_and_equals_the_plain_step_over_the_same_calls(kind: str) -> None:
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "embedding_dropout")
    changes = dict.fromkeys((*names, "mlp_dropout", "dropout"), 0.1)
    result, found = step(kind, packed=True, retain=0.3, **changes)
    assert result.replay_drift == 0
    encoder, loss = build(kind, **changes).train(), make_loss()
    encoder.pack()
    torch.manual_seed(5)
    value = reference_step([pool_of(encoder)], batch()[1], loss, budget=BUDGET)
    assert result.loss == pytest.approx(value.item(), rel=1e-12)
    expected = {name: each.grad for name, each in encoder.named_parameters() if each.grad is not None}
    assert largest_difference({**expected, "log_scale": loss.log_scale.grad}, found) <= 1e-10
    assert result.loss != pytest.approx(step(kind, packed=True)[0].loss, rel=1e-6)


def step_of_a_rank(rank: int, kind: str, budget: ChunkBudget, assignment: RowAssignment) -> Any:
    """Do one step on this rank's rows; return the result, and the gradients by parameter."""
    encoder, loss = build(kind).train(), make_loss()
    encoder.pack()
    options = EngineOptions(budget, torch.device("cpu"), ranks=Ranks.of_this_process())
    engine = GradCacheEngine(loss, options, list(trainable_of(encoder).values()))
    result = engine.step([pool_of(encoder, assignment.slots[rank])], batch()[1], assignment=assignment)
    found = {name: each.grad for name, each in encoder.named_parameters() if each.grad is not None}
    return result.loss, result.replay_drift, {**found, "log_scale": loss.log_scale.grad}


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_two_ranks_end_with_the_gradients_of_one(two_ranks: RankPool, kind: str) -> None:
    _, expected = step(kind, packed=False)
    rows = np.arange(2 * PAIRS)
    uneven = RowAssignment((rows[:4], rows[4:]))
    for loss, drift, found in two_ranks.run(step_of_a_rank, kind, BUDGET, uneven):
        assert loss == pytest.approx(step(kind, packed=True)[0].loss, rel=1e-12)
        assert drift == 0
        assert largest_difference(expected, found) <= 1e-10


def test_a_call_that_no_loss_sees_holds_one_row_and_no_more_tokens_than_that() -> None:
    from vembed.gradcache.chunks import equal_calls, plan_calls

    encoder = build("bert")
    encoder.pack()
    pool = pool_of(encoder)
    calls = plan_calls([pool], np.arange(2 * PAIRS), BUDGET, torch.device("cpu"), retain=0.0)

    class Others(Ranks):
        """Ranks of which another one makes two calls more."""

        def max_(self, numbers: torch.Tensor) -> torch.Tensor:
            return numbers + torch.tensor([2, 0])

    spare = equal_calls(calls, [pool], Others(), torch.device("cpu"))[:2]
    assert [(len(call.chunk.rows), call.chunk.padded_tokens, call.is_spare) for call in spare] == [(1, 1, True)] * 2
    assert encoder(encoder.collate(pool.features, spare[0].chunk.rows, spare[0].chunk.width)).shape == (1, 32)
