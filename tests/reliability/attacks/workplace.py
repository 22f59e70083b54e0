"""A folder with small inputs of commands."""

import json
import random
from pathlib import Path

from saved_models import CORPUS, add_settings, write_run
from synthetic_squad import make_squad, untrained_checkpoint, write_json
from synthetic_tagging import make_sentences, prepare_tagging

RECIPE = """\
defaults: {lr: 3.0e-3, epochs: 4, batch_size: 8, warmup: 0.1, dropout: 0.1, attention_dropout: 0.1, num_separators: 2}
tasks: {parsing: {}}
"""


def write_workplace(folder: Path) -> Path:
    """Write a run, a tokenizer in ``start``, a treebank, questions and probing data."""
    folder.mkdir()
    (folder / "out").mkdir()
    write_run(folder / "run", "amos", task={"tokens_per_sample": 20})
    add_settings(folder / "run", "amos_tiny")
    write_probing_data(folder / "probing", random.Random(0))
    untrained_checkpoint(folder / "start", prepare_tagging(folder / "labels"), 40)
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "trees.conllu").write_text("".join(map(as_tree, make_sentences(40))), encoding="utf-8")
    write_json(folder / "squad.json", make_squad(paragraphs=4))
    return folder


def as_tree(words: list[tuple[str, str, str]]) -> str:
    """Return a sentence as CoNLL-U; the head of each word is the one before."""
    lines = ""
    for number, (word, tag, _) in enumerate(words, start=1):
        relation = ("root", "det", "obj")[min(number - 1, 1 + number % 2)]
        lines += f"{number}\t{word}\t_\t{tag}\t_\t_\t{number - 1}\t{relation}\t_\t_\n"
    return lines + "\n"


def write_probing_data(folder: Path, draw: random.Random) -> None:
    words = " ".join(CORPUS[1:]).split()
    (folder / "pos").mkdir(parents=True)
    for split, size in {"train": 30, "valid": 8, "test": 9}.items():
        texts = [draw.choices(words, k=5) for _ in range(size)]
        rows = [
            {"text": " ".join(text), "targets": [{"span1": [0, 1], "label": "noun" if text[0] == "fox" else "öther"}]}
            for text in texts
        ]
        (folder / "pos" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
