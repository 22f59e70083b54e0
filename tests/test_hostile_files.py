"""A file of questions that a stranger may have written, with each of its values damaged: read, or refused in one line."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from amos_fairseq.errors import UserError
from amos_fairseq.inputs.question_files import read_squad

# As they are spelled in a file: json.dumps refuses an integer of 5,000 digits.
VALUES = (
    *("null", "5", "-1", "true", "1e308", "1e400", "NaN", "-Infinity", "[]", "[5]", "{}"),
    *("9" * 19, "9" * 400, "9" * 5000, json.dumps("x" * 5000), "[" * 10**5 + "]" * 10**5),
    *('"x"', '""', '"\\ud800"', '"a\\u0000b"', '"a\\nb"', '"../../x"', '"/etc/passwd"'),
)
QUESTION = {"id": "q", "question": "w", "is_impossible": False, "answers": [{"text": "a", "answer_start": 0}]}
SQUAD = {"version": "v2.0", "data": [{"title": "t", "paragraphs": [{"context": "a b", "qas": [QUESTION]}]}]}


def places(content: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every value in nested containers."""
    parts = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for name, part in parts:
        yield (*place, name)
        yield from places(part, (*place, name))


def damaged(content: Any) -> Iterator[str]:
    """Yield the text of ``content`` with each of its values removed, and replaced by each of ``VALUES``."""
    for *place, name in places(content):
        container = changed = copy.deepcopy(content)
        for part in place:
            container = container[part]
        container[name] = "<here>"
        yield from (json.dumps(changed).replace('"<here>"', value) for value in VALUES)
        del container[name]
        yield json.dumps(changed)


def test_damaged_files_are_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "dev.json"
    for text in (json.dumps(SQUAD), *VALUES, *damaged(SQUAD)):
        path.write_text(text)
        try:
            read_squad(path)
        except UserError as error:
            message = str(error).replace(str(tmp_path), "")
            assert "\n" not in message, text[:200]
            assert len(message) < 500, text[:200]


def test_half_of_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dev.json"
    path.write_text(json.dumps(SQUAD).replace('"w"', '"\\ud800"'))
    with pytest.raises(UserError, match=r"surrogate|Unicode"):
        read_squad(path)
