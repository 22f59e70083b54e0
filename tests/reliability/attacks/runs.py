"""Attacks on training runs: kills and damaged files; and kills of a command that trains in a process."""

import os
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
from forked_command import ForkedCommand
from interrupted_run import BackgroundRun, assert_same_run, checkpoint, flags_command, run_to_end
from waiting import has_ended

from amos_fairseq.python_process import SECONDS_TO_SAVE
from attacks.commands import Place, amos_harm, amos_script, command_harm, run_command
from attacks.damage import damage
from attacks.workplace import TRAINING, write_workplace

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
    return Place(folder, corpus, references, write_workplace(folder / "workplace"), amos_script(folder))


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


def killed_commands(place: Place, folder: Path, draw: random.Random) -> Iterator[tuple[str, str]]:
    """End a fine-tuning command alone by a signal: its training ends, and the repeated command has the undisturbed result."""
    undisturbed: dict[str, tuple[float, list[bytes]]] = {}
    while True:
        name, sent = draw.choice(list(TRAINING)), draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        arguments, out = [name, *TRAINING[name]], folder / "out" / name
        if name not in undisturbed:
            shutil.copytree(place.workplace, folder)
            begin = time.monotonic()
            code, text = run_command("amos_start", arguments, folder)
            assert code == 0, text[-3000:]
            undisturbed[name] = time.monotonic() - begin, results(out)
            shutil.rmtree(folder)
        duration, expected = undisturbed[name]
        shutil.copytree(place.workplace, folder)
        log = folder.with_suffix(".log")
        log.unlink(missing_ok=True)
        command = ForkedCommand("amos_start", arguments, folder, log, log)
        end = time.monotonic() + draw.uniform(0, 0.8 * duration)
        while command.poll() is None and (time.monotonic() < end or not training_processes(out)):
            time.sleep(0.01)
        was_running = command.poll() is None
        with suppress(ProcessLookupError):
            os.kill(command.pid, sent)  # the command alone, not its group
        end = time.monotonic() + SECONDS_TO_SAVE + 30
        while (training_processes(out) or command.poll() is None) and time.monotonic() < end:
            time.sleep(0.05)
        harm = "its training goes on" if training_processes(out) or command.poll() is None else ""
        if not harm and "Traceback" in log.read_text(errors="replace"):
            harm = "traceback"
        if not harm:
            code, text = run_command("amos_start", arguments, folder)
            harm = amos_harm(code, text, folder)
        if not harm and (code != 0 or results(out) != expected):
            harm = f"another result: exit code {code}"
        yield f"amos {name}, {sent.name} {'while it trained' if was_running else 'after its end'}", harm


def training_processes(out: Path) -> list[int]:
    """Processes that train a run of OUT. The lock of each run's directory names its process."""
    found = []
    for file in out.glob("runs/*/*/.lock"):
        with suppress(FileNotFoundError):
            found.append(int(file.read_text().split()[1]))  # "process 123 on HOST"
    return [pid for pid in found if not has_ended(pid)]


def results(out: Path) -> list[bytes]:
    """The table, and labels and scores of every run."""
    names = ("*.md", "runs/*/*/predictions*", "runs/*/*/scores.json")
    return [file.read_bytes() for name in names for file in sorted(out.glob(name))]
