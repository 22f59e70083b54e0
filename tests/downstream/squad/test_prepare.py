"""``amos prepare squad``: its files, counts and errors."""

import json
import lzma
import shutil
from pathlib import Path

import pytest
from failures import error_line, harm_last_byte
from fairseq.data import Dictionary
from preparing import prepare
from synthetic_squad import make_squad, prepare_squad, write_json

from amos_fairseq.downstream.squad.dataset import SquadSplit, read_squad_manifest
from amos_fairseq.errors import UserError
from amos_fairseq.text.tokenization import load_tokenizer

main = prepare("squad")

SQUAD = make_squad()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return prepare_squad(tmp_path_factory.mktemp("squad"), SQUAD)


def refused(capsys, *arguments: object) -> str:
    return error_line(capsys, main, *arguments, reports_progress=True)


def test_files_have_every_question_and_paragraph(data):
    """Ids of the tokenizer and fairseq's dictionary, one text at a time, and the tokenizer's offsets."""
    tokenizer, dictionary = load_tokenizer(data / "tokenizer"), Dictionary.load(str(data / "dict.txt"))
    paragraphs = SQUAD["data"][0]["paragraphs"]
    for name in ("train", "valid"):
        split = SquadSplit(data, name)
        asked = [(number, q) for number, paragraph in enumerate(paragraphs) for q in paragraph["qas"]]
        assert len(split.examples) == len(asked)
        for index, (number, q) in enumerate(asked):
            example = split.examples[index]
            assert (example.context, example.id, example.is_impossible) == (number, q["id"], q["is_impossible"])
            expected = [dictionary.index(piece) for piece in tokenizer.encode(q["question"])]
            assert split.questions[index].tolist() == expected
            answers = [{"text": answer.text, "answer_start": answer.start} for answer in example.answers]
            assert answers == q["answers"]
        assert split.texts == [paragraph["context"] for paragraph in paragraphs]
        assert len(split.contexts) == len(paragraphs)
        for number, text in enumerate(split.texts):
            assert split.contexts[number].tolist() == [dictionary.index(piece) for piece in tokenizer.encode(text)]
            spans = [(start, end) for _, start, end in tokenizer.encode_with_offsets(text)]
            assert list(zip(*(part.tolist() for part in split.offsets(number)), strict=True)) == spans


def test_changed_and_damaged_files_are_refused_at_opening(data, tmp_path):
    """By their hashes; without these, as in data of earlier versions, a damaged line is one line as well."""
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    for name in ("valid.context_end.bin", "valid.examples.jsonl"):
        harm_last_byte(copy / name)
        with pytest.raises(UserError, match=rf"{name} is not the file that amos prepare wrote: copy"):
            SquadSplit(copy, "valid")
        shutil.copyfile(data / name, copy / name)
    assert len(SquadSplit(copy, "valid")) == len(SquadSplit(data, "valid"))
    (copy / "squad.json").unlink()  # the hashes
    (copy / "valid.examples.jsonl").write_text('{"id": 5}\n')
    with pytest.raises(UserError, match=r"examples\.jsonl is damaged \(answers is None, not a list\): prepare the"):
        SquadSplit(copy, "valid")
    lines = (copy / "train.examples.jsonl").read_text().splitlines()
    for change in ({"context": 10**6}, {"tokens": [0, 10**6]}, {"tokens": [-1, 0]}, {"tokens": [1, 0]}):
        example = json.loads(lines[0])
        (example if "context" in change else example["answers"][0]).update(change)
        (copy / "train.examples.jsonl").write_text("\n".join([json.dumps(example), *lines[1:], ""]))
        with pytest.raises(UserError, match=r"train\.examples\.jsonl is damaged \(.*\): prepare the data again"):
            SquadSplit(copy, "train")


def test_inexact_answers_are_counted_and_listed(tmp_path):
    """A misplaced answer is not trained on; one that ends inside a token is extended to it."""
    squad = make_squad(seed=2)
    first, second, third = squad["data"][0]["paragraphs"][0]["qas"][:3]
    first["answers"] = [{"text": "no such text", "answer_start": 3}]
    context = squad["data"][0]["paragraphs"][0]["context"]
    second["answers"] = [{"text": "olou", "answer_start": context.index("olou")}]
    data = prepare_squad(tmp_path, squad)
    facts = read_squad_manifest(data)["splits"]["train"]
    assert facts["answers"] == {"exact": 56, "wider": 1, "lost": 0, "misplaced": 1}
    assert facts["untrainable"] == 1
    assert facts["named"]["misplaced"] == [{"id": first["id"], "answer": "no such text", "tokens_give": ""}]
    assert facts["named"]["wider"][0]["tokens_give"] == "colour"
    split = SquadSplit(data, "train")
    assert [not example.spans for example in split.examples[:3]] == [True, False, False]
    assert split.examples[2].answers[0].text == third["answers"][0]["text"]


def test_sampled_questions(tmp_path, data):
    """A seeded sample in the order of the file, without paragraphs that have no question; the dev set is complete."""
    few = prepare_squad(tmp_path / "a", SQUAD, "--max-train-questions", "7")
    again = prepare_squad(tmp_path / "b", SQUAD, "--max-train-questions", "7")
    other = prepare_squad(tmp_path / "c", SQUAD, "--max-train-questions", "7", "--seed", "2")
    ids = [[example.id for example in SquadSplit(out, "train").examples] for out in (few, again, other)]
    everything = [example.id for example in SquadSplit(data, "train").examples]
    assert ids[0] == ids[1] == [name for name in everything if name in set(ids[0])]
    assert len(ids[0]) == 7
    assert ids[2] != ids[0]
    split = SquadSplit(few, "train")
    assert {example.context for example in split.examples} == set(range(len(split.contexts)))
    assert len(SquadSplit(few, "valid")) == 40
    manifest = read_squad_manifest(few)
    assert manifest["settings"] == {"max_train_questions": 7, "seed": 1}
    assert manifest["splits"]["train"]["source_questions"] == 40


def test_refusals(data, tmp_path, capsys):
    """One line that names the file and what is wrong; nothing is left of OUT."""
    source, tokenizer, out = data.parent / "squad.json", data.parent / "tokenizer", tmp_path / "out"
    (tmp_path / "text.json").write_text("no json")
    (tmp_path / "cut.json.xz").write_bytes(lzma.compress(source.read_bytes())[:-30])
    cases = [([tmp_path / "text.json", source, tokenizer, out], "text.json is not JSON")]
    cases += [([tmp_path / "cut.json.xz", source, tokenizer, out], "cut.json.xz is damaged")]
    cases += [([source, tmp_path / "absent.json", tokenizer, out], "absent.json: no such file")]
    cases += [([source, source, tmp_path / "absent", out], "is not a directory")]
    cases += [([source, source, tokenizer, out, "--max-train-questions", 0], "--max-train-questions 0")]
    cases += [([source, source, tokenizer, data, "--max-train-questions", 3], "None there, 3 here")]
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(1 << 40)  # which takes no space
    cases += [([source, tmp_path / "huge.json", tokenizer, out], "huge.json holds more than 256 MiB")]
    cases += [([source, source, tokenizer, tmp_path], "is not empty and contains no SQuAD data")]
    cases += [([write_json(tmp_path / "empty.json", []), source, tokenizer, out], "holds no questions")]
    for arguments, message in cases:
        assert message in refused(capsys, *arguments), arguments
    assert not out.exists()
