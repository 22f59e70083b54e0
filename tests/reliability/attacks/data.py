"""Attacks by data: compressed text, and the other raw files that commands read."""

import gzip
import lzma
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import zstandard

from attacks.commands import Place, amos_harm, run_amos
from attacks.damage import attack_json, damage

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


# A raw file of the workplace, and a command that reads it.
READ_BY = {
    "squad.json": "prepare squad squad.json squad.json start/tokenizer out/squad",
    "probing/pos/train.jsonl": "probe --checkpoint run --data probing --out out/probe --updates 2 --seeds 1 --layers 1",
    "trees.conllu": "prepare probing --treebank trees.conllu trees.conllu trees.conllu --out out/probing",
}


def raw_files(place: Place, folder: Path, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Change raw questions, probing files or a treebank; nothing is left of a refusal."""
    while True:
        shutil.copytree(place.workplace, folder)
        name = draw.choice(list(READ_BY))
        path = folder / name
        how = damage(path, draw) if path.suffix == ".conllu" else attack_json(path, draw)
        code, text = run_amos(READ_BY[name].split(), folder)
        harm = amos_harm(code, text, folder)
        prepared = folder / "out" / ("squad" if name == "squad.json" else "probing")
        yield f"{name}: {how}", harm or ("left OUT" if code != 0 and prepared.exists() else "")
