"""Labeled words that a tiny model can learn: names are spans, all other words decide their part of speech."""

import random
from pathlib import Path

from preparing import prepare

from amos_fairseq.text.vocabulary import learn_tokenizer

NAMES = ["Anna", "ﬁona", "Łukasz", "New", "York", "São"]
OTHERS = {"sees": "VERB", "the": "DET", "(grey)": "ADJ", "house": "NOUN", ",": "PUNCT", "3.5%": "NUM", "and": "CCONJ"}
LONG = 30  # words of every tenth sentence
NAMES_OF_COLUMNS = ("--columns", "word,pos,ner")  # of write_columns


def sentence(generator: random.Random, length: int) -> list[tuple[str, str, str]]:
    """Words with their part of speech and their entity (IOB2); two names in a row are one span."""
    rows: list[tuple[str, str, str]] = []
    while len(rows) < length:
        if generator.random() < 0.3:
            number = generator.randint(1, 2)
            rows += [(generator.choice(NAMES), "proper noun", f"{place}-NAME") for place in "BI"[:number]]
            rows.append(("sees", "VERB", "O"))
        else:
            word = generator.choice(list(OTHERS))
            rows.append((word, OTHERS[word], "O"))
    return rows


def make_sentences(number: int = 40, seed: int = 1) -> list[list[tuple[str, str, str]]]:
    generator = random.Random(seed)
    return [sentence(generator, LONG if i % 10 == 9 else generator.randint(1, 8)) for i in range(number)]


def write_columns(path: Path, sentences: list[list[tuple[str, str, str]]]) -> Path:
    path.write_text("\n".join("".join("\t".join(row) + "\n" for row in rows) for rows in sentences), encoding="utf-8")
    return path


def write_conllu(path: Path, sentences: list[list[tuple[str, str, str]]], misc: str = "_") -> Path:
    blocks = [
        "".join(f"{i}\t{word}\t_\t{pos}\t_\t_\t0\troot\t_\t{misc}\n" for i, (word, pos, _) in enumerate(rows, 1))
        for rows in sentences
    ]
    path.write_text("\n".join(blocks), encoding="utf-8")
    return path


def prepare_tagging(directory: Path, *flags: str) -> Path:
    """``directory/data``, prepared with the same sentences to train and to evaluate on, and ``directory/tokenizer``."""
    sentences = make_sentences()
    directory.mkdir(parents=True, exist_ok=True)
    text = "\n".join(" ".join(word for word, _, _ in rows) for rows in sentences) + "\n"
    (directory / "text.txt").write_text(text, encoding="utf-8")
    learn_tokenizer(directory / "text.txt", 100, cased=False).save(directory / "tokenizer")
    source = str(write_columns(directory / "train.txt", sentences))
    prepare("tagging")(
        [source, source, str(directory / "tokenizer"), str(directory / "data"), *NAMES_OF_COLUMNS, *flags]
    )
    return directory / "data"
