"""Everything that was weighed, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.plan.hardware import GIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.plan.cost_model import Candidate
    from vembed.plan.plan import Plan

HEADER = (
    "way", "weights", "grads", "adam", "activ.", "loss", "other", "total", "host", "fits", "retain", "speed", "scaling",
    "sent",
)  # fmt: skip

LEGEND = (
    "GiB on each device. loss: embeddings and blocks of the similarity matrix; other: buckets, what sharding gathers;",
    "total: the worst moment, when not all of these are there.",
    "retain: part of the batch that isn't encoded twice. speed: 1 is forward and backward once without waiting;",
    "scaling: what communication leaves of that; sent: GiB in a step. Speeds are rough. *: chosen.",
)


def comparison(plan: Plan) -> str:
    """Return the table of all ways, then the decision tree, the ladder, and more devices."""
    blocks = [_block("ways to train", [*_table(plan), *LEGEND])]
    blocks += [
        _block(title, lines)
        for title, lines in (
            ("ZeRO stages", plan.advice.zero_stages),
            ("decision tree", plan.advice.decision_tree),
            ("if a step runs out of memory all the same", plan.advice.oom_ladder),
            ("as devices are added, each with its batch", plan.advice.scaling),
        )
        if lines
    ]
    return "\n".join(blocks)


def _block(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _table(plan: Plan) -> list[str]:
    rows: list[tuple[str, ...]] = [HEADER, *(_row(each, chosen=plan.recommends(each)) for each in _shown(plan))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    return [
        "  ".join(cell.ljust(width) if place == 0 else cell.rjust(width) for place, (cell, width) in
                  enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]  # fmt: skip


def _shown(plan: Plan) -> list[Candidate]:
    """Return all but the partly sharded ways that nobody asked for: of each of those only the one that shards all."""
    return [
        each
        for each in plan.candidates
        if each.way.sharding_factor in (1, plan.world_size, plan.way.sharding_factor)
        or (each.way.mode == "sharded" and not each.way.cpu_offload and not each.way.gradient_checkpointing)
    ]


def _row(candidate: Candidate, *, chosen: bool) -> tuple[str, ...]:
    sizes, way = candidate.bytes_per_device, candidate.way
    name = str(way) if way.mode is None else f"{way}, 1/{way.sharding_factor} (ZeRO-{way.zero_stage})"
    other = sizes.reduction + sizes.sharding
    counts = (
        sizes.parameters, sizes.gradients, sizes.optimizer, sizes.activations, sizes.loss + sizes.embeddings, other,
        sizes.total, candidate.host_bytes,
    )  # fmt: skip
    return (
        f"{'*' if chosen else ' '} {name}",
        *(f"{count / GIB:.2f}" for count in counts),
        "yes" if candidate.fits else "no",
        f"{candidate.chunks.kept_share:.2f}" if way.gradient_cache else "all",
        f"{candidate.relative_speed:.2f}",
        f"{candidate.scaling_efficiency:.0%}",
        f"{candidate.communication_bytes / GIB:.2f}",
    )
