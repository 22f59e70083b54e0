"""Readers of files that a stranger may have written, each with some 200 damaged files: read, or refused in one line."""

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from amos_fairseq.errors import UserError
from amos_fairseq.inputs.question_files import read_squad

TEXTS = (
    *("null", "5", "[]", "[5]", "{}", '"x"', "true", "", "\0", "{", "Infinity", "NaN", '"\\ud800"'),
    *("9" * 400, "9" * 5000, "[" * 10**5 + "]" * 10**5, '{"a":' * 10**5 + "1" + "}" * 10**5),
)
# As they are spelled in a file: json.dumps refuses an integer of 5,000 digits.
VALUES = (
    *("null", "5", "-1", "true", "1e308", "1e400", "NaN", "-Infinity", "[]", "[5]", "{}"),
    *("9" * 19, "9" * 400, "9" * 5000, json.dumps("x" * 5000)),
    *('"x"', '""', '"\\ud800"', '"a\\u0000b"', '"a\\nb"', '"../../x"', '"/etc/passwd"'),
)

QUESTION = {"id": "q", "question": "w", "is_impossible": False, "answers": [{"text": "a", "answer_start": 0}]}
SQUAD = {"version": "v2.0", "data": [{"title": "t", "paragraphs": [{"context": "a b", "qas": [QUESTION]}]}]}

READERS: dict[str, tuple[str, Any, Callable[[Path], Any]]] = {"SQuAD": ("dev.json", SQUAD, read_squad)}


def places(content: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every value in nested containers."""
    parts = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for name, part in parts:
        yield (*place, name)
        yield from places(part, (*place, name))


def damaged(content: Any) -> Iterator[str]:
    """Yield the text of ``content`` with each of its values removed, and replaced by each of ``VALUES``."""
    for *place, name in places(content):
        changed = copy.deepcopy(content)
        container = changed
        for part in place:
            container = container[part]
        container[name] = "<here>"
        for value in VALUES:
            yield json.dumps(changed).replace('"<here>"', value)
        del container[name]
        yield json.dumps(changed)


def outcome(read: Callable[[Path], Any], path: Path) -> str:
    """Return what is wrong with the way in which a file was read or refused."""
    try:
        read(path)
    except UserError as error:
        message = str(error).replace(str(path.parent), "")
        return "" if "\n" not in message and len(message) < 500 else f"message: {message[:500]}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return ""


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_read_or_refused(name, tmp_path):
    file_name, content, read = READERS[name]
    path = tmp_path / "out" / file_name
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(content))
    read(path)
    wrong = {}
    for text in (*TEXTS, *damaged(content)):
        path.write_text(text)
        wrong[text[:200]] = outcome(read, path)
    path.write_bytes(b"\xff\xfe{")
    wrong["not UTF-8"] = outcome(read, path)
    path.unlink()
    path.mkdir()
    wrong["a folder"] = outcome(read, path)
    path.rmdir()
    path.symlink_to(path.name)
    wrong["a circle of links"] = outcome(read, path)
    path.unlink()
    os.mkfifo(path)
    wrong["a pipe"] = outcome(read, path)
    assert {text: what for text, what in wrong.items() if what} == {}
    shutil.rmtree(tmp_path)


def test_half_surrogates_are_refused_where_they_would_be_written(tmp_path):
    path = tmp_path / "dev.json"
    path.write_text(json.dumps(SQUAD).replace('"w"', '"\\ud800"'))
    with pytest.raises(UserError, match=r"surrogate|Unicode"):
        read_squad(path)
