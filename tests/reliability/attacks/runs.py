"""Accidents of training runs: kills and damaged files."""

import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import preparing
import torch
from interrupted_run import BackgroundRun, assert_same_run, checkpoint, flags_command, run_to_end

from attacks.commands import Place, command_harm, run_command
from attacks.damage import damage
from attacks.workplace import write_workplace

PRECISIONS = {"float32": [], "bf16": ["--bf16"]}


def prepare(folder: Path) -> Place:
    """Write a corpus with ``corpus.json`` and the workplace, and train one undisturbed run in each precision."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 7))) for _ in range(200)]
    text = folder / "text.txt"
    text.write_text("\n\n".join(" ".join(draw.choices(words, k=40)) for _ in range(240)) + "\n", encoding="utf-8")
    corpus = folder / "corpus"
    preparing.prepare("text")([str(text), "--out", str(corpus), "--vocab-size", "200", "--workers", "1"])
    references = {}
    for precision, flags in PRECISIONS.items():
        references[precision] = folder / precision
        run_to_end(flags_command(corpus, folder / precision, *FLAGS, *flags), folder / f"{precision}.log")
    return Place(folder, corpus, references, write_workplace(folder / "workplace"))


# Records of several updates, so that one of them is interrupted; two checkpoints beside the last one.
FLAGS = ["--log-interval", "3", "--keep-interval-updates", "2"]


def kill(command: list[str], save_dir: Path, draw: random.Random, at_write: bool) -> bool:
    """Start a run and kill it after a random time, or while it writes a checkpoint; return False if it ended before."""
    run = BackgroundRun(command, save_dir.with_suffix(".log"))
    end = time.monotonic() + draw.uniform(0.5, 5.0)
    while run.process.poll() is None:
        is_writing = at_write and any(save_dir.glob("checkpoint*.unfinished.*"))
        if is_writing or (not at_write and time.monotonic() > end):
            time.sleep(draw.uniform(0, 0.01))
            with suppress(ProcessLookupError):
                run.signal_group(signal.SIGKILL)
            return run.process.wait(30) == -signal.SIGKILL
        time.sleep(0.0005)
    return False


def kills(place: Place, folder: Path, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Kill each run one to three times, some times at a checkpoint's write; it must end as the undisturbed run."""
    for run_number in count():
        shutil.rmtree(folder, ignore_errors=True)
        precision = list(PRECISIONS)[run_number % 2]
        command = flags_command(place.corpus, folder, *FLAGS, *PRECISIONS[precision])
        moments = (True, False, True)[: 1 + run_number % 3]
        killed = [at_write for at_write in moments if kill(command, folder, draw, at_write)]
        harm = command_harm(*run_command(command[2], command[3:]), folder)
        if not harm:
            try:
                assert_same_run(folder, place.references[precision])
            except AssertionError as error:
                harm = f"another result: {str(error).splitlines()[0]}"
        for at_write in killed:
            yield f"{precision}, run {run_number}, at {'the write' if at_write else 'any time'}", harm


def copy_of_interrupted_run(place: Place, run: Path) -> None:
    """Copy the undisturbed run as it was at its first checkpoint that is still there."""
    shutil.copytree(place.references["float32"], run)
    (run / "checkpoint_last.pt").unlink()
    middle = sorted(run.glob("checkpoint_*_*.pt"), key=lambda path: int(path.stem.split("_")[2]))[0]
    shutil.copy(middle, run / "checkpoint_last.pt")
    for path in {*run.glob("checkpoint_*.pt")} - {middle, run / "checkpoint_last.pt"}:
        path.unlink()


def damaged_files(place: Place, folder: Path, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Damage a file of a run, then continue it: it ends as the undisturbed one, or is refused.

    Not of its corpus, of which a start checks the sizes alone: ``amos verify`` reads it.
    """
    while True:
        copy_of_interrupted_run(place, folder / "run")
        paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name[0] != ".")
        weights = [10 if path.suffix == ".pt" else 3 for path in paths]
        (path,) = draw.choices(paths, weights)
        how = damage(path, draw)
        command = flags_command(place.corpus, folder / "run", *FLAGS)
        code, text = run_command(command[2], command[3:])
        harm = command_harm(code, text, folder / "run")
        if not harm and code == 0 and path.name != "metrics.jsonl":
            try:
                assert_same_weights(folder / "run", place.references["float32"])
            except AssertionError:
                harm = "accepted, with another result"
        yield f"{path.relative_to(folder)}, {how}", harm


def assert_same_weights(save_dir: Path, reference: Path) -> None:
    found, expected = checkpoint(save_dir)["model"], checkpoint(reference)["model"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
