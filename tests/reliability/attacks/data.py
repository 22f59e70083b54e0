"""Attacks by data: compressed text, tables to label, and the other raw files that commands read."""

import csv
import datetime
import gzip
import json
import lzma
import random
import shutil
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pandas
import pyarrow
import pyarrow.parquet
import zstandard

from attacks.commands import Place, amos_harm, run_amos, run_command
from attacks.damage import attack_json, damage
from attacks.workplace import RESULTS

MIB = 1 << 20
COMPRESS = {
    "": bytes,
    ".gz": lambda content: gzip.compress(content, 1),
    ".xz": lambda content: lzma.compress(content, preset=0),
    ".zst": zstandard.ZstdCompressor().compress,
    ".bz2": bytes,  # refused by its name
}
# What is repeated, between a beginning and an end; a document that is too large has lines, because each takes its time.
ENDLESS = {
    ".txt": (("", "x", ""), ("a text\n\n", "x " * 512 + "\n", ""), ("", "\0", "")),
    ".jsonl": (
        ('{"text": "', "x", '"}\n'),
        ("", "[", ""),
        ('{"text": "a", "b": [', "[],", "[]]}\n"),
        ('{"text": ', "1", "}\n"),
        ('{"text": "', "\\n", '"}\n'),
        ('{"text": "a", "b": {', '"":{},', '"":{}}}\n'),
    ),
}


def bombs(place: Place, folder: Path, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Prepare a small file that holds up to 4 GiB: it is refused, in little memory, and nothing is left."""
    while True:
        folder.mkdir()
        suffix, kind = draw.choice(list(COMPRESS)), draw.choice(list(ENDLESS))
        before, unit, after = draw.choice(ENDLESS[kind])
        # A line of 120 MiB is read, one of 128 MiB is not.
        size = draw.choice([120 * MIB, 4096 * MIB])
        text = folder / f"text{kind}{suffix}"
        write_bomb(text, before, unit, after, size, suffix)
        code, output = run_amos(["prepare", text, "--out", "out", "--workers", "1", "--vocab-size", "120"], folder)
        harm = amos_harm(code, output, folder)
        if not harm and (code == 0 or (folder / "out").exists()):
            harm = "accepted" if code == 0 else "left OUT"
        yield f"{text.name} of {f'{before}{unit[:5]}{after}'.strip()}, {size // MIB} MiB", harm


def write_bomb(path: Path, before: str, unit: str, after: str, size: int, suffix: str) -> None:
    """Write streams of 8 MiB one after another, which is a valid file of each kind; plain text is at most 256 MiB."""
    compress = COMPRESS[suffix]
    part = unit.encode() * (8 * MIB // len(unit))
    stream = compress(part)
    with path.open("wb") as file:
        file.write(compress(before.encode()))
        for _ in range(min(size, 4096 * MIB if len(stream) < MIB else 256 * MIB) // len(part)):
            file.write(stream)
        file.write(compress(after.encode()))


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


def run(command: list[str], folder: Path) -> tuple[int, str]:
    """Only a new process can train: its training is a process of its own."""
    return run_command("amos_start", command, folder) if "--recipe" in command else run_amos(command, folder)


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
