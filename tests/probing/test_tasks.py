"""Converters to edge probing: small files whose targets are written out here."""

import json
from pathlib import Path

import pytest
from failures import error_line
from preparing import prepare

from amos_fairseq.errors import UserError
from amos_fairseq.probing.tasks import MOST_LABELS, Target, read_examples, read_tasks

main = prepare("probing")

CONLLU = """\
# text = I'm at Ann's
1-2\tI'm\t_\t_\t_\t_\t_\t_\t_\t_
1\tI\tI\tPRON\tPRP\t_\t4\tnsubj\t_\t_
2\t'm\tbe\tAUX\tVBP\t_\t4\tcop\t_\t_
3\tat\tat\tADP\tIN\t_\t4\tcase\t_\t_
4\tAnn\tAnn\tPROPN\tNNP\t_\t0\troot\t_\tSpaceAfter=No
4.1\tgone\tgo\tVERB\tVBN\t_\t_\t_\t_\t_
5\t's\t's\tPART\tPOS\t_\t4\tcase:gen\t_\t_

"""
CHUNKS = "He PRP B-NP\nsaw VBD B-VP\nthe DT B-NP\nblue JJ I-NP\ncar NN I-NP\nyesterday NN B-NP\n. . O\nSo RB I-ADVP\n\n"
SEMEVAL = (
    '1\t"A <e1>fire</e1>, which <e2>oil tanks</e2>-makers fear."\r\nCause-Effect(e1,e2)\r\nComment: none\r\n\r\n'
    '2\t"The <e2>lid</e2> and the <e1>box</e1>."\nOther\nComment:\n\n'
)
GOOD = '{"text": "The cat  sat", "targets": [{"span1": [0, 2], "span2": [2, 3], "label": "nsubj"}], "info": {}}'
ONE_SPAN = '{"text": "The cat sat", "targets": [{"span1": [0, 2], "label": ["animate", "definite"]}]}'


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.write_bytes(content.encode())
    return path


def test_three_corpora(tmp_path: Path):
    treebank = write(tmp_path, "ud.conllu", CONLLU)
    chunks = write(tmp_path, "chunks.txt", CHUNKS * 20)
    relations = write(tmp_path, "TRAIN.TXT", SEMEVAL)
    out = tmp_path / "out"
    flags = ["--treebank", treebank, treebank, treebank, "--chunks", chunks, chunks]
    main([out, *flags, "--relations", relations, relations, relations])

    (sentence,) = records(out / "pos" / "test.jsonl")
    assert (sentence["text"], sentence["raw_text"]) == ("I 'm at Ann 's", "I'm at Ann's")
    assert [target["label"] for target in sentence["targets"]] == ["PRON", "AUX", "ADP", "PROPN", "PART"]
    (sentence,) = records(out / "dependencies" / "train.jsonl")
    edges = [([0, 1], "nsubj"), ([1, 2], "cop"), ([2, 3], "case"), ([4, 5], "case:gen")]
    assert sentence["targets"] == [{"span1": span, "span2": [3, 4], "label": label} for span, label in edges]
    held_out, kept, test = (records(out / "chunks" / f"{split}.jsonl") for split in ("valid", "train", "test"))
    assert (len(held_out), len(kept), len(test)) == (2, 18, 20)
    expected = [([0, 1], "NP"), ([1, 2], "VP"), ([2, 5], "NP"), ([5, 6], "NP"), ([7, 8], "ADVP")]
    assert [(target["span1"], target["label"]) for target in test[0]["targets"]] == expected
    first, second = records(out / "relations" / "valid.jsonl")
    assert first["text"] == "A fire , which oil tanks -makers fear."
    assert first["raw_text"] == "A fire, which oil tanks-makers fear."
    assert first["targets"] == [{"span1": [1, 2], "span2": [4, 6], "label": "Cause-Effect(e1,e2)"}]
    assert second["targets"] == [{"span1": [4, 5], "span2": [1, 2], "label": "Other"}]

    tasks = read_tasks(out, None)
    assert [task.name for task in tasks] == ["pos", "chunks", "dependencies", "relations"]
    assert all(task.splits.keys() == {"train", "valid", "test"} for task in tasks)
    examples = [task.splits["test"][0] for task in tasks]
    assert [example.spaces for example in examples[:2]] == [[False, True, True, False, False], None]
    assert ["raw_text" in record for record in test] == [False] * 20


def test_odd_words(tmp_path: Path):
    """With a no-break space inside a word, and as a word, the text has as many words as the sentence. Words without a tag or a
    relation are no targets."""
    treebank = CONLLU.replace("\t'm\t", "\t\u00a0\t").replace("\tAnn\t", "\tA\u00a0nn\t")
    treebank = write(tmp_path, "ud.conllu", treebank.replace("\tADP\t", "\t_\t").replace("\tcop\t", "\t_\t"))
    main([tmp_path / "out", "--treebank", treebank, treebank, treebank])
    (example,) = read_tasks(tmp_path / "out", "pos")[0].splits["test"]
    assert example.words == ["I", "_", "at", "Ann", "'s"]
    (sentence,) = records(tmp_path / "out" / "pos" / "test.jsonl")
    assert [target["label"] for target in sentence["targets"]] == ["PRON", "AUX", "PROPN", "PART"]
    (sentence,) = records(tmp_path / "out" / "dependencies" / "test.jsonl")
    assert [target["label"] for target in sentence["targets"]] == ["nsubj", "case", "case:gen"]


def test_bad_files_and_flags_are_one_line_and_nothing_is_left(tmp_path: Path, capsys):
    path, wrong_heads = tmp_path / "file.txt", ("x", "2", "9" * 5000)
    for flag, content, num_files, reason in (
        ("--relations", SEMEVAL.replace("2\t", "2 "), 3, "line 5: expected a number, a tab"),
        ("--relations", SEMEVAL.replace("lid", "lid</e1> <e1>"), 3, "a sentence with one <e1>...</e1> and one <e2>"),
        ("--relations", SEMEVAL.replace("\nOther", "\n\nOther"), 3, "Cause-Effect(e1,e2) or Other; got ''"),
        ("--chunks", "a b c\nd e\n", 3, "line 2: 2 columns"),
        ("--chunks", CHUNKS.replace("B-NP", "NP"), 3, "file.txt: the last column does not mark chunks"),
        ("--chunks", "a NN B-NP\nb NN B-NP\n\n", 3, "chunks: the training targets have only the label NP: there is"),
        *(("--treebank", CONLLU.replace("4\tcop", f"{h}\tcop"), 3, f"line 4: the head '{h[:18]}") for h in wrong_heads),
        ("--chunks", CHUNKS.replace("VP", "V" * 5000) * 20, 3, "file.txt: 'VVVV"),
        ("--chunks", CHUNKS, 1, "give --treebank, --chunks or --relations with two or three files"),
        ("--chunks", CHUNKS, 2, "chunks: the valid split has no target: give a longer file"),
    ):
        write(tmp_path, "file.txt", content)
        arguments = [tmp_path / "out", flag, *[path] * num_files]
        assert reason in error_line(capsys, main, *arguments, reports_progress=True)
    assert [left.name for left in tmp_path.iterdir()] == ["file.txt"]


def write_task(folder: Path, *lines: str, name: str = "train.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / name


def test_content(tmp_path: Path):
    raw = GOOD.replace('"info": {}', '"raw_text": "Thecat sat"')
    (example, empty, with_raw) = read_examples(write_task(tmp_path, GOOD, '{"text": "", "targets": []}', raw))
    assert with_raw == example._replace(spaces=[False, True, False])
    assert (example.words, example.spaces) == (["The", "cat", "sat"], None)
    assert example.targets == [Target(((0, 2), (2, 3)), ("nsubj",))]
    assert empty.words == []
    assert read_examples(write_task(tmp_path, ONE_SPAN))[0].targets == [Target(((0, 2),), ("animate", "definite"))]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is n"),
        (GOOD.replace('"nsubj"', '"\\ud800"'), "is not a printable string"),
        (GOOD.replace('"nsubj"', '"%s"' % ("x" * 5000)), "is not a printable string"),
        ('{"text": "a"}', "targets is None, not a list"),
        (GOOD.replace("[2, 3]", "[2, 4]"), "the end exclusive, within 3 words, also span2: got"),
        (GOOD.replace("[2, 3]", "[2.0, 3]"), "a target is"),
        ('{"text": "\\ud800", "targets": []}', "not a string of Unicode characters"),
        (GOOD.replace('"info": {}', '"raw_text": "The cat sat."'), "raw_text is not the words of text with other sp"),
        (GOOD.replace('"nsubj"', "3"), "a target is"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, reason: str):
    path = write_task(tmp_path, GOOD, line)
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
            write_task(tmp_path / "mixed", *lines, name=f"{split}.jsonl")
        with pytest.raises(UserError, match=reason):
            read_tasks(tmp_path, "mixed")


def test_tasks_are_in_the_order_of_the_paper(tmp_path: Path):
    with pytest.raises(UserError, match=r"no folder TASK.*there: none; amos prepare probing writes them"):
        read_tasks(tmp_path, None)
    for name in ("zebra", "relations", "pos"):
        write_task(tmp_path / name, GOOD, GOOD.replace("nsubj", "iobj"))
        write_task(tmp_path / name, GOOD.replace("nsubj", "obj"), name="valid.jsonl")
    assert [task.name for task in read_tasks(tmp_path, None)] == ["pos", "relations", "zebra"]
    task, other = read_tasks(tmp_path, "zebra, pos")
    assert (task.name, other.name) == ("pos", "zebra")
    assert (task.labels, task.scored_split) == (["iobj", "nsubj"], "valid")
    (tmp_path / "pos" / "valid.jsonl").unlink()
    with pytest.raises(UserError, match=r"valid\.jsonl.* no such file"):
        read_tasks(tmp_path, "pos")
