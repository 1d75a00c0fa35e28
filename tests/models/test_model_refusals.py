"""What a model may not do or lacks is refused with the key to set, and the valid neighbour loads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import pytest
import torch
from huggingface_hub import is_offline_mode
from kit.picture_models import write_picture_model
from kit.several_ranks import free_port
from kit.text_models import POSITIONS, TEXTS, byte_tokenizer, edit_json, embed, load, load_any, write_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModel, CanineConfig, FNetConfig

from vembed.errors import ConfigError, ExitCode, MachineError
from vembed.models import hub
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder, load_skeleton

if TYPE_CHECKING:
    from pathlib import Path

CUSTOM_CODE = """
from pathlib import Path
from transformers import BertConfig, BertModel
Path({marker!r}).write_text("this code has run")
class CustomConfig(BertConfig):
    model_type = "custom-thing"
class CustomModel(BertModel):
    config_class = CustomConfig
"""


@pytest.fixture
def bert_folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "bert", "bert")


def refused(name: Path | str, message: str, **options: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        load(name, **options)


def test_code_that_a_model_brings_along_runs_only_when_trusted(
    bert_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    marker = tmp_path / "marker"
    (bert_folder / "custom.py").write_text(CUSTOM_CODE.format(marker=str(marker)))
    classes = {"AutoConfig": "custom.CustomConfig", "AutoModel": "custom.CustomModel"}
    edit_json(bert_folder / "config.json", model_type="custom-thing", auto_map=classes, architectures=["CustomModel"])
    refused(bert_folder, "set trust_remote_code: true and model_revision")
    assert not marker.exists()
    assert embed(load(bert_folder, trust_remote_code=True)).isfinite().all()
    assert marker.exists()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_xlnet_is_refused_before_its_weights_in_every_type_but_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = write_model(tmp_path / "xlnet", "xlnet")
    assert embed(load(folder)).isfinite().all()
    (folder / "model.safetensors").unlink()
    wanted = str(dtype).removeprefix("torch.")
    message = f"attention in float32.*with torch_dtype {wanted}; set torch_dtype: float32"
    refused(folder, message, dtype=dtype)
    with pytest.raises(ConfigError, match=message):  # what `--plan` builds
        load_skeleton(ModelKeys(model_name=str(folder), torch_dtype=wanted))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (FNetConfig(hidden_size=32, num_hidden_layers=1, intermediate_size=32, vocab_size=300), "mixes padding"),
        (CanineConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32), "hashes"),
    ],
)
def test_types_whose_vectors_or_tokens_cannot_be_right_are_refused(tmp_path: Path, config: Any, reason: str) -> None:
    AutoModel.from_config(config).save_pretrained(tmp_path)
    byte_tokenizer(start=True, end=True).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        load(tmp_path)


def test_pickled_weights_are_read_only_when_allowed(bert_folder: Path) -> None:
    expected = embed(load(bert_folder))
    torch.save(load_file(bert_folder / "model.safetensors"), bert_folder / "pytorch_model.bin")
    assert torch.equal(embed(load(bert_folder)), expected)  # safetensors beside a pickle need no leave
    (bert_folder / "model.safetensors").unlink()
    refused(bert_folder, "only as a pickle.*set allow_pickle: true")
    assert torch.equal(embed(load(bert_folder, allow_pickle=True)), expected)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.marker),))


def test_an_allowed_pickle_still_runs_no_code(bert_folder: Path, tmp_path: Path) -> None:
    weights = load_file(bert_folder / "model.safetensors")
    (bert_folder / "model.safetensors").unlink()
    torch.save({**weights, "bomb": Bomb(tmp_path / "marker")}, bert_folder / "pytorch_model.bin")
    refused(bert_folder, "something else than tensors.*convert them to safetensors", allow_pickle=True)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    ("specials", "suggested"),
    [({}, "</s>"), ({"eos_token": None, "unk_token": "<s>"}, "<s>"), ({"eos_token": None, "bos_token": None}, "<s>")],
)
def test_a_tokenizer_without_a_pad_token_says_which_to_set(
    tmp_path: Path, specials: dict[str, Any], suggested: str
) -> None:
    folder = write_model(tmp_path, "gpt2", tokenizer=byte_tokenizer(pad=False, **specials))
    refused(folder, f"no pad token; set pad_token: '{suggested}'")
    encoder = load(folder, pad_token=suggested)
    assert encoder.tokenizer.pad_token == suggested
    assert torch.allclose(embed(encoder)[0], embed(encoder, TEXTS[:1])[0], atol=1e-5)
    encoder.save(tmp_path / "saved")
    assert torch.equal(embed(load(tmp_path / "saved")), embed(encoder))  # the export needs no setting any more


def test_a_pad_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "gpt2", tokenizer=byte_tokenizer(pad=False))
    refused(folder, "pad_token '<nothing>' is not in the vocabulary", pad_token="<nothing>")
    load(folder, pad_token="<pad>")


def test_a_pad_token_that_the_weights_have_no_row_for_says_which_key_cures_it(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(pad=False)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    folder = write_model(tmp_path, "gpt2", tokenizer=tokenizer)
    refused(folder, r"padding token '\[PAD\]' is token 259, .* have 259 tokens; set pad_token to ")
    assert load(folder, pad_token="</s>").tokenizer.pad_token == "</s>"


def test_a_model_without_its_tokenizer_is_refused(bert_folder: Path) -> None:
    tokenizer = (bert_folder / "tokenizer.json").read_bytes()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (bert_folder / file).unlink()
    refused(bert_folder, r"has no tokenizer: none of vocab.txt, tokenizer.json")
    (bert_folder / "tokenizer.json").write_bytes(tokenizer)
    load(bert_folder, pad_token="[PAD]")


def test_weights_that_no_file_holds_are_refused_instead_of_random(
    bert_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = load_file(bert_folder / "model.safetensors")
    without_pooler = {key: tensor for key, tensor in weights.items() if not key.startswith("pooler.")}
    save_file(without_pooler, bert_folder / "model.safetensors", metadata={"format": "pt"})
    load(bert_folder)
    assert "newly initialized" not in caplog.text, "a pooler that nobody uses"
    del without_pooler["encoder.layer.1.output.dense.weight"]
    save_file(without_pooler, bert_folder / "model.safetensors", metadata={"format": "pt"})
    refused(bert_folder, r"1 weights of BertModel are in none of its files, first encoder.layer.1.output.dense.weight")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_truncated_file_is_refused(bert_folder: Path, file: str) -> None:
    load(bert_folder)
    content = (bert_folder / file).read_bytes()
    (bert_folder / file).write_bytes(content[: len(content) // 2])
    refused(bert_folder, rf"{file} is broken|bert could not be loaded.*{file}")


@pytest.mark.parametrize("beside_its_base", [False, True])
def test_an_adapter_without_its_base_merged_says_what_to_do(
    bert_folder: Path, tmp_path: Path, beside_its_base: bool
) -> None:
    config = LoraConfig(r=2, target_modules=["query"])
    get_peft_model(AutoModel.from_pretrained(bert_folder), config).save_pretrained(tmp_path / "adapter")
    if beside_its_base:
        shutil.copytree(bert_folder, tmp_path / "adapter", dirs_exist_ok=True)
    message = (
        rf"holds an adapter for {bert_folder} \(adapter_config.json\), .*merge the two with peft's merge_and_unload"
    )
    refused(tmp_path / "adapter", message)


def test_a_folder_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "could not be loaded")


@pytest.mark.parametrize("kind", ["bert", "roberta", "gpt2"])
def test_a_length_over_the_positions_is_refused(tmp_path: Path, kind: str) -> None:
    folder = write_model(tmp_path, kind)
    message = f"max_seq_length {POSITIONS + 1} is over the {POSITIONS} positions"
    refused(folder, message, max_seq_length=POSITIONS + 1)
    assert load(folder, max_seq_length=POSITIONS).max_length == POSITIONS


def test_a_model_that_the_hub_cant_give_is_the_machines_fault() -> None:
    with pytest.raises(MachineError, match="no-owner/no-such-model") as caught:
        load("no-owner/no-such-model")
    assert caught.value.exit_code == ExitCode.ENVIRONMENT == 5


def test_a_file_of_a_model_is_told_from_a_name_of_the_hub(bert_folder: Path) -> None:
    for name in ("model.safetensors", "config.json"):  # the second is a shape, which a plan takes and a run doesn't
        refused(bert_folder / name, f"bert/{name} is a file; name the folder that a model lies in")


def test_a_folder_that_isnt_there_is_the_configurations_fault() -> None:
    refused("./no/such/folder", "there is no folder ./no/such/folder; name that of a model, or of a run")


@pytest.mark.parametrize(
    ("name", "closest"), [("ngrambag", "ngram-bag"), ("tiny-transfomer", "tiny-transformer"), ("tiny", "tiny-clip")]
)
def test_a_misspelt_builtin_names_the_closest(name: str, closest: str) -> None:
    refused(f"builtin:{name}", f"no built-in model 'builtin:{name}'; did you mean builtin:{closest}")


IDLE = {
    "pooling_method": "cls",
    "max_seq_length": 32,
    "query_prompt": "q: ",
    "pad_token": "[PAD]",
    "model_revision": "main",
}
"""Keys that none of the models below reads, stated here, as a class's own statement may name too many."""


@pytest.mark.parametrize("key", IDLE)
@pytest.mark.parametrize("kind", ["builtin:ngram-bag", "builtin:tiny-transformer", "builtin:tiny-clip", "clip"])
def test_a_key_without_effect_on_a_model_is_refused(tmp_path: Path, kind: str, key: str) -> None:
    if kind == "clip" and key == "model_revision":
        pytest.skip("a folder's class reads it")
    name = str(write_picture_model(tmp_path, kind)) if kind == "clip" else kind
    with pytest.raises(ConfigError, match=f"{key}.* has no effect with"):
        load_encoder(ModelKeys.model_validate({"model_name": name, key: IDLE[key]}), TEXTS)


def test_a_builtin_takes_empty_prompts_and_its_own_folder_refuses_options_too(tmp_path: Path) -> None:
    load_any("builtin:ngram-bag", prompts={}).save(tmp_path)
    load_encoder(ModelKeys(model_name=str(tmp_path)))
    with pytest.raises(ConfigError, match="pooling_method has no effect with "):
        load_any(tmp_path, pooling_method="cls")


OFFLINE_SCRIPT = """
import json, sys, warnings
from vembed.errors import VembedError
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder, load_skeleton
answers = {}
for name in sys.argv[1:]:
    try:
        encoder = load_encoder(ModelKeys(model_name=name))
        answers[name] = [encoder.describe()["pooling"], encoder.prompts["query"]]
    except VembedError as error:
        answers[name] = [type(error).__name__, int(error.exit_code), str(error)]
print("ANSWERS", json.dumps(answers))
"""


def cache_model(cache: Path, name: str, folder: Path) -> None:
    """Lay a folder out as the hub's cache does."""
    repository = cache / f"models--{name.replace('/', '--')}"
    commit = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [True, False], ids=["by the user", "no network"])
def test_a_cached_hub_model_works_offline_and_another_is_named(
    bert_folder: Path, tmp_path: Path, *, chosen: bool
) -> None:
    cache = tmp_path / "hub"
    load(bert_folder, pooling_method="cls", prompts={"query": "q: "}).save(tmp_path / "described")
    cache_model(cache, "owner/described", tmp_path / "described")
    cache_model(cache, "owner/bare", bert_folder)
    names = ["owner/described", "owner/bare", "owner/absent"]
    nowhere = f"http://127.0.0.1:{free_port()}"
    way = {"HF_HUB_OFFLINE": "1"} if chosen else {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": nowhere}
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), **way}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE_SCRIPT, *names], env=environment, capture_output=True, text=True, check=True
    )
    answers = json.loads(done.stdout.partition("ANSWERS ")[2])
    assert answers["owner/described"] == ["cls (modules.json)", "q: "]
    assert answers["owner/bare"][0].startswith("mean (encoder")
    kind, code, message = answers["owner/absent"]
    assert (kind, code) == ("MachineError", 5)
    assert "'owner/absent'" in message
    assert "Retrying" not in done.stderr, "the library's six requests for each file that isn't in the cache"
    assert (nowhere in done.stderr) is not chosen
    assert done.stderr.count("models are read from the local cache") == (0 if chosen else 1)


def test_open_clips_description_that_cant_be_fetched_is_told_in_words() -> None:
    with pytest.raises(MachineError, match=r"open_clip:hf-hub:owner/absent could not be loaded by open_clip: "):
        load_skeleton(ModelKeys(model_name="open_clip:hf-hub:owner/absent"))


@pytest.mark.parametrize("answer", ["an error", "a redirect to nowhere", None])
def test_the_hub_is_asked_where_it_answers_whatever_it_says(
    monkeypatch: pytest.MonkeyPatch, answer: str | None
) -> None:
    class Answering(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(404 if answer == "an error" else 302)
            self.send_header("Location", f"http://127.0.0.1:{free_port()}/")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    hub._hub_answers.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        if answer is None:
            server.server_close()
        else:
            threading.Thread(target=server.handle_request).start()
        with hub.hub_or_cache():
            assert is_offline_mode() is (answer is None)
        assert not is_offline_mode(), "what others do isn't changed"
    hub._hub_answers.cache_clear()
