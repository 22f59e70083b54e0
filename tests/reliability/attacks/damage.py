"""Damaged files, and JSON with values that its readers do not expect."""

import json
import math
import os
import random
from pathlib import Path

from amos_fairseq.untrusted import values_in

_NUMBERS = (None, True, 0, -1, 5, 10**9, 2**62, 10**30, 10**400, 0.5, 1e308, -1e308, math.inf, math.nan)
_TEXTS = ("", "x", "x" * 5000, "a\0b", "\x1b[31m", "\ud800", "../../x", "/dev/zero", "__class__")
HOSTILE_VALUES = (*_NUMBERS, *_TEXTS, [], [5], {}, {"a": 5})
_DEEP = "(a value that is nested deeply)"
LEVELS = 100_000


def damage(path: Path, draw: random.Random) -> str:
    """Damage a file and return how."""
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
    return how


def replace(path: Path, draw: random.Random) -> str:
    """Put something else in the place of a file and return what."""
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
    return what


def change_value(text: str, draw: random.Random) -> tuple[str, str]:
    """Return a JSON text with one value or name replaced, and what was replaced by what."""
    content = {"": json.loads(text)}
    value = draw.choice([*HOSTILE_VALUES, _DEEP])
    parts = [part for part in values_in(content[""]) if isinstance(part, dict | list) and part]
    part = content if not parts or draw.random() < 0.1 else draw.choice(parts)
    place = draw.choice(list(part) if isinstance(part, dict) else range(len(part)))
    if isinstance(value, str) and isinstance(part, dict) and part is not content and draw.random() < 0.3:
        part[value] = part.pop(place)
        how = f"the name {place!r} is"
    else:
        part[place] = value
        how = f"{place!r} is"
    deep = "[" * LEVELS + "]" * LEVELS
    return json.dumps(content[""]).replace(json.dumps(_DEEP), deep), f"{how} {value!r:.30}"


def attack_json(path: Path, draw: random.Random) -> str:
    """Damage or replace a file of JSON or of lines of JSON, or one value in it, and return how."""
    kind = draw.choice(["damage", "replace", "value", "value", "value", "value"])
    if kind != "value":
        return damage(path, draw) if kind == "damage" else replace(path, draw)
    lines = path.read_text(encoding="utf-8").splitlines() if path.suffix == ".jsonl" else [path.read_text("utf-8")]
    number = draw.randrange(len(lines))
    lines[number], how = change_value(lines[number], draw)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return how
