"""Attacks on training runs: kills, damaged files, links in SAVE_DIR; and kills of a command that trains in a process."""

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import preparing
import torch
from forked_command import start_module
from interrupted_run import BackgroundRun, assert_same_run, checkpoint, flags_command

from amos_fairseq.python_process import SECONDS_TO_SAVE
from attacks.commands import Attack, Place, amos_harm, amos_script, command_harm, run_command
from attacks.damage import damage
from attacks.settings import TINY_RECIPE
from attacks.workplace import COMMANDS, SMALL_RUN, write_workplace

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
        run = BackgroundRun(flags_command(corpus, folder / precision, *FLAGS, *flags), folder / f"{precision}.log")
        assert run.exit_code(300) == 0, run.text()[-3000:]
    return Place(folder, corpus, references, write_workplace(folder / "workplace"), amos_script(folder))


# Records of several updates, so that one of them is interrupted; two checkpoints beside the last one.
FLAGS = ["--log-interval", "3", "--keep-interval-updates", "2"]


def kill(run: BackgroundRun, save_dir: Path, draw: random.Random, at_write: bool) -> bool:
    """Kill a run after a random time, or while it writes a checkpoint; return False if it ended before."""
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


def kills(place: Place, tries: int, seed: int) -> Iterator[Attack]:
    """Kill each run up to three times, every other time at a checkpoint's write; it must end as the undisturbed run."""
    draw = random.Random(seed)
    number, run_number = 0, 0
    while number < tries:
        precision = list(PRECISIONS)[run_number % 2]
        save_dir = place.folder / f"killed{run_number}"
        command = flags_command(place.corpus, save_dir, *FLAGS, *PRECISIONS[precision])
        times, ended = [], False
        while not ended and number < tries and len(times) < 3:
            run = BackgroundRun(command, place.folder / "killed.log")
            at_write = number % 2 == 0
            if kill(run, save_dir, draw, at_write):
                number += 1
                times.append("write" if at_write else "any time")
            else:
                ended = True
        code, text = run_command(command[2], command[3:])
        harm = command_harm(code, text, save_dir)
        if not harm:
            try:
                assert_same_run(save_dir, place.references[precision])
            except AssertionError as error:
                harm = f"another result: {str(error).splitlines()[0]}"
        for time_of_kill in times:
            yield Attack(f"kill, {precision}", f"run {run_number}, {time_of_kill}", harm)
        shutil.rmtree(save_dir, ignore_errors=True)
        run_number += 1


def copy_of_interrupted_run(place: Place, run: Path) -> None:
    """Copy the undisturbed run as it was at its first checkpoint that is still there."""
    shutil.copytree(place.references["float32"], run)
    (run / "checkpoint_last.pt").unlink()
    middle = sorted(run.glob("checkpoint_*_*.pt"), key=lambda path: int(path.stem.split("_")[2]))[0]
    shutil.copy(middle, run / "checkpoint_last.pt")
    for path in {*run.glob("checkpoint_*.pt")} - {middle, run / "checkpoint_last.pt"}:
        path.unlink()


def damaged_files(place: Place, tries: int, seed: int) -> Iterator[Attack]:
    """Damage a file of a run or of its corpus, then continue the run: it ends as the undisturbed one, or is refused."""
    draw = random.Random(seed)
    for number in range(tries):
        folder = place.folder / "damaged"
        copy_of_interrupted_run(place, folder / "run")
        shutil.copytree(place.corpus, folder / "corpus")
        paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name[0] != ".")
        weights = [10 if path.suffix in (".pt", ".bin", ".idx") else 3 for path in paths]
        (path,) = draw.choices(paths, weights)
        how = damage(path, draw)
        command = flags_command(folder / "corpus", folder / "run", *FLAGS)
        code, text = run_command(command[2], command[3:])
        harm = command_harm(code, text, folder / "run")
        if not harm and code == 0 and path.name != "metrics.jsonl":
            try:
                assert_same_weights(folder / "run", place.references["float32"])
            except AssertionError:
                harm = "accepted, with another result"
        yield Attack("damaged file", f"{path.relative_to(folder)}, {how}, seed {seed}, number {number}", harm)
        shutil.rmtree(folder)


def links(place: Place, tries: int, seed: int) -> Iterator[Attack]:
    """Put a link to a file elsewhere into SAVE_DIR, then continue the run; the file elsewhere does not change."""
    draw = random.Random(seed)
    names = [".lock", "metrics.jsonl", "checkpoint_last.pt", "checkpoint_best.pt", "tokenizer", "tokenizer/dict.txt"]
    of_hydra = ["hydra_train.log", ".hydra", ".hydra/config.yaml"]
    for number in range(tries):
        folder = place.folder / "links"
        copy_of_interrupted_run(place, folder / "run")
        name = draw.choice([*names, *of_hydra])
        link, elsewhere = folder / "run" / name, folder / "elsewhere"
        elsewhere.write_text("precious\n")
        if link.is_dir():
            shutil.rmtree(link)
        link.unlink(missing_ok=True)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(elsewhere)
        command = flags_command(place.corpus, folder / "run", *FLAGS)
        if name in of_hydra:
            overrides = [*SMALL_RUN, f"task.data={place.corpus}", f"checkpoint.save_dir={folder / 'run'}"]
            command[2:] = ["fairseq_cli.hydra_train", *TINY_RECIPE, *overrides]
        code, text = run_command(command[2], command[3:])
        changed = elsewhere.read_text() != "precious\n"
        harm = "changed a file elsewhere" if changed else command_harm(code, text, folder / "run")
        yield Attack("link in SAVE_DIR", f"{name}, seed {seed}, number {number}", harm)
        shutil.rmtree(folder)


def assert_same_weights(save_dir: Path, reference: Path) -> None:
    found, expected = checkpoint(save_dir)["model"], checkpoint(reference)["model"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def killed_commands(place: Place, tries: int, seed: int) -> Iterator[Attack]:
    """Kill ``amos tag`` alone: its training ends by itself, and the repeated command has the undisturbed result."""
    draw = random.Random(seed)
    folder = place.folder / "killed command"
    arguments = ["tag", *COMMANDS["tag"]]
    shutil.copytree(place.workplace, folder)
    begin = time.monotonic()
    code, text = run_command("amos_start", arguments, folder)
    assert code == 0, text[-3000:]
    duration, expected = time.monotonic() - begin, results(folder)
    for number in range(tries):
        shutil.rmtree(folder)
        shutil.copytree(place.workplace, folder)
        log = place.folder / "killed command.log"
        command = start_module("amos_start", arguments, folder, log, log.with_suffix(".err"))
        end = time.monotonic() + draw.uniform(0, 0.8 * duration)
        while command.poll() is None and (time.monotonic() < end or not training_processes(folder)):
            time.sleep(0.01)
        was_running = command.poll() is None
        with suppress(ProcessLookupError):
            os.kill(command.pid, signal.SIGKILL)  # the command alone, not its group
        end = time.monotonic() + SECONDS_TO_SAVE + 30
        while training_processes(folder) and time.monotonic() < end:
            time.sleep(0.05)
        harm = "its training goes on" if training_processes(folder) else ""
        if not harm:
            code, text = run_command("amos_start", arguments, folder)
            harm = amos_harm(code, text, folder)
        if not harm and (code != 0 or results(folder) != expected):
            harm = f"another result: exit code {code}"
        what = "while it trained" if was_running else "after its end"
        yield Attack("killed command", f"amos tag, {what}, seed {seed}, number {number}", harm)


def training_processes(folder: Path) -> list[int]:
    """Processes whose command line names a run in ``folder``."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{folder}/out/tag/runs".encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


def results(folder: Path) -> list[bytes]:
    """The table, and labels and scores of every run."""
    names = ("tagging.md", "runs/*/*/predictions.txt", "runs/*/*/scores.json")
    return [file.read_bytes() for name in names for file in sorted((folder / "out" / "tag").glob(name))]
