"""Attacks on training runs, commands, files and settings. ``tests/reliability/run.sh`` executes them.

Every attack has a seed, which is printed when it succeeds. An attack succeeds if a bit or a record of a run is lost, if a
command ends in a traceback or leaves an unfinished file, or if code of a file is executed.
"""

import argparse
import multiprocessing
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from attacks.commands import Attack, Place
from attacks.data import bombs, damaged_data, damaged_results
from attacks.models import hostile_files, imported_folders
from attacks.runs import damaged_files, killed_commands, kills, links, prepare
from attacks.settings import command_settings, settings
from attacks.surroundings import consoles, planted_modules

# Attacks of each kind for one of --tries, the longest first.
SHARES: dict[Callable[[Place, int, int], Iterator[Attack]], float] = {
    kills: 1,
    settings: 3,
    damaged_files: 1,
    command_settings: 1,
    damaged_results: 1,
    consoles: 0.5,
    planted_modules: 0.2,
    bombs: 0.5,
    killed_commands: 0.05,
    hostile_files: 0.6,
    links: 0.2,
    imported_folders: 3,
    damaged_data: 5,
}


def attack(tries: int, seed: int, folder: Path, processes: int = 1) -> list[Attack]:
    """Run all attacks, print those that succeed, and return all, which do not depend on the number of processes."""
    place = prepare(folder)
    plan = [(make, place, max(1, int(share * tries)), seed) for make, share in SHARES.items()]
    if processes == 1:
        return [result for kind in plan for result in attack_kind(*kind)]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(attack_kind, *kind) for kind in plan]
        return [result for kind in running for result in kind.result()]


def attack_kind(
    make: Callable[[Place, int, int], Iterator[Attack]], place: Place, tries: int, seed: int
) -> list[Attack]:
    results = []
    for result in make(place, tries, seed):
        results.append(result)
        if result.harm:
            print(f"{result.kind}: {result.what}: {result.harm}", file=sys.stderr, flush=True)
    return results


def table(attacks: list[Attack]) -> str:
    counts, harms = Counter(each.kind for each in attacks), Counter(each.kind for each in attacks if each.harm)
    rows = [f"| {kind} | {count} | {harms[kind]} |" for kind, count in counts.items()]
    return "\n".join(["| attack | tries | succeeded |", "|---|---:|---:|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser("run.sh", description="attack runs, commands, files and settings")
    parser.add_argument("--tries", type=int, default=100, help="number of kills and damaged files (default: 100)")
    parser.add_argument("--seed", type=int, default=1, help="of all attacks (default: 1)")
    parser.add_argument("--table", type=Path, help="write the table to this file too")
    parser.add_argument("--processes", type=int, default=2, help="that attack at the same time (default: 2)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        attacks = attack(arguments.tries, arguments.seed, Path(folder), arguments.processes)
    print(table(attacks))
    if arguments.table:
        arguments.table.write_text(table(attacks) + "\n", encoding="utf-8")
    sys.exit(any(each.harm for each in attacks))
