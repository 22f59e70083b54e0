"""A file of questions that a stranger may have written, with one of its values damaged: read, or refused in one line."""

import json
import random
from pathlib import Path

import pytest
from damage import attack_json

from amos_fairseq.errors import UserError
from amos_fairseq.inputs.question_files import read_squad

QUESTION = {"id": "q", "question": "w", "is_impossible": False, "answers": [{"text": "a", "answer_start": 0}]}
SQUAD = {"version": "v2.0", "data": [{"title": "t", "paragraphs": [{"context": "a b", "qas": [QUESTION]}]}]}


def test_damaged_files_are_read_or_refused(tmp_path: Path) -> None:
    path, draw, refused = tmp_path / "dev.json", random.Random(1), 0
    for _ in range(1000):
        path.write_text(json.dumps(SQUAD))
        attack_json(path, draw)
        try:
            read_squad(path)
        except UserError as error:
            refused += 1
            message = str(error).replace(str(tmp_path), "")
            assert "\n" not in message, path.read_text()[:200]
            assert len(message) < 500, path.read_text()[:200]
    assert 500 < refused < 1000


def test_half_of_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "dev.json").write_text(json.dumps(SQUAD).replace('"w"', '"\\ud800"'))
    with pytest.raises(UserError, match=r"surrogate|Unicode"):
        read_squad(path)
