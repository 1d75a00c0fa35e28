"""A stranger's encoders in one file: the one that CONTRIBUTING.md prints, and one of two vectors for each row."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from kit.warm import run_warm

import vembed
from vembed.config.load import load_config
from vembed.entrypoints.export import main as export
from vembed.errors import ConfigError
from vembed.models.keys import AdapterKeys, ModelKeys
from vembed.models.load import load_encoder
from vembed.models.measure import ProfileTarget
from vembed.models.profile import profile_model
from vembed.registry import ENCODERS, LOSSES
from vembed.testing.encoders import EncoderContract

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from vembed.models.encoder import Encoder

pytestmark = pytest.mark.usefixtures("undrawn")

ROOT = Path(vembed.__file__).parents[1]
RECIPE = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("## Add a model")[2].partition("\n## ")[0]
CODE, CONTRACT = re.findall(r"```python\n(.*?)```", RECIPE, flags=re.DOTALL)
(SETTINGS,) = re.findall(r"```yaml\n(.*?)```", RECIPE, flags=re.DOTALL)

SEVERAL = '''

import numpy as np

from vembed.losses.base import MultiVectorLoss
from vembed.losses.registry import LossSection


@vembed.register_encoder
class Pairs(Letters):
    """Two vectors for each text."""

    builtin = "pairs"
    marker = "pairs.txt"
    multi_vector = True

    def __init__(self, name):
        super().__init__(name)
        self.table = nn.Embedding(256, 2 * self.dimension)

    def num_vectors(self, features):
        return np.full(len(features), 2)

    def forward(self, inputs):
        return unit(super().forward(inputs).view(-1, self.dimension))


class BestPairKeys(LossSection):
    """Facts of the softmax over late-interaction scores."""

    name = "best-pair"


@vembed.register_loss
class BestPair(MultiVectorLoss):
    """Softmax over late-interaction scores."""

    keys = BestPairKeys

    def forward(self, q, d, structure):
        """For each vector of the query the nearest of the document, summed."""
        scores_QD = torch.stack(
            [torch.stack([(one @ other.T).amax(dim=1).sum() for other in d.rows()]) for one in q.rows()]
        )
        queries_P, positives_P = structure.positives_P2.unbind(dim=1)
        return (scores_QD.logsumexp(dim=1)[queries_P] - scores_QD[queries_P, positives_P]).mean()
'''


TINY = {
    "plugins": ["letters"], "data_path": "train.jsonl", "val_data_path": "train.jsonl", "torch_dtype": "float64",
    "global_batch_size": 8, "gradient_cache_chunk_size": 3, "retain": 0, "epochs": 2, "learning_rate": 0.05,
    "logging_steps": 1, "bm25": False, "report_to": "none",
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with the plugin in it; what it registers is forgotten with it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for registry in (ENCODERS, LOSSES):
        for table in ("_entries", "_plugins"):
            monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    (tmp_path / "letters.py").write_text(CODE + SEVERAL, "utf-8")
    rows = [{"query": f"colour {number}", "positive": f"farbe {number} {'x' * (number % 5)}"} for number in range(32)]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    yield tmp_path
    sys.modules.pop("letters", None)


def run_contract(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the recipe's tests on the plugin in a folder, as its author does."""
    (folder / "test_letters.py").write_text(CONTRACT)
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "test_letters.py"]
    return run_warm(words, cwd=folder, env=os.environ, scratch=folder)


def test_the_recipe_keeps_the_contract_of_every_encoder(folder: Path) -> None:
    done = run_contract(folder)
    assert done.returncode == 0, done.stdout
    promises = {name for name in vars(EncoderContract) if name.startswith("test_")}
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) >= len(promises) - 1


@pytest.mark.slow
def test_a_vector_that_depends_on_its_company_breaks_the_contract(folder: Path) -> None:
    sound = "* mask[..., None]).sum(dim=1))"
    assert CODE.count(sound) == 1
    (folder / "letters.py").write_text(CODE.replace(sound, ").sum(dim=1))"))
    done = run_contract(folder)
    assert done.returncode == 1, done.stdout
    assert "FAILED test_letters.py::TestLetters::test_company_order_and_width_change_no_vector[letters]" in done.stdout


def built(kind: str, **keys: Any) -> Encoder:
    load_config(None, ["model_name=m", "plugins=[letters]"])
    torch.manual_seed(0)
    return load_encoder(ModelKeys(model_name=f"builtin:{kind}", **keys))


def test_the_recipe_s_settings_are_valid_and_a_wrong_name_is_told_the_nearest(folder: Path) -> None:
    (folder / "config.yaml").write_text(SETTINGS)
    assert load_config(folder / "config.yaml").config.model_name == "builtin:letters"
    with pytest.raises(ConfigError, match="no built-in model 'builtin:leters'; did you mean builtin:letters"):
        load_encoder(ModelKeys(model_name="builtin:leters"))
    with pytest.raises(ConfigError, match="max_seq_length has no effect with builtin:letters; remove it"):
        built("letters", max_seq_length=32)


@pytest.mark.parametrize(("kind", "count"), [("letters", 1), ("pairs", 2)])
def test_it_is_measured_without_data_on_fake_tensors(kind: str, count: int, caplog: pytest.LogCaptureFixture) -> None:
    encoder = built(kind)
    for target in (ProfileTarget("cpu"), ProfileTarget("cuda", torch.bfloat16)):
        keys = ModelKeys(model_name=f"builtin:{kind}")
        size = profile_model(keys, target, lora=AdapterKeys())
        assert not size.estimated
        assert size.num_parameters == sum(each.numel() for each in encoder.parameters())
        assert (size.max_length, size.adapted) == (64, None)
        assert size.row_vectors == count
        [tower] = size.towers
        assert tower.peak(8, 61, checkpointed=False) > 8 * 61 * encoder.dimension * 4
    assert not caplog.records


def test_one_that_reads_values_is_estimated_and_the_plan_says_why(caplog: pytest.LogCaptureFixture) -> None:
    letters = type(built("letters"))

    @vembed.register_encoder
    class Peeking(letters):  # type: ignore[valid-type, misc]
        builtin = "peeking"

        def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            assert inputs["lengths"].max().item() > 0
            result: torch.Tensor = super().forward(inputs)
            return result

    assert profile_model(ModelKeys(model_name="builtin:peeking"), ProfileTarget("cpu")).estimated
    assert "can't be run without memory (DataDependentOutputException" in caplog.text


def test_a_fault_of_its_own_code_is_told_as_one_and_not_estimated(folder: Path) -> None:
    (folder / "faulty.py").write_text(
        "import letters, vembed\n\n@vembed.register_encoder\nclass Faulty(letters.Letters):\n    builtin = 'faulty'\n\n"
        "    def forward(self, inputs):\n        return super().forward(inputs).unit_length()\n"
    )
    load_config(None, ["model_name=m", "plugins=[letters, faulty]"])
    try:
        with pytest.raises(ConfigError, match=r"plugins: Faulty of faulty can't encode .*faulty\.py:8: AttributeError"):
            profile_model(ModelKeys(model_name="builtin:faulty"), ProfileTarget("cpu"))
    finally:
        sys.modules.pop("faulty", None)


def test_without_its_plugin_a_folder_is_told_to_need_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built("letters").save(folder / "model")
    keys = ModelKeys(model_name=str(folder / "model"))
    with monkeypatch.context() as without:
        without.setattr(ENCODERS, "_plugins", {})
        with pytest.raises(ConfigError, match=r"A model of a plugin needs the plugin: plugins: \[MODULE\], or vembed"):
            load_encoder(keys)
    assert load_encoder(keys).dimension == 16


def test_a_class_that_no_name_means_is_refused() -> None:
    letters = type(built("letters"))
    nameless = type("Nameless", (letters,), {"builtin": "", "marker": ""})
    with pytest.raises(ConfigError, match="encoder Nameless: no model name means it; state builtin, prefix or marker"):
        vembed.register_encoder(nameless)


def test_a_class_that_files_mean_is_no_built_in_model() -> None:
    marked = type("Marked", (type(built("letters")),), {"builtin": "", "marker": "marked.txt"})
    vembed.register_encoder(marked)
    with pytest.raises(ConfigError, match="no built-in model 'builtin:marked'; did you mean builtin:"):
        vembed.train({**TINY, "model_name": "builtin:marked"})


def card_code(folder: Path) -> str:
    """Return the one example of a model's card."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text("utf-8"), flags=re.DOTALL)
    return code


def test_it_trains_is_loaded_and_exported(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    vembed.train({**TINY, "model_name": "builtin:letters", "output_dir": "out", "num_processes": 1})
    losses = [json.loads(line)["loss"] for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
    plan = json.loads((folder / "out" / "plan.json").read_text())
    [line] = [reason for reason in plan["reasons"] if reason.startswith(f"plugins: letters ({folder / 'letters.py'})")]
    assert "encoder letters" in line
    assert "encoder pairs" in line
    model = vembed.load("out")
    assert model.encode(["colour 3"], side="query").shape == (1, 16)
    assert export(["out", "--output", "exported"], program="vembed export") == 0
    assert "vembed folder" in capsys.readouterr().out
    again = vembed.load("exported")
    np.testing.assert_array_equal(again.encode(["a"], side="query"), model.encode(["a"], side="query"))
    assert export(["out", "--output", "other", "--format", "transformers"], program="vembed export") == 2
    assert "no library but vembed runs" in capsys.readouterr().err
    with monkeypatch.context() as elsewhere:
        elsewhere.chdir(folder / "out")
        assert card_code(folder / "out" / "model").startswith("import letters\nimport vembed\n")
        exec(card_code(folder / "out" / "model"), {})  # the card's own example


@pytest.mark.slow
def test_one_of_two_vectors_trains_alike_in_one_process_and_in_two(folder: Path) -> None:
    keys = {**TINY, "model_name": "builtin:pairs", "loss_type": "best-pair"}
    vembed.train({**keys, "output_dir": "out-1", "num_processes": 1})
    (folder / "config.yaml").write_text(json.dumps({**keys, "output_dir": "out-2", "num_processes": 2}))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = run_warm([str(ROOT / "run.py"), "config.yaml"], cwd=folder, env=environment, scratch=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    losses, scores = [], []
    for output in (folder / "out-1", folder / "out-2"):
        losses.append([json.loads(line)["loss"] for line in (output / "metrics.jsonl").read_text().splitlines()])
        scores.append(json.loads((output / "evaluation" / "final" / "metrics.json").read_text())["metrics"]["ndcg@10"])
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], abs=1e-10)
    assert scores[1] == pytest.approx(scores[0])
    assert export(["out-1", "--output", "exported"], program="vembed export") == 0
    assert (folder / "exported" / "pairs.txt").is_file()
    code = card_code(folder / "exported").replace('vembed.load("exported")', f'vembed.load("{folder / "exported"}")')
    exec(code, scope := {})  # the card's own example
    assert np.shape(scope["scores"]) == (1, 2)
    assert "texts become several vectors of 16 numbers" in (folder / "exported" / "README.md").read_text()
    with pytest.raises(ConfigError, match="several vectors"):
        vembed.load("out-1").encode(["a"], side="query")
    with pytest.raises(ConfigError, match=r"loss_type infonce takes one vector for each row and .* gives several"):
        vembed.train({**keys, "loss_type": "infonce", "output_dir": "out-3", "num_processes": 1})
