"""Play one round of the soak: disturb a command, repeat it, and say what is wrong with what is left."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import soak_commands as commands
from soak_compare import compare

if TYPE_CHECKING:
    from pathlib import Path

    from soak_site import Scenario

DISK_BYTES: Final = 400 << 20
SIGNALS: Final = {"term": signal.SIGTERM, "int": signal.SIGINT, "hup": signal.SIGHUP, "usr1": signal.SIGUSR1}
BY_CLOCK: Final = {"stop", "ctrl-c", "worker", "rank-kill", "rank-term", "rank-stop", "all-ranks-kill"}
"""Disturbances that a process can't do to itself."""

CODES: Final = {
    "kill": {-signal.SIGKILL, -signal.SIGALRM},
    "flip": {-signal.SIGKILL, -signal.SIGALRM},
    "full": {5},
    "worker": {5},
    "rank-kill": {5},
    "all-ranks-kill": {5},
    "rank-term": {75, 5},
    "int": {75, 130, -signal.SIGINT},
    "ctrl-c": {75, 130, -signal.SIGINT},
} | {name: {75, -number} for name, number in SIGNALS.items() if name != "int"}
"""How a disturbed command may end, beside ending well."""

KINDS: Final = ("divergence", "hang", "leftover", "traceback", "ending")
FRESH_SHARE: Final = 0.1
SECOND_SHARE: Final = 0.3
"""Rounds whose repeated command is disturbed as well."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The undisturbed command: how long it takes, and what can be hit."""

    seconds: float  # of a fork, or of a fresh interpreter in scenarios of ranks
    operations: int  # that it does to files
    first_operation: int = 0  # that may be hit
    first_second: float = 0


START_SECONDS: Final = 0.2
"""Python's own start takes a third of this: it answers an interrupt there with a traceback that nobody can prevent."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What happens to a command, and when."""

    kind: str
    seconds: float  # since its start; or since the file operation, for a kill
    operation: int | None  # right before this file operation; None by the clock
    pause: float  # how long a stop lasts, seconds
    free_bytes: int  # that a full disk keeps
    seed: int  # of the choice of a process or a bit

    def __str__(self) -> str:
        if self.operation is None:
            return f"{self.kind} after {self.seconds:.2f} s"
        return f"{self.kind} at file operation {self.operation}" + (f" + {self.seconds:.3f} s" if self.seconds else "")


@dataclass(slots=True)
class Outcome:
    """What became of a round."""

    number: int
    scenario: str
    disturbances: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)  # each disturbance with its moment
    codes: list[int | None] = field(default_factory=list)  # of all commands
    failures: list[tuple[str, str]] = field(default_factory=list)  # (kind, what)
    seconds: float = 0
    by_clock: bool = False  # whether a kill came at some moment, not at a file operation


def draw(
    rng: random.Random, scenario: Scenario, profile: Profile, *, is_fresh: bool, fresh_seconds: float
) -> Disturbance:
    """Draw what happens to a command."""
    kind = rng.choice(scenario.disturbances)
    first, last = profile.first_second, profile.seconds
    if is_fresh and not scenario.in_ranks:
        first, last = first + (fresh_seconds if scenario.only_finish else 0), last + fresh_seconds
    if is_fresh and kind != "kill":
        first = min(max(first, START_SECONDS), last)
    by_clock = is_fresh or kind in BY_CLOCK or rng.random() < 0.5
    seconds = rng.uniform(first, last)
    operation = rng.randrange(profile.first_operation, profile.operations)
    if not by_clock:
        seconds = rng.choice((0, 0, rng.uniform(0, 0.02))) if kind in {"kill", "flip"} else 0
    return Disturbance(
        kind=kind,
        seconds=seconds,
        operation=None if by_clock else operation,
        pause=rng.uniform(0.1, 1.5),
        free_bytes=int(10 ** rng.uniform(2, 6)),
        seed=rng.getrandbits(32),
    )


class Job:
    """Plays rounds one after the other, each in an empty folder."""

    def __init__(self, folder: Path, site: Path, profiles: dict[str, Profile], fresh_seconds: float, seed: str) -> None:
        self.site, self.profiles, self.fresh_seconds, self.seed = site, profiles, fresh_seconds, seed
        self.disk = folder / "disk"
        self.has_disk = commands.mount_disk(self.disk, DISK_BYTES)
        self.round, self.said, self.filler = self.disk / "round", folder / "said", self.disk / "filler"

    def play(self, number: int, scenarios: dict[str, Scenario]) -> Outcome:
        """Play a round."""
        rng = random.Random(f"{self.seed}/{number}")
        outcome = Outcome(number, rng.choice(list(scenarios)))
        scenario = scenarios[outcome.scenario]
        started = time.monotonic()
        self._prepare(outcome)
        is_fresh = rng.random() < FRESH_SHARE or scenario.in_ranks
        for _ in range(1 + (rng.random() < SECOND_SHARE)):
            profile = self.profiles[outcome.scenario]
            plan = draw(rng, scenario, profile, is_fresh=is_fresh, fresh_seconds=self.fresh_seconds)
            if plan.kind == "full" and not self.has_disk:
                continue
            outcome.disturbances.append(plan.kind)
            outcome.told.append(f"{plan}{' (fresh)' if is_fresh else ''}")
            self._run(outcome, scenario, plan, is_fresh=is_fresh)
            if plan.kind == "flip":
                self._flip(outcome, scenario, random.Random(plan.seed), is_fresh=is_fresh)
        self._repeat(outcome, scenario, started, is_fresh=is_fresh)
        return outcome

    def kill(self, number: int, name: str, scenario: Scenario, operation: int) -> Outcome:
        """Kill a command right before one of its file operations, and start it again."""
        plan = Disturbance("kill", seconds=0, operation=operation, pause=0, free_bytes=0, seed=0)
        outcome, started = Outcome(number, name, [plan.kind], [str(plan)]), time.monotonic()
        self._prepare(outcome)
        self._run(outcome, scenario, plan, is_fresh=False)
        self._repeat(outcome, scenario, started, is_fresh=False)
        return outcome

    def _prepare(self, outcome: Outcome) -> None:
        """Empty the round's folder, and put into it what a command of the scenario may find."""
        for folder in (self.round, self.said):
            shutil.rmtree(folder, ignore_errors=True)
        self.said.mkdir(parents=True)
        prepared = self.site.parent / "before" / outcome.scenario
        shutil.copytree(prepared, self.round) if prepared.is_dir() else self.round.mkdir(parents=True)

    def _repeat(self, outcome: Outcome, scenario: Scenario, started: float, *, is_fresh: bool) -> None:
        """Start the command again, undisturbed, and compare what it leaves."""
        self._run(outcome, scenario, None, is_fresh=is_fresh)
        found = compare(self.site.parent / "whole" / outcome.scenario, self.round)
        outcome.failures += [("divergence", each) for each in found.divergences]
        outcome.failures += [("leftover", each) for each in found.leftovers]
        outcome.seconds = time.monotonic() - started

    def _run(self, outcome: Outcome, scenario: Scenario, plan: Disturbance | None, *, is_fresh: bool) -> int | None:
        """Run the round's command, disturbed or not, check how it ended, and return its exit code."""
        number = len(outcome.codes)
        moment = None
        if plan is not None and plan.operation is not None:
            moment = commands.FileMoment(plan.operation, partial(_act, plan, self.filler))
        command = commands.Command(
            words=tuple(scenario.words.format(site=self.site).split()),
            folder=self.round,
            said=self.said / f"said-{number}.txt",
            temporary=self.said / f"temporary-{number}",
            is_fresh=is_fresh,
            moment=moment,
        )
        command.said.touch()  # it may be killed before it opens it
        running = commands.start(command)
        if plan is not None and plan.operation is None:
            _disturb(running, plan, self.filler)
        if not running.wait(90 + 20 * self.profiles[outcome.scenario].seconds):
            outcome.failures.append(("hang", f"command {number} doesn't end: {commands.where(running.pid)}"))
            running.send(signal.SIGKILL)
            running.wait(20)
        outcome.codes.append(running.code)
        self.filler.unlink(missing_ok=True)
        was_killed = running.code is None or running.code < 0
        outcome.failures += [("leftover", f"process {each}") for each in _clear(30 if scenario.in_ranks else 12)]
        # A signal may come when all is done, and so may a kill by the clock, or one some milliseconds behind a file
        # operation: while the interpreter ends. Behind a kill right at a file operation, the same command must see by
        # itself what is done.
        outcome.by_clock |= plan is not None and plan.kind == "kill" and (plan.operation is None or plan.seconds > 0)
        may_be_done = bool({*outcome.disturbances} - {"kill"}) or outcome.by_clock
        judged = _judge(command, running.code, plan, may_be_done=may_be_done)
        outcome.failures += [(kind, f"command {number}: {what}") for kind, what in judged]
        if not was_killed:
            outcome.failures += [("leftover", f"{each.name} in TMPDIR") for each in command.temporary.iterdir()]
        return running.code

    def _flip(self, outcome: Outcome, scenario: Scenario, rng: random.Random, *, is_fresh: bool) -> None:
        """Flip a bit of the newest checkpoint; where it is the only one, see it refused, and flip it back."""
        steps = sorted((self.round / "out/checkpoints").glob("step-*"))
        if not steps:
            return
        path = rng.choice(sorted(each for each in steps[-1].iterdir() if each.stat().st_size))
        content = path.read_bytes()
        flipped = bytearray(content)
        position = rng.randrange(8 * len(content))
        flipped[position // 8] ^= 1 << position % 8
        path.write_bytes(flipped)
        outcome.told[-1] += f", bit {position} of {path.parent.name}/{path.name}"
        if len(steps) > 1:
            return
        code = self._run(outcome, scenario, REFUSAL, is_fresh=is_fresh)
        if code != 5:
            outcome.failures.append(("ending", f"code {code} with its only checkpoint broken"))
        path.write_bytes(content)


REFUSAL: Final = Disturbance("flip", seconds=1e9, operation=None, pause=0, free_bytes=0, seed=0)


def _act(plan: Disturbance, filler: Path) -> None:
    """Do to oneself, in the forked command, what the plan says."""
    if plan.kind in {"kill", "flip"}:
        commands.kill_oneself(plan.seconds)
    elif plan.kind == "full":
        commands.fill_disk(filler, plan.free_bytes)
    else:
        os.kill(os.getpid(), SIGNALS[plan.kind])


def _disturb(running: commands.Running, plan: Disturbance, filler: Path) -> None:
    """Do to a command what the plan says, when the time has come."""
    if running.wait(min(plan.seconds, 60)):
        return
    if plan.kind in {"kill", "flip"}:
        running.send(signal.SIGKILL)
    elif plan.kind == "full":
        commands.fill_disk(filler, plan.free_bytes)
    elif plan.kind == "stop":
        _stop(running.pid, plan.pause)
    elif plan.kind == "ctrl-c":
        # As a terminal does: to all of the command's session. Ranks have their own; the launcher tells them.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGINT)
    elif plan.kind in SIGNALS:
        running.send(SIGNALS[plan.kind])
    else:
        _disturb_child(running, plan)


def _disturb_child(running: commands.Running, plan: Disturbance) -> None:
    """Do something to one of the processes that a command has started, once there is one."""
    find = commands.descendants if plan.kind == "worker" else commands.ranks_of
    while not (found := find(running.pid)):
        if running.wait(0.01):
            return
    chosen = random.Random(plan.seed).choice(found)
    if plan.kind == "rank-stop":
        _stop(chosen, plan.pause)
    elif plan.kind == "rank-term":
        _send(chosen, signal.SIGTERM)
    else:
        for pid in found if plan.kind == "all-ranks-kill" else [chosen]:
            _send(pid, signal.SIGKILL)


def _stop(pid: int, seconds: float) -> None:
    _send(pid, signal.SIGSTOP)
    time.sleep(seconds)
    _send(pid, signal.SIGCONT)


def _send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended by itself."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _clear(seconds: float) -> list[str]:
    """Wait until nothing of a command runs any more; end what does, and return what that was."""
    until = time.monotonic() + seconds
    while left := commands.descendants(os.getpid()):
        if time.monotonic() > until:
            told = [commands.where(pid) for pid in left]
            for pid in left:
                _send(pid, signal.SIGKILL)
            time.sleep(0.2)
            commands.reap()
            return told
        time.sleep(0.02)
        commands.reap()
    return []


def _judge(
    command: commands.Command, code: int | None, plan: Disturbance | None, *, may_be_done: bool
) -> list[tuple[str, str]]:
    """Return what is wrong with how a command ended, as (kind, what)."""
    said = command.said.read_text("utf-8", errors="replace")
    log = command.folder / "out/train.log"
    found = []
    if "Traceback (most recent call last)" in said or (log.is_file() and "Traceback" in log.read_text("utf-8")):
        found.append(("traceback", said.rstrip().rpartition("\n")[2][:200]))
    allowed = {0} | (CODES.get(plan.kind, set()) if plan is not None else set())
    is_done = may_be_done and code == 2 and "--overwrite" in said  # the files tell
    if code is not None and code not in allowed and not is_done and plan is not REFUSAL:
        last = next((line for line in said.splitlines() if line.startswith("error:")), said[-200:])
        found.append(("ending", f"code {code}: {last[:300]}"))
    if code is not None and code > 0 and "error:" not in said and "at once" not in said and "interrupted" not in said:
        found.append(("ending", f"code {code} without a word"))
    return found
