"""``amos prepare squad``: its files, counts and errors."""

import gzip
import json
import lzma
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard
from failures import error_line, harm_last_byte
from fairseq.data import Dictionary
from hugging_face_folders import train_wordpiece
from preparing import prepare
from synthetic_squad import make_squad, prepare_squad, squad_tokenizer, without_impossible, write_json

from amos_fairseq.downstream.squad.dataset import SquadSplit, read_squad_manifest
from amos_fairseq.errors import UserError
from amos_fairseq.fingerprint import file_sha256
from amos_fairseq.text.tokenization import load_tokenizer

main = prepare("squad")

SQUAD = make_squad()


@pytest.fixture(scope="module", params=["sentencepiece", "fastbpe"])
def data(request, tmp_path_factory) -> Path:
    return prepare_squad(tmp_path_factory.mktemp(request.param), SQUAD, bpe=request.param)


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


def test_answers_cut_by_their_tokens(data):
    """Except a full stop that SentencePiece joins to the word before it, which no score counts."""
    split = SquadSplit(data, "train")
    for example in split.examples:
        starts, ends = split.offsets(example.context)
        for answer in example.answers:
            first, last = answer.tokens
            assert split.texts[example.context][starts[first] : ends[last]].rstrip(".") == answer.text
        assert (example.target is None) == example.is_impossible


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
    (copy / "squad.json").unlink()
    (copy / "valid.examples.jsonl").write_text('{"id": 5}\n')
    with pytest.raises(UserError, match=r"examples\.jsonl is damaged \(answers is None, not a list\): prepare the"):
        SquadSplit(copy, "valid")


@pytest.mark.parametrize("value", [10**6, [0, 10**6], [1, 0], [-1, 0]])
def test_answers_outside_of_their_context_are_refused(data, tmp_path, value):
    """The number of a context, or tokens."""
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    (copy / "squad.json").unlink()  # the hashes
    examples = [json.loads(line) for line in (copy / "train.examples.jsonl").read_text().splitlines()]
    example = next(example for example in examples if example["answers"])
    if isinstance(value, int):
        example["context"] = value
    else:
        example["answers"][0]["tokens"] = value
    (copy / "train.examples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in examples))
    with pytest.raises(UserError, match=r"train\.examples\.jsonl is damaged \(.*\): prepare the data again"):
        SquadSplit(copy, "train")


def test_file_names_and_dtype(data):
    names = {path.name for path in data.iterdir()}
    arrays = ("question", "context", "context_start", "context_end")
    of_split = {f"{name}.{extension}" for name in arrays for extension in ("bin", "idx")}
    of_split |= {"examples.jsonl", "contexts.jsonl"}
    shared = {"dict.txt", "tokenizer", "squad.json"}
    assert names == {f"{split}.{name}" for split in ("train", "valid") for name in of_split} | shared
    assert (data / "train.question.bin").stat().st_size == 2 * int(SquadSplit(data, "train").questions.sizes.sum())
    assert (data / "dict.txt").read_bytes() == (data / "tokenizer" / "dict.txt").read_bytes()


def test_manifest_counts(data):
    manifest = read_squad_manifest(data)
    source = data.parent / "squad.json"
    assert manifest["sources"]["train"] == {"name": "squad.json", "sha256": file_sha256(source)}
    facts = manifest["splits"]["train"]
    assert (facts["questions"], facts["impossible"], facts["paragraphs"]) == (40, 10, 10)
    assert facts["answers"] == {"exact": 60, "wider": 0, "lost": 0, "misplaced": 0}
    split = SquadSplit(data, "train")
    assert facts["context_tokens"] == int(np.sum(split.contexts.sizes))
    assert facts["longest_question"] == int(split.questions.sizes.max())


def test_inexact_answers_are_counted_and_listed(tmp_path, capsys):
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
    assert [example.target is None for example in split.examples[:3]] == [True, False, False]
    assert split.examples[2].answers[0].text == third["answers"][0]["text"]
    assert "1 questions are not used in training" in capsys.readouterr().err


def test_version_one(tmp_path):
    data = prepare_squad(tmp_path, without_impossible(SQUAD))
    assert read_squad_manifest(data)["splits"]["valid"]["impossible"] == 0
    assert all(example.answers and not example.is_impossible for example in SquadSplit(data, "valid").examples)


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


def test_compressed_files_and_a_bare_tokenizer(tmp_path):
    """xz and gz give equal data; a directory with tokenizer.json alone is enough."""
    text = json.dumps(SQUAD).encode()
    (tmp_path / "train.json.xz").write_bytes(lzma.compress(text))
    (tmp_path / "dev.json.gz").write_bytes(gzip.compress(text))
    train_wordpiece(tmp_path / "tokenizer", [p["context"] for p in SQUAD["data"][0]["paragraphs"]])
    command = [tmp_path / "train.json.xz", tmp_path / "dev.json.gz", tmp_path / "tokenizer", tmp_path / "out"]
    main(command)
    train, valid = (SquadSplit(tmp_path / "out", name) for name in ("train", "valid"))
    assert train.examples == valid.examples
    assert len(train) == 40
    assert (tmp_path / "out" / "tokenizer" / "tokenizer.settings.json").is_file()


def test_files_of_a_killed_run_are_removed(data, tmp_path):
    """Those of a process that no longer runs, not those of a running one."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    prefix = f".out.unfinished.{socket.gethostname()}."
    for process in (dead.pid, os.getppid()):
        (tmp_path / f"{prefix}{process}").mkdir()
    source, tokenizer = data.parent / "squad.json", data.parent / "tokenizer"
    main([source, source, tokenizer, tmp_path / "out"])
    assert {path.name for path in tmp_path.iterdir()} == {"out", f"{prefix}{os.getppid()}"}


def test_finished_data_are_unchanged(data, capsys, tmp_path):
    source, tokenizer = data.parent / "squad.json", data.parent / "tokenizer"
    before = {path: path.stat().st_mtime_ns for path in data.rglob("*")}
    main([source, source, tokenizer, data])
    assert "finished already" in capsys.readouterr().err
    assert "(settings max_train_questions: None there, 3 here)" in refused(
        capsys, source, source, tokenizer, data, "--max-train-questions", 3
    )
    other = write_json(tmp_path / "other.json", make_squad(seed=9))
    assert "(sources train name: squad.json there, other.json here)" in refused(capsys, other, source, tokenizer, data)
    squad_tokenizer(tmp_path / "text", SQUAD, size=160).save(tmp_path / "tokenizer")
    assert "(tokenizer_sha256: " in refused(capsys, source, source, tmp_path / "tokenizer", data)
    assert {path: path.stat().st_mtime_ns for path in data.rglob("*")} == before


def change(path: list, value: object) -> dict:
    """The synthetic data with one value replaced, or, for None, removed."""
    squad = json.loads(json.dumps(SQUAD))
    *before, last = path
    part = squad
    for key in before:
        part = part[key]
    if value is None:
        del part[last]
    else:
        part[last] = value
    return squad


FIRST = ["data", 0, "paragraphs", 0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "contains [], not an object"),
        ({"version": "v2.0"}, "data must be a list, it is missing"),
        (change(["data", 0, "paragraphs"], {"a": 1}), 'data[0].paragraphs must be a list, it is {"a": 1}'),
        (change([*FIRST, "context"], None), "data[0].paragraphs[0].context must be a string, it is missing"),
        (change([*FIRST, "qas", 1, "id"], 7), "data[0].paragraphs[0].qas[1].id must be a string, it is 7"),
        (change([*FIRST, "qas", 1, "question"], None), "qas[1].question must be a string, it is missing"),
        (change([*FIRST, "qas", 0, "answers"], None), "qas[0].answers must be a list, it is missing"),
        (change([*FIRST, "qas", 0, "answers", 1, "answer_start"], "3"), "answers[1].answer_start must be an integer, "),
        (change([*FIRST, "qas", 0, "is_impossible"], "no"), "qas[0].is_impossible must be true or false"),
        (change([*FIRST, "qas", 0, "id"], "p0q1"), "the id p0q1 occurs twice"),
        (change(["data"], []), "holds no questions"),
    ],
)
def test_wrong_layouts_are_refused_by_their_path(data, tmp_path, capsys, content, message):
    wrong = write_json(tmp_path / "wrong.json", content)
    tokenizer = data.parent / "tokenizer"
    line = refused(capsys, wrong, data.parent / "squad.json", tokenizer, tmp_path / "out")
    assert message in line
    assert str(wrong) in line
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.json"]


def test_other_mistakes_are_one_line(data, tmp_path, capsys):
    source, tokenizer, out = data.parent / "squad.json", data.parent / "tokenizer", tmp_path / "out"
    (tmp_path / "text.json").write_text("no json")
    assert "text.json is not JSON" in refused(capsys, tmp_path / "text.json", source, tokenizer, out)
    # zstandard's own reader takes cut files.
    for suffix, compress in (("gz", gzip.compress), ("xz", lzma.compress), ("zst", zstandard.compress)):
        path = tmp_path / f"cut.json.{suffix}"
        path.write_bytes(compress(source.read_bytes())[:-30])
        assert f"{path.name} is damaged" in refused(capsys, path, source, tokenizer, out)
    assert "no such file" in refused(capsys, source, tmp_path / "absent.json", tokenizer, out)
    assert "is not a directory" in refused(capsys, source, source, tmp_path / "absent", out)
    assert "--max-train-questions 0" in refused(capsys, source, source, tokenizer, out, "--max-train-questions", 0)
    assert "is not empty and contains no SQuAD data" in refused(capsys, source, source, tokenizer, tmp_path)
    assert "is not a directory" in refused(capsys, source, source, tokenizer, source)
    assert not out.exists()


def test_answer_starts_in_bytes_are_refused(data, tmp_path, capsys):
    """Most answers are then not found at their start."""
    squad = json.loads(json.dumps(SQUAD))
    for paragraph in squad["data"][0]["paragraphs"]:
        for asked in paragraph["qas"]:
            for answer in asked["answers"]:
                answer["answer_start"] = len(paragraph["context"][: answer["answer_start"]].encode("utf-8"))
    wrong = write_json(tmp_path / "wrong.json", squad)
    line = refused(capsys, wrong, wrong, data.parent / "tokenizer", tmp_path / "out")
    assert "are not at their answer_start: the starts must count characters" in line
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.json"]


@pytest.mark.parametrize("content", ["{}", "[1]", "nothing", '{"settings": {}}'])
def test_invalid_manifests_are_refused(tmp_path, content):
    with pytest.raises(UserError, match=r"squad\.json is missing"):
        read_squad_manifest(tmp_path)
    (tmp_path / "squad.json").write_text(content)
    with pytest.raises(UserError, match=r"was not written by amos prepare"):
        read_squad_manifest(tmp_path)
