"""Synthetic GLUE: raw files with the oddities of the official ones and their expected rows, and prepared data of a few rows."""

import json
import random
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fairseq.data import Dictionary, data_utils
from saved_models import change_checkpoint, small_tokenizer, write_run
from synthetic_corpus import write_rows

from amos_fairseq.downstream.texts.command import Classification, open_classification
from amos_fairseq.downstream.texts.glue.tasks import AVERAGED, TASKS
from amos_fairseq.downstream.texts.prepare import NAME, prepare_inside, write_task
from amos_fairseq.experiments.benchmark import Session, session_from
from amos_fairseq.inputs.rows import LabeledRows, LabelSpace, Tables
from amos_fairseq.text.tokenization import load_tokenizer
from amos_fairseq.text.vocabulary import learn_tokenizer

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "end", "a", "and", "of"]
INFERENCE = ("entailment", "neutral", "contradiction")
# What fairseq and its trainer read from a checkpoint, in addition to what this package reads.
TRAINED = {"extra_state": {"train_iterator": {"epoch": 2}, "previous_training_time": 1000.0}}

MNLI_HEADER = "index\tpromptID\tpairID\tgenre\tparse1\tparse2\tparse3\tparse4\tsentence1\tsentence2"
STSB_HEADER = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2"
MRPC_HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"

# Text of each file by its path in the download.
FILES: dict[str, str] = {
    "CoLA/train.tsv": 'gj04\t1\t\tThe "sailors rode.\ngj04\t0\t*\tRode the\' sailors "breeze"\ngj04\t1\t\tlabel\n',
    "CoLA/dev.tsv": "gj04\t0\t*\tThe breeze rode.\n",
    "CoLA/test.tsv": "index\tsentence\n0\tThe sailors.\n1\tA breeze\n",
    "SST-2/train.tsv": "sentence\tlabel\nhide the sailors \t0\nit 's a \" charming breeze \t1\n",
    "SST-2/dev.tsv": "sentence\tlabel\n中国 </s> <mask> and more \t1\n",
    # A byte-order mark; a line end inside a text breaks one row into two lines.
    "MRPC/train.tsv": f"\ufeff{MRPC_HEADER}\n"
    '1\t11\t12\tHe said " the breeze\tThe breeze , he said\n0\t21\t22\tA sailor was\nhere\tNobody was\n'
    "0\t31\t32\tA ship\tA shop\n",
    "MRPC/dev.tsv": f"{MRPC_HEADER}\r\n1\t41\t42\tA ship\tOne ship\r\n",
    "MRPC/test.tsv": "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t1\t2\tA ship\tTwo\n1\t3\t4\tbroken\n2\t5\t6\tTwo\tA ship\n",
    "STS-B/train.tsv": f"{STSB_HEADER}\tscore\n0\tg\tf\t2012\t1\tn\tn\tA plane.\tAn air plane.\t5.000\n"
    "1\tg\tf\t2012\t2\tn\tn\tA man.\tA woman.\t0\n2\tg\tf\t2012\t3\tn\tn\tRain\tSnow\t2.75\n",
    "STS-B/dev.tsv": f"{STSB_HEADER}\tscore\n0\tg\tf\t2012\t1\tn\tn\tRain.\tRain.\t3.2\n",
    # Too few columns, too many columns (a tab inside a question), an empty line, an empty question that stays.
    "QQP/train.tsv": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    "7\t1\t2\tWhat is rain?\tWhat is snow?\t0\n8\t3\t4\tWhat is\n9\t5\t6\tA\ttab?\tA tab?\t1\n\n"
    "10\t7\t8\tIs it rain?\t\t0\n11\t9\t10\tWho sails?\tWho is sailing?\t1\n",
    "QQP/dev.tsv": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t1\t2\tSnow?\tSnow?\t1\n",
    "QQP/test.tsv": "id\tquestion1\tquestion2\n5\tRain?\tSnow?\n3\tShip?\tShop?\n",
    "MNLI/train.tsv": f"{MNLI_HEADER}\tlabel1\tgold_label\n"
    "0\t1\t1n\tg\t( x\tx\tx\tx\tIt rains.\tIt snows.\tneutral\tcontradiction\n"
    "1\t2\t2e\tg\tx\tx\tx\tx\tIt rains now.\tIt rains.\tentailment\tentailment\n"
    "2\t3\t3n\tg\tx\tx\tx\tx\tIt rains.\tIt rains there.\tneutral\tneutral\n",
    "MNLI/dev_matched.tsv": f"{MNLI_HEADER}\tlabel1\tlabel2\tgold_label\n0\t1\t1\tg\tx\tx\tx\tx\tRain\tSnow\t-\t-\tneutral\n",
    "MNLI/dev_mismatched.tsv": f"{MNLI_HEADER}\tlabel1\tgold_label\n0\t1\t1\tg\tx\tx\tx\tx\tShip\tShop\tx\tentailment\n"
    "1\t1\t1\tg\tx\tx\tx\tx\tShop\tShip\tx\tneutral\n",
    "MNLI/test_matched.tsv": f"{MNLI_HEADER}\n9\t1\t1\tg\tx\tx\tx\tx\tSail\tSailor\n",
    "MNLI/test_mismatched.tsv": f"{MNLI_HEADER}\n8\t1\t1\tg\tx\tx\tx\tx\tHere\tThere\n7\t1\t1\tg\tx\tx\tx\tx\tMore\tLess\n",
    "QNLI/train.tsv": "index\tquestion\tsentence\tlabel\n0\tWho?\tThe sailor.\tentailment\n1\tWhen?\tHere\tnot_entailment\n",
    "QNLI/dev.tsv": "index\tquestion\tsentence\tlabel\n0\tWho sails?\tHe sails.\tnot_entailment\n",
    "RTE/train.tsv": "index\tsentence1\tsentence2\tlabel\n0\tA ship sails.\tIt sails.\tnot_entailment\n",
    "RTE/dev.tsv": "index\tsentence1\tsentence2\tlabel\n0\tRain\tSnow\tentailment\n",
    "WNLI/train.tsv": "index\tsentence1\tsentence2\tlabel\n0\tIt had a hole.\tThe ship had.\t1\n",
    "WNLI/dev.tsv": "index\tsentence1\tsentence2\tlabel\n0\tThe drain\tThe hair\t0\n",
    "diagnostic/diagnostic.tsv": "index\tsentence1\tsentence2\n0\tThe cat sat.\tThe cat did not sit.\n",
}


class Split(NamedTuple):
    """Texts and label of every row, in order; numbers of the broken lines; ids of a test set."""

    rows: list[tuple[str, ...]]
    broken: list[int] = []
    ids: list[str] = []


# Written by hand, not by a program that reads TSV. The last item of a labelled row is its label.
EXPECTED: dict[str, dict[str, Split]] = {
    "CoLA": {
        "train": Split([('The "sailors rode.', "1"), ('Rode the\' sailors "breeze"', "0"), ("label", "1")]),
        "valid": Split([("The breeze rode.", "0")]),
        "test": Split([("The sailors.",), ("A breeze",)], [], ["0", "1"]),
    },
    "SST-2": {
        "train": Split([("hide the sailors ", "0"), ("it 's a \" charming breeze ", "1")]),
        "valid": Split([("中国 </s> <mask> and more ", "1")]),
    },
    "MRPC": {
        "train": Split([('He said " the breeze', "The breeze , he said", "1"), ("A ship", "A shop", "0")], [3, 4]),
        "valid": Split([("A ship", "One ship", "1")]),
        "test": Split([("A ship", "Two"), ("Two", "A ship")], [3], ["0", "2"]),
    },
    "STS-B": {
        "train": Split([("A plane.", "An air plane.", "5.000"), ("A man.", "A woman.", "0"), ("Rain", "Snow", "2.75")]),
        "valid": Split([("Rain.", "Rain.", "3.2")]),
    },
    "QQP": {
        "train": Split(
            [("What is rain?", "What is snow?", "0"), ("Is it rain?", "", "0"), ("Who sails?", "Who is sailing?", "1")],
            [3, 4],
        ),
        "valid": Split([("Snow?", "Snow?", "1")]),
        "test": Split([("Rain?", "Snow?"), ("Ship?", "Shop?")], [], ["5", "3"]),
    },
    "MNLI": {
        "train": Split(
            [
                ("It rains.", "It snows.", "contradiction"),
                ("It rains now.", "It rains.", "entailment"),
                ("It rains.", "It rains there.", "neutral"),
            ]
        ),
        "valid": Split([("Rain", "Snow", "neutral")]),
        "valid1": Split([("Ship", "Shop", "entailment"), ("Shop", "Ship", "neutral")]),
        "test": Split([("Sail", "Sailor")], [], ["9"]),
        "test1": Split([("Here", "There"), ("More", "Less")], [], ["8", "7"]),
    },
    "QNLI": {
        "train": Split([("Who?", "The sailor.", "entailment"), ("When?", "Here", "not_entailment")]),
        "valid": Split([("Who sails?", "He sails.", "not_entailment")]),
    },
    "RTE": {
        "train": Split([("A ship sails.", "It sails.", "not_entailment")]),
        "valid": Split([("Rain", "Snow", "entailment")]),
    },
    "WNLI": {
        "train": Split([("It had a hole.", "The ship had.", "1")]),
        "valid": Split([("The drain", "The hair", "0")]),
    },
    "AX": {"test": Split([("The cat sat.", "The cat did not sit.")], [], ["0"])},
}

# The order of the classes, on which every checkpoint and every submission depends.
CLASSES: dict[str, list[str]] = {
    **{task: ["0", "1"] for task in ("CoLA", "SST-2", "MRPC", "QQP", "WNLI")},
    **{task: ["entailment", "not_entailment"] for task in ("QNLI", "RTE")},
    **{task: list(INFERENCE) for task in ("MNLI", "AX")},
    "STS-B": [],
}


def write_raw_glue(directory: Path, *prefixes: str) -> Path:
    """Write those of ``FILES`` that begin with one of ``prefixes`` (none: all)."""
    for path, text in FILES.items():
        if not prefixes or path.startswith(prefixes):
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_bytes(text.encode("utf-8"))
    return directory


def write_glue_tokenizer(directory: Path) -> Path:
    """Write a tokenizer with pieces for every letter of ``FILES``."""
    words = " ".join(FILES.values()).split()
    sample = directory.parent / f"{directory.name}.txt"
    sample.write_text("\n".join(" ".join(words[i : i + 20]) for i in range(0, len(words), 20)), encoding="utf-8")
    learn_tokenizer(sample, 150, cased=True).save(directory)
    return directory


def decoded_texts(out: Path, task: str, split: str) -> list[tuple[str, ...]]:
    """Texts of a prepared split, read with fairseq's own dictionary and data, back through the tokenizer."""
    tokenizer = load_tokenizer(out / task / "tokenizer")
    columns = []
    for name in ("input0", "input1"):
        if not (out / task / name).is_dir():
            continue
        dictionary = Dictionary.load(str(out / task / name / "dict.txt"))
        lines = data_utils.load_indexed_dataset(str(out / task / name / split), dictionary)
        assert all(line[-1] == dictionary.eos() for line in lines)
        columns.append([tokenizer.decode([dictionary[i] for i in line[:-1].tolist()]) for line in lines])
    return list(zip(*columns, strict=True))


def write_pretrained_checkpoint(directory: Path) -> Path:
    """A SAVE_DIR with an untrained AMOS model (16 wide, 80 positions) and its tokenizer; returns the checkpoint."""
    history = [{"num_updates": 7, "criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}}]
    change_checkpoint(write_run(directory, max_positions=80), optimizer_history=history, **TRAINED)
    return directory / "checkpoint_last.pt"


def session(start: Path, out: Path, name: str = "glue", **options: Any) -> Session:
    """The session of a command for the benchmark ``name``: recipe ``amos`` on the CPU, two seeds, other ``options`` by name."""
    defaults = {"recipe": "amos", "seeds": 2, "from_scratch": False, "cpu": True, "parallel": 1}
    defaults |= {"precision": "float32", "keep_checkpoints": False, "subcommand": name, "overrides": []}
    return session_from(Namespace(checkpoint=str(start), out=str(out), **(defaults | options)))


def open_table(
    start: Path, out: Path, table: Path, recipe: str = "amos", seeds: int = 1, **options: Any
) -> Classification:
    """``amos classify`` of a table before the training; ``options``: of :class:`Tables`."""
    own_session = session(start, out, NAME, seeds=seeds, recipe=recipe)
    with own_session.preparing() as tokenizer:
        data = prepare_inside(out, Tables(table, **options).check(), tokenizer)
    return open_classification(own_session, data)


def write_pretraining_data(data: Path) -> None:
    """Write a corpus to pretrain on, 66 blocks of 128 tokens, in the layout of ``amos prepare``."""
    tokenizer = small_tokenizer()
    tokenizer.save(data / "tokenizer")
    dictionary = Dictionary.load(str(data / "tokenizer" / "dict.txt"))
    dictionary.save(str(data / "dict.txt"))
    for split, lines in (("train", 420), ("valid", 20)):
        sentences = [WORDS[line % 12 :] + WORDS[: line % 7] for line in range(lines)]
        encoded = [[dictionary.index(piece) for piece in tokenizer.encode(" ".join(words))] for words in sentences]
        write_rows(data, split, [[*row, dictionary.eos()] for row in encoded])


def write_glue(data: Path, start: Path, task: str, labels: Sequence[str], rows: dict[str, int], pair: bool) -> None:
    """Random sentences; the class is the index of the first word in ``WORDS``, the score (no ``labels``) half of it.

    ``start``: SAVE_DIR whose tokenizer is used; ``rows``: split -> number of rows, without labels in test splits."""
    generator, splits = random.Random(task), {}
    for split, number in rows.items():
        classes = [generator.randrange(len(labels) or 10) for _ in range(number)]
        texts = [" ".join([WORDS[value], *generator.choices(WORDS, k=generator.randint(0, 6))]) for value in classes]
        of_rows = list(zip(texts, texts[::-1], strict=True)) if pair else [(text,) for text in texts]
        names = [labels[value] if labels else value / 2 for value in classes]
        given = [None] * number if split.startswith("test") else names
        splits[split] = LabeledRows(f"{split}.tsv", "", list(map(str, range(number))), of_rows, given)
    space = LabelSpace("classes" if labels else "number", tuple(labels))
    (data / task).mkdir(parents=True)
    record = write_task(data / task, task, space, splits, load_tokenizer(start / "tokenizer"))
    for split, facts in record["splits"].items():
        facts |= {"source_rows": facts["rows"], "suffix": "_mm" if split == "valid1" else ""}
    record |= {"scores": list(TASKS[task].scores), "in_average": task in AVERAGED, "head": TASKS[task].head}
    # Without hashes: tests change the files.
    record |= {"format": 1, "settings": {"max_train_rows": None, "seed": None}, "tokenizer_sha256": "x"}
    (data / task / "task.json").write_text(json.dumps(record), encoding="utf-8")


def folders(data: Path, tasks: Sequence[str]) -> dict[str, Path]:
    """The prepared data of tasks by name."""
    return {task: data / task for task in tasks}


def change_task(data: Path, directory: str, /, **changes: Any) -> None:
    """Replace parts of the ``task.json`` in ``data/directory``."""
    file = data / directory / "task.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes), encoding="utf-8")
