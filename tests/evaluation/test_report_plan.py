"""The plan in the report: lists of texts are read line by line, not in one cell."""

from __future__ import annotations

from vembed.evaluation.report.run_report import plan_parts, plan_section
from vembed.pages.page import Table


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


def candidate(*, recommended: bool, apart: int = 0) -> dict[str, object]:
    sizes = {"parameters": 3 << 20, "activations": 2 << 20, "apart": apart, "total": (5 << 20) + apart}
    return {"strategy": "ddp", "bytes_per_device": sizes, "recommended": recommended}


def test_of_the_ways_that_have_the_chosen_strategy_only_the_chosen_one_is_marked() -> None:
    ways = [candidate(recommended=recommended) for recommended in (False, True, False)]
    (table,) = plan_section({"reasons": [], "candidates": ways}).blocks
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows] == ["ddp", "✓ ddp (chosen)", "ddp"]
    assert table.tones == {1: "chosen"}


def test_bytes_that_are_never_there_at_once_are_a_size_and_explained() -> None:
    (table,) = plan_section({"reasons": [], "candidates": [candidate(recommended=True, apart=-(512 << 10))]}).blocks
    assert isinstance(table, Table)
    cells = dict(zip(table.heads, table.rows[0], strict=True))
    assert cells["never at once"] == "512 KiB"
    assert cells["total"] == "4.5 MiB"
    assert not any("-" in str(cell) for cell in cells.values())
    assert "never there at once" in table.caption
    (plain,) = plan_section({"oom_ladder": ["1. less"]}).blocks
    assert isinstance(plain, Table)
    assert plain.caption == ""
