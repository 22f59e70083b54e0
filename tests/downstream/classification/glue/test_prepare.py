"""amos prepare for GLUE: its output as stock fairseq reads it, what a second run repeats, counts and messages."""

import hashlib
import json
import lzma
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from failures import harm_last_byte
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask
from preparing import prepare
from synthetic_glue import CLASSES, EXPECTED, FILES, decoded_texts, write_raw_glue

from amos_fairseq.downstream.classification.glue.data import read_glue_data
from amos_fairseq.downstream.classification.glue.tasks import TASKS
from amos_fairseq.downstream.classification.stock_task import check_labeled_texts
from amos_fairseq.errors import UserError
from amos_fairseq.fingerprint import directory_sha256

main = prepare("glue")


def task_record(out: Path, task: str) -> dict:
    return json.loads((out / task / "task.json").read_text(encoding="utf-8"))


def stock_task(out: Path, name: str) -> SentencePredictionTask:
    settings = {"init_token": 0, "regression_target": name == "STS-B", "no_shuffle": True, "seed": 1}
    config = SentencePredictionConfig(data=str(out / name), num_classes=TASKS[name].num_classes, **settings)
    return SentencePredictionTask.setup_task(config)


@pytest.mark.parametrize("task", EXPECTED)
def test_stock_task_reads_rows_and_classes(prepared_glue, task):
    """Texts decoded by tokenizer and dictionary; targets are indices in the fixed order of the labels."""
    stock = stock_task(prepared_glue, task)
    for split, expected in EXPECTED[task].items():
        stock.load_dataset(split)
        samples = [stock.datasets[split][i] for i in range(len(stock.datasets[split]))]
        assert len(samples) == len(expected.rows)
        texts = [tuple(" ".join(text.split()) for text in row[: len(TASKS[task].texts)]) for row in expected.rows]
        assert decoded_texts(prepared_glue, task, split) == texts
        if split.startswith("test"):
            assert all("target" not in sample for sample in samples)
            assert (prepared_glue / task / f"{split}.ids").read_text().split("\n")[:-1] == expected.ids
        else:
            labels = [row[-1] for row in expected.rows]
            found = [sample["target"] for sample in samples]
            if task == "STS-B":
                assert found == [[float(label)] for label in labels]
            else:
                assert [target.item() for target in found] == [CLASSES[task].index(label) for label in labels]


@pytest.mark.parametrize("task", ["SST-2", "RTE"])
def test_stock_task_joins_the_texts(prepared_glue, task):
    """<s> A </s>, and for a pair <s> A </s> B </s>; the </s> is fairseq-preprocess's."""
    stock = stock_task(prepared_glue, task)
    stock.load_dataset("valid")
    tokens = stock.datasets["valid"][0]["net_input.src_tokens"].tolist()
    dictionary = stock.source_dictionary
    assert tokens[0] == dictionary.bos()
    assert tokens[-1] == dictionary.eos()
    assert tokens.count(dictionary.eos()) == len(TASKS[task].texts)
    assert len(tokens) == task_record(prepared_glue, task)["splits"]["valid"]["longest"]


def test_records(prepared_glue, raw_glue, glue_tokenizer):
    for task, splits in EXPECTED.items():
        record = task_record(prepared_glue, task)
        assert record["task"] == task
        assert record["kind"] == ("number" if task == "STS-B" else "classes")
        assert record["labels"] == CLASSES[task]
        assert record["num_classes"] == max(1, len(CLASSES[task]))
        assert record["tokenizer_sha256"] == directory_sha256(glue_tokenizer)
        assert record["splits"].keys() == splits.keys()
        for split, expected in splits.items():
            facts = record["splits"][split]
            assert (facts["rows"], facts["source_rows"]) == (len(expected.rows), len(expected.rows))
            assert (facts["broken"], facts["broken_lines"]) == (len(expected.broken), expected.broken)
    source = (raw_glue / "MNLI" / "dev_mismatched.tsv").read_bytes()
    facts = task_record(prepared_glue, "MNLI")["splits"]["valid1"]
    assert (facts["source"], facts["sha256"]) == ("dev_mismatched.tsv", hashlib.sha256(source).hexdigest())


def test_dictionaries_and_tokenizer_are_copies(prepared_glue, glue_tokenizer):
    dictionary = (glue_tokenizer / "dict.txt").read_bytes()
    assert {path.read_bytes() for path in prepared_glue.glob("*/input*/dict.txt")} == {dictionary}
    assert directory_sha256(prepared_glue / "tokenizer") == directory_sha256(glue_tokenizer)
    assert (prepared_glue / "AX" / "label" / "dict.txt").read_text() == "entailment 1\nneutral 1\ncontradiction 1\n"
    assert not [path for path in prepared_glue.rglob("*") if path.suffix in (".pieces", ".log", ".prepare")]
    assert not list(prepared_glue.rglob(".prepare"))


def test_long_texts_are_counted_in_tokens_of_fine_tuning(glue_tokenizer, tmp_path, capsys):
    """'@' has no piece, so each word is two pieces: the word mark and one unknown. 510 pieces with <s> and </s> still fit."""
    files = write_raw_glue(tmp_path / "glue", "SST-2")
    rows = [" ".join(["@"] * 255), " ".join(["@"] * 256), "The"]
    (files / "SST-2" / "train.tsv").write_text("sentence\tlabel\n" + "".join(f"{row}\t1\n" for row in rows))
    main([files, "SST-2", glue_tokenizer, tmp_path / "out", "--workers", "1"])
    facts = task_record(tmp_path / "out", "SST-2")["splits"]["train"]
    assert (facts["longest"], facts["longer_than"]) == (514, {"64": 2, "128": 2, "256": 2, "512": 1})
    assert "(longer: 2 than 64, 2 than 128, 2 than 256, 1 than 512; a model" in capsys.readouterr().err
    assert facts["unknown_share"] == pytest.approx(511 / 1023, abs=0.005)  # "The" adds one or two known pieces


def test_printed_counts_and_notes(raw_glue, glue_tokenizer, tmp_path, capsys):
    main([raw_glue, "qqp", glue_tokenizer, tmp_path / "out", "--workers", "1"])
    printed = capsys.readouterr().err
    assert "QQP train: 3 rows; longest" in printed
    assert "QQP train: 3 broken lines of train.tsv skipped (lines 3, 4, 5)" in printed
    assert "the official file has 363846 rows, train.tsv has 3: scores are not comparable" in printed


def test_absent_tasks_and_compressed_files(raw_glue, prepared_glue, glue_tokenizer, tmp_path, capsys):
    files = write_raw_glue(tmp_path / "glue", "RTE", "WNLI")
    for path in files.glob("RTE/*.tsv"):
        path.with_suffix(".tsv.xz").write_bytes(lzma.compress(path.read_bytes()))
        path.unlink()
    main([files, "ALL", glue_tokenizer, tmp_path / "out", "--workers", "1"])
    assert "so not prepared: CoLA, SST-2, MRPC, STS-B, QQP, MNLI, QNLI, AX" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"RTE", "WNLI", "tokenizer"}
    for path in (prepared_glue / "RTE").rglob("*.*"):
        if path.name != "task.json":
            assert path.read_bytes() == (tmp_path / "out" / path.relative_to(prepared_glue)).read_bytes()


def test_training_rows_are_limited(glue_tokenizer, tmp_path):
    """A seeded sample in the order of the file; another seed gives another; all development rows remain."""
    files = write_raw_glue(tmp_path / "glue", "SST-2")
    rows = [f"The sailor {number}" for number in range(200)]
    (files / "SST-2" / "train.tsv").write_text("sentence\tlabel\n" + "".join(f"{row}\t1\n" for row in rows))
    chosen = {}
    for seed in ("1", "1", "2"):
        command = [files, "SST-2", glue_tokenizer, tmp_path / "out", "--workers", "1"]
        main([*command, "--max-train-rows", "50", "--seed", seed])
        texts = [text for (text,) in decoded_texts(tmp_path / "out", "SST-2", "train")]
        assert texts == sorted(texts, key=rows.index)
        assert len(set(texts)) == 50
        assert chosen.setdefault(seed, texts) == texts
    assert chosen["1"] != chosen["2"]
    record = task_record(tmp_path / "out", "SST-2")
    assert (record["max_train_rows"], record["seed"]) == (50, 2)
    assert (record["splits"]["train"]["rows"], record["splits"]["train"]["source_rows"]) == (50, 200)
    assert record["splits"]["valid"]["rows"] == 1


@pytest.mark.parametrize("name", ["input0/valid.bin", "label/valid.bin", "input1/valid.idx", "label/dict.txt"])
def test_a_changed_file_is_refused_at_opening(prepared_glue, tmp_path, name):
    """By ``amos glue`` and by the training, which loads one split; without hashes, sizes are compared."""
    task = SimpleNamespace(cfg=SimpleNamespace(data=str(tmp_path / "RTE")))
    shutil.copytree(prepared_glue / "RTE", tmp_path / "RTE")
    assert check_labeled_texts(lambda task, split: split, task, "valid") == "valid"
    assert read_glue_data(tmp_path, "RTE").labels("valid").tolist()
    harm_last_byte(tmp_path / "RTE" / name)
    reads = [lambda: read_glue_data(tmp_path, "RTE"), lambda: check_labeled_texts(pytest.fail, task, "valid")]
    for read in reads:
        with pytest.raises(UserError, match=rf"{name} is not the file that amos prepare wrote: copy"):
            read()
    (tmp_path / "RTE" / "task.json").unlink()
    (tmp_path / "RTE" / "input0" / "valid.idx").write_bytes(b"no index")
    with pytest.raises(UserError, match=r"valid\.idx is not an index of fairseq"):
        check_labeled_texts(pytest.fail, task, "valid")


def test_finished_tasks_are_repeated_only_after_a_change(glue_tokenizer, tmp_path, capsys):
    files, out = write_raw_glue(tmp_path / "glue", "RTE", "WNLI"), tmp_path / "out"

    def redone(*flags: str) -> set:
        before = {task: (out / task).stat().st_ino for task in ("RTE", "WNLI") if (out / task).exists()}
        main([files, "RTE,WNLI", glue_tokenizer, out, "--workers", "1", *flags])
        return {task for task in ("RTE", "WNLI") if (out / task).stat().st_ino != before.get(task)}

    assert redone() == {"RTE", "WNLI"}
    capsys.readouterr()
    assert redone() == set()
    assert "RTE is finished already" in capsys.readouterr().err
    (files / "RTE" / "test.tsv").write_text("index\tsentence1\tsentence2\n4\tRain\tSnow\n")
    assert redone() == {"RTE"}
    assert (out / "RTE" / "test.ids").read_text() == "4\n"
    (files / "WNLI" / "dev.tsv").write_text(FILES["WNLI/dev.tsv"].replace("drain", "train"))
    assert redone() == {"WNLI"}
    (out / "WNLI" / "input1" / "valid.idx").unlink()
    assert redone() == {"WNLI"}
    harm_last_byte(out / "RTE" / "input0" / "train.bin")
    assert redone() == {"RTE"}
    assert redone("--max-train-rows", "5") == {"RTE", "WNLI"}
    assert redone("--max-train-rows", "5") == set()
