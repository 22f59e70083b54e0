"""Attacks by what surrounds a command: modules in the current folder, the locale, closed and full outputs, a full disk."""

import errno
import os
import random
import resource
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tiny_runs import ROOT, TINY_RUN

from amos_fairseq.python_process import python_command
from attacks.commands import Place, amos_harm, command_harm, run_amos, run_interpreter
from attacks.workplace import COMMANDS, SMALL_RUN

# Of the standard library, of what the package needs, and the package itself.
PLANTED = shlex.split(
    "json queue pickle multiprocessing yaml numpy torch fairseq hydra amos_fairseq typing sitecustomize transformers "
    "matplotlib tokenizers fairseq_cli amos_start sentencepiece"
)


def planted_modules(place: Place, folder: Path, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Run a command in a folder with modules named like those that it imports; they are not executed."""
    canary = place.folder / "executed"
    refused = ["--checkpoint", "run", "--data", "nothing", "--out", "out/x", "--cpu"]
    of_amos = COMMANDS | {"glue": refused, "squad": refused, "verify": [place.corpus]}
    of_amos["train"] = ["amos_tiny", *SMALL_RUN, f"task.data={place.corpus}", "checkpoint.save_dir=out/run"]
    commands = {f"amos {name}": [*place.amos, name, *arguments] for name, arguments in of_amos.items()}
    # In another folder fairseq finds the plugin by its path alone.
    flags = [*TINY_RUN, "--user-dir", ROOT / "amos_fairseq"]
    flags += ["--save-dir", "out/run", "--max-update", "2", "--num-workers", "1"]
    commands["fairseq-train"] = [*python_command("fairseq_cli.train"), place.corpus, *flags]
    while True:
        shutil.copytree(place.workplace, folder)
        name = draw.choice(list(commands))
        planted = draw.sample(PLANTED, 10)
        for module in planted:
            source = draw.choice([folder / f"{module}.py", folder / module / "__init__.py"])
            source.parent.mkdir(exist_ok=True)
            source.write_text(f"open({str(canary)!r}, 'a').write({module + ' '!r})\n")
        code, text = run_interpreter(commands[name], folder, {})
        harm = f"executed {canary.read_text()}" if canary.exists() else command_harm(code, text, folder)
        yield f"{name}, {', '.join(planted)}", harm
        canary.unlink(missing_ok=True)


# Python reads these when it starts: such a command needs a new process.
LOCALES = ({"LC_ALL": "C", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "ascii"})
LOCALES += ({"LC_ALL": "POSIX", "PYTHONIOENCODING": "latin-1"},)
FILE_SIZES = (0, 100, 1000, 10_000, 100_000)


def close_stdout() -> None:
    os.close(1)
    sys.stdout = None


def fill_stdout() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def limit_files(size: int) -> Callable[[], None]:
    """No file can grow beyond ``size`` bytes, as on a disk that is full then."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def fail_to_rename(number: int) -> Callable[[], None]:
    """No file of the folder gets another name, as on a network disk that has lost it, or on a disk of its own."""

    def refuse(rename: Callable[..., None]) -> Callable[..., None]:
        def refused(source: str, *arguments: object, **options: object) -> None:
            if os.path.abspath(source).startswith(os.getcwd()):
                raise OSError(number, os.strerror(number), source)
            rename(source, *arguments, **options)

        return refused

    def before() -> None:
        os.replace, os.rename = refuse(os.replace), refuse(os.rename)

    return before


def consoles(place: Place, folder: Path, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Run a command in another locale, with a closed or full output, or on a disk that is full or fails.

    It ends well, or in one line; all of its files are then there, or the repeated command writes them.
    """
    folder = folder / "of Ω"
    disturbances = {
        **{str(variables): variables for variables in LOCALES},
        **{f"at most {size} bytes in a file": limit_files(size) for size in FILE_SIZES},
        **{f"no new names ({os.strerror(number)})": fail_to_rename(number) for number in (errno.ESTALE, errno.EXDEV)},
        "stdout closed": close_stdout,
        "stdout on /dev/full": fill_stdout,
    }
    names = [name for name in COMMANDS if name != "tag"]  # it trains as the command train does
    expected: dict[str, set[str]] = {}
    while True:
        name, what = draw.choice(names), draw.choice(list(disturbances))
        command = [name, *COMMANDS[name]]
        if name not in expected:
            shutil.copytree(place.workplace, folder)
            code, text = run_amos(command, folder)
            assert code == 0, text[-3000:]
            expected[name] = files_in(folder / "out")
            shutil.rmtree(folder)
        shutil.copytree(place.workplace, folder)
        if what in map(str, LOCALES):
            code, text = run_interpreter([*place.amos, *command], folder, disturbances[what])
        else:
            code, text = run_amos(command, folder, before=disturbances[what])
        harm = amos_harm(code, text, folder)
        if not harm and files_in(folder / "out") != expected[name]:
            harm = "files are missing" if code == 0 else ""
            code, text = run_amos(command, folder)
            if not harm and (code != 0 or files_in(folder / "out") != expected[name]):
                harm = f"the repeated command ends with {code}: {text[-300:]}"
        yield f"amos {name}, {what}", harm


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
