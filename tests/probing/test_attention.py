"""Attention heads as relations: weights beside Hugging Face's, words by hand, counts by a loop, and the command."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from failures import error_line
from hugging_face_folders import export, outputs, padded_tokens
from saved_models import write_run

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.cli.main import main
from amos_fairseq.probing import attention
from amos_fairseq.probing.attention import FARTHEST, attention_between_words, count_heads, recorded_attention
from amos_fairseq.probing.features import encode_split, parts_of
from amos_fairseq.probing.tasks import AnnotatedText, ProbingTask, Target

MODERN = {"encoder": "modernbert", "local_attention": 8, "global_attention_every": 2}
TEXTS = ["the quick brown fox", "a lazy dog jumps over the end", "the", "over the end of the brown dog and the fox"]


def test_words_by_hand():
    """<s> a b1 b2 </s>: to b is the sum of its pieces, from b the mean; <s> and </s> do not count."""
    weights = torch.tensor(
        [
            [0.2, 0.2, 0.2, 0.2, 0.2],
            [0.1, 0.2, 0.3, 0.1, 0.3],
            [0.0, 0.5, 0.1, 0.2, 0.2],
            [0.4, 0.1, 0.1, 0.1, 0.3],
            [0.2, 0.2, 0.2, 0.2, 0.2],
        ]
    )
    found = attention_between_words(weights[None], [(1, 2), (2, 4)])
    torch.testing.assert_close(found, torch.tensor([[[-1.0, 0.4], [0.3, -1.0]]]))


@pytest.mark.parametrize(
    ("objective", "settings"),
    [("mlm", {}), ("mlm", {"relative_position_scheme": "t5"}), ("mlm", MODERN)],
    ids=["bert", "mpnet", "modernbert"],
)
def test_weights_are_those_of_hugging_face(objective: str, settings: dict, tmp_path: Path):
    run = write_run(tmp_path / "run", objective, **settings)
    export(run, tmp_path / "hf", "--part", "encoder")
    loaded = load_checkpoint(run)
    tokens = padded_tokens(loaded)[:6]
    theirs = outputs(tmp_path / "hf", "AutoModel", tokens, output_attentions=True, attn_implementation="eager")
    (part,) = parts_of(loaded.model).values()
    encoder = part.layers[0][0]
    shape, before = encoder.shape, [layer.attention.attend for layer in encoder.layers]
    with recorded_attention(encoder) as weights, torch.no_grad():
        encoder(part.embed_tokens(tokens), tokens.eq(1))
    assert len(weights) == len(theirs.attentions) == len(encoder.layers)
    for own, their in zip(weights, theirs.attentions, strict=True):
        for row, length in enumerate(tokens.ne(1).sum(1)):
            torch.testing.assert_close(own[row, :, :length], their[row, :, :length], rtol=1e-4, atol=1e-6)
    assert encoder.shape is shape
    assert [layer.attention.attend for layer in encoder.layers] == before


def arcs_of(words: list[str]) -> list[Target]:
    """Each word but the first depends on the one before it, every third on the first; two relations and a subtype."""
    names = ("det", "nsubj", "nsubj:pass")
    heads = [0 if word % 3 == 0 else word - 1 for word in range(1, len(words))]
    return [
        Target(((word, word + 1), (head, head + 1)), (names[word % 3],))
        for word, head in zip(range(1, len(words)), heads, strict=True)
    ]


def test_counts_are_those_of_a_loop(tmp_path: Path):
    loaded = load_checkpoint(write_run(tmp_path / "run", "mlm", max_positions=14))
    examples = [AnnotatedText(text.split(), arcs_of(text.split())) for text in TEXTS]
    task = ProbingTask("dependencies", {"train": examples, "valid": examples}, {})
    (part,) = parts_of(loaded.model).values()
    encoded, relations = encode_split(loaded, examples), ["det", "nsubj"]
    assert any(pieces is None for pieces in encoded.word_pieces[-1]), "a text is cut"
    assert any(end - start > 1 for own in encoded.word_pieces for start, end in filter(None, own))
    found = count_heads(part, task, "valid", encoded, relations, loaded.dictionary.pad(), "cpu")
    heads, totals = np.zeros_like(found.heads), np.zeros_like(found.totals)
    offsets, start, encoder = np.zeros_like(found.offsets), 0, part.layers[0][0]
    for example, sentence, ranges in zip(examples, encoded.sentences, encoded.word_pieces, strict=True):
        with recorded_attention(encoder) as weights, torch.no_grad():
            encoder(part.embed_tokens(sentence[None]))
        for target in example.targets:
            (word, _), (gold, _) = target.spans
            if ranges[word] is None or ranges[gold] is None:
                continue
            relation = relations.index(target.labels[0].split(":")[0])
            totals[relation] += 1
            offsets[gold - word + FARTHEST, relation] += 1
            for layer, own in enumerate(weights):
                for head in range(own.size(1)):
                    scores = {}
                    for other, pieces in enumerate(ranges):
                        if pieces is not None and other != word:
                            block = own[0, head, ranges[word][0] - start + 1 : ranges[word][1] - start + 1]
                            scores[other] = float(block[:, pieces[0] - start + 1 : pieces[1] - start + 1].sum(1).mean())
                    heads[layer, head, relation] += max(scores, key=scores.get) == gold
        start += len(sentence) - 2
    for own, expected in zip(found, (heads, offsets, totals), strict=True):
        np.testing.assert_array_equal(own, expected)
    assert 0 < heads.sum() < heads[..., 0].size * totals.sum()


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(attention, "LEAST_TARGETS", 2)
    run, data = write_run(tmp_path / "run", "electra"), tmp_path / "data" / "dependencies"
    data.mkdir(parents=True)
    for split in ("train", "valid", "test"):
        examples = ((text.split(), arcs_of(text.split())) for text in TEXTS)
        with (data / f"{split}.jsonl").open("w") as file:
            for words, arcs in examples:
                targets = [{"span1": a, "span2": b, "label": t.labels[0]} for t in arcs for a, b in [t.spans]]
                file.write(json.dumps({"text": " ".join(words), "targets": targets}) + "\n")
    command = ["probe", "--checkpoint", run, "--data", data.parent, "--out", tmp_path / "out"]
    command += ["--attention", "--baseline"]
    main([str(argument) for argument in command])
    content = json.loads((tmp_path / "out" / "attention.json").read_text())
    assert list(content) == ["generator", "discriminator", "generator, random", "discriminator, random"]
    rows = {row["relation"]: row for row in content["discriminator"]}
    # A word of nsubj, also of its subtype, follows its head.
    assert rows["all relations"]["count"] == sum(len(arcs_of(text.split())) for text in TEXTS) == 18
    assert (rows["nsubj"]["offset"], rows["nsubj"]["offset_accuracy"]) == (-1, 100.0)
    assert {path.suffix for path in (tmp_path / "out").glob("attention.*")} >= {".json", ".md", ".png"}
    for flags, reason in (
        (["--layers", "1"], "--layers has no effect with --attention"),
        (["--part", "encoder"], "has no part 'encoder': give --part some of generator, discriminator"),
    ):
        assert reason in error_line(capsys, main, *command, *flags, reports_progress=True)
    monkeypatch.setattr(attention, "LEAST_TARGETS", 100)
    assert "no relation has 100 words" in error_line(capsys, main, *command, reports_progress=True)
