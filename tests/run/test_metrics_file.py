"""The reader of metrics.jsonl: which lines are records, and what readers get of a file that is missing or cut short."""

import json

import pytest

from amos_fairseq.run.metrics_file import FILE_NAME, NewRecords, read_records


@pytest.mark.parametrize("text", ["nonsense", '{"split": "train", "upd', '{"split": "train"}', "[5]", "\0"])
def test_other_lines_are_no_records(text, tmp_path):
    record = {"split": "valid", "update": 7, "epoch": 0.5, "loss": 0.25, "ppl": None}
    assert read_records(tmp_path) == []
    (tmp_path / FILE_NAME).write_text(f"{text}\n{json.dumps(record)}")
    assert read_records(tmp_path) == [record]


def test_new_records_are_those_since_the_last_call(tmp_path):
    """A line that is being written is returned once, when it is whole."""
    file, records = tmp_path / FILE_NAME, [{"split": "train", "update": update, "loss": 1.0} for update in (2, 4, 6)]
    lines = [json.dumps(record) + "\n" for record in records]
    new = NewRecords(tmp_path)
    assert (new.read(), new.update) == ([], 0)
    file.write_text(lines[0] + lines[1][:20])
    assert (new.read(), new.update) == (records[:1], 2)
    assert new.read() == []
    file.write_text("".join(lines))
    assert (new.read(), new.update) == (records[1:], 6)


def test_what_a_file_holds_before_is_not_new(tmp_path):
    file = tmp_path / FILE_NAME
    file.write_bytes(b'\x00\n{"split": "train", "update": 8}\n{"split": "train", "update": 12}\n')
    new = NewRecords(tmp_path)
    assert (new.read(), new.update) == ([], 12)
    file.write_text('{"split": "train", "update": 8}\n')  # as a run that is resumed cuts it back
    assert (new.read(), new.update) == ([], 8)
    for update in (9, 10):  # and where it has already written the next record
        records = [{"split": "train", "update": number} for number in (8, update)]
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        assert (new.read(), new.update) == (records[1:], update)
