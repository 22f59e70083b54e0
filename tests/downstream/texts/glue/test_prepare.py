"""amos prepare glue: rows written by hand, its output as stock fairseq reads it, counts, refusals."""

import json
import lzma
from pathlib import Path

import pytest
from failures import error_line
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask
from preparing import prepare
from synthetic_glue import CLASSES, EXPECTED, decoded_texts, write_raw_glue

from amos_fairseq.downstream.texts.glue.prepare import read_split
from amos_fairseq.downstream.texts.glue.tasks import TASKS, find_files, parse_tasks
from amos_fairseq.errors import UserError
from amos_fairseq.files import directory_sha256

main = prepare("glue")


def task_record(out: Path, task: str) -> dict:
    return json.loads((out / task / "task.json").read_text(encoding="utf-8"))


def test_ids_and_texts_of_odd_files(tmp_path):
    """Broken lines count where no column has ids; a row without texts is one; columns are found by name; a carriage return ends
    no line, NUL is dropped."""
    (tmp_path / "test.tsv").write_text("sentence1\tsentence2\na\tb\nbroken\n\t\nc\td\n")
    rows = read_split(tmp_path / "test.tsv", TASKS["RTE"], "test")
    assert (rows.ids, rows.texts) == (["0", "2", "3"], [("a", "b"), ("", ""), ("c", "d")])
    (tmp_path / "dev.tsv").write_bytes(b"label\tsentence2\tnew\tsentence1\r\nentailment\tb\tx\ta\rb\0c\r\n")
    assert read_split(tmp_path / "dev.tsv", TASKS["RTE"], "valid").texts == [("a bc", "b")]


def test_errors_name_file_and_line(tmp_path):
    for task, content, message in (
        ("SST-2", b"good\t1\nbad\t0\n", "no column 'sentence'"),
        ("SST-2", b"sentence\tlabel\ngood\t1\nbad\t2\n", "line 3: label '2' is not one of 0, 1"),
        ("CoLA", b"source\tlabel\tmark\tsentence\nx\t1\t\tyes\n", "line 1: label 'label' is not"),
        ("STS-B", b"sentence1\tsentence2\tscore\na\tb\t5\na\tb\t5.001\n", "line 3: label '5.001' is not a number"),
        ("SST-2", b"sentence\tlabel\ngood\n", "has no row of the columns sentence, label"),
    ):
        (tmp_path / "train.tsv").write_bytes(content)
        with pytest.raises(UserError) as error:
            read_split(tmp_path / "train.tsv", TASKS[task], "train")
        assert str(tmp_path / "train.tsv") in str(error.value)
        assert message in str(error.value)


def test_missing_and_compressed_files(tmp_path, capsys):
    write_raw_glue(tmp_path, "RTE")
    (tmp_path / "RTE" / "dev.tsv").unlink()
    with pytest.raises(UserError, match=r"RTE/dev.tsv: no such file \(nor as .gz, .xz, .zst\)"):
        find_files(tmp_path, TASKS["RTE"])
    (tmp_path / "RTE" / "dev.tsv.xz").write_bytes(lzma.compress(b""))
    assert find_files(tmp_path, TASKS["RTE"])["valid"] == tmp_path / "RTE" / "dev.tsv.xz"
    assert capsys.readouterr().err == ""
    (tmp_path / "RTE" / "dev.tsv").write_text("")
    assert find_files(tmp_path, TASKS["RTE"])["valid"] == tmp_path / "RTE" / "dev.tsv"
    assert "RTE/dev.tsv is read, and not " in capsys.readouterr().err


def test_names_of_tasks():
    """Those of the average, unless others are known; AX is prepared and not scored."""
    assert parse_tasks("rte, CoLA,RTE") == ["RTE", "CoLA"]
    assert len(parse_tasks("ALL")) == 8
    assert parse_tasks("all", TASKS, TASKS) == list(TASKS)
    with pytest.raises(UserError, match="unknown task 'AX': choose ALL or"):
        parse_tasks("AX")


@pytest.mark.parametrize("task", EXPECTED)
def test_stock_task_reads_rows_and_classes(prepared_glue, task):
    """<s> A </s>, and for a pair <s> A </s> B </s>, whose texts are decoded by tokenizer and dictionary; targets are indices in
    the fixed order of the labels."""
    settings = {"init_token": 0, "regression_target": task == "STS-B", "no_shuffle": True, "seed": 1}
    settings |= {"data": str(prepared_glue / task), "num_classes": max(1, len(CLASSES[task]))}
    stock = SentencePredictionTask.setup_task(SentencePredictionConfig(**settings))
    record = task_record(prepared_glue, task)
    assert (record["labels"], record["num_classes"]) == (CLASSES[task], settings["num_classes"])
    assert record["tokenizer_sha256"] == directory_sha256(prepared_glue / task / "tokenizer")
    for split, expected in EXPECTED[task].items():
        stock.load_dataset(split)
        samples = [stock.datasets[split][i] for i in range(len(stock.datasets[split]))]
        assert len(samples) == len(expected.rows)
        facts = record["splits"][split]
        assert (facts["rows"], facts["broken"], facts["broken_lines"]) == (
            len(samples),
            len(expected.broken),
            expected.broken,
        )
        width, dictionary = len(TASKS[task].texts), stock.source_dictionary
        texts = [tuple(" ".join(text.split()) for text in row[:width]) for row in expected.rows]
        assert decoded_texts(prepared_glue, task, split) == texts
        rows = [sample["net_input.src_tokens"].tolist() for sample in samples]
        assert all((row[0], row[-1], row.count(2)) == (dictionary.bos(), dictionary.eos(), width) for row in rows)
        assert max(map(len, rows)) == facts["longest"]
        if split.startswith("test"):
            assert all("target" not in sample for sample in samples)
            assert (prepared_glue / task / f"{split}.ids").read_text().split("\n")[:-1] == expected.ids
            continue
        labels, found = [row[-1] for row in expected.rows], [sample["target"] for sample in samples]
        if task == "STS-B":
            assert found == [[float(label)] for label in labels]
        else:
            assert [target.item() for target in found] == [CLASSES[task].index(label) for label in labels]


def test_long_texts_are_counted_in_tokens_of_fine_tuning(glue_tokenizer, tmp_path, capsys):
    """'☃' has no piece, so each word is two pieces: the word mark and one unknown. 510 pieces with <s> and </s> still fit."""
    files = write_raw_glue(tmp_path / "glue", "SST-2")
    rows = [" ".join(["☃"] * 255), " ".join(["☃"] * 256), "The"]
    (files / "SST-2" / "train.tsv").write_text("sentence\tlabel\n" + "".join(f"{row}\t1\n" for row in rows))
    main([files, "SST-2", glue_tokenizer, tmp_path / "out", "--workers", "1"])
    facts = task_record(tmp_path / "out", "SST-2")["splits"]["train"]
    assert facts["longest"] == 514
    assert "longest 514 tokens" in capsys.readouterr().err
    assert facts["unknown_share"] == pytest.approx(511 / 1023, abs=0.005)  # "The" adds one or two known pieces


def test_what_was_read_is_printed_of_each_file(glue_tokenizer, tmp_path, capsys):
    files = write_raw_glue(tmp_path / "glue", "QQP")
    main([files, "QQP", glue_tokenizer, tmp_path / "out", "--workers", "1"])
    train, test = (f"prepare: {files}/QQP/{name}.tsv" for name in ("train", "test"))
    counted = "TSV, columns question1, question2, is_duplicate: 3 rows; left out: 2 with another number of columns"
    printed = capsys.readouterr().err
    for line in (
        f"{train}: {counted}\n{train}: the first: What is rain? | What is snow? -> 0\n",
        f"{test}: TSV, columns question1, question2: 2 rows\n{test}: the first: Rain? | Snow?\n",
    ):
        assert line in printed


def test_training_rows_are_limited(glue_tokenizer, tmp_path):
    """A seeded sample in the order of the file; another seed gives another; all development rows remain."""
    files, chosen = write_raw_glue(tmp_path / "glue", "SST-2"), []
    rows = [f"The sailor {number}" for number in range(200)]
    (files / "SST-2" / "train.tsv").write_text("sentence\tlabel\n" + "".join(f"{row}\t1\n" for row in rows))
    for seed in (1, 2):
        sampling = ["--workers", 1, "--max-train-rows", 50, "--seed", seed]
        main([files, "SST-2", glue_tokenizer, tmp_path / str(seed), *sampling])
        chosen.append([text for (text,) in decoded_texts(tmp_path / str(seed), "SST-2", "train")])
        assert chosen[-1] == sorted(set(chosen[-1]), key=rows.index)
    record = task_record(tmp_path / "2", "SST-2")
    assert (record["settings"], len(chosen[0])) == ({"max_train_rows": 50, "seed": 2}, 50)
    assert chosen[0] != chosen[1]
    assert [record["splits"][split]["source_rows"] for split in ("train", "valid")] == [200, 1]


def refused(capsys, *arguments: object) -> str:
    return error_line(capsys, main, *arguments, reports_progress=True)


def test_finished_tasks_are_skipped_and_other_ones_refused(glue_tokenizer, tmp_path, capsys):
    files, out = write_raw_glue(tmp_path / "glue", "RTE", "WNLI"), tmp_path / "out"
    main([files, "WNLI", glue_tokenizer, out, "--workers", "1"])
    before = (out / "WNLI").stat().st_ino
    capsys.readouterr()
    main([files, "RTE,WNLI", glue_tokenizer, out, "--workers", "1"])
    assert f"{out}/WNLI is finished already" in capsys.readouterr().err
    assert ((out / "WNLI").stat().st_ino, {path.name for path in out.iterdir()}) == (before, {"RTE", "WNLI"})
    (files / "RTE" / "test.tsv").write_text("index\tsentence1\tsentence2\n4\tRain\tSnow\n")
    arguments = [files, "RTE", glue_tokenizer, out, "--workers", "1"]
    for flags in ([], ["--max-train-rows", "5"]):
        assert "RTE is not empty, and was not made of these files and settings" in refused(capsys, *arguments, *flags)


def test_bad_input_is_one_line(raw_glue, glue_tokenizer, tmp_path, capsys):
    """Nothing is written, but for the tasks before one that is wrong."""
    glue, tokenizer, foreign, out = raw_glue, glue_tokenizer, tmp_path / "foreign", tmp_path / "out"
    foreign.mkdir()
    (foreign / "letter.txt").write_text("dear")
    for arguments, message in (
        ([glue, "CoLA,SST2", tokenizer, out], "unknown task 'SST2': choose ALL or"),
        ([tmp_path / "absent", "ALL", tokenizer, out], "no such file"),
        ([glue, "CoLA", foreign, out], "holds no tokenizer"),
        ([glue, "CoLA", tokenizer, foreign / "letter.txt"], "Not a directory"),
        ([glue, "CoLA", tokenizer, out, "--max-train-rows", 0], "--max-train-rows: 0 must be at least 1"),
    ):
        assert message in refused(capsys, *arguments), arguments
        assert [path.name for path in tmp_path.iterdir()] == ["foreign"]
    assert [path.name for path in foreign.iterdir()] == ["letter.txt"]
    broken = write_raw_glue(tmp_path / "broken", "RTE", "CoLA")
    dev = broken / "RTE" / "dev.tsv"
    dev.write_text(dev.read_text().replace("\tentailment", "\tmaybe"))
    assert "dev.tsv, line 2: label 'maybe' is not" in refused(capsys, broken, "CoLA,RTE", tokenizer, out)
    assert {path.name for path in out.iterdir()} == {"CoLA"}
