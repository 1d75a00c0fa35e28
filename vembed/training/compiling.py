"""Compile the repeated layers of an encoder: one graph of a layer serves all layers of its kind.

Weights and the sizes of a call are inputs of a graph, so that neither the next layer nor the next shape compiles again;
what does is another mode (without gradients, with them, evaluation), a mask that is there or not, and a single row.
Modules stay what they are: names, hooks, checkpoints, adapters and shards know nothing of it.

Random numbers come from the operators of an eager layer, in their order: pass 2 draws the masks of pass 1.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vembed.errors import ConfigError, MachineError
from vembed.text import first_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vembed.models.encoder import Encoder

MOST_GRAPHS = 64
"""Of all layers: torch's own 8 are soon reached, as the layers of transformers share one function."""

SETTINGS: dict[str, Any] = {
    "backend": "inductor",
    "options": {
        # Inductor's own random numbers aren't an eager layer's; reordered, independent draws would change places.
        "fallback_random": True,
        "reorder_for_peak_memory": False,
        "compile_threads": 1,  # in this process: workers would outlive one that is killed
    },
}


def compile_layers(encoder: Encoder, *, strict: bool) -> None:
    """Let the repeated layers of all towers compile when they are first called; comes before sharding.

    Args:
        strict: Whether what can't be compiled is an error; else it computes as without, after a warning of torch.

    Raises:
        ConfigError: There are no repeated layers.
    """
    lists = [tower.layers for tower in encoder.towers() if tower.layers is not None]
    if not lists:
        raise ConfigError(f"{encoder.name} has no list of equal layers to compile; set compile: false")
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = max(dynamo.recompile_limit, MOST_GRAPHS)
    dynamo.suppress_errors = not strict
    for name in lists:
        for layer in encoder.get_submodule(name).children():
            layer.compile(dynamic=True, fullgraph=strict, **SETTINGS)


@contextmanager
def compile_errors_explained() -> Iterator[None]:
    """Say how to do without, where a layer can't be compiled within the block.

    Raises:
        MachineError: It can't.
    """
    try:
        yield
    except Exception as error:
        known = sys.modules.get("torch._dynamo.exc")  # a second to import, and before that nothing is compiled
        if known is None or not isinstance(error, (known.TorchDynamoException, known.FailOnRecompileLimitHit)):
            raise
        cause = getattr(error, "inner_exception", error)
        first = first_line(cause)
        raise MachineError(
            f"a layer of the encoder can't be compiled ({type(cause).__name__}: {first}); set compile: false"
        ) from error
