"""An index is searched with the model that made it, and only whole."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from search_cases import DOCUMENTS, FILES, meta_of

import vembed
from vembed.models.tables import NgramBag, NgramBagConfig

if TYPE_CHECKING:
    from pathlib import Path


def test_another_models_weights_are_refused(call: Any, index: Path, bag: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    NgramBag(NgramBagConfig(dimension=64, buckets=4096)).save(tmp_path / "other")
    refused = call("search", index, "apple", "--model", tmp_path / "other")
    assert refused.code == 2
    assert "its vectors mean something else" in refused.err
    shutil.copytree(bag, tmp_path / "copy")
    assert call("search", index, "apple", "--model", tmp_path / "copy").code == 0


def test_the_same_weights_read_otherwise_are_refused(tmp_path: Path, corpus: Path) -> None:
    from vembed.models.keys import ModelKeys
    from vembed.models.load import load_encoder

    torch.manual_seed(0)
    folder = tmp_path / "tiny"
    load_encoder(ModelKeys(model_name="builtin:tiny-transformer"), DOCUMENTS.values()).save(folder)
    vembed.build_index(vembed.load(folder, document_prompt="text: "), corpus, tmp_path / "index")
    assert meta_of(tmp_path / "index")["model_options"] == {"document_prompt": "text: "}
    assert len(vembed.open_index(tmp_path / "index")) == 4, "the option is kept"
    pooling = folder / "1_Pooling" / "config.json"
    content = json.loads(pooling.read_text())
    pooling.write_text(json.dumps(content | {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}))
    with pytest.raises(vembed.ConfigError, match="another vector for its first document"):
        vembed.open_index(tmp_path / "index")


def test_a_model_that_moved_is_named(call: Any, bag: Path, corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(bag, tmp_path / "model")
    vembed.build_index(tmp_path / "model", corpus, tmp_path / "index")
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    refused = call("search", tmp_path / "index", "apple")
    assert refused.code == 2
    assert "isn't there any more; name its new place with --model" in refused.err
    assert call("search", tmp_path / "index", "apple", "--model", tmp_path / "elsewhere").code == 0


def test_the_relative_path_of_a_model_is_kept_as_an_absolute_one(
    bag: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bag.parent)
    vembed.build_index(bag.name, corpus, tmp_path / "index")
    monkeypatch.chdir(tmp_path)
    assert len(vembed.open_index("index")) == 4


@pytest.mark.parametrize("name", sorted(FILES - {"checksums.json"}))
def test_a_file_that_is_missing_or_cut_is_named(call: Any, index: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(index, tmp_path / "index")
    path = tmp_path / "index" / name
    content = path.read_bytes()
    path.write_bytes(content[:-5])
    cut = call("search", tmp_path / "index", "apple")
    assert cut.code == 2
    assert name in cut.err
    path.unlink()
    missing = call("search", tmp_path / "index", "apple")
    assert missing.code == 2
    assert name in missing.err
    path.write_bytes(content)
    assert call("search", tmp_path / "index", "apple").code == 0


@pytest.mark.parametrize("name", sorted(FILES - {"checksums.json"}))
def test_one_flipped_bit_is_noticed_unless_the_index_is_of_an_older_version(
    call: Any, index: Path, tmp_path: Path, name: str
) -> None:
    shutil.copytree(index, tmp_path / "index")
    path = tmp_path / "index" / name
    content = bytearray(path.read_bytes())
    at = content.index(b"apple") if name == "ids.jsonl" else len(content) - 20
    content[at] ^= 1
    path.write_bytes(content)
    bent = call("search", tmp_path / "index", "apple")
    assert bent.code == 2
    assert f"{path} is damaged" in bent.err or name == "meta.json"
    assert name in bent.err
    assert "encode the corpus again" in bent.err
    path.write_bytes((index / name).read_bytes())
    (tmp_path / "index" / "checksums.json").unlink()
    old = call("search", tmp_path / "index", "apple")
    assert old.code == 0
    assert "has no checksums.json" in old.err


def test_what_is_no_index_or_of_a_later_version_is_refused(call: Any, index: Path, tmp_path: Path) -> None:
    shutil.copytree(index, tmp_path / "index")
    path = tmp_path / "index" / "meta.json"
    for changes, message in (
        ({"format_version": 3}, "update vembed"),
        ({"format_version": 1}, "encode the corpus again"),
        ({"kind": "x"}, "something else than an index"),
    ):
        path.write_text(json.dumps(meta_of(index) | changes))
        refused = call("search", tmp_path / "index", "apple")
        assert refused.code == 2
        assert message in refused.err
    assert "make one with vembed encode" in call("search", tmp_path / "nothing", "apple").err
