"""How records divide into batches."""

from __future__ import annotations


def epoch_layout(num_records: int, batch_size: int, *, drop_last: bool) -> tuple[int, tuple[str, ...]]:
    """Return the batches of an epoch, and what to tell the user where the records don't divide evenly.

    Args:
        num_records: Records, at least 2.
        batch_size: Records of a batch, over all devices.
        drop_last: Leave out the smaller last batch. With fewer records than a batch it has no effect.
    """
    steps, tail = divmod(num_records, batch_size)
    if steps == 0:
        return 1, (f"{num_records:,} records are fewer than a batch of {batch_size:,}: each step takes all of them.",)
    if tail == 0:
        return steps, ()
    if drop_last:
        return steps, (f"The last {tail:,} records of each epoch's order are left out (drop_last).",)
    if tail == 1:
        return steps, (
            "The last record of each epoch's order is left out: a batch of one record has no in-batch negatives.",
        )
    return steps + 1, (f"The last batch of each epoch has {tail:,} records instead of {batch_size:,}.",)
