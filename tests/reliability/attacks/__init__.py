"""Accidents of training runs, and files of strangers that commands read. ``tests/reliability/run.sh`` executes them.

Every attack has a seed, which is printed when it succeeds. An attack succeeds if a bit or a record of a run is lost, if a
command ends in a traceback or leaves an unfinished file, or if code of a file is executed.
"""

import argparse
import multiprocessing
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from attacks.commands import Place
from attacks.data import bombs, raw_files
from attacks.models import hostile_files, imported_folders
from attacks.runs import damaged_files, kills, prepare

# Each attacks for ever, in a folder that is new for each attack, and yields what it did and what it achieved ("": nothing).
# Beside it the number of its attacks for one of --tries. The longest come first.
KINDS: dict[str, tuple[Callable[[Place, Path, random.Random], Iterator[tuple[str, str]]], float]] = {
    "kill": (kills, 1),
    "damaged file": (damaged_files, 1),
    "raw file": (raw_files, 1),
    "compression bomb": (bombs, 0.5),
    "hostile file": (hostile_files, 0.6),
    "imported folder": (imported_folders, 3),
}


class Attack(NamedTuple):
    kind: str
    what: str
    harm: str


def attack(tries: int, seed: int, folder: Path, processes: int = 1) -> list[Attack]:
    """Run all attacks, print those that succeed, and return all, which do not depend on the number of processes."""
    place = prepare(folder)
    plan = [(kind, place, max(1, int(share * tries)), seed) for kind, (_, share) in KINDS.items()]
    if processes == 1:
        return [result for part in plan for result in attack_kind(*part)]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(attack_kind, *part) for part in plan]
        return [result for part in running for result in part.result()]


def attack_kind(kind: str, place: Place, tries: int, seed: int) -> list[Attack]:
    results, folder = [], place.folder / kind
    attacks = KINDS[kind][0](place, folder, random.Random(seed))
    for number, (what, harm) in zip(range(tries), attacks, strict=False):
        results.append(Attack(kind, f"{what}, seed {seed}, number {number}", harm))
        shutil.rmtree(folder, ignore_errors=True)
        if harm:
            print(f"{kind}: {results[-1].what}: {harm}", file=sys.stderr, flush=True)
    return results


def table(attacks: list[Attack]) -> str:
    counts, harms = Counter(each.kind for each in attacks), Counter(each.kind for each in attacks if each.harm)
    rows = [f"| {kind} | {count} | {harms[kind]} |" for kind, count in counts.items()]
    return "\n".join(["| attack | tries | succeeded |", "|---|---:|---:|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser("run.sh", description="attack runs and commands")
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
