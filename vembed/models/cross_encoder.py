"""A cross-encoder of sentence-transformers: it reads a query and a document together and gives the pair one score.

The library tokenizes, sorts by length, pads and computes. It trains nothing here: it teaches, and judges negatives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from vembed.errors import ConfigError
from vembed.models.hub import ModelFiles, tensors_sha256
from vembed.text import first_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from vembed.batch import Modality
    from vembed.models.keys import ModelKeys

PAIRS_AT_ONCE = 32
"""Of one call: the library's default."""

_PROBES = (("A fox.", "naïve Größe 東京 🦊"), ("a long query " * 200, "a long text " * 2000))


class CrossEncoder:
    """A model that scores pairs of texts.

    Raises:
        ConfigError: sentence-transformers isn't installed or can't load it, or it gives several scores.
    """

    modalities: ClassVar[frozenset[Modality]] = frozenset({"text"})

    def __init__(self, keys: ModelKeys) -> None:
        self.name = keys.model_name
        self._model = _load(ModelFiles(keys))
        if self._model.num_labels != 1:
            raise ConfigError(f"{self.name} gives a pair {self._model.num_labels} scores, and one is needed")

    @staticmethod
    def is_meant(keys: ModelKeys) -> bool:
        """Return whether a model is one, by what its files say."""
        files = ModelFiles(keys)
        kind = files.read_json("config_sentence_transformers.json").get("model_type")
        heads = files.read_json("config.json").get("architectures") or []
        return kind == "CrossEncoder" or any(str(head).endswith("ForSequenceClassification") for head in heads)

    def key(self) -> dict[str, str]:
        """Return what its scores depend on: hashes of its weights, and of what it makes of sample pairs."""
        made = self._model.preprocess([list(pair) for pair in _PROBES])
        inputs = sorted((name, value) for name, value in made.items() if isinstance(value, torch.Tensor))
        weights = tensors_sha256(sorted(self._model.state_dict().items()))
        return {"weights": weights, "encoder": "cross-encoder", "preprocessing": tensors_sha256(inputs)}

    def to(self, device: torch.device) -> CrossEncoder:
        """Bring it to a device."""
        self._model.to(device)
        return self

    def scores(self, pairs: Sequence[tuple[str, str]], autocast_dtype: torch.dtype | None = None) -> Tensor:
        """Return the logit of each (query, document), (N,) float32 on the model's device."""
        device = next(self._model.parameters()).device
        if not pairs:
            return torch.zeros(0, device=device)
        with torch.autocast(device.type, autocast_dtype, enabled=autocast_dtype is not None):
            found: Tensor = self._model.predict(
                [list(pair) for pair in pairs],
                batch_size=PAIRS_AT_ONCE,
                show_progress_bar=False,
                activation_fn=torch.nn.Identity(),
                convert_to_tensor=True,
            )
        return found.float()


def _load(files: ModelFiles) -> Any:
    try:
        from sentence_transformers import CrossEncoder as Library
    except ImportError as error:
        raise ConfigError(f"{files.name} is a cross-encoder: pip install vembed[st]") from error
    how: dict[str, Any] = {"dtype": files.dtype}
    if not files.keys.allow_pickle:
        how["use_safetensors"] = True
    try:
        return Library(files.name, device="cpu", revision=files.keys.model_revision, model_kwargs=how).eval()
    except Exception as error:  # whatever the library makes of a file that it doesn't expect
        first = first_line(error)
        raise ConfigError(f"{files.name}: sentence-transformers can't run this cross-encoder: {first}") from error
