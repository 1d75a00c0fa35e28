"""How the processes of a run agree, as plain callables: nothing here or above knows what carries it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from vembed.checkpoint.format import FutureCheckpointError, InvalidCheckpointError
from vembed.errors import ConfigError, MachineError, NonFiniteError, VembedError

if TYPE_CHECKING:
    from vembed.distributed.ranks import Ranks

Agree: TypeAlias = Callable[[bool], bool]
"""Takes this process's verdict and returns True when every process says True; all must call it at the same points."""

Share: TypeAlias = Callable[[Any], Sequence[Any]]
"""Takes this process's plain value and returns those of all, the first one's first; called at the same points."""

Problem: TypeAlias = OSError | VembedError
"""What may go wrong on one process and must become the outcome of all."""

T = TypeVar("T")

_KINDS: dict[str, type[Problem]] = {
    kind.__name__: kind
    for kind in (NonFiniteError, ConfigError, MachineError, InvalidCheckpointError, FutureCheckpointError, OSError)
}


def alone(ok: bool) -> bool:
    """Agree with oneself: the agreement of a run of one process."""
    return ok


def _only_own(value: Any) -> Sequence[Any]:
    return [value]


@dataclass(frozen=True, slots=True)
class Answers:
    """What an action came to on all processes.

    Attributes:
        values: What it returned on each, the first process first; None where it failed.
        problem: The first process's error, the same on all of them; None when all went well.
    """

    values: Sequence[Any]
    problem: Problem | None

    def require(self) -> Sequence[Any]:
        """Return the values.

        Raises:
            OSError: What went wrong, or
            VembedError: of the kind that the first failing process met.
        """
        if self.problem is not None:
            raise self.problem
        return self.values


@dataclass(frozen=True, slots=True)
class Team:
    """The processes that save and load together; without arguments it is a run of one process.

    Attributes:
        rank: This process, counted from 0.
        world_size: How many there are.
        share: How they tell each other what came of something.
    """

    rank: int = 0
    world_size: int = 1
    share: Share = _only_own

    @property
    def leads(self) -> bool:
        """Whether this process does what only one may do."""
        return self.rank == 0

    def each(self, action: Callable[[], Any]) -> Answers:
        """Do something on every process and wait for all: an error on one is the same outcome everywhere.

        Args:
            action: What it returns is told to all: numbers, texts, lists and dictionaries of them.
        """
        problem: Problem | None = None
        value: Any = None
        try:
            value = action()
        except tuple(_KINDS.values()) as error:
            problem = error
        if self.world_size == 1:
            return Answers([value], problem)
        told = self.share((value, None if problem is None else (_kind(problem), str(problem))))
        return Answers([value for value, _ in told], _first_problem([failure for _, failure in told]))

    def own(self, action: Callable[[], T]) -> T:
        """Do something on every process, wait for all, and return what came of it on this one.

        Raises:
            OSError: The first failing process met it; all raise it.
            VembedError: Likewise.
        """
        kept: list[T] = []
        self.each(lambda: kept.append(action())).require()
        return kept[0]

    def lead(self, action: Callable[[], Any]) -> Any:
        """Do something on the first process and return what came of it on all of them.

        Args:
            action: What it returns is told to all: numbers, texts, lists and dictionaries of them.

        Raises:
            OSError: The first process met it; all raise it.
            VembedError: Likewise.
        """
        return self.each(action if self.leads else _nothing).require()[0]


def team_of(ranks: Ranks) -> Team:
    """Return the team of the processes that share a batch."""
    return Team(ranks.rank, ranks.world_size, ranks.gather_objects)


def _nothing() -> None:
    return None


def _kind(problem: Problem) -> str:
    """Return the name under which an error travels: its own, or that of the nearest class above it."""
    return next(name for name in (kind.__name__ for kind in type(problem).__mro__) if name in _KINDS)


def _first_problem(failures: Sequence[tuple[str, str] | None]) -> Problem | None:
    """Return the error of the first process that failed; the message names it unless it is the first of all."""
    for rank, failure in enumerate(failures):
        if failure is not None:
            kind, message = failure
            return _KINDS[kind](message if rank == 0 else f"process {rank}: {message}")
    return None
