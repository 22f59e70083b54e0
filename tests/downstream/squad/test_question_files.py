"""Data sets in other layouts than SQuAD's own: the same questions, and what is wrong with an answer."""

import json
from pathlib import Path
from typing import Any

import pytest
from synthetic_squad import make_squad, write_json

from amos_fairseq.downstream.squad.question_files import SquadFile, read_squad, script_notes
from amos_fairseq.errors import UserError

SQUAD = make_squad()


def flat_rows() -> list[dict[str, Any]]:
    """As load_dataset("squad_v2") gives them."""
    rows = []
    for paragraph in SQUAD["data"][0]["paragraphs"]:
        for asked in paragraph["qas"]:
            answers = {key: [answer[key] for answer in asked["answers"]] for key in ("text", "answer_start")}
            row = {"id": asked["id"], "title": "Synthetic", "context": paragraph["context"]}
            rows.append(row | {"question": asked["question"], "answers": answers})
    return rows


def write_rows(path: Path) -> Path:
    rows = flat_rows()
    if path.suffix == ".jsonl" or path.name == "lines.json":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        write_json(path, {"data": rows} if path.name == "data.json" else rows)
    else:
        datasets = pytest.importorskip("datasets")
        table = datasets.Dataset.from_list(rows)
        table.to_parquet(path) if path.suffix else table.save_to_disk(path)
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "lines.json", "array.json", "data.json", "rows.parquet", "folder"])
def test_flat_rows_are_the_same_questions(name, tmp_path):
    official = read_squad(write_json(tmp_path / "official.json", SQUAD))
    assert read_squad(write_rows(tmp_path / name)).paragraphs == official.paragraphs
    assert sum(question.is_impossible for question in official.questions) == 10


def test_one_row(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(flat_rows()[0]) + "\n")
    assert [question.id for question in read_squad(tmp_path / "a.jsonl").questions] == ["p0q0"]
    lines = "".join(json.dumps(row | {"is_impossible": None}) + "\n" for row in flat_rows())
    (tmp_path / "b.jsonl").write_text(f"\ufeff{lines}", encoding="utf-8")
    assert len(read_squad(tmp_path / "b.jsonl").questions) == len(flat_rows())
    (tmp_path / "c.json").write_text(json.dumps([row | {"is_impossible": None} for row in flat_rows()]))
    assert len(read_squad(tmp_path / "c.json").questions) == len(flat_rows())


def test_many_wrong_starts_are_found_in_linear_time(tmp_path, monkeypatch):
    calls, original = [], SquadFile.without_start
    monkeypatch.setattr(SquadFile, "without_start", lambda self: calls.append(1) or original(self))
    read_squad(write_json(tmp_path / "a.json", squad_of("a b c d e f", *[(name, 9) for name in "ab"], *[("c", 4)] * 3)))
    assert len(calls) == 2


def test_a_wrong_start_is_shown_with_what_is_there(tmp_path):
    with pytest.raises(UserError, match=r"the first is 'HOUSE', and the context has 'house' there"):
        read_squad(write_json(tmp_path / "a.json", squad_of("the house", ("HOUSE", 4))))


def squad_of(context: str, *answers: tuple[str, int], **more: Any) -> dict[str, Any]:
    """A question for each answer, whose id is a number."""
    asked = [
        {"id": number, "question": "?", "answers": [{"text": text, "answer_start": start}], **more}
        for number, (text, start) in enumerate(answers)
    ]
    return {"data": [{"paragraphs": [{"context": context, "qas": asked}]}]}


def test_numbers_as_ids_and_questions_without_an_answer(tmp_path):
    """A question without answers, or with an empty one, is impossible, with and without the flag."""
    squad = squad_of("a b c", ("a", 0), ("", 0), is_impossible=False)
    squad["data"][0]["paragraphs"][0]["qas"].append({"id": 7, "question": "?", "answers": []})
    questions = read_squad(write_json(tmp_path / "a.json", squad)).questions
    assert [(question.id, question.is_impossible) for question in questions] == [("0", False), ("1", True), ("7", True)]


def test_an_answer_is_corrected_only_where_its_text_is_once(tmp_path):
    """Off by three, -1, and beyond the end; "the" is there twice, "no" nowhere."""
    context = "the house and the old garden"
    wrong = [("house", 7), ("garden", -1), ("old", 99), ("the", 1), ("no", 0)]
    right = [("the", 0), ("the", 14), ("and", 10), ("house", 4), ("old", 18), ("garden", 22)]
    data = read_squad(write_json(tmp_path / "a.json", squad_of(context, *wrong, *right)))
    starts = [question.answers[0].start for question in data.questions]
    assert starts == [4, 22, 18, 1, 0, *(start for _, start in right)]
    (note,) = data.notes
    assert note.startswith("3 answers were not at their answer_start")
    assert note.endswith("(0, 1, 2)")
    assert data.without_start() == ["3", "4"]
    squad = squad_of(context, ("house", 7), *right)
    squad["data"][0]["paragraphs"][0]["qas"][0]["answers"].append({"text": "the", "answer_start": 1})
    (note,) = read_squad(write_json(tmp_path / "two.json", squad)).notes
    assert note.endswith("that has their text (0)")
    assert not read_squad(write_json(tmp_path / "b.json", squad_of(context, *right))).notes


def test_starts_in_other_units_are_refused(tmp_path):
    """UTF-16 units, as JavaScript counts, and bytes."""
    context = "\U0001f600 Zoë likes the old garden"
    for encoding, size in (("utf-16-le", 2), ("utf-8", 1)):
        starts = [
            (word, len(context[: context.index(word)].encode(encoding)) // size) for word in ("likes", "old", "garden")
        ]
        with pytest.raises(UserError, match=r"3 of 3 answers are not at their answer_start \(0, 1, 2\).*UTF-16"):
            read_squad(write_json(tmp_path / "a.json", squad_of(context, *starts)))


@pytest.mark.parametrize(
    ("text", "is_told"), [("中国人民", True), ("ประเทศไทย", True), ("ひらがな", True), ("대한 민국", False)]
)
def test_scripts_without_blanks(text, is_told, tmp_path):
    data = read_squad(write_json(tmp_path / "a.json", squad_of(f"{text} {text}.", (text, 0))))
    assert bool(list(script_notes(data))) == is_told


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"qid": 1, "text": 1}\n{"a": 2}\n', "in data\\[0\\] there is no context .* but qid, text"),
        ('{"id": 1, "context": "a", "question": "?", "answers": ["a"]}\n', "answers of the question 1 are texts"),
        ('{"context": "a", "question": "?"}\n', "in data\\[0\\] id is None"),
        ('{"id": 1, "context": "a", "question": "?"}\n', "in data\\[0\\] answers is None, not a list"),
        ("a b\n", "is not JSON"),
        ('{"id": 1, "context": "a", "question": "?", "answers": []}\n', "no question has an answer"),
        ('{"id": 1, "context": "a"}\n{"id": 2, "con\n', "line 2 is not JSON"),
    ],
)
def test_rows_that_cannot_be_read(content, message, tmp_path):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UserError, match=rf"a\.jsonl.*{message}"):
        read_squad(tmp_path / "a.jsonl")
