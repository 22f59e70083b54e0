"""Files of edge probing: their content, and one line about each mistake."""

import json
from pathlib import Path

import pytest

from amos_fairseq.errors import UserError
from amos_fairseq.probing.prepare import read_tasks
from amos_fairseq.probing.targets import LONGEST_TEXT, MOST_LABELS, Target, read_examples

GOOD = '{"text": "The cat  sat", "targets": [{"span1": [0, 2], "span2": [2, 3], "label": "nsubj"}], "info": {}}'
ONE_SPAN = '{"text": "The cat sat", "targets": [{"span1": [0, 2], "label": ["animate", "definite"]}]}'


def write(folder: Path, *lines: str, name: str = "train.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / name


def test_content(tmp_path: Path):
    raw = GOOD.replace('"info": {}', '"raw_text": "Thecat sat"')
    (example, empty, with_raw) = read_examples(write(tmp_path, GOOD, '{"text": "", "targets": []}', raw))
    assert with_raw == example._replace(spaces=[False, True, False])
    assert (example.words, example.spaces) == (["The", "cat", "sat"], None)
    assert example.targets == [Target(((0, 2), (2, 3)), ("nsubj",))]
    assert empty.words == []
    assert read_examples(write(tmp_path, ONE_SPAN))[0].targets == [Target(((0, 2),), ("animate", "definite"))]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is not JSON"),
        (GOOD.replace("cat", "x" * LONGEST_TEXT), r"the text has 1,000,009 characters"),
        ("[" * 100_000, "is n"),
        (GOOD.replace('"nsubj"', '"\\ud800"'), "has a character that cannot be printed"),
        (GOOD.replace('"nsubj"', '"%s"' % ("x" * 5000)), "has 5,000 characters"),
        ('{"text": "a"}', "targets is None, not a list"),
        (GOOD.replace("[2, 3]", "[2, 4]"), r"the span \[2, 4\] is empty or not within the 3 words"),
        (GOOD.replace("[2, 3]", "[2.0, 3]"), r"the span \[2.0, 3\]"),
        ('{"text": "\\ud800", "targets": []}', "not a string of Unicode characters"),
        (
            GOOD.replace('"info": {}', '"raw_text": "The cat sat."'),
            "raw_text is not the words of text with other spaces",
        ),
        (GOOD.replace('"nsubj"', "3"), "the label is a string or a list of strings, got 3"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, reason: str):
    path = write(tmp_path, GOOD, line)
    with pytest.raises(UserError, match=f"train.jsonl, line 2: .*{reason}"):
        read_examples(path)


def test_other_bad_files(tmp_path: Path):
    no_target, no_label = '{"text": "a b", "targets": []}', GOOD.replace('"nsubj"', "[]")
    many = [f"label {number}" for number in range(MOST_LABELS + 1)]
    for lines, reason in (
        ([no_target], "mixed: the train split has no target"),
        ([no_label], "mixed: the training targets have no label"),
        ([GOOD, GOOD], "mixed: the training targets have only the label nsubj"),
        ([GOOD, ONE_SPAN], "mixed: some targets have a span2"),
        ([GOOD, GOOD.replace('"nsubj"', json.dumps(many))], "mixed: 10,002 labels for 2 targets are too many"),
    ):
        for split in ("train", "valid"):
            write(tmp_path / "mixed", *lines, name=f"{split}.jsonl")
        with pytest.raises(UserError, match=reason):
            read_tasks(tmp_path, "mixed")
    write(tmp_path / "a\nb", GOOD)
    with pytest.raises(UserError, match=r"the folder 'a\\nb' has a name that cannot be printed"):
        read_tasks(tmp_path, "mixed")


def test_tasks_are_in_the_order_of_the_paper(tmp_path: Path):
    with pytest.raises(UserError, match="has no task"):
        read_tasks(tmp_path, None)
    for name in ("zebra", "relations", "pos"):
        write(tmp_path / name, GOOD, GOOD.replace("nsubj", "iobj"))
        write(tmp_path / name, GOOD.replace("nsubj", "obj"), name="valid.jsonl")
    assert [task.name for task in read_tasks(tmp_path, None)] == ["pos", "relations", "zebra"]
    task, other = read_tasks(tmp_path, "zebra, pos")
    assert (task.name, other.name) == ("pos", "zebra")
    assert (task.labels, task.scored_split) == (["iobj", "nsubj"], "valid")
    with pytest.raises(UserError, match="no task 'ner': give one of pos, relations, zebra"):
        read_tasks(tmp_path, "ner")
    (tmp_path / "pos" / "valid.jsonl").unlink()
    with pytest.raises(UserError, match=r"valid\.jsonl is missing"):
        read_tasks(tmp_path, "pos")
