"""Names of columns in a step's row of metrics.jsonl that the training loop writes and the report reads."""

SOURCE_LOSS = "loss_source_"
"""Prefix of the mean loss of one training source, before its number, counted from 1."""

PART_NAMES = {
    "data_seconds": "waiting for data",
    "encode_seconds": "encoding, forward and backward",
    "wait_seconds": "waiting for the slowest rank",
    "loss_seconds": "loss over the batch",
    "reduce_seconds": "adding gradients up over ranks",
    "update_seconds": "clipping and optimizer",
    "": "everything else",
}
"""Column of each part of a step, "" for the rest of the step -> what the step does there."""
