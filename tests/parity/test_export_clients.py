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
from hugging_face_folders import export, train_wordpiece
from saved_models import write_run
from small_models import MODERN
from tiny_runs import ROOT
from tokenizer_text import token_of_word
from torch import Tensor

import amos_fairseq
from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.downstream.model import TEXT_HEAD
from amos_fairseq.downstream.words.command import labeled_spans, predict_file, with_probability
from amos_fairseq.downstream.words.dataset import Column
from amos_fairseq.errors import UserError
from amos_fairseq.inputs.word_files import read_sentences, spaces_in
from amos_fairseq.models.pretraining import PretrainingBatch
from amos_fairseq.text.tokenization import load_tokenizer
from amos_fairseq.text.vocabulary import learn_tokenizer

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
    with torch.no_grad():
        ours = pretrained.model(pretrained.tokens(TEXTS[0])[None], classification_head_name=TEXT_HEAD)[0][0].softmax(-1)
    assert names["logits"].softmax(-1)[0].tolist() == pytest.approx(ours.tolist(), abs=TOLERANCE)
    of_text, of_pair = names["found"]
    assert of_text == {
        "label": ["bad", "good"][ours.argmax()],
        "score": pytest.approx(ours.max().item(), abs=TOLERANCE),
    }
    assert of_pair["label"] in ("bad", "good")


# Texts, and their words.
TREEBANK = {
    "I don't know 3.5% of it.": "I do n't know 3.5 % of it .",
    "中国人口3108人、「密度」。": "中国 人口 3108 人 、 「 密度 」 。",
}


@torch.no_grad()
def test_labels_of_words_in_raw_text(tmp_path):
    """Those of the words in a treebank, whose places in its texts are written here."""
    (tmp_path / "text.txt").write_text(
        "I don't know.\n3.5% of it\n中国人口密度。\n「中国人口、3108人」\n" * 9, encoding="utf-8"
    )
    tokenizer = learn_tokenizer(tmp_path / "text.txt", 130, cased=True)
    run = write_run(tmp_path / "run", tokenizer=tokenizer, labels=5, names="ABCDE")
    export(run, tmp_path / "out")
    tag = transformers.pipeline("token-classification", model=str(tmp_path / "out"), ignore_labels=[])
    pretrained, found, num_shared = load_checkpoint(run), [], 0
    for text, words in TREEBANK.items():
        words = words.split()
        ids, ranges = pretrained.tokenizer.encode_words(words, spaces_in(text, words))
        positions = torch.tensor([[start + 1 for start, _ in ranges]])
        tokens = torch.tensor([[0, *ids, 2]])
        ours = pretrained.model(tokens, word_positions=positions).logits["upos_labels"][0].softmax(-1).max(-1)
        given, end = tag(text), 0
        for word, score, label in zip(words, *map(Tensor.tolist, ours), strict=True):
            begin = text.index(word, end)
            end = begin + len(word)
            token = token_of_word(given, text, begin, end)
            num_shared += token["start"] < begin
            assert (token["entity"], token["score"]) == ("ABCDE"[label], pytest.approx(score, abs=TOLERANCE)), word
            found.append(round(score, 3))
    assert (len(found), len(set(found)) > 12, num_shared > 0) == (18, True, True)


PARTS = ["New", "York", "Jan-Peter", "U.S.", "don't", "(3.5%)", "browned", "été", "北京", "-", "…"]


def test_spans_of_raw_text_are_those_of_the_pipeline(tmp_path):
    """Of 150 texts with hyphens and punctuation, by a model of random values with WordPiece."""
    draw, names = random.Random(1), ["O", "B-X", "I-X", "B-Y", "I-Y"]
    parts = (draw.choices(PARTS, k=draw.randint(1, 12)) for _ in range(150))
    texts = ["".join(part + draw.choice(["", " ", "  ", ", "]) for part in each) for each in parts]
    train_wordpiece(tmp_path / "given", texts[:50])
    run = write_run(tmp_path / "run", tokenizer=load_tokenizer(tmp_path / "given"), labels=5, names=names)
    export(run, tmp_path / "out")
    tag = transformers.pipeline("token-classification", model=str(tmp_path / "out"), aggregation_strategy="first")
    (tmp_path / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    file, column = read_sentences(tmp_path / "texts.txt", labeled=False, raw=True), Column(tmp_path, "", names, True)
    predictions = predict_file(load_checkpoint(run), "upos_labels", file, with_probability, "cpu")
    num_spans = 0
    for text, sentence, predicted in zip(texts, file.sentences, predictions, strict=True):
        ours = [tuple(span.values()) for span in labeled_spans(sentence, column, predicted)]
        assert ours == [
            (span["start"], span["end"], span["entity_group"], pytest.approx(span["score"], abs=TOLERANCE))
            for span in tag(text)
        ], text
        num_spans += len(ours)
    assert num_spans > 300


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
