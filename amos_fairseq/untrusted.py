"""Read what a stranger may have written: files, JSON, numbers and names. Every reader of such files uses these functions.

:func:`read_bytes`, :func:`read_text`, :func:`read_json`, :func:`read_json_lines` and :func:`read_yaml` raise :class:`UserError`
with the path and a hint. The others raise ``ValueError`` with the reason; their callers know the file and the line.
"""

import argparse
import collections
import json
import math
import os
import re
import reprlib
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from amos_fairseq.errors import UserError

# Parsed JSON takes some twenty times as much memory as its file: at most 6 GB. The largest files here are those of tokenizers.
LARGEST_FILE = 256 << 20
# Code that walks through nested values calls itself for each level; the files here have ten at most.
DEEPEST = 100
# More than a dictionary of a million tokens has.
MOST_VALUES = 10_000_000
LONGEST_NAME = 1000
# Sizes, updates and counts beyond this are in no file that this package or Hugging Face writes.
LARGEST_COUNT = 2**53
# For files of Hugging Face: of equal keys the last one counts, as for transformers. Otherwise equal keys are refused.
LAST_KEYS = {"object_pairs_hook": dict}
_KINDS = {dict: "an object", list: "a list", str: "a string", int: "an integer", bool: "true or false"}


def read_bytes(path: str | os.PathLike, hint: str, largest: int = LARGEST_FILE) -> bytes:
    """Return the content of a file of at most ``largest`` bytes; ``hint``: how to fix it, the end of the message."""
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            problem = "is a folder, not a file"
        elif not stat.S_ISREG(status.st_mode):  # opening a pipe waits for its writer
            problem = "is a pipe or a device, not a file"
        elif status.st_size > largest:
            problem = f"is too large ({status.st_size:,} bytes; at most {largest:,} are read)"
        else:
            return Path(path).read_bytes()
    except FileNotFoundError:
        problem = "is a link to a file that does not exist" if os.path.islink(path) else "is missing"
    except (OSError, ValueError) as error:  # ValueError: a NUL or half of a surrogate pair in the path
        problem = f"cannot be read ({getattr(error, 'strerror', None) or error})"
    raise UserError(f"{path} {problem}: {hint}")


def read_text(path: str | os.PathLike, hint: str, largest: int = LARGEST_FILE) -> str:
    """Return the content of a UTF-8 file, as :func:`read_bytes` does."""
    try:
        return read_bytes(path, hint, largest).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}): {hint}") from error


def read_json(path: str | os.PathLike, hint: str, kind: type = dict, optional: bool = False, **hooks: Any) -> Any:
    """Return the content of a JSON file: a dict, a list, or with ``object`` any value; None if nothing has this path and it is
    ``optional``. ``hint``: how to fix it; ``hooks``: see :func:`parse_json`."""
    if optional:
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError):
            pass  # read_text says why it cannot be read
    text = read_text(path, hint)
    try:
        return parse_json(text, kind, **hooks)
    except ValueError as error:
        raise UserError(f"{path} {error}: {hint}") from error


def read_json_lines(path: Path, hint: str, parse: Callable[[str], Any]) -> list[Any]:
    """Return what ``parse`` makes of each line of a prepared file; ``hint``: how to write it again."""
    try:
        with path.open(encoding="utf-8", newline="\n") as lines:
            return [parse(line) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is missing or damaged ({type(error).__name__}: {error}): {hint}") from error


def read_yaml(path: str | os.PathLike, hint: str) -> Any:
    """Return the content of a YAML file, without equal keys, and without aliases: nine lists of nine aliases
    each grow ninefold per level."""
    import yaml  # not needed by most commands

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("it has an alias")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            content = super().construct_mapping(node, deep)
            if len(content) < len(node.value):
                raise yaml.YAMLError("a key is there twice")
            return content

    text = read_text(path, hint, largest=1 << 20)
    try:
        return yaml.load(text, Loader)
    # ValueError: the date 2000-99-99
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is not YAML that can be read ({reason:.200}): {hint}") from error


def parse_json(text: str | bytes, kind: type = dict, **hooks: Any) -> Any:
    """Return the content of a JSON text. ``hooks`` of ``json.loads``: one for numbers replaces the check of such numbers."""
    checks = {"parse_int": _number, "parse_float": _number, "parse_constant": _number, "object_pairs_hook": unique_keys}
    try:
        content = json.loads(text, **checks | hooks)
        collections.deque(values_in(content), maxlen=0)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"is not JSON that can be read ({error})") from error
    if not isinstance(content, kind):
        raise ValueError(f"contains {reprlib.repr(content)}, not {_KINDS[kind]}")
    return content


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of JSON with these keys; raise ``ValueError`` if two are equal, because programs read either value."""
    content = dict(pairs)
    if len(content) < len(pairs):
        [(twice, _)] = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"has the key {twice[:60]!r} twice")
    return content


def _number(digits: str) -> int | float:
    value = float(digits)  # also of NaN, Infinity and -Infinity, which JSON does not have
    if not math.isfinite(value):
        raise ValueError(f"has {digits[:20]}, which is not a finite number")
    return int(digits) if digits.lstrip("-").isdigit() else value


def values_in(content: Any) -> Iterator[Any]:
    """Yield every value in nested dictionaries, lists, tuples and namespaces, the containers too."""
    level, depth, number = [content], 0, 0
    while level:
        depth, parts = depth + 1, []
        for value in level:
            yield value
            value = vars(value) if isinstance(value, argparse.Namespace) else value
            if isinstance(value, (dict, list, tuple)):
                number += len(value)
                if depth > DEEPEST or number > MOST_VALUES:  # before they are collected
                    raise ValueError(f"has more than {DEEPEST} levels of values, or more than {MOST_VALUES:,} values")
                parts += value.values() if isinstance(value, dict) else value
        level = parts


def field(content: Any, name: str, kind: type) -> Any:
    """Return ``content[name]``; raise ``ValueError`` unless ``content`` is a dictionary that has it, of type ``kind``."""
    value = content.get(name) if isinstance(content, dict) else None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} is {reprlib.repr(value)}, not {_KINDS[kind]}")
    return value


def text_in(value: Any) -> str:
    """Return ``value``; raise ``ValueError`` unless it is a string that UTF-8 can represent."""
    if not isinstance(value, str) or not is_unicode(value):
        raise ValueError(f"{reprlib.repr(value)} is not a string of Unicode characters")
    return value


def finite_number(value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """Return ``value`` as a float; raise ``ValueError`` unless it is a finite number from ``low`` to ``high``."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and low <= value <= high and abs(value) <= 1e308):  # an integer can be larger than any float
        limits = "" if (low, high) == (-math.inf, math.inf) else f" from {low:g} to {high:g}"
        raise ValueError(f"{reprlib.repr(value)} is not a finite number{limits}")
    return float(value)


def whole_number(value: Any, low: int = 0, high: int = LARGEST_COUNT) -> int:
    """Return ``value``; raise ``ValueError`` unless it is an integer from ``low`` to ``high``."""
    if type(value) is not int or not low <= value <= high:  # True is none
        raise ValueError(f"{reprlib.repr(value)} is not an integer from {low:,} to {high:,}")
    return value


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can represent a string: whether no lone surrogate is in it.

    Python reads bytes of the command line that are not UTF-8 as lone surrogates, and JSON can spell them.
    """
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def are_labels(labels: Any) -> bool:
    """Return whether this is a list of different names of labels, each on one line."""
    return (
        isinstance(labels, list)
        and all(isinstance(label, str) and label != "" and not re.search(r"[\r\n\0]", label) for label in labels)
        and all(map(is_unicode, labels))
        and len(labels) == len(set(labels)) > 0
    )


def plain_name(value: Any, longest: int = LONGEST_NAME) -> str:
    """Return ``value``; raise ``ValueError`` unless it is a string that can be printed.

    It may contain ``/`` and ``..``: who makes a path of it checks that. Such a string is not empty, not too long, and has
    neither control characters (NUL ends paths, others change a terminal) nor halves of surrogate pairs, which UTF-8 cannot
    represent.
    """
    is_printable = isinstance(value, str) and re.search(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", value) is None
    if not is_printable or not 0 < len(value) <= longest:
        raise ValueError(f"{reprlib.repr(value)} is not a printable string of 1 to {longest:,} characters")
    return value
