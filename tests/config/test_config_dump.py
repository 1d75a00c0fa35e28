"""What is kept of a configuration: the dumped file, the hash, the comparison on resume, and no secret in any."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from vembed.config.load import load_config
from vembed.config.messages import key_schemas
from vembed.config.record import config_hash, dump_config, on_resume, resume_differences, shared_values
from vembed.config.schema import SECTIONS, Config, key_names
from vembed.errors import ConfigError
from vembed.redact import redact
from vembed.registry import METRICS, TRACKERS

DIFFICULT_TEXTS = [
    "", " ", "null", "~", "no", "on", "true", "True", "1", "1e-5", "1_000", ".nan", ".inf", "1:30", "2024-01-01", "=",
    "<<", "- a", "? a", "a: b", "a #b", "#a", "*a", "&a", "!a", "%a", "@a", "`a", "|", ">", "'", '"', "a\nb", "a\n",
    "\na", "a \n b\n\n", "query: ", " a ", "\t", "\r\n", "é😀\u2028\x85\xa0", "\x07\x1b\x7f", "\ufeff", "---", "...",
    "a" * 500 + " b" * 300,
]  # fmt: skip


def make(**values: object) -> Config:
    return Config.model_validate({"model_name": "some/model", **values})


def loaded(text: str, folder: Path) -> Config:
    path = folder / "config.yaml"
    path.write_bytes(text.encode())
    return load_config(path).config


CHANGED = make(
    model_name="other", learning_rate=1e-5, max_grad_norm=None, max_seq_length=128, query_prompt="query: ",
    document_prompt="", column_mapping={"b": "query", "a": None, "no": "label", "3": "negatives"}, bf16=True,
    use_gradient_cache=True, gradient_cache_chunk_size=8, eval_strategy="no", skip_invalid_records=True,
    max_invalid_records=7, nonfinite_policy="skip", max_skipped_steps=3, save_minutes=0.5, output_dir="a=b",
    mrl_dims=[64, 16], mrl_weights=[1, 0.5],
)  # fmt: skip


@pytest.mark.parametrize("config", [make(), CHANGED])
def test_a_dumped_config_loads_as_an_equal_one(config: Config, tmp_path: Path) -> None:
    assert loaded(dump_config(config), tmp_path) == config
    assert dump_config(loaded(dump_config(config), tmp_path)) == dump_config(config)


@pytest.mark.parametrize("text", DIFFICULT_TEXTS)
def test_every_text_survives_the_dump(text: str, tmp_path: Path) -> None:
    config = make(query_prompt=text, column_mapping={f"{text}x": "query"})
    assert loaded(dump_config(config), tmp_path) == config


def test_a_dump_holds_every_key_once_under_its_section_and_keeps_auto() -> None:
    text = dump_config(make())
    assert list(yaml.safe_load(text)) == list(key_names())
    assert [line[2:] for line in text.splitlines() if line.startswith("# ")] == list(SECTIONS)
    assert "max_seq_length: auto\n" in text


def test_equal_configs_have_equal_bytes_in_every_process(tmp_path: Path) -> None:
    one = make(column_mapping={"a": "query", "b": None})
    two = make(column_mapping={"b": None, "a": "query"})
    assert one == two
    assert dump_config(one) == dump_config(two)
    assert config_hash(one) == config_hash(two)
    (tmp_path / "config.yaml").write_text(dump_config(one))
    script = (
        "import sys; from pathlib import Path; from vembed.config.load import load_config;"
        "from vembed.config.record import config_hash, dump_config;"
        f"config = load_config(Path({str(tmp_path / 'config.yaml')!r})).config;"
        "sys.stdout.write(config_hash(config) + dump_config(config))"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, check=True, env={"PYTHONHASHSEED": seed, "PATH": ""}
        )
        assert done.stdout.decode() == config_hash(one) + dump_config(one)


OTHER_VALUES = {
    "output_dir": "x", "overwrite_output_dir": True, "resume": "never", "logging_steps": 1, "report_to": "none",
    "log_model": True, "save_strategy": "epoch", "save_steps": 1, "save_minutes": 1.0, "save_total_limit": 3,
    "eval_batch_size": 8, "bm25": False, "bm25_language": "german", "oom_retry": False, "num_workers": 2,
    "prefetch_factor": 3, "num_processes": 2, "use_fsdp": True, "sharding_factor": 2, "fsdp_mode": "lean",
    "cpu_offload": True, "nccl_timeout": 60, "ddp_find_unused_parameters": True, "dataloader_pin_memory": False,
    "resume_elastic": True, "learning_rate": 1.0, "seed": 1, "batch_size": 8, "model_name": "x", "data_path": "x",
    "column_mapping": {"a": "query"}, "temperature": 1.0, "metric_for_best_model": "mrr@10",
    "attn_implementation": "eager", "deterministic": True,
}  # fmt: skip
OF_A_PROCESS = {"output_dir", "overwrite_output_dir", "num_workers", "prefetch_factor", "report_to", "log_model"}
HARMLESS = OF_A_PROCESS | {
    "eval_batch_size", "bm25", "bm25_language", "oom_retry", "num_processes", "use_fsdp", "sharding_factor",
    "fsdp_mode", "cpu_offload", "nccl_timeout", "ddp_find_unused_parameters", "dataloader_pin_memory",
    "resume", "resume_elastic", "logging_steps", "save_strategy", "save_steps", "save_minutes", "save_total_limit",
}  # fmt: skip


@pytest.mark.parametrize("key", OTHER_VALUES)
def test_hash_resume_and_agreement_of_processes_follow_what_a_key_decides(key: str) -> None:
    base, changed = make(), make(**{key: OTHER_VALUES[key]})
    assert (config_hash(changed) == config_hash(base)) == (key in HARMLESS)
    assert len(config_hash(changed)) == 64
    values, others = shared_values(base), shared_values(changed)
    assert {name for name in values if others[name] != values[name]} == {key} - OF_A_PROCESS
    assert (key in values) == (key not in OF_A_PROCESS)
    old = base.model_dump()
    assert resume_differences(old, base) == []
    kind = "harmless" if key in HARMLESS else "refused"
    assert resume_differences(old, changed) == [(key, old[key], OTHER_VALUES[key], kind)]


def test_the_harmless_keys_are_exactly_these() -> None:
    assert {key for key in key_schemas() if on_resume(key) == "harmless"} == HARMLESS
    assert set(OTHER_VALUES) >= HARMLESS


def test_a_checkpoint_of_an_older_or_newer_schema_is_compared_by_defaults() -> None:
    old = make().model_dump()
    del old["seed"]
    assert resume_differences(old, make()) == []
    assert [each.key for each in resume_differences(old, make(seed=3))] == ["seed"]
    assert resume_differences({**old, "kl_teacher_temperature": 1.0}, make()) == [], "no loss reads it"
    assert resume_differences({**old, "temperature": 1.0}, make()) == [("temperature", 1.0, 0.05, "refused")]
    assert resume_differences({**old, "no_longer": True}, make()) == [("no_longer", True, None, "refused")]
    assert [each.key for each in resume_differences({**old, "bm25": 1}, make())] == ["bm25"], "true is not 1"
    assert resume_differences(yaml.safe_load(dump_config(make())), make()) == []


def test_a_plugin_added_for_its_tracker_alone_is_told_and_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("only_trackers", "only_trackers.part", "more", "nothing"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(TRACKERS, "_plugins", {"a": "only_trackers.part", "b": "more"})
    monkeypatch.setattr(METRICS, "_plugins", {"c": "more"})

    def kinds(old: list[str], new: list[str]) -> list[str]:
        return [each.kind for each in resume_differences(make(plugins=old).model_dump(), make(plugins=new))]

    assert kinds([], ["only_trackers"]) == ["harmless"]
    assert kinds(["more"], ["more", "only_trackers"]) == ["harmless"]
    for old, new in [
        ([], ["more"]),
        ([], ["nothing"]),
        (["only_trackers"], []),
        (["more", "nothing"], ["nothing", "more"]),
    ]:
        assert kinds(old, new) == ["refused"]


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("https://user:pw@host/x", "https://***@host/x"),
        ("model_namehttps://user:pw@host/x", "model_namehttps://***@host/x"),
        ("https://token@host/x", "https://***@host/x"),
        ("https://user:p@w@host", "https://***@host"),
        ("see git+ssh://u:p@h/x and HTTPS://u:p@h.", "see git+ssh://***@h/x and HTTPS://***@h."),
        ("https://h/x?a=1&access_token=pw#x", "https://h/x?a=1&access_token=***#x"),
        ("https://h/x?X-Amz-Signature=pw&b=2", "https://h/x?X-Amz-Signature=***&b=2"),
        ("https://host/a@b", "https://host/a@b"),
        ("https://host/?q=a@b", "https://host/?q=a@b"),
        ("user@host:folder", "user@host:folder"),
        ("data/train.jsonl", "data/train.jsonl"),
        ("MLFLOW_TRACKING_TOKEN=pw, HF_TOKEN=pw", "MLFLOW_TRACKING_TOKEN=***, HF_TOKEN=***"),
    ],
)
def test_redact_hides_what_a_url_carries_for_a_server(text: str, redacted: str) -> None:
    assert redact(text) == redacted
    assert redact(redacted) == redacted


def test_no_secret_is_dumped_compared_or_hashed(tmp_path: Path) -> None:
    one, two = make(data_path="https://u:canary@host/x"), make(data_path="https://u:canary2@host/x")
    assert "canary" not in dump_config(one)
    assert config_hash(one) == config_hash(two)
    with pytest.raises(ConfigError, match="replaces a secret; write the secret itself"):
        loaded(dump_config(one), tmp_path)  # nothing is trained with the mask
    assert resume_differences(one.model_dump(), two) == []
    differences = resume_differences({**one.model_dump(), "gone": "https://u:canary@h"}, make())
    assert [each.key for each in differences] == ["data_path", "gone"]
    assert "canary" not in str(differences)
    assert config_hash(one) != config_hash(make(data_path="https://u:canary@other/x"))
