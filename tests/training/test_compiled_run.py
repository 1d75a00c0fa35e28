"""A run with compiled layers leaves what any run leaves, and resumes exactly."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters

import vembed
from vembed.training import compiling

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("undrawn")


def files_of(run: Path) -> set[str]:
    return {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_compiled_run_leaves_the_files_of_an_eager_one_and_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "SETTINGS", {"backend": "aot_eager"})
    rows = tmp_path / "rows.jsonl"
    texts = [{"query": f"tree {row}", "positive": f"the tree of {row}" + " and more" * (row % 7)} for row in range(48)]
    rows.write_text("".join(json.dumps(each) + "\n" for each in texts))

    def train(name: str, **changes: Any) -> dict[str, torch.Tensor]:
        keys: dict[str, Any] = {"batch_size": 16, "gradient_cache_chunk_size": 4, "max_steps": 4, "save_steps": 2}
        keys |= {"model_name": "builtin:tiny-transformer", "data_path": str(rows), "report_to": [], "bm25": False}
        vembed.train({**keys, "output_dir": str(tmp_path / name), **changes})
        return load_file(tmp_path / name / "model" / "model.safetensors")

    try:
        eager = train("eager", compile=False)
        counters.clear()
        compiled = train("compiled", compile=True)
        assert counters["stats"]["unique_graphs"] > 0
        assert files_of(tmp_path / "compiled") == files_of(tmp_path / "eager")
        step = tmp_path / "compiled" / "checkpoints" / "step-00000003"
        resumed = train("compiled", compile=True, resume=str(step))
    finally:
        torch._dynamo.reset()
    assert eager.keys() == compiled.keys()
    for name, tensor in eager.items():
        assert (compiled[name] - tensor).abs().max() < 1e-5, name
        assert torch.equal(resumed[name], compiled[name]), name
    assert json.loads((tmp_path / "compiled" / "plan.json").read_text())["compile"] is True
