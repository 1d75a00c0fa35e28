"""Disturb commands at random moments, repeat them, and compare what they leave with what they leave undisturbed.

    python benchmarks/soak.py --rounds 200 --jobs 2

Each round takes one scenario (a training run, an evaluation, an index, ...) in a folder of its own, starts its command,
and does something to it: a signal, a full disk, a killed data worker. Half of these come at a random moment, half
right before a random one of the command's own file operations. Then the same command is started again, undisturbed,
and must end well with the same files, bit for bit but for times, and with nothing else: no temporary file, no process.
With `--every`, nothing is drawn: each scenario is killed right before each of its file operations, the last ones first.
A round is a function of the seed and its number; moments by the clock depend on the machine too.

Rounds of the scenario `ranks`, and one in ten of the others, start fresh interpreters; the rest are forks of one
process that has imported everything, which takes seconds off each round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import soak_commands as commands
from soak_compare import compare
from soak_rounds import KINDS, Job, Outcome, Profile
from soak_site import SCENARIOS, Scenario, make_site


def measure(folder: Path, names: list[str], *, has_fresh: bool) -> tuple[dict[str, Profile], float]:
    """Make the site, run every scenario undisturbed, and return how; also the seconds that a fresh interpreter adds.

    Args:
        has_fresh: Whether some commands will be fresh interpreters, which must leave what forks leave.
    """
    site = folder / "site"
    commands.in_child(partial(make_site, site))
    trains = has_fresh or any("{site}/out" in f"{SCENARIOS[name].words} {SCENARIOS[name].before}" for name in names)
    needed = [*["train"] * trains, *(name for name in names if not (trains and name == "train"))]
    profiles, fresh_seconds = {}, 0.0
    for name in needed:
        scenario = SCENARIOS[name]
        whole, before = folder / "whole" / name, folder / "before" / name
        if scenario.before:
            _undisturbed(scenario.before, before, site)
            shutil.copytree(before, whole)
        seconds, lines = _undisturbed(scenario.words, whole, site, is_fresh=scenario.in_ranks)
        profiles[name] = _profile(scenario, seconds, lines)
        if name == "train":
            shutil.copytree(whole / "out", site / "out")
            if not has_fresh:
                continue
            again, _ = _undisturbed(scenario.words, folder / "again", site, is_fresh=True)
            fresh_seconds = max(0.0, again - seconds)
            found = compare(whole, folder / "again")
            if found.divergences or found.leftovers:
                raise SystemExit(f"a fork and a fresh interpreter differ, so the soak would prove nothing: {found}")
        print(f"undisturbed {name:<9} {seconds:5.1f} s  {profiles[name].operations} file operations", flush=True)
    return profiles, fresh_seconds


def _undisturbed(words: str, folder: Path, site: Path, *, is_fresh: bool = False) -> tuple[float, list[str]]:
    """Run a command to its end and return its seconds and its file operations."""
    folder.mkdir(parents=True, exist_ok=True)
    said, record = site.parent / "said.txt", site.parent / "operations.txt"
    record.unlink(missing_ok=True)
    parts = tuple(words.format(site=site).split())
    running = commands.start(commands.Command(parts, folder, said, site.parent / "temporary", is_fresh, record=record))
    if not running.wait(600) or running.code != 0:
        raise SystemExit(f"vembed {words} ends with {running.code} undisturbed:\n{said.read_text()[-3000:]}")
    seconds = time.monotonic() - running.started
    return seconds, record.read_text().splitlines() if record.is_file() else []


def _profile(scenario: Scenario, seconds: float, lines: list[str]) -> Profile:
    first, first_second = 0, 0.0
    if scenario.only_finish:
        first = 1 + max(n for n, line in enumerate(lines) if "os.rename" in line and "/checkpoints/step-" in line)
        first_second = float(lines[first].split()[0])
    return Profile(seconds, max(1, len(lines)), first, first_second)


def play_all(folder: Path, job: int, options: argparse.Namespace, profiles: dict[str, Profile], fresh: float) -> None:
    """Play every round of a job and write the outcomes; runs in a process of its own."""
    commands.become_keeper()
    player = Job(folder / f"job-{job}", folder / "site", profiles, fresh, str(options.seed))
    scenarios = _scenarios(options)
    moments = [(name, operation) for name in scenarios for operation in range(profiles[name].operations)]
    moments.sort(key=lambda moment: moment[1] - profiles[moment[0]].operations, reverse=True)
    if not player.has_disk and job == 0:
        print("no full disks: this user may not mount a small one", flush=True)
    with (folder / f"outcomes-{job}.jsonl").open("w") as file:
        for number in range(options.first + job, options.first + options.rounds, options.jobs):
            if options.every:
                name, operation = moments[number]
                outcome = player.kill(number, name, scenarios[name], operation)
            else:
                outcome = player.play(number, scenarios)
            file.write(f"{json.dumps(asdict(outcome))}\n")
            file.flush()
            print(_line(outcome, options), flush=True)
            if outcome.failures and options.keep_failures:
                kept = options.keep_failures / f"round-{number}"
                shutil.rmtree(kept, ignore_errors=True)
                shutil.copytree(player.round, kept / "round")
                shutil.copytree(player.said, kept / "said")


def _scenarios(options: argparse.Namespace) -> dict[str, Scenario]:
    """Return the scenarios and the disturbances of each that were asked for."""
    chosen = {}
    for name in options.only:
        kinds = tuple(kind for kind in SCENARIOS[name].disturbances if not options.disturb or kind in options.disturb)
        if kinds:
            chosen[name] = replace(SCENARIOS[name], disturbances=kinds)
    return chosen


def _line(outcome: Outcome, options: argparse.Namespace) -> str:
    told = "; ".join(outcome.told)
    ended = ", ".join(map(str, outcome.codes))
    state = "FAILED" if outcome.failures else "ok"
    line = f"{outcome.number:4}  {outcome.scenario:<9} {told}; ended {ended}  {outcome.seconds:.1f} s  {state}"
    if outcome.failures:
        line += "".join(f"\n      {kind}: {what}" for kind, what in outcome.failures[:12])
        which = f"--seed {options.seed} --first {outcome.number} --rounds 1 --only {','.join(options.only)}"
        which += " --every" * options.every
        which += f" --disturb {','.join(options.disturb)}" if options.disturb else ""
        line += f"\n      repeat: python benchmarks/soak.py {which}"
    return line


def table(outcomes: list[Outcome]) -> str:
    """Return rounds by scenario and disturbance, and what failed, as Markdown."""
    kinds = sorted({kind for outcome in outcomes for kind in outcome.disturbances})
    lines = [
        "| scenario | rounds | " + " | ".join((*kinds, *KINDS)) + " |",
        "|---" * (2 + len(kinds) + len(KINDS)) + "|",
    ]
    for name in [*sorted({outcome.scenario for outcome in outcomes}), "all"]:
        of = [outcome for outcome in outcomes if name in (outcome.scenario, "all")]
        hits = Counter(kind for outcome in of for kind in outcome.disturbances)
        failed = Counter(kind for outcome in of for kind in {kind for kind, _ in outcome.failures})
        cells = (name, len(of), *(hits[kind] or "" for kind in kinds), *(failed[kind] for kind in KINDS))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, help="default: 200, or with --every all that there are")
    parser.add_argument("--every", action="store_true", help="kill right before every file operation; draw nothing")
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, which is printed")
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--jobs", type=int, default=1, help="rounds at the same time")
    parser.add_argument("--only", default=",".join(SCENARIOS), help="scenarios, separated by commas; default: all")
    parser.add_argument("--disturb", default="", help="disturbances, such as kill,full; default: all of a scenario")
    parser.add_argument("--keep-failures", type=Path, metavar="DIR", help="gets folders and outputs of failed rounds")
    options = parser.parse_args()
    options.only = options.only.split(",")
    if options.every:
        options.only = [name for name in options.only if name not in SCENARIOS or not SCENARIOS[name].in_ranks]
    options.disturb = options.disturb.split(",") if options.disturb else []
    if unknown := [name for name in options.only if name not in SCENARIOS]:
        parser.error(f"no scenario {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    if not _scenarios(options):
        parser.error(f"--disturb {','.join(options.disturb)}: no scenario has it")
    options.seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    return options


def main() -> int:
    """Play the rounds and return 1 when one failed."""
    options = parse_arguments()
    print(f"seed {options.seed}", flush=True)
    commands.warm_up()
    folder = Path(tempfile.mkdtemp(prefix="vembed-soak-"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the folder goes
    jobs: list[int] = []
    try:
        started = time.monotonic()
        profiles, fresh = measure(folder, options.only, has_fresh=not options.every)
        if options.every:
            count = sum(profiles[name].operations for name in options.only) - options.first
            options.rounds = count if options.rounds is None else min(options.rounds, count)
        elif options.rounds is None:
            options.rounds = 200
        jobs += [commands.fork(partial(play_all, folder, job, options, profiles, fresh)) for job in range(options.jobs)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(job, 0)[1]) for job in jobs]
        lines = [line for path in folder.glob("outcomes-*.jsonl") for line in path.read_text().splitlines()]
        outcomes = [Outcome(**json.loads(line)) for line in lines]
    finally:
        for job in jobs:
            with suppress(ProcessLookupError, ChildProcessError):  # it has ended
                os.kill(job, signal.SIGTERM)
                os.waitpid(job, 0)
        shutil.rmtree(folder, ignore_errors=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = f"{time.monotonic() - started:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of CPU"
    print(f"\n{table(outcomes)}\n\nseed {options.seed}, {seconds}")
    failed = [outcome for outcome in outcomes if outcome.failures]
    print(
        f"{len(outcomes)} rounds, {len(failed)} failed"
        + (": " + ", ".join(str(each.number) for each in failed) if failed else "")
    )
    return 1 if failed or any(codes) or len(outcomes) != options.rounds else 0


if __name__ == "__main__":
    sys.exit(main())
