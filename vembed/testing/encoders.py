"""The promises of every encoder, as one class of tests.

Derive from it and name a tiny model, and an encoder is proved:

    class TestLetters(EncoderContract):
        cases = (EncoderCase("letters"),)  # trains builtin:letters; or EncoderCase(..., write=FUNCTION OF A FOLDER)

Promise                       Compared with
reload                        the same weights before they were saved, bit for bit
company, order, width         each item encoded alone, in float64
padding                       other tokens in padded places; a tokenizer that pads at the other side
rows end to end               padded rows
engine                        one autograd graph over the batch, at three retentions, under dropout
gradient                      a central difference along a random direction of all weights
checkpointing, adapters       the step without them; the folder that they were merged into
plan                          the bytes that a real forward pass keeps
export forms                  the library that the folder is for, called as its users call it

Every comparison is guarded against being vacuous: items have distinct vectors, weights moved, chunks were many.
Shape legend: N items, V vectors of an item (1 unless the encoder gives several), E embedding dim, T tokens.
"""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from vembed.batch import Composed, ContrastiveBatch, Features, Image
from vembed.errors import ConfigError
from vembed.gradcache.chunks import ChunkBudget, Pool
from vembed.gradcache.engine import EngineOptions, GradCacheEngine, StepResult
from vembed.gradcache.reference import reference_step
from vembed.losses.base import BatchLoss, BatchStructure
from vembed.losses.colbert import ColbertLoss
from vembed.losses.infonce import InfoNCE
from vembed.models.adapters import add_adapters, save_trained, takes_adapters
from vembed.models.export import TOLERANCE, ExportRequest, export_model
from vembed.models.exportable import FORMS, writable_forms
from vembed.models.keys import AdapterKeys, ModelKeys
from vembed.models.load import load_encoder
from vembed.models.measure import LiveBytes, ProfileTarget
from vembed.models.plannable import ROWS
from vembed.models.profile import profile_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import PIL.Image

    from vembed.batch import Item, Side
    from vembed.models.encoder import Encoder
    from vembed.models.exportable import Recipe

    Gradients = dict[str, torch.Tensor]

CPU = torch.device("cpu")
SIDES: tuple[Side, Side] = ("query", "document")
CHUNKS = ChunkBudget(rows=2, tokens=10**6)
NO_GRADIENT_IN_TRUTH = ("k_proj.bias", "key.bias", "key_proj.bias")
"""The same vector added to all keys of a row changes no attention, so its true gradient is zero."""
IDLE_KEYS: dict[str, Any] = {
    "pooling_method": "cls",
    "max_seq_length": 32,
    "query_prompt": "q: ",
    "pad_token": "[PAD]",
    "image_tokens": 40,
    "topk_tokens": 4,
}
"""Keys of the model that some families don't read, with a value that isn't their default."""

TEXTS = (
    "sea",
    "The river runs to the sea.",
    "how do I sort a list in place? use list.sort",
    "a b",
    "a red fox",
    "it returns none",
    "two round shapes, one of them in blue",
    "list of rivers",
)
"""Of uneven lengths, all within 60 tokens of a tokenizer of bytes."""


@dataclass(frozen=True)
class EncoderCase:
    """A tiny model, and the few facts about it that no encoder states itself."""

    entry: str  # name of the class: of its `builtin`, or in ENCODERS
    kind: str = ""  # tells it from other cases of the class
    write: Callable[[Path], object] | None = None  # makes a folder of the model; None saves a new `builtin:ENTRY`
    keys: Mapping[str, Any] = field(default_factory=dict)  # keys of the model that the user gives
    near: float = 1e-9  # relative precision of float64 vectors
    sees_padding: bool = False  # convolutions run over padded tokens too
    fixed_padding: bool = False  # texts are padded to one length and not masked, which is a part of their vector
    estimated: bool = False  # the plan can't run it on fake tensors
    texts_at_most: float = 1.05  # bytes of a call, predicted over real; never below 0.95
    pictures_at_most: float = 1.05
    without_gradient: str = "\0"  # substring of parameters that reach no vector
    breaks: Mapping[str, str] = field(default_factory=dict)  # promise -> why it is known not to hold

    def __str__(self) -> str:
        return f"{self.entry} {self.kind}".strip()

    def make(self, folder: Path) -> None:
        """Write the folder of the model."""
        if self.write is not None:
            self.write(folder)
        else:
            torch.manual_seed(0)
            load_encoder(ModelKeys(model_name=f"builtin:{self.entry}"), TEXTS).save(folder)

    def load(self, folder: Path, *, dtype: torch.dtype = torch.float64, **keys: Any) -> Encoder:
        """Load the model in evaluation mode."""
        return load_case(folder, {**self.keys, **keys}, dtype=dtype)


def load_case(folder: Path, keys: Mapping[str, Any], *, dtype: torch.dtype = torch.float64) -> Encoder:
    """Load the model of a case, in a process of its own too."""
    torch.manual_seed(1)  # a new head or projection is drawn
    name = str(dtype).removeprefix("torch.")
    return load_encoder(ModelKeys.model_validate({"model_name": str(folder), "torch_dtype": name, **keys})).eval()


# --- items ---


def picture(seed: int, size: tuple[int, int] = (40, 36)) -> Image:
    """Return coloured squares as PNG bytes in memory."""
    import PIL.Image  # here, as encoders of texts need no Pillow

    colours = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    PIL.Image.fromarray(colours).resize(size, PIL.Image.Resampling.NEAREST).save(buffer, "PNG")
    return Image(f"picture-{seed}.png", buffer.getvalue())


def opened(images: Sequence[Image]) -> list[PIL.Image.Image]:
    """Decode pictures with Pillow alone."""
    import PIL.Image

    return [PIL.Image.open(io.BytesIO(image.read())).convert("RGB") for image in images]


def items_of(encoder: Encoder) -> tuple[Item, ...]:
    """Return distinct items of uneven sizes, some of each modality that an encoder takes."""
    items: list[Item] = [*TEXTS] if "text" in encoder.modalities else []
    if "image" in encoder.modalities:
        sizes = ((40, 36), (64, 64), (30, 70), (32, 32), (40, 36), (40, 36), (50, 20))
        items += [picture(seed, size) for seed, size in enumerate(sizes)]
    if "image+text" in encoder.modalities:
        items += [Composed((picture(1, (64, 64)),), "in red"), Composed((picture(7),), "a round one")]
        if encoder.several_pictures:
            items.append(Composed((picture(2, (30, 70)), picture(8)), "two of them"))
    return tuple(items)


# --- vectors ---


@torch.no_grad()
def embed(encoder: Encoder, items: Sequence[Item], side: Side = "query", *, wider: int = 0) -> list[torch.Tensor]:
    """Encode items in one call per modality.

    Returns:
        The vectors of each item, (V, E), in the order of the items.
    """
    vectors: list[Any] = [None] * len(items)
    for _, indices in encoder.by_modality(items):
        features = encoder.featurize([items[index] for index in indices], side)
        z_VE = encoder(encoder.collate(features, np.arange(len(indices)), int(features.lengths.max()) + wider))
        counts = encoder.num_vectors(features)
        counts = np.ones(len(indices), int) if counts is None else counts
        for index, rows in zip(indices, z_VE.split(counts.tolist()), strict=True):
            vectors[index] = rows
    return vectors


def embed_both_sides(encoder: Encoder) -> list[torch.Tensor]:
    """Encode all items of a case as queries and as documents."""
    return [rows for side in SIDES for rows in embed(encoder, items_of(encoder), side)]


def difference(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """Return the largest difference of a component, infinite where an item has more vectors in one of them."""
    if [rows.shape for rows in one] != [rows.shape for rows in other]:
        return float("inf")
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(one, other, strict=True))


def assert_distinct(vectors: Sequence[torch.Tensor]) -> None:
    """Fail where two items look alike: a comparison of such vectors could not."""
    means = torch.stack([rows.double().mean(dim=0) for rows in vectors])
    assert torch.pdist(means).min() > 1e-4, "two different items have one vector"


# --- steps ---


def search_batch(encoder: Encoder) -> ContrastiveBatch:
    """Let items search items: every modality stands on both sides where there are enough of it."""
    items = items_of(encoder)
    if encoder.modalities == {"text", "image"}:  # late interaction on pages: texts search pictures
        queries, documents = items[:5], items[8:]
    else:
        queries, documents = items[0::2], items[1::2]
    num_pairs = min(len(queries), len(documents))
    numbers = np.arange(num_pairs)
    return ContrastiveBatch(
        queries=queries[:num_pairs],
        documents=documents,
        positives_P2=np.stack([numbers, numbers], axis=1),
        query_ids_Q=numbers,
        document_ids_D=np.arange(len(documents)) + 100,
        record_ids=tuple(range(num_pairs)),
    )


def pools_of(encoder: Encoder, batch: ContrastiveBatch, slots: Sequence[int] | None = None) -> list[Pool]:
    """Make one pool per modality, queries and documents together as in training.

    Args:
        slots: Rows of [queries; documents] to take; all by default.
    """
    parts: dict[str, list[tuple[Features, Any]]] = {}
    # Rows of a pool are counted over [queries; documents], so those of documents begin behind the queries.
    for side, items, first in ((SIDES[0], batch.queries, 0), (SIDES[1], batch.documents, len(batch.queries))):
        for modality, indices in encoder.by_modality(items):
            features = encoder.featurize([items[index] for index in indices], side)
            parts.setdefault(modality, []).append((features, indices + first))
    pools = []
    for sides in parts.values():
        features = Features.concat([features for features, _ in sides])
        rows = np.concatenate([rows for _, rows in sides])
        mine = np.flatnonzero(np.isin(rows, rows if slots is None else slots))
        dealt = (features.take(mine), rows[mine])
        if len(mine) == 0:  # a spare row, as training deals it: a sharded encoder makes the same calls on every rank
            dealt = (features.take(np.array([0])), np.array([-1]))
        pools.append(Pool(encoder, encoder.collate, *dealt, encoder.num_vectors(dealt[0]), packs=encoder.packs))
    return pools


def make_loss(encoder: Encoder) -> BatchLoss:
    """Make the loss that takes what an encoder gives, in float64."""
    if encoder.multi_vector:
        return ColbertLoss(temperature=0.3, dtype=torch.float64, tile_size=24)
    return InfoNCE(temperature=0.1, bidirectional=True, dtype=torch.float64)


def weighted_sum(encoder: Encoder) -> torch.Tensor:
    """Return a fixed weighting of all vectors of the batch: as smooth as the encoder is."""
    # Random weights: with equal ones, errors of two vectors could cancel out.
    weights, total = torch.Generator().manual_seed(4), torch.zeros((), dtype=torch.float64)
    for pool in pools_of(encoder, search_batch(encoder)):
        z = encoder(encoder.collate(pool.features, np.arange(len(pool.features)), int(pool.features.lengths.max())))
        total = total + (z * torch.randn(z.shape, generator=weights, dtype=z.dtype)).sum()
    return total


class InFloat64(TorchFunctionMode):
    """Computation in float64 where code asks for float32: some norms do, whatever the type of the weights.

    A difference of two nearby sums loses what float32 rounds off.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        positional = [torch.float64 if value is torch.float32 else value for value in args]
        named = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return function(*positional, **named)


def take_gradients(module: torch.nn.Module) -> Gradients:
    """Take the gradients out of a module."""
    gradients = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad
            gradients[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        parameter.grad = None
    return gradients


def plain_step(encoder: Encoder, *, budget: ChunkBudget | None = CHUNKS) -> tuple[float, Gradients]:
    """Do the step as one autograd graph. Masks of dropout depend on the chunks, so these are the engine's."""
    batch = search_batch(encoder)
    torch.manual_seed(5)
    loss = reference_step(pools_of(encoder, batch), BatchStructure.of(batch), make_loss(encoder), budget=budget)
    return loss.item(), take_gradients(encoder)


def engine_step(encoder: Encoder, *, retain: float = 0.0) -> tuple[StepResult, Gradients]:
    """Do the step by the engine, on one rank."""
    batch = search_batch(encoder)
    torch.manual_seed(5)
    trainable = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    engine = GradCacheEngine(make_loss(encoder), EngineOptions(CHUNKS, CPU, retain=retain), trainable)
    result = engine.step(pools_of(encoder, batch), BatchStructure.of(batch))
    return result, take_gradients(encoder)


def assert_same_gradients(gradients: Gradients, expected: Gradients, *, near: float) -> None:
    """Compare gradients of all parameters, in units of the largest."""
    assert gradients.keys() == expected.keys()
    # Of the largest: a parameter whose true gradient is zero has rounding alone, which would be an error of 100%.
    largest = max(float(gradient.norm()) for gradient in expected.values())
    assert largest > 0
    errors = {name: float((gradients[name] - wanted).norm()) / largest for name, wanted in expected.items()}
    assert max(errors.values()) <= near, {name: error for name, error in errors.items() if error > near}


def assert_all_trainable_move(encoder: Encoder, gradients: Gradients, *, but: str) -> None:
    """Fail where a weight that trains got no gradient, unless its name contains `but` or its true gradient is zero."""
    trainable = {name for name, parameter in encoder.named_parameters() if parameter.requires_grad}
    largest = max(float(gradient.norm()) for gradient in gradients.values())
    still = {name for name in trainable if name not in gradients or gradients[name].norm() <= 1e-12 * largest}
    unexplained = {name for name in still if but not in name and not name.endswith(NO_GRADIENT_IN_TRUTH)}
    assert not unexplained


def wake_adapters(encoder: Encoder) -> None:
    """Give the second factor of each adapter, which begins at zero, random values."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


# --- other libraries ---


def by_sentence_transformers(folder: Path, encoder: Encoder, side: Side) -> list[torch.Tensor]:
    """Encode the items with sentence-transformers, the way its users do."""
    import sentence_transformers

    kind = "MultiVectorEncoder" if encoder.multi_vector else "SentenceTransformer"
    model: Any = getattr(sentence_transformers, kind)(str(folder), device="cpu")
    texts = [item for item in items_of(encoder) if isinstance(item, str)]
    pictures = [item for item in items_of(encoder) if isinstance(item, Image)]
    vectors = [*(model.encode_query(texts) if side == "query" else model.encode_document(texts))] if texts else []
    vectors += [*model.encode(opened(pictures))] if pictures else []
    return [torch.as_tensor(rows).reshape(-1, encoder.dimension) for rows in vectors]


@torch.no_grad()
def by_transformers(folder: Path, encoder: Encoder, recipe: Recipe) -> list[torch.Tensor]:
    """Encode the items with transformers alone, as the model card tells its readers to."""
    import transformers

    model = getattr(transformers, recipe.auto_class).from_pretrained(folder).eval()
    vectors: list[torch.Tensor] = []
    if "text" in encoder.modalities:
        texts = [item for item in items_of(encoder) if isinstance(item, str)]
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        tokens = tokenizer(texts, return_tensors="pt", truncation=True, **recipe.text_padding)
        if recipe.kind == "dual":
            vectors += [*model.get_text_features(**tokens).pooler_output]
        else:
            vectors += [*_pooled(model(**tokens), tokens["attention_mask"].bool(), recipe.pooling)]
    if "image" in encoder.modalities:
        pictures = [item for item in items_of(encoder) if isinstance(item, Image)]
        pixels = transformers.AutoImageProcessor.from_pretrained(folder)(images=opened(pictures), return_tensors="pt")
        if recipe.kind == "dual":
            vectors += [*model.get_image_features(**pixels).pooler_output]
        else:
            outputs = model(**pixels)
            vectors += [*_pooled(outputs, torch.ones(outputs.last_hidden_state.shape[:2]).bool(), recipe.pooling)]
    return [F.normalize(vector, dim=-1)[None] for vector in vectors]


def _pooled(outputs: Any, real_NT: torch.Tensor, pooling: str) -> torch.Tensor:
    """Pool each row by itself: no padding can slip in."""
    if pooling == "head":
        head: torch.Tensor = outputs.pooler_output
        return head
    rows = [hidden[real] for hidden, real in zip(outputs.last_hidden_state, real_NT, strict=True)]
    if pooling == "mean":
        return torch.stack([row.mean(dim=0) for row in rows])
    return torch.stack([row[{"cls": 0, "lasttoken": -1}[pooling]] for row in rows])


@torch.no_grad()
def by_open_clip(folder: Path, encoder: Encoder) -> list[torch.Tensor]:
    """Encode the items with open_clip."""
    import open_clip

    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    model.eval()
    texts = [item for item in items_of(encoder) if isinstance(item, str)]
    pictures = [item for item in items_of(encoder) if isinstance(item, Image)]
    tokens = open_clip.get_tokenizer(f"local-dir:{folder}")(texts)
    pixels = torch.stack([preprocess(image) for image in opened(pictures)])
    both = (*model.encode_text(tokens, normalize=True), *model.encode_image(pixels, normalize=True))
    return [vector[None] for vector in both]


def kept_bytes(encoder: Encoder, inputs: dict[str, torch.Tensor]) -> int:
    """Run a call on real tensors and return the bytes that wait for its backward pass, embeddings included."""
    known = [*encoder.parameters(), *encoder.buffers(), *inputs.values()]
    with LiveBytes(known) as live:
        z = encoder(inputs)
        sizes = live.alive_at(live.now())
    del z
    return sum(size * count for size, count in sizes.items())


class EncoderContract:
    """Promises of an encoder, each a test that every case runs. Tiny models take seconds."""

    cases: ClassVar[Sequence[Any]] = ()  # each an EncoderCase, or a pytest.param of one

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each promise for each case."""
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.cases, ids=str)

    @pytest.fixture(scope="class")
    @classmethod
    def folder_of(cls, tmp_path_factory: pytest.TempPathFactory) -> Callable[[EncoderCase], Path]:
        """Write the folder of a case when a test first asks for it; later tests of this process share it."""
        root, written = tmp_path_factory.mktemp("encoders"), set()

        def folder_of(case: EncoderCase) -> Path:
            folder = root / str(case).replace(" ", "-").replace(",", "")
            if folder not in written:
                case.make(folder)
                written.add(folder)
            return folder

        return folder_of

    @pytest.fixture
    def folder(
        self, case: EncoderCase, folder_of: Callable[[EncoderCase], Path], request: pytest.FixtureRequest
    ) -> Path:
        """Give the folder of a case, and mark a promise that it is known to break."""
        promise = request.node.originalname
        form = request.node.callspec.params.get("form")
        reason = case.breaks.get(promise if form is None else f"{promise}[{form}]")
        if reason is not None:
            request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
        return folder_of(case)

    def test_reload_gives_the_same_bits(self, case: EncoderCase, folder: Path, tmp_path: Path) -> None:
        encoder = case.load(folder, dtype=torch.float32)
        before = embed_both_sides(encoder)
        # Moved first: a `load` that ignored what `save` wrote would give the old vectors.
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in encoder.parameters():
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
        moved = embed_both_sides(encoder)
        encoder.save(tmp_path)
        again = replace(case, keys={}).load(tmp_path, dtype=torch.float32)
        assert type(again) is type(encoder)
        assert (again.dimension, again.max_length, again.similarity) == (
            encoder.dimension, encoder.max_length, encoder.similarity,
        )  # fmt: skip
        assert again.prompts == encoder.prompts
        assert difference(embed_both_sides(again), moved) == 0
        assert difference(embed_both_sides(encoder), moved) == 0
        assert difference(before, moved) > 1e-4

    def test_company_order_and_width_change_no_vector(self, case: EncoderCase, folder: Path) -> None:
        encoder = case.load(folder)
        items = items_of(encoder)
        for side in SIDES:
            together = embed(encoder, items, side)
            assert_distinct(together)
            if encoder.similarity == "cosine":
                norms = torch.cat(together).norm(dim=-1)
                assert (norms - 1).abs().max() < 1e-6
            assert difference(embed(encoder, items[::-1], side)[::-1], together) < case.near
            if not case.sees_padding:
                assert difference([embed(encoder, [item], side)[0] for item in items], together) < case.near
                assert difference(embed(encoder, items, side, wider=3), together) < case.near

    def test_padding_changes_no_vector(self, case: EncoderCase, folder: Path, tmp_path: Path) -> None:
        encoder = case.load(folder)
        if "text" not in encoder.modalities or case.sees_padding or case.fixed_padding:
            pytest.skip("no texts, or their vectors depend on what pads them")
        texts = [item for item in items_of(encoder) if isinstance(item, str)]
        expected = embed(encoder, texts)
        features = encoder.featurize(texts, "query")
        width = int(features.lengths.max())
        inputs = encoder.collate(features, np.arange(len(texts)), width)
        ids_NT = inputs.get("input_ids")
        if ids_NT is not None and ids_NT.shape == (len(texts), width):  # a table or a bag pads nothing
            padded_NT = torch.arange(width) >= torch.from_numpy(features.lengths)[:, None]
            inputs["input_ids"] = torch.where(padded_NT, ids_NT.flip(0).roll(1, dims=1).clamp(min=1), ids_NT)
            with torch.no_grad():
                assert difference([encoder(inputs)], [torch.cat(expected)]) < case.near
        # Whoever publishes a model may have told its tokenizer either side; the vectors are the same.
        flipped = shutil.copytree(folder, tmp_path / "flipped")
        for path in flipped.rglob("tokenizer_config.json"):
            settings = json.loads(path.read_text("utf-8"))
            other_side = "right" if settings.get("padding_side") == "left" else "left"
            path.write_text(json.dumps(settings | {"padding_side": other_side}), "utf-8")
        assert difference(embed(case.load(flipped), texts), expected) < case.near

    def test_rows_end_to_end_have_the_vectors_of_padded_ones(self, case: EncoderCase, folder: Path) -> None:
        encoder = case.load(folder)
        if encoder.why_not_packed("cpu", torch.float64):
            pytest.skip(encoder.why_not_packed("cpu", torch.float64))
        expected, (_, gradients) = embed(encoder, items_of(encoder)), plain_step(encoder)
        encoder.pack()
        assert difference(embed(encoder, items_of(encoder)), expected) < case.near
        result, packed = engine_step(encoder)
        assert result.padded_tokens == result.tokens or "image" in encoder.modalities
        assert_same_gradients(packed, gradients, near=100 * case.near)

    def test_engine_equals_reference(self, case: EncoderCase, folder: Path) -> None:
        encoder = case.load(folder).train()
        loss, expected = plain_step(encoder)
        assert_all_trainable_move(encoder, expected, but=case.without_gradient)
        # From replaying every chunk to keeping every graph: dropout's masks must be those of the first pass.
        for retain in (0.0, 0.5, 1.0):
            result, gradients = engine_step(encoder, retain=retain)
            assert result.num_chunks >= 3
            assert result.replay_drift == 0
            assert result.loss == pytest.approx(loss, rel=1e-12)
            assert_same_gradients(gradients, expected, near=1e-10)

    def test_one_step_lowers_the_loss(self, case: EncoderCase, folder: Path) -> None:
        encoder = case.load(folder)
        result, gradients = engine_step(encoder)
        # A step along the gradient that lowers the loss by a thousandth of it, to first order.
        squared = sum(float(gradient.square().sum()) for gradient in gradients.values())
        with torch.no_grad():
            for name, gradient in gradients.items():
                encoder.get_parameter(name).sub_(1e-3 * result.loss / squared * gradient)
        assert engine_step(encoder)[0].loss < result.loss

    def test_gradient_is_that_of_the_vectors(self, case: EncoderCase, folder: Path) -> None:
        """Engine and reference both follow a graph that was cut by mistake; a finite difference does not."""
        encoder = case.load(folder)
        generator = torch.Generator().manual_seed(3)
        trainable = {name: weight for name, weight in encoder.named_parameters() if weight.requires_grad}
        # A weight of a single value has no standard deviation.
        sizes = {name: weight.detach().std().nan_to_num(1.0) for name, weight in trainable.items()}
        direction = {
            name: sizes[name] * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            for name, weight in trainable.items()
        }
        for name, module in encoder.named_modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                direction[f"{name}.weight"][module.padding_idx] = 0  # torch never trains this row, which ColPali uses
        with InFloat64():
            weighted_sum(encoder).backward()
        gradients = take_gradients(encoder)
        slope = float(sum((gradients[name] * direction[name]).sum() for name in gradients))
        # Central, so that the error falls with the square of the step; in float64 rounding leaves ten digits of it.
        step, ends = 1e-6, []
        for sign in (1.0, -1.0):
            with torch.no_grad():
                for name, parameter in trainable.items():
                    parameter.add_(sign * step * direction[name])
                with InFloat64():
                    ends.append(float(weighted_sum(encoder)))
                for name, parameter in trainable.items():
                    parameter.sub_(sign * step * direction[name])
        # The standard deviation of the slope over all directions: what the graph lost is missing by its share of it.
        spread = sum(float(gradient.norm() * sizes[name]) ** 2 for name, gradient in gradients.items()) ** 0.5
        assert spread > 0
        assert abs((ends[0] - ends[1]) / (2 * step) - slope) < 0.02 * spread

    def test_checkpointing_changes_no_gradient(self, case: EncoderCase, folder: Path) -> None:
        try:
            recomputed = case.load(folder, gradient_checkpointing=True).train()
        except ConfigError:
            pytest.skip("refused: it has no gradient checkpointing")
        assert_same_gradients(plain_step(recomputed)[1], plain_step(case.load(folder).train())[1], near=1e-9)

    def test_adapters_train_exactly_and_merge_into_the_folder(
        self, case: EncoderCase, folder: Path, tmp_path: Path
    ) -> None:
        encoder = case.load(folder)
        if not takes_adapters(encoder):
            with pytest.raises(ConfigError):
                add_adapters(encoder, AdapterKeys())
            return
        # B begins at zero, so that new adapters change nothing; woken ones must change every comparison below.
        plain = embed_both_sides(encoder)
        add_adapters(encoder, AdapterKeys(lora_r=2, lora_dropout=0.1))
        assert difference(embed_both_sides(encoder), plain) < 1e-12
        wake_adapters(encoder)
        loss, expected = plain_step(encoder.train())
        assert any(".lora_A." in name for name in expected)
        result, gradients = engine_step(encoder)
        assert result.loss == pytest.approx(loss, rel=1e-12)
        assert_same_gradients(gradients, expected, near=1e-10)
        adapted = embed_both_sides(encoder.eval())
        assert difference(adapted, plain) > 1e-4
        save_trained(encoder, tmp_path / "model", tmp_path / "adapter")
        assert difference(embed_both_sides(replace(case, keys={}).load(tmp_path / "model")), adapted) < 1e-6
        assert list((tmp_path / "adapter").rglob("adapter_model.safetensors"))

    def test_mixed_precision_gives_unit_vectors_in_float32(self, case: EncoderCase, folder: Path) -> None:
        encoder = case.load(folder, dtype=torch.float32)
        expected = embed(encoder, items_of(encoder))
        with torch.autocast("cpu", torch.bfloat16):
            rounded = embed(encoder, items_of(encoder))
        assert {vectors.dtype for vectors in rounded} == {torch.float32}
        if encoder.similarity == "cosine":  # normalised in float32: bfloat16 would miss by 1e-3
            assert (torch.cat(rounded).norm(dim=-1) - 1).abs().max() < 1e-5
        if not case.keys.keys() & {"topk_tokens", "pool_factor"}:  # rounding may choose and group other tokens
            assert difference(rounded, expected) < 0.3

    def test_long_texts_are_cut_and_counted(self, case: EncoderCase, folder: Path) -> None:
        encoder = case.load(folder)
        if "text" not in encoder.modalities or encoder.max_length is None:
            pytest.skip("no text, or no limit of its length")
        features = encoder.featurize(["sea", "a b " * 3000, "b a " * 3000], "document")
        assert features.num_truncated == 2
        assert encoder.featurize(["sea"], "document").num_truncated == 0

    def test_plan_measures_it(self, case: EncoderCase, folder: Path) -> None:
        keys = ModelKeys.model_validate({"model_name": str(folder), **case.keys})
        size, encoder = profile_model(keys, ProfileTarget("cpu")), case.load(folder, dtype=torch.float32).train()
        assert size.estimated == case.estimated
        assert size.num_parameters == sum(weight.numel() for weight in encoder.parameters())
        assert size.num_trainable == sum(weight.numel() for weight in encoder.parameters() if weight.requires_grad)
        assert size.dimension == encoder.dimension
        assert size.modalities == encoder.modalities <= type(encoder).modalities
        if case.estimated:
            return
        assert {tower.name for tower in size.towers} == {tower.name for tower in encoder.towers()}
        items = items_of(encoder)
        for tower in size.towers:
            kind = Image if tower.name == "vision" else str
            seen = [item for item in items if isinstance(item, kind)]
            features = encoder.featurize(seen, "document")
            width = int(features.lengths.max())
            rows = np.full(ROWS, features.lengths.argmax())
            kept = kept_bytes(encoder, encoder.collate(features, rows, width))
            at_most = case.pictures_at_most if kind is Image else case.texts_at_most
            assert 0.95 < tower.saved.of(len(rows), width) / kept < at_most, tower.name

    @pytest.mark.parametrize("form", FORMS)
    def test_a_folder_of_each_form_is_read_by_its_library(
        self, case: EncoderCase, folder: Path, form: Any, tmp_path: Path
    ) -> None:
        encoder = case.load(folder, dtype=torch.float32)
        keys = ModelKeys.model_validate({"model_name": str(folder), **case.keys})
        request = ExportRequest(keys=keys, output=tmp_path / "out", form=form)
        if form not in writable_forms(encoder):
            with pytest.raises(ConfigError, match=f"--format {form}"):
                export_model(request, lambda *_: {})
            assert not list(tmp_path.iterdir())
            return
        done = export_model(request, lambda *_: {})
        assert (done.form, done.difference <= TOLERANCE) == (form, True)
        again = replace(case, keys={}).load(tmp_path / "out", dtype=torch.float32)
        assert (again.max_length, again.dimension) == (encoder.max_length, encoder.dimension)
        plain = [item for item in items_of(encoder) if isinstance(item, str | Image)]
        for side in SIDES:
            expected = embed(encoder, plain, side)
            assert difference(embed(again, plain, side), expected) == 0
            if form == "sentence-transformers":
                assert difference(by_sentence_transformers(tmp_path / "out", encoder, side), expected) <= TOLERANCE
            elif form == "open_clip":
                assert difference(by_open_clip(tmp_path / "out", encoder), expected) <= TOLERANCE
            elif form == "transformers" and (recipe := encoder.recipe()) is not None:
                assert difference(by_transformers(tmp_path / "out", encoder, recipe), expected) <= TOLERANCE

    def test_keys_that_it_has_no_use_for_are_refused(self, case: EncoderCase, folder: Path) -> None:
        encoder = case.load(folder)
        for key, value in IDLE_KEYS.items():
            if key not in type(encoder).reads:
                with pytest.raises(ConfigError):
                    case.load(folder, **{key: value})
