"""Similarity of sentence vectors: loops and scipy on vectors made by hand, Hugging Face's model on a table, wrong tables."""

import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from hugging_face_folders import LINES, write_model
from scipy.stats import spearmanr

from amos_fairseq.adaptation.similarity import agreement, read_pairs, similarity
from amos_fairseq.errors import UserError
from amos_fairseq.hugging_face.import_folder import import_folder
from amos_fairseq.hugging_face.imported import write

PAIRS = [(LINES[i], LINES[(3 * i + 1) % 40], i % 7) for i in range(12)]


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    lengths = (math.sqrt(sum(value * value for value in vector.tolist())) for vector in (one, other))
    return sum(a * b for a, b in zip(one.tolist(), other.tolist(), strict=True)) / math.prod(lengths)


def by_hand(first: torch.Tensor, second: torch.Tensor, scores: list[float]) -> dict[str, float]:
    half = len(first) // 2
    cosines = [cosine(one, other) for one, other in zip(first, second, strict=True)]
    unrelated = [cosine(first[row], second[row - half]) for row in range(len(first))]
    spearman = 100 * spearmanr(cosines, scores).statistic
    return {"spearman": spearman, "cosine_of_unrelated_texts": sum(unrelated) / len(unrelated)}


def test_agreement_is_that_of_a_loop() -> None:
    torch.manual_seed(0)
    first, second, scores = torch.randn(15, 4), torch.randn(15, 4) + 1, [0.5 * (i % 6) for i in range(15)]
    assert agreement(first, second, scores) == pytest.approx(by_hand(first, second, scores))


def write_table(file: Path, rows: list[tuple]) -> Path:
    lines = ["index\tgenre\tsentence1\tsentence2\tscore"]
    lines += [f"{i}\tnews\t{a}\t{b}\t{c}" for i, (a, b, c) in enumerate(rows)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


@pytest.mark.parametrize("pooling", ["", "pooling_mode_cls_token"])
def test_a_folder_with_its_own_pooling(pooling: str, tmp_path: Path) -> None:
    """Rows without a text or a number are left out."""
    reference = write_model(tmp_path / "folder", "bert", "BertModel")
    if pooling:
        kinds = {"": "Transformer", "1_Pooling": "Pooling"}
        modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for path, kind in kinds.items()]
        (tmp_path / "folder" / "1_Pooling").mkdir()
        (tmp_path / "folder" / "1_Pooling" / "config.json").write_text(json.dumps({pooling: True}), encoding="utf-8")
        (tmp_path / "folder" / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    file = tmp_path / "model.pt"
    write(import_folder(tmp_path / "folder", "mlm_base"), file)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    vectors = []
    for texts in zip(*PAIRS, strict=True):
        if isinstance(texts[0], str):
            ids = [torch.tensor([tokenizer.encode(f"[CLS] {text} [SEP]", add_special_tokens=False)]) for text in texts]
            states = [reference(each).last_hidden_state[0] for each in ids]
            vectors.append(torch.stack([each[0] if pooling else each.mean(0) for each in states]).detach())
    pairs = read_pairs(write_table(tmp_path / "dev.tsv", [*PAIRS, (LINES[0], "", 3), (LINES[0], LINES[1], "NaN")]))
    expected = by_hand(*vectors, [float(score) for *_, score in PAIRS])
    assert similarity(file, pairs) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text\tscore\na\t1\n", "needs two columns of texts and one of numbers, .*; it has text, score"),
        ("sentence1\tsentence2\tscore\n" + "a\tb\tgood\n" * 12, "dev.tsv, line 2, column score: the label 'good' is"),
        ("sentence1\tsentence2\tscore\n" + "a\tb\t1\n" * 3, "has 3 pairs: give 10 or more, with different scores"),
        ("sentence1\tsentence2\tscore\n" + "a\tb\t1\n" * 12, "has 12 pairs: give 10 or more, with different scores"),
    ],
)
def test_other_tables_are_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "dev.tsv").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        read_pairs(tmp_path / "dev.tsv")
