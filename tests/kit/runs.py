"""What the tests of whole runs share: word pairs to learn, tiny models, and two ways of running the command."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import yaml
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from kit.warm import WarmProcess, run_warm
from vembed.entrypoints.train import main
from vembed.training.loop import TrainingLoop

ROOT = Path(__file__).parents[2]
RUN = ROOT / "run.py"
SAME_IN_EVERY_RUN = ("step", "epoch", "loss", "learning_rate", "grad_norm")

COLOURS = ("red", "blue", "green", "white", "black", "brown", "grey", "pink", "gold", "teal")
THINGS = ("fox", "tree", "car", "lamp", "river", "stone", "bird", "house", "boat", "hat", "door", "coin")
NUM_TRAIN, NUM_DEV = 84, 16


def word_pairs() -> list[dict[str, Any]]:
    """Return 120 pairs in two made-up languages: no word of a query stands in its positive, each must be learned."""
    rows = [
        {"query": f"a {colour} {thing}", "positive": f"un {thing[::-1]}o {colour[::-1]}a"}
        for colour, thing in itertools.product(COLOURS, THINGS)
    ]
    random.Random(5).shuffle(rows)
    return rows


def write_rows(path: Path, rows: list[Any]) -> Path:
    """Write rows (objects, or text as it is), one a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), "utf-8")
    return path


@dataclass(frozen=True)
class Site:
    """Data and models that many runs share, read only.

    Attributes:
        train: 84 pairs.
        dev: 16 others.
        test: 20 others.
        bert: A BERT of 2 layers x 32 with dropout 0.1.
        bert_without_dropout: The same without dropout.
    """

    train: Path
    dev: Path
    test: Path
    bert: Path
    bert_without_dropout: Path

    def keys(self, **changes: Any) -> dict[str, Any]:
        """Return the settings of a run of 8 steps with two evaluations, changed where asked; None leaves a key out."""
        keys = {
            "model_name": str(self.bert),
            "data_path": str(self.train),
            "val_data_path": str(self.dev),
            "test_data_path": str(self.test),
            "batch_size": 16,
            "max_steps": 8,
            "learning_rate": 3e-3,
            "temperature": 0.1,
            "eval_strategy": "steps",
            "eval_steps": 4,
            "bm25": False,
            "report_to": "none",
            "logging_steps": 1,
        } | changes
        return {key: value for key, value in keys.items() if value is not None}


def make_site(folder: Path) -> Site:
    """Write the shared data and models."""
    rows = word_pairs()
    texts = [text for row in rows for text in (row["query"], row["positive"])]
    return Site(
        train=write_rows(folder / "train.jsonl", rows[:NUM_TRAIN]),
        dev=write_rows(folder / "dev.jsonl", rows[NUM_TRAIN : NUM_TRAIN + NUM_DEV]),
        test=write_rows(folder / "test.jsonl", rows[NUM_TRAIN + NUM_DEV :]),
        bert=write_bert(folder / "bert", texts, dropout=0.1),
        bert_without_dropout=write_bert(folder / "bert0", texts, dropout=0.0),
    )


def write_bert(folder: Path, texts: list[str], *, dropout: float) -> Path:
    """Write a tiny BERT with a vocabulary of whole words."""
    import torch

    words = dict.fromkeys(word for text in texts for word in text.split())
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    vocabulary = {token: number for number, token in enumerate([*special, *words])}
    core = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer(lowercase=True)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.post_processor = processors.BertProcessing(("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, model_max_length=32, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]",
    )  # fmt: skip
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    torch.manual_seed(1)
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_config(folder: Path, keys: dict[str, Any], name: str = "config.yaml") -> Path:
    """Write a configuration whose output_dir, unless the keys say otherwise, is `out` beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(yaml.safe_dump({"output_dir": str(folder / "out")} | keys, sort_keys=False), "utf-8")
    return path


@dataclass(frozen=True)
class Done:
    """A command's exit code, and all that it printed."""

    code: int
    out: str
    err: str

    def ok(self) -> Self:
        """Return this, or fail unless the command ended well."""
        assert self.code == 0, self.err or self.out
        return self

    def fails(self, code: int, *words: str) -> Self:
        """Return this, or fail unless the command ended with a code, these words and no traceback."""
        assert self.code == code, self.err or self.out
        assert not (missing := [each for each in words if each not in self.err]), f"not said: {missing}\n{self.err}"
        assert "Traceback" not in self.err
        return self


@dataclass(frozen=True)
class Outcome(Done):
    """What a run left behind.

    Attributes:
        folder: Its output folder.
        rows: The rows of metrics.jsonl as they were when the command ended.
    """

    folder: Path
    rows: list[dict[str, Any]]

    @classmethod
    def of(cls, code: int, out: str, err: str, folder: Path) -> Outcome:
        """Look at what is there now."""
        return cls(code, out, err, folder, metric_rows(folder))

    def text(self, name: str) -> str:
        """Read a file of the output folder."""
        return (self.folder / name).read_text("utf-8")

    def json(self, name: str) -> Any:
        """Read a file of JSON of the output folder."""
        return json.loads(self.text(name))

    @property
    def plan(self) -> dict[str, Any]:
        """The plan that the run wrote."""
        plan: dict[str, Any] = self.json("plan.json")
        return plan

    @property
    def last_line(self) -> str:
        """The last line printed."""
        return self.out.rstrip("\n").rpartition("\n")[2]

    @property
    def flat(self) -> str:
        """What was printed on one line: a sentence that a screen wraps reads as it was written."""
        return " ".join(self.out.split())

    @property
    def same_rows(self) -> list[tuple[Any, ...]]:
        """What of metrics.jsonl must be equal in equal runs."""
        return [tuple(row[key] for key in SAME_IN_EVERY_RUN) for row in self.rows]

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [row["loss"] for row in self.rows]


def metric_rows(folder: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl as far as its lines are whole."""
    path = folder / "metrics.jsonl"
    text = path.read_text("utf-8") if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def run_here(config: Path, *words: str, folder: Path | None = None) -> Outcome:
    """Run the command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(config), *words], program="python run.py")
        except SystemExit as error:  # argparse
            code = int(error.code or 0)
    return Outcome.of(code, out.getvalue(), err.getvalue(), folder or config.parent / "out")


class Killed(BaseException):
    """Stands for the end of the process."""


def run_killed(config: Path, *, before: int | None = None, after: int | None = None) -> None:
    """Run the command in this process, which ends before a step, or after one that nothing has counted yet."""
    train_step = TrainingLoop.train_step

    def killed(self: TrainingLoop, number: int) -> Any:
        if number == before:
            raise Killed
        measured = train_step(self, number)
        if number == after:
            raise Killed
        return measured

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "train_step", killed)
        with pytest.raises(Killed):
            run_here(config)


def run_keys(folder: Path, keys: dict[str, Any], *words: str) -> Outcome:
    """Write a configuration into a folder and run it in this process."""
    return run_here(write_config(folder, keys), *words)


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a child: one thread as here, and the package on its path."""
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | changes


def run_process(config: Path, *words: str, **changes: str) -> Outcome:
    """Run the command in a process of its own."""
    done = run_warm(
        [str(RUN), str(config), *words], cwd=config.parent, env=environment(**changes), scratch=config.parent
    )
    return Outcome.of(done.returncode, done.stdout, done.stderr, config.parent / "out")


def start_process(config: Path, *words: str) -> WarmProcess:
    """Start the command; its output goes to a file, so that no pipe fills up."""
    return WarmProcess(
        [str(RUN), str(config), *words], cwd=config.parent, env=environment(), output=config.parent / "output.txt"
    )


def steps_saved(folder: Path) -> list[int]:
    """Return the steps of the checkpoints of a run."""
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


def evaluation(folder: Path, name: str) -> dict[str, Any]:
    """Return an evaluation's metrics.json without its times."""
    content: dict[str, Any] = json.loads((folder / "evaluation" / name / "metrics.json").read_text("utf-8"))
    del content["seconds"]
    return content


def assert_same_run(one: Path, other: Path) -> None:
    """Fail unless two runs are bit for bit the same: weights, optimizer, metrics, evaluations."""
    rows = [[tuple(row[key] for key in SAME_IN_EVERY_RUN) for row in metric_rows(folder)] for folder in (one, other)]
    assert rows[0] == rows[1]
    assert [row[0] for row in rows[0]] == list(range(1, len(rows[0]) + 1)), "each step once"
    last = steps_saved(one)[-1]
    assert last == len(rows[0])
    assert steps_saved(other)[-1] == last
    for name in ("model.safetensors", "optimizer.safetensors", "loss.safetensors", "state.json"):
        path = Path("checkpoints") / f"step-{last:08d}" / name
        assert (one / path).read_bytes() == (other / path).read_bytes(), path
    models = [{path.name: path.read_bytes() for path in (folder / "model").iterdir() if path.is_file()}
              for folder in (one, other)]  # fmt: skip
    assert models[0].keys() == models[1].keys()
    for name in models[0].keys() - {"README.md"}:  # it names the folder
        assert models[0][name] == models[1][name], name
    plans = [json.loads((folder / "plan.json").read_text("utf-8"))["model"] for folder in (one, other)]
    assert plans[0] == plans[1]
    for name in ("baseline", "final"):
        assert evaluation(one, name) == evaluation(other, name), name
        run = f"evaluation/{name}/run.trec"
        assert (one / run).read_bytes() == (other / run).read_bytes(), name
