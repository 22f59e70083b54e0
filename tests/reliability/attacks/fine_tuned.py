"""Attacks on fine-tuning: its results and labels, tables to label, and the raw files that it reads."""

import csv
import datetime
import json
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from pathlib import Path

import pandas
import pyarrow
import pyarrow.parquet

from amos_fairseq.experiments.records import write_record
from attacks.commands import Place, amos_harm, run_amos, run_command
from attacks.damage import attack_json, damage
from attacks.data import MIB
from attacks.workplace import COMMANDS, FINE_TUNING, PREDICT, RESULTS, TRAINING

PREDICTIONS = "out/*/runs/*/*/*predictions*"
NOT_USED = (".log", ".lock", "")  # suffixes
# A command, the files that it uses and that are changed, and the files that it writes.
USES = {
    "parse --predict": (["parse", *PREDICT["parse"]], "results/parse/runs/**/*", "out/*.conllu"),
    "classify --predict": (["classify", *PREDICT["classify"]], "results/classify/runs/**/*", "out/*.tsv"),
    "glue --teachers": (
        ["glue", *TRAINING["glue"], "--teachers", "results/glue"],
        "results/glue/**/train/*",
        "out/glue/*.md",
    ),
    "report": (["report", *COMMANDS["report"]], "results/*/*.json", "out/*.html"),
    "report of a run": (["report", *COMMANDS["report"]], "run/metrics.jsonl", "out/*.html"),
    "plot of a run": (["plot", *COMMANDS["plot"]], "run/metrics.jsonl", "out/*/*.svg"),
    "tag --data A B": (["tag", *TRAINING["tag"][4:], "--data", "labels/data", "pos"], "pos/**/*", PREDICTIONS),
    **{name: ([name, *FINE_TUNING[name]], f"results/{name}/**/*", f"results/{name}/*.md") for name in TRAINING},
    # A second seed trains on the data that the first one has prepared in OUT.
    **{
        f"{name} --seeds 2": (
            [name, *FINE_TUNING[name], "--seeds", "2"],
            f"results/{name}/data/**/*",
            f"results/{name}/runs/*/seed2/predictions*",
        )
        for name in TRAINING
    },
}


def changed_results(place: Place, folder: Path, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Change results, labels, teachers, prepared data, logs or a checkpoint; what uses them refuses them, or writes what it
    writes without the change.

    A record can be rewritten with a matching fingerprint: it then says something else, but harms nothing. Logged values have
    no fingerprint: other values are shown, but what no run can have logged is refused (:func:`is_log`).
    """
    expected: dict[str, list[bytes]] = {}
    while True:
        use = draw.choice(list(USES))
        command, used, written = USES[use]
        for is_changed in (False, True) if use not in expected else (True,):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(place.workplace, folder)
            files = sorted(path for path in folder.glob(used) if path.is_file() and path.suffix not in NOT_USED)
            path = draw.choice(files)
            before = path.read_bytes()
            how, may_differ = change(path, draw) if is_changed else ("", False)
            if path.name == "metrics.jsonl" and path.is_file() and path.stat().st_size < MIB:
                may_differ = path.read_bytes() != before and is_log(path.read_text(encoding="utf-8", errors="replace"))
            code, text = run(command, folder)
            contents = [path.read_bytes() for path in sorted(folder.glob(written))]
            assert is_changed or (code == 0 and contents), text[-3000:]
            expected.setdefault(use, contents)
        harm = amos_harm(code, text, folder / "out")
        if not harm and code == 0 and not may_differ and contents != expected[use]:
            harm = "accepted, with another result"
        yield f"amos {use}, {path.relative_to(folder)}: {how}", harm


def is_log(text: str) -> bool:
    """Return whether a run can have logged this: each line but an unfinished last one has an update that is not below the one
    before, the name of a split, and numbers or null."""
    last = 0
    for line in text.split("\n")[:-1]:
        try:
            record = json.loads(line)
            update, split = record.pop("update"), record.pop("split")
            numbers = [value for value in record.values() if value is not None]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return False
        is_record = type(update) is int and update >= last and isinstance(split, str) and split.isprintable()
        if not is_record or not all(type(number) in (int, float) and abs(number) <= 1e308 for number in numbers):
            return False
        last = update
    return True


def run(command: list[str], folder: Path) -> tuple[int, str]:
    """Only a new process can train: its training is a process of its own."""
    return run_command("amos_start", command, folder) if "--recipe" in command else run_amos(command, folder)


def change(path: Path, draw: random.Random) -> tuple[str, bool]:
    """Change a file; return how, and whether it is a record that was rewritten with a matching fingerprint."""
    if path.suffix in (".txt", ".tsv") and draw.random() < 0.6:
        lines = path.read_text(encoding="utf-8").splitlines()
        one, other = draw.randrange(len(lines)), draw.randrange(len(lines))
        lines[one], lines[other] = lines[other], lines[one].replace("0.", "0.9")
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return f"lines {one + 1} and {other + 1} exchanged", False
    if not path.suffix.startswith(".json"):
        return damage(path, draw), False
    how = attack_json(path, draw)
    with suppress(OSError, ValueError, RecursionError):  # damaged, or no file any more
        is_small = path.is_file() and path.stat().st_size < MIB
        content = json.loads(path.read_text(encoding="utf-8")) if is_small else None
        if isinstance(content, dict) and content.pop("sha256", None) and draw.random() < 0.5:
            write_record(path, content)
            return f"{how}, with its fingerprint", True
    return how, False


CELLS = ("", "the fox", "a\rb", "a\nb", 'a "b"', "a\tb", "a\u2028b", "=1+1", "nan", "0", " x ", "中国", "x" * 200_000)
COLUMNS = {
    "text": lambda n: pyarrow.array([str(CELLS[i % len(CELLS)]) for i in range(n)]),
    "number": lambda n: pyarrow.array([float("nan"), None, *[1e300] * (n - 2)]),
    "integer": lambda n: pyarrow.array([2**62 + i for i in range(n)]),
    "bytes": lambda n: pyarrow.array(["café".encode(), *[b"a"] * (n - 1)]),
    "other bytes": lambda n: pyarrow.array([b"\xff", *[b"a"] * (n - 1)]),
    "time": lambda n: pyarrow.array([datetime.datetime(2024, 1, 1)] * n, pyarrow.timestamp("ns", tz="Nowhere/City")),
    "day": lambda n: pyarrow.array([datetime.date(1, 1, 1)] * n),
    "decimal": lambda n: pyarrow.array([Decimal("1.50")] * n),
    "duration": lambda n: pyarrow.array([datetime.timedelta(1)] * n),
    "object": lambda n: pyarrow.array([{"a": [1]}] * n),
    "list": lambda n: pyarrow.array([["a"]] * n),
    "category": lambda n: pyarrow.array(["a"] * n).dictionary_encode(),
    "nothing": lambda n: pyarrow.nulls(n),
}
READERS = {
    "csv": lambda file: pandas.read_csv(file, dtype=str, keep_default_na=False),
    "tsv": lambda file: pandas.read_csv(file, sep="\t", dtype=str, keep_default_na=False),
    "jsonl": lambda file: pandas.DataFrame(map(json.loads, file.read_text("utf-8").split("\n")[:-1]), dtype=object),
}


def tables(place: Place, folder: Path, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Label a table with odd cells and columns, or a small file that holds gigabytes; other programs read the same rows."""
    while True:
        shutil.copytree(place.workplace, folder)
        texts, other = draw.choice(["text", "text", *COLUMNS]), draw.choice(list(COLUMNS))
        kind = draw.choice([*READERS, "parquet", "a long text", "many rows"])
        suffix = kind if kind in ("csv", "tsv", "jsonl") else "parquet"
        table = pyarrow.table({"text": COLUMNS[texts](20), "other": COLUMNS[other](20)})
        if kind == "a long text":  # each row has the same megabyte
            repeated = pyarrow.array([0] * 20_000, pyarrow.int32())
            table = pyarrow.table({"text": pyarrow.DictionaryArray.from_arrays(repeated, ["a b " * 2**18])})
        elif kind == "many rows":
            table = pyarrow.table({"text": pyarrow.nulls(50_000_000, pyarrow.string())})
        written = draw.choice(["csv", "tsv", "jsonl"])
        try:
            write_table(table, folder / f"in.{suffix}")
        except (TypeError, ValueError, OSError):
            shutil.rmtree(folder)
            continue  # this format has no such cells
        file = folder / "out" / f"labeled.{written}"
        flags = ["--checkpoint", RESULTS + "/classify", "--predict", f"in.{suffix}", "--out", file]
        code, text = run_amos(["classify", *flags], folder)
        harm = amos_harm(code, text, folder)
        if not harm and code == 0:
            found, is_tsv = READERS[written](file), suffix == "tsv"
            if is_tsv:
                of_file = rows_of_tsv(folder / "in.tsv")
            else:
                of_file = table["text"].to_pylist() if texts == "text" else [""] * len(table)
            rows = [text or "" for text in found["text"]] if texts == "text" or is_tsv else [""] * len(found)
            if rows != of_file:
                harm = "other rows"
            elif texts == "text" and len(set(zip(rows, found["prediction"], strict=True))) != len(set(rows)):
                harm = "equal texts have other labels"
        elif not harm and file.exists():
            harm = "left a file"
        yield f"{kind}, texts {texts}, beside {other}, to {written}", harm


def write_table(table: pyarrow.Table, file: Path) -> None:
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(table, file)
    elif file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()), encoding="utf-8")
    elif file.suffix == ".tsv":  # as they are: cells with line ends and tabs make rows of their own
        cells = [["" if cell is None else str(cell) for cell in row.values()] for row in table.to_pylist()]
        lines = ["\t".join(row) for row in [table.column_names, *cells]]
        file.write_bytes("".join(f"{line}\n" for line in lines).encode())
    else:
        table.to_pandas().to_csv(file, index=False, quoting=csv.QUOTE_ALL)


def rows_of_tsv(file: Path) -> list[str]:
    """Return the texts by the rules of the package: quotes are ordinary characters, a line with another number of columns has
    an empty row."""
    rows = [line.rstrip("\r").split("\t") for line in file.read_bytes().decode().split("\n")[1:-1]]
    return [row[0] if len(row) == 2 else "" for row in rows]


# A raw file of the workplace, and a command that reads it.
READ_BY = {
    "squad.json": "prepare squad squad.json squad.json start/tokenizer out/squad",
    "probing/pos/train.jsonl": "probe --checkpoint run --data probing --out out/probe --updates 2 --seeds 1 --layers 1",
    "trees.conllu": "prepare probing --treebank trees.conllu trees.conllu trees.conllu --out out/probing",
    "own.json": "glue --checkpoint start/checkpoint_last.pt --data glue --own-tasks own.json --out out/glue --epochs 1 "
    "--recipe recipe.yaml --tasks RTE --multi-task --seeds 1 --cpu",
}
OWN_NAMES = ("SQuAD", "parsing", "average", "AVG", "RTE", "../x", "a/b", ".", "a|b", "<b>", "", "x" * 300, "a\x1b[31m")


def raw_files(place: Place, folder: Path, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Change raw questions, probing files, a treebank, or the names and values of own tasks; nothing is left of a refusal."""
    while True:
        shutil.copytree(place.workplace, folder)
        name = draw.choice(list(READ_BY))
        path = folder / name
        if name == "own.json":
            own = {draw.choice(OWN_NAMES): {"train": "table.tsv", "label": "label", "text": ["text"]}}
            path.write_text(json.dumps(own), encoding="utf-8")
            how = f"a task {next(iter(own))!r:.20}"
            if draw.random() < 0.4:
                how = f"{how}, {attack_json(path, draw)}"
        else:
            how = damage(path, draw) if path.suffix == ".conllu" else attack_json(path, draw)
        code, text = run(READ_BY[name].split(), folder)
        harm = amos_harm(code, text, folder)
        prepared = folder / "out" / ("squad" if name == "squad.json" else "probing")
        yield f"{name}: {how}", harm or ("left OUT" if code != 0 and prepared.exists() else "")
