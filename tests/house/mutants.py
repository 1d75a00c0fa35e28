"""Faults planted in the encoders, each of which the contract for encoders must see. Run by hand; no test collects it.

    python tests/house/mutants.py                             all of them, about half a minute each
    python tests/house/mutants.py "static: sum"               those whose name holds these words
    python tests/house/mutants.py --tests tests/models/test_static.py "static: sum"     by other tests, slow ones too

1. The package and its tests are copied to a temporary folder, and one text of the copy is replaced.
2. pytest runs the contract there, on the cases of the family, and stops at the first failure.
3. A line says which test failed, or SURVIVED. Before a test is deleted as covered by the contract, a fault that it
   catches must stand here and be caught by the contract.

A text that no longer stands in the code exactly once is an error: the row must follow the code.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = "tests/encoders"


@dataclass(frozen=True)
class Mutant:
    """A fault: one text of one file replaced by another."""

    name: str
    file: str  # below vembed/
    sound: str
    planted: str
    cases: str  # pytest's -k: where the contract must see it


MUTANTS = (
    Mutant(
        "static: sum for mean",
        "models/tables.py",
        'inputs["offsets"], mode="mean")',
        'inputs["offsets"], mode="sum")',
        "static and (company or form)",
    ),
    Mutant(
        "static: the longest text isn't written",
        "models/tables.py",
        "self.tokenizer.save(str(folder / TOKENIZER_FILE))",
        "self.tokenizer.no_truncation()\n        self.tokenizer.save(str(folder / TOKENIZER_FILE))",
        "static and short",
    ),
    Mutant(
        "late: longest vectors cut across rows",
        "models/late.py",
        '                order_C = order_C[inputs["row_of_token"][order_C].sort(stable=True).indices]\n',
        "",
        "colbert and topk",
    ),
    Mutant(
        "late: vectors of the longest norm in another order",
        "models/late.py",
        'order_C[inputs["longest_tokens"]].sort().values',
        'order_C[inputs["longest_tokens"]].sort().values.flip(0)',
        "colbert and topk",
    ),
    Mutant(
        "colbert: filling tokens seen by the others",
        "models/colbert.py",
        "seen = ids.lengths if self.late.attends else seen",
        "seen = ids.lengths",
        "colbert and all",
    ),
    Mutant(
        "colbert: punctuation of documents gives vectors too",
        "models/colbert.py",
        "counts = ~np.isin(ids.values, self._skipped_ids)",
        "counts = np.ones_like(counts)",
        "colbert and all and form",
    ),
    Mutant(
        "vision: mean without the first token",
        "models/vision.py",
        "hidden_RTH.mean(dim=1)",
        "hidden_RTH[:, 1:].mean(dim=1)",
        "vision and mae and form",
    ),
    Mutant(
        "vision: pictures of a call in another order",
        "models/vision.py",
        'rows_of(features.per_row["pixel_values"], rows)}',
        'rows_of(features.per_row["pixel_values"], rows[::-1])}',
        "vision and vit",
    ),
    Mutant(
        "patches: the head isn't read back",
        "models/vision.py",
        "layers = [load_dense(files, HEAD_FOLDER)] if saved else []",
        "layers = []",
        "patches and reload",
    ),
    Mutant(
        "vision-language: the folder loses the query instruction",
        "models/vision_language.py",
        '"instructions": dict(self.prompts),',
        '"instructions": {**self.prompts, "query": ""},',
        "vision_language and qwen3_vl and reload",
    ),
    Mutant(
        "vision-language: lengths of padded rows forgotten",
        "models/vision_language.py",
        '        if (ids.lengths < width).any():\n            inputs["lengths"]',
        '        if False:\n            inputs["lengths"]',
        "vision_language and qwen2_vl",
    ),
    Mutant(
        "vision-late: the head isn't read back",
        "models/vision_late.py",
        "layers = [] if saved is None else [load_dense",
        "layers = [] if True else [load_dense",
        "vision-late and qwen3_vl and reload",
    ),
    Mutant(
        "dual: SigLIP's texts not padded",
        "models/dual.py",
        "        if self.pads_texts:  # SigLIP",
        "        if False:  # SigLIP",
        "dual and siglip",
    ),
    Mutant(
        "dual: vectors keep their length",
        "models/dual.py",
        "return unit(self._towers.get_image_features",
        "return 1.5 * unit(self._towers.get_image_features",
        "dual and clip",
    ),
    Mutant(
        "open_clip: a text's end is cut off",
        "models/open_clip.py",
        "self.causal_texts.cut(ids_NT))",
        "[row[: max(1, len(row) - 1)] for row in self.causal_texts.cut(ids_NT)])",
        "open_clip and clip",
    ),
    Mutant(
        "composed: no gradient behind the projections",
        "models/composed.py",
        "self.projections[part](unit(x).to(dtype)",
        "self.projections[part](unit(x.detach()).to(dtype)",
        "composed and bert",
    ),
    Mutant(
        "composed: the image tower's projection is written for texts",
        "models/composed.py",
        "        save_weights(self.projections, folder, PROJECTIONS_FILE)\n",
        "        self.projections[TEXT].load_state_dict(self.projections[IMAGE].state_dict())\n"
        "        save_weights(self.projections, folder, PROJECTIONS_FILE)\n",
        "composed and bert",
    ),
    Mutant(
        "LoRA: half of the delta merged",
        "models/adapters.py",
        "+ delta.to(wide)).to(",
        "+ 0.5 * delta.to(wide)).to(",
        "adapters and (text or dual) and (bert or clip)",
    ),
    Mutant(
        "plan: half of what grows with tokens",
        "models/measure.py",
        "per_token += count * size / (rows * width)",
        "per_token += count * size / (rows * width) / 2",
        "plan and text and bert",
    ),
    Mutant(
        "plan: layers counted twice",
        "models/profile.py",
        "        return CallCosts(CallCost(**saved), last.transient)\n",
        '        saved["per_token"] *= 2\n        return CallCosts(CallCost(**saved), last.transient)\n',
        "plan and text and bert",
    ),
    Mutant(
        "text: cut texts not counted",
        "models/text.py",
        "return sum(bool(encoding.overflowing) for encoding in encoded.encodings)",
        "return 0",
        "text and bert and long_texts",
    ),
    Mutant(
        "text: form transformers doubles the longest text",
        "models/text.py",
        '| {"model_max_length": self.max_length}',
        '| {"model_max_length": 2 * self.max_length}',
        "text and bert and short and form",
    ),
    Mutant(
        "text: padding is attended to",
        "models/text.py",
        "        attention_mask_RT = real_RT.long() if takes_mask else None\n",
        "        attention_mask_RT = torch.ones_like(ids_RT) if takes_mask else None\n",
        "text and bert",
    ),
    Mutant(
        "text: prompts aren't written",
        "models/formats.py",
        'general = {"prompts": dict(prompts)',
        'general = {"prompts": {}',
        "text and prompts and dense",
    ),
    Mutant(
        "text: another activation of dense layers is written",
        "models/formats.py",
        '"activation_function": f"{kind.__module__}.{kind.__qualname__}",',
        '"activation_function": "torch.nn.modules.linear.Identity",',
        "text and dense",
    ),
    Mutant(
        "packing: positions run on over rows",
        "models/attention.py",
        "position_T = torch.arange(num_tokens, device=device) - starts_S1[segment_T]",
        "position_T = torch.arange(num_tokens, device=device)",
        "text and bert and end_to_end",
    ),
    Mutant(
        "packing: rows attend to each other",
        "models/attention.py",
        "segment_T = segments_S.repeat_interleave(lengths_S, output_size=num_tokens)",
        "segment_T = segments_S.repeat_interleave(lengths_S, output_size=num_tokens) * 0",
        "text and bert and end_to_end",
    ),
    Mutant(
        "tiny-clip: the picture tower trains on detached pixels of half the rows",
        "models/from_scratch.py",
        "return unit(self.vision(x))",
        "z = self.vision(x)\n        return unit(torch.cat([z[:1].detach(), z[1:]]))",
        "tiny-clip",
    ),
    Mutant(
        "sentence-transformers: prompts of the other side",
        "models/st_library.py",
        "self.model.preprocess(texts, prompt=self.prompts[side] or None, task=side)",
        'self.model.preprocess(texts, prompt=self.prompts["document"] or None, task=side)',
        "sentence_transformers and layer and form",
    ),
    Mutant(
        "sentence-transformers: rows of both sides not put back in order",
        "models/st_library.py",
        "torch.cat(embeddings)[torch.cat(indices).argsort()]",
        "torch.cat(embeddings)",
        "sentence_transformers and layer",
    ),
    Mutant(
        "sentence-transformers: a side without trained weights counts as frozen",
        "models/st_library.py",
        "z_RE.requires_grad_(any(parameter.requires_grad for parameter in self.parameters()))",
        "pass",
        "sentence_transformers and router and adapters",
    ),
    Mutant(
        "keys: what nobody reads isn't refused",
        "models/load.py",
        "getattr(keys, key) != default_of(key)]",
        "getattr(keys, key) != default_of(key) and False]",
        "keys and (open_clip or tiny-clip)",
    ),
    Mutant(
        "checkpointing: a layer draws other masks",
        "models/plannable.py",
        'enable({"use_reentrant": False})',
        'enable({"use_reentrant": False, "preserve_rng_state": False})',
        "checkpointing and text and bert",
    ),
)


def run(mutant: Mutant, tests: list[str]) -> str:
    """Plant a fault in a copy, run tests on it, and say which failed first."""
    file = ROOT / "vembed" / mutant.file
    code = file.read_text("utf-8")
    if code.count(mutant.sound) != 1:
        return f"ERROR: its text stands {code.count(mutant.sound)} times in {mutant.file}"
    if mutant.planted == mutant.sound:
        return "ERROR: it changes nothing"
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        for name in ("vembed", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        (copy / "vembed" / mutant.file).write_text(code.replace(mutant.sound, mutant.planted), "utf-8")
        words = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", "", "-p", "no:cacheprovider"]
        words += tests or [CONTRACT, "-k", mutant.cases]
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?)(?:::\w+)??::(\w+(?:\[.*?\])?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode == 0:
        return "SURVIVED"
    if done.returncode != 1 or failed is None:
        return f"ERROR: pytest ended with {done.returncode}: {done.stdout.strip()[-300:]}"
    return failed[2] if not tests else f"{Path(failed[1]).name} {failed[2]}"


def main() -> int:
    """Run the faults that the arguments name."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="run those whose name holds one of these words; all by default")
    parser.add_argument("--tests", nargs="+", default=[], help="files of tests instead of the contract")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if not options.words or any(word in mutant.name for word in options.words)]
    bad = 0
    for mutant in chosen:
        start = time.monotonic()
        verdict = run(mutant, options.tests)
        bad += verdict.startswith(("SURVIVED", "ERROR"))
        print(f"{mutant.name:72} {verdict}  ({time.monotonic() - start:.0f} s)", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} seen")
    return 1 if bad or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
