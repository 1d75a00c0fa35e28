"""What every section of the configuration is."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A group of keys: strict, frozen, without unknown ones."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # a path may hold a password
        protected_namespaces=(),  # model_name is ours
    )

    @classmethod
    def default(cls, name: str) -> Any:
        """Return the value of a key that nobody sets."""
        return cls.model_fields[name].get_default()
