"""Damaged files, JSON with values that its readers do not expect, and what counts as a clean end of a command."""

import json
import math
import os
import random
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from interrupted_run import BackgroundRun

from amos_fairseq.untrusted import values_in

TRIES = int(os.environ.get("AMOS_TRIES", "2"))
_NUMBERS = (None, True, 0, -1, 5, 10**9, 2**62, 10**30, 10**400, 0.5, 1e308, -1e308, math.inf, math.nan)
_TEXTS = ("", "x", "x" * 5000, "a\0b", "\x1b[31m", "\ud800", "../../x", "/dev/zero", "__class__")
HOSTILE_VALUES = (*_NUMBERS, *_TEXTS, [], [5], {}, {"a": 5})
_DEEP = "(a value that is nested deeply)"
# 1: refused; 2: wrong flags; 76: diverged. Hydra ends with 1 as well.
EXIT_CODES = {0, 1, 2, 76}
# Of processor time, which does not depend on what else runs; the commands here take a few.
MOST_SECONDS = 60
# Beyond what a forked process has. Without a limit, an attack that succeeds would fill the memory of the machine.
MORE_MEMORY = 3 << 30


class Bomb:
    """An object whose loading calls a function, as an attacker's might."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = call, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def damage(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    how = draw.choice(["a bit flipped", "cut", "a part of zeros", "empty", "other bytes"])
    start = draw.randrange(max(1, len(content)))
    if how == "a bit flipped" and content:
        content[start] ^= 1 << draw.randrange(8)
    elif how == "cut":
        del content[start:]
    elif how == "a part of zeros":
        content[start : start + 4096] = bytes(len(content[start : start + 4096]))
    elif how == "empty":
        content = bytearray()
    elif how == "other bytes":
        content[start : start + 64] = draw.randbytes(64)
    path.write_bytes(content)


def replace(path: Path, draw: random.Random) -> None:
    """Put something else in the place of a file."""
    path.unlink(missing_ok=True)
    what = draw.choice(["a folder", "a circle of links", "a link to nothing", "a pipe", "a terabyte"])
    if what == "a folder":
        path.mkdir()
    elif what == "a pipe":
        os.mkfifo(path)
    elif what == "a terabyte":
        with path.open("wb") as file:
            file.truncate(1 << 40)  # which takes no space
    else:
        path.symlink_to(path.name if what == "a circle of links" else "nothing")


def attack_json(path: Path, draw: random.Random) -> None:
    """Replace one value or name in a file of JSON."""
    content = {"": json.loads(path.read_text(encoding="utf-8"))}
    value = draw.choice([*HOSTILE_VALUES, _DEEP])
    parts = [part for part in values_in(content[""]) if isinstance(part, dict | list) and part]
    part = content if not parts or draw.random() < 0.1 else draw.choice(parts)
    place = draw.choice(list(part) if isinstance(part, dict) else range(len(part)))
    if isinstance(value, str) and isinstance(part, dict) and part is not content and draw.random() < 0.3:
        part[value] = part.pop(place)
    else:
        part[place] = value
    deep = "[" * 100_000 + "]" * 100_000
    path.write_text(json.dumps(content[""]).replace(json.dumps(_DEEP), deep) + "\n", encoding="utf-8")


def run_bounded(module: str, arguments: Sequence[object], cwd: Path) -> tuple[int, str]:
    """Run a module in ``cwd`` with bounded memory and time; return its exit code and what it printed."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    run = BackgroundRun(command, Path(tempfile.mkdtemp()) / "log", cwd=cwd)
    pages = int(Path(f"/proc/{run.process.pid}/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + MORE_MEMORY
    resource.prlimit(run.process.pid, resource.RLIMIT_AS, (memory, memory))
    resource.prlimit(run.process.pid, resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS + 5))
    return run.exit_code(), run.text()


def assert_clean_end(code: int, text: str, folder: Path) -> None:
    """An error is one line that can be printed, and no unfinished file is left in ``folder``."""
    assert "Traceback" not in text, text[-3000:]
    assert code != -signal.SIGXCPU, f"more than {MOST_SECONDS} seconds"
    assert code in EXIT_CODES, text[-3000:]
    errors = [line for line in text.splitlines() if line.startswith("amos_fairseq: error: ")]
    assert len(errors) == (code == 1), text[-3000:]
    assert all(len(line) <= 4000 and line.isprintable() for line in errors)
    assert not list(folder.rglob("*.unfinished.*"))
