"""The plan in the report: lists of texts are read line by line, not in one cell."""

from __future__ import annotations

from vembed.evaluation.report.run_report import plan_parts


def test_a_list_of_texts_is_a_table_of_one_column() -> None:
    plan = {"strategy": "ddp", "reasons": ["fits"], "oom_ladder": ["1. less", "2. more"], "zero_stages": []}
    reasons, settings, tables = plan_parts(plan)
    assert reasons == ["fits"]
    assert tables == [("oom_ladder", [{"oom_ladder": "1. less"}, {"oom_ladder": "2. more"}])]
    assert [key for key, _ in settings] == ["strategy", "zero_stages"]


def test_candidates_stay_a_table_of_their_columns() -> None:
    _, _, tables = plan_parts({"candidates": [{"strategy": "ddp", "bytes_per_device": {"total": 2**30}, "fits": True}]})
    ((name, (record,)),) = tables
    assert name == "candidates"
    assert list(record) == ["strategy", "total", "fits"]
    assert record["fits"] == "yes"
