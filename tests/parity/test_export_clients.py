"""Exported folders in common client libraries, offline and without code in the folder.

Tolerance: float32; onnxruntime fuses operations, and its erf and softmax round otherwise than PyTorch's.
"""

import random
import re
import runpy
from pathlib import Path

import numpy
import pytest
import scipy.stats
import torch
import transformers
from hugging_face_folders import export
from saved_models import write_run
from small_models import MODERN
from tiny_runs import ROOT
from tokenizer_text import small_tokenizer_of_kind

import amos_fairseq
from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.downstream.model import TEXT_HEAD
from amos_fairseq.errors import UserError
from amos_fairseq.models.pretraining import PretrainingBatch

TOLERANCE = 1e-4
WORDS = ["the", "jumps", "over", "end", "lazy", "brown"]
TEXTS = ["the quick brown fox", "jumps", "over the end of the lazy dog & a quick brown dog, the end"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """The run, and its encoder, generator and discriminator; a fine-tuned run and one of ModernBERT with their folders."""
    root = tmp_path_factory.mktemp("folders")
    write_run(root / "run")
    write_run(root / "classified", classes=2, names=["bad", "good"])
    write_run(root / "modern run", **MODERN)
    for part in ("encoder", "generator", "discriminator"):
        export(root / "run", root / part, "--part", part)
    export(root / "classified", root / "classifier")
    export(root / "modern run", root / "modern encoder")
    return root


def test_fill_mask(folders):
    """The pipeline's probabilities are those of our generator's softmax at the masked position."""
    fill = transformers.pipeline("fill-mask", model=str(folders / "generator"), top_k=5)
    found = fill("the quick <mask> jumps")
    pretrained = load_checkpoint(folders / "run")
    dictionary, model = pretrained.dictionary, pretrained.model
    before, after = pretrained.tokens("the quick")[:-1], pretrained.tokens("jumps")[1:]
    tokens = torch.cat([before, torch.tensor([dictionary.index("<mask>")]), after])[None]
    mask = len(before)
    logits = model.predict_logits(PretrainingBatch(tokens, tokens, torch.tensor([[mask]]), torch.ones(1, 1)))[0][
        -1, 0, 0
    ]
    best = logits[: len(dictionary)].softmax(-1).topk(5)
    assert [prediction["token"] for prediction in found] == best.indices.tolist()
    assert [prediction["score"] for prediction in found] == pytest.approx(best.values.tolist(), rel=TOLERANCE)


def test_token_classification(folders):
    """Every token is labelled; the score of "replaced" is our sigmoid, and offsets point into the text."""
    classify = transformers.pipeline("token-classification", model=str(folders / "discriminator"))
    text = TEXTS[2]
    found = classify(text)
    pretrained = load_checkpoint(folders / "run")
    model = pretrained.model
    with torch.no_grad():
        tokens = pretrained.tokens(text)[None]
        ours = model.detection_head(model.extract_features(tokens)).sigmoid()[0, 1:-1].tolist()
    replaced = [token["score"] if token["entity"] == "replaced" else 1 - token["score"] for token in found]
    assert replaced == pytest.approx(ours, abs=TOLERANCE)
    assert {token["entity"] for token in found} == {"original", "replaced"}
    surfaces = [text[token["start"] : token["end"]].strip() for token in found]
    assert "".join(surfaces) == text.replace(" ", "")


def test_code_of_the_card(folders, monkeypatch):
    """Of a classifier: what it prints of a text is the class with the largest probability of our model."""
    monkeypatch.chdir(folders)
    code = re.search(r"```python\n(.*?)```", (folders / "classifier" / "README.md").read_text(), re.DOTALL)[1]
    exec(code.replace("A text.", TEXTS[0]), names := {})
    pretrained = load_checkpoint(folders / "classified")
    pair = torch.cat([pretrained.tokens("One text."), pretrained.tokens("And another.")[1:]])
    with torch.no_grad():
        ours = [
            pretrained.model(tokens[None], classification_head_name=TEXT_HEAD)[0][0].softmax(-1)
            for tokens in (pretrained.tokens(TEXTS[0]), pair)
        ]
    assert names["logits"].softmax(-1)[0].tolist() == pytest.approx(ours[0].tolist(), abs=TOLERANCE)
    assert names["found"] == [
        {"label": ["bad", "good"][row.argmax()], "score": pytest.approx(row.max().item(), abs=TOLERANCE)}
        for row in ours
    ]


PARTS = ["bakelimo", "nu-Tare", "sí", "Jan-Peter", "U.S.", "don't", "(3.5%)", "browned", "été", "北京", "-", "…"]
SPAN_LABELS = ["O", "B-X", "I-X", "B-Y", "I-Y"]


def raw_texts(number: int) -> list[str]:
    """Texts with hyphens, punctuation, and several spaces or none between words."""
    draw = random.Random(1)
    parts = (draw.choices(PARTS, k=draw.randint(1, 12)) for _ in range(number))
    return ["".join(part + draw.choice(["", " ", "  ", ", "]) for part in each) for each in parts]


@pytest.mark.parametrize("kind", ["cased", "wordpiece", "bytes", "prefixed bytes", "unigram"])
@pytest.mark.parametrize(
    "outputs",
    [
        {"kind": "spans", "raw_text": True},
        {"kind": "spans", "raw_text": False, "signs": "-", "whole": ["(3.5%)", "U.S."]},
        {"kind": "words", "raw_text": True, "signs": "-", "whole": ["(3.5%)", "U.S."]},
    ],
)
def test_spans_of_raw_text_are_those_of_the_pipeline(kind, outputs, tmp_path, monkeypatch, modules_cache):
    """Of 150 texts, by a model of random values. With WordPiece the strategy "first" of transformers gives the same ones."""
    tokenizer = small_tokenizer_of_kind(tmp_path, kind)
    run = write_run(tmp_path / "run", tokenizer=tokenizer, labels=5, names=SPAN_LABELS, of_head=outputs)
    export(run, tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"```python\n(.*?)```", (tmp_path / "out" / "README.md").read_text(), re.DOTALL)[1], names := {})
    # The last one has several windows, with WordPiece words without a piece, and special tokens, which Unigram has as pieces.
    special = [] if kind == "unigram" else ["<s>a</s>", "[SEP]", "<mask>"]
    texts = [*raw_texts(150), " ".join([*PARTS, "\u0301", *special] * 9)]
    ours = [[tuple(span.values()) for span in spans] for spans in amos_fairseq.load(run).predict(texts)]
    assert sum(map(len, ours)) > 30
    found = [names["tag"](texts[0]), *names["tag"](texts[1:], batch_size=4)]
    if kind == "wordpiece" and "signs" not in outputs:
        first = transformers.pipeline("token-classification", model="out", aggregation_strategy="first")
        texts, ours, found = texts + texts[:-1], ours + ours[:-1], found + first(texts[:-1])
    for text, spans, theirs in zip(texts, ours, found, strict=True):
        expected = [(*span[:3], pytest.approx(span[3], abs=TOLERANCE)) for span in spans]
        assert [(each["start"], each["end"], each["entity_group"], each["score"]) for each in theirs] == expected, text


@pytest.mark.parametrize(("run", "exported"), [("run", "encoder"), ("modern run", "modern encoder")])
def test_sentence_transformers_pooling_is_ours(folders, run, exported):
    """The library's default is the mean of our features over real tokens."""
    library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(str(folders / exported), device="cpu")
    features = amos_fairseq.load(folders / run)(TEXTS)
    ours = (features.states * features.mask[..., None]).sum(1) / features.mask.sum(1, keepdim=True)
    theirs = model.encode(TEXTS, convert_to_tensor=True)
    assert (ours - theirs).abs().max() < TOLERANCE


def test_example_of_sentence_embeddings(folders, tmp_path, capsys):
    """What it prints against our own features, before and after it has learned which word a number belongs to."""
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer

    fine_tune = runpy.run_path(str(ROOT / "examples/hugging_face/sentence_embeddings.py"))["main"]

    pairs = [(f"{one} quick", f"{other} dog", one == other) for one in WORDS for other in WORDS]
    table, out = tmp_path / "pairs.tsv", tmp_path / "out"
    table.write_text("a\tb\tscore\n" + "".join(f"{one}\t{other}\t{int(same)}\n" for one, other, same in pairs))
    flags = ["--dev", str(table), "--text", "a", "b"]
    more = f"--train {table} --out {out} --epochs 20 --batch-size 9 --lr 0.003"
    fine_tune([str(folders / "encoder"), *flags, *more.split()])
    shown = re.findall(r": mean cosine of different pairs (\S+), Spearman (\S+)\n", capsys.readouterr().out)
    before, after = ([float(number) for number in each] for each in shown)
    features = amos_fairseq.load(folders / "run")
    vectors = [features([pair[side] for pair in pairs]) for side in (0, 1)]
    means = [(each.states * each.mask[..., None]).sum(1) / each.mask.sum(1, keepdim=True) for each in vectors]
    cosines = torch.cosine_similarity(*means)
    ranked = scipy.stats.spearmanr(cosines, [same for *_, same in pairs]).statistic
    assert before[1] == pytest.approx(100 * ranked, abs=0.06)
    every = torch.cosine_similarity(means[0][:, None], means[1][None], dim=-1)
    different = every[~torch.eye(len(pairs), dtype=torch.bool)]
    assert before[0] == pytest.approx(float(different.mean()), abs=0.01)  # a thousand of them
    # 64.5 is the largest for numbers of which a sixth is 1: sqrt(3 p (1 - p)).
    assert before[1] < 60 < after[1]
    kept = SentenceTransformer(str(out), device="cpu").encode([pair[0] for pair in pairs], convert_to_tensor=True)
    assert (kept - means[0]).abs().max() > 0.01  # trained weights, not those of the export
    table.write_text("a\tb\tscore\none\t\\N\t1\none\ttwo\thigh\n")
    with pytest.raises(UserError, match="line 3: score: the label 'high' is not a number from"):
        fine_tune([str(folders / "encoder"), *flags])


@pytest.mark.slow
def test_onnx(folders, tmp_path):
    """Exported with one batch, run with others: another number of texts, shorter and longer ones, padding."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    auto_class = transformers.AutoModelForSequenceClassification
    model = auto_class.from_pretrained(folders / "classifier", output_hidden_states=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders / "classifier")
    example = tokenizer(TEXTS[:2], padding=True, return_tensors="pt")
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=150)
    shapes = {name: {0: batch, 1: length} for name in example}
    settings = {"input_names": list(example), "dynamic_shapes": shapes, "dynamo": True, "verbose": False}
    torch.onnx.export(model, kwargs=dict(example), f=str(tmp_path / "model.onnx"), **settings)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for texts in (TEXTS, TEXTS[1:2], [TEXTS[2] * 3]):
        inputs = tokenizer(texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            expected = model(**inputs)
        logits, *states = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        numpy.testing.assert_allclose(logits, expected.logits.numpy(), atol=TOLERANCE, rtol=TOLERANCE)
        real = inputs["attention_mask"].bool().numpy()
        last = expected.hidden_states[-1].numpy()
        numpy.testing.assert_allclose(states[-1][real], last[real], atol=TOLERANCE, rtol=TOLERANCE)
