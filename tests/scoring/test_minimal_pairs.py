"""Minimal pairs: accuracies by hand, detection against a loop in float64, and the example."""

import copy
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from saved_models import SCORED_SIZES, pretrained, sequences, write_run
from tiny_runs import ROOT, run_process
from torch.nn.functional import gelu

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.errors import UserError
from amos_fairseq.models.amos import AmosConfig, AmosModel
from amos_fairseq.models.electra import ElectraConfig, ElectraModel
from amos_fairseq.models.teams import TeamsConfig, TeamsModel
from amos_fairseq.scoring import minimal_pairs
from amos_fairseq.scoring.lines import score_lines, unknown_log_prob
from amos_fairseq.scoring.minimal_pairs import read_pairs, score_pairs
from amos_fairseq.scoring.token_scorers import DetectionScorer, build_pair_scorer, build_token_scorer

NUM_WORDS = 5
LENGTHS = (4, 1, 6, 2)
UNKNOWN = "日本"

# term, UID, scores of the good and of the bad sentence.
BY_HAND = [
    ("agreement", "noun", -1.0, -2.0),
    ("agreement", "noun", -3.0, -2.5),
    ("agreement", "noun", -4.0, -4.0),
    ("agreement", "verb", -1.0, -1.5),
    ("npi", "ever", -7.0, -6.0),
    ("npi", "ever", -5.0, -5.0),
    ("npi", "noun", -1.0, -9.0),  # a UID of the same name in another term
]
ACCURACY = {
    ("agreement", "noun"): (3, 50.0, 1),
    ("agreement", "verb"): (1, 100.0, 0),
    ("npi", "ever"): (2, 25.0, 1),
    ("npi", "noun"): (1, 100.0, 0),
}
OF_TERM = {"agreement": (4, 62.5, 1), "npi": (3, 50.0, 1)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {name: write_run(folder / name, name) for name in ("amos", "mlm")}


def scored(tmp_path: Path, loaded, pairs: list, tokens_per_batch: int = 64) -> dict:
    """What the JSON has."""
    lines = [json.dumps({"sentence_good": good, "sentence_bad": bad}) + "\n" for good, bad in pairs]
    file, out = tmp_path / "pairs.jsonl", tmp_path / "out.json"
    file.write_text("".join(lines), encoding="utf-8")
    score_pairs(loaded, [file], tokens_per_batch, out)
    return json.loads(out.read_text(encoding="utf-8"))


def test_accuracies_by_hand(runs, tmp_path, monkeypatch):
    """Scores are given; the JSON and the table have the accuracies of BY_HAND."""
    words = ["a", "the", "fox", "dog", "end", "lazy", "quick"]
    lines = []
    for word, (term, uid, _, _) in zip(words, BY_HAND, strict=True):
        record = {"sentence_good": f"{word} jumps", "sentence_bad": f"{word} over"}
        record |= {"UID": uid, "linguistics_term": term}
        lines.append(json.dumps(record | {"field": "morphology", "pairID": 3}))
    (tmp_path / "pairs.jsonl").write_text("\n\n".join(lines), encoding="utf-8")
    monkeypatch.setattr(minimal_pairs, "scores_of", lambda *_: [(good, bad) for *_, good, bad in BY_HAND])
    out = tmp_path / "out.json"
    table = score_pairs(load_checkpoint(runs["amos"]), [tmp_path / "pairs.jsonl"], 4096, out)
    content = json.loads(out.read_text(encoding="utf-8"))

    def result(group):
        return group["pairs"], group["accuracy"], group["ties"]

    assert {(group["term"], group["uid"]): result(group) for group in content["uids"]} == ACCURACY
    assert {group["term"]: result(group) for group in content["terms"]} == OF_TERM
    assert result(content["overall"]) == (7, round(100 * 4 / 7, 4), 2)  # three right, two halves
    assert table.rows[-2:] == [["all of npi", "3", "50.0"], ["all pairs", "7", "57.1"]]
    found = [(pair["line"], pair["good"], pair["bad"]) for pair in content["pairs"]]
    assert found == [(1 + 2 * index, good, bad) for index, (_, _, good, bad) in enumerate(BY_HAND)]


TEAMS = {"generator_layers": 2, "negative_samples": 2}
DETECTORS = {
    "electra": (ElectraModel, ElectraConfig, {"generator_size": 0.5}),
    "electra_t5": (ElectraModel, ElectraConfig, {"generator_size": 0.5, "relative_position_scheme": "t5"}),
    "amos": (AmosModel, AmosConfig, {"generator_depths": "1,2", "max_update": 30}),
    "teams_mws": (TeamsModel, TeamsConfig, TEAMS | {"representation": "mws"}),
    "teams_extra": (TeamsModel, TeamsConfig, TEAMS | {"task_heads": "extra_layer"}),
    "teams_ffn": (TeamsModel, TeamsConfig, TEAMS | {"task_heads": "ffn"}),
    "teams_one": (TeamsModel, TeamsConfig, TEAMS | {"mws_loss_weight": 0.0, "representation": "rtd"}),
}


def detector(name):
    model_class, config_class, settings = DETECTORS[name]
    return pretrained(model_class, config_class(**(SCORED_SIZES | settings)), NUM_WORDS)


@torch.no_grad()
def naive_detection(model, tokens):
    """log(1 - sigmoid(logit)) of each token of one sequence [L], through the parts of the model in float64."""
    model = copy.deepcopy(model).double()
    embeddings = model.embed_tokens(tokens[None])
    encoder = model.discriminator
    states, bias = [encoder.embed(embeddings, None)], encoder.attention_context(embeddings, None)
    for layer in encoder.layers:
        states.append(layer(states[-1], bias))
    last = states[-1]
    if getattr(model, "rtd_layer", None) is not None:
        last = model.rtd_layer(states[-2], bias)
    if getattr(model, "rtd_ffn", None) is not None:
        last = model.rtd_ffn(last)
    if hasattr(model.detection_head, "dense"):
        last = gelu(model.detection_head.dense(last))
    logits = last[0] @ model.detection_head.output.weight[0] + model.detection_head.output.bias
    return (1 - logits.sigmoid()).log()


@pytest.mark.parametrize("name", DETECTORS)
def test_detection_equals_a_loop_in_float64(name):
    loaded = detector(name)
    texts = sequences(loaded.dictionary, LENGTHS, NUM_WORDS)
    scorer = build_pair_scorer(loaded, 4096)
    assert isinstance(scorer, DetectionScorer)
    spread = torch.cat([naive_detection(loaded.model, tokens)[1:-1] for tokens in texts])
    assert float(spread.max() - spread.min()) > 0.1, "tokens have different scores"
    for tokens, values in zip(texts, scorer.log_probs(texts), strict=True):
        assert scorer.num_passes(tokens) == 1
        assert values[0] == values[-1] == 0
        expected = naive_detection(loaded.model, tokens)[1:-1]
        # Layers in float32, other sums with padding.
        torch.testing.assert_close(values[1:-1].double(), expected, rtol=1e-4, atol=1e-5)


REFUSED = {
    "its main network is not trained to detect replacements": ("electra", {"main_objective": "replace_mlm"}, {}),
    "it was trained at masked positions only": ("electra", {}, {"detection_positions": "masked"}),
    "its discriminator was not trained": ("electra", {}, {"discriminator_loss_weight": 0.0}),
    "it was trained without replaced token detection": ("teams_mws", {"rtd_loss_weight": 0.0}, {}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_variants_that_do_not_detect_are_refused(reason):
    name, settings, criterion = REFUSED[reason]
    model_class, config_class, own = DETECTORS[name]
    loaded = pretrained(model_class, config_class(**(SCORED_SIZES | own | settings)), NUM_WORDS, **criterion)
    with pytest.raises(UserError, match=f"tiny.pt has no score for minimal pairs: {reason}.*; give an electra"):
        build_pair_scorer(loaded, 4096)
    with pytest.raises(UserError, match=reason if name == "electra" else "gives no probability of a token"):
        build_token_scorer(loaded, 4096)


def test_sentences_that_are_read_alike_are_scored_once(runs, tmp_path, monkeypatch):
    """Two spaces between words are one for the tokenizer. The longest sentences come first, and each pair has its scores."""
    lines = []
    recorded = lambda *given: (lines.append(one) or one for one in score_lines(*given))  # noqa: E731
    monkeypatch.setattr(minimal_pairs, "score_lines", recorded)
    pairs = [("the fox  jumps", "the fox jumps"), ("the dog", "a lazy dog jumps"), ("the quick", "the  quick")]
    pairs += [("the dog", "a")]
    content = scored(tmp_path, load_checkpoint(runs["mlm"]), pairs, 20)
    assert content["overall"]["ties"] == 2
    lengths = [len(one.line.tokens) for one in lines]
    assert (len(lines), lengths) == (5, sorted(lengths, reverse=True))
    plls = {" ".join(one.line.text.split()): round(one.pll, 6) for one in lines}
    found = [(pair["good"], pair["bad"]) for pair in content["pairs"]]
    assert found == [tuple(plls[" ".join(text.split())] for text in pair) for pair in pairs]


def test_unknown_pieces_and_long_sentences(runs, tmp_path):
    loaded = load_checkpoint(runs["amos"])
    pairs = [("the fox", f"the {UNKNOWN}"), ("the fox", "the fox " * 100), ("a dog", "the dog"), ("a", "  "), ("", "a")]
    content = scored(tmp_path, loaded, pairs)
    assert [pair["line"] for pair in content["pairs"]] == [1, 3]
    assert content["pairs"][0]["bad"] < unknown_log_prob(len(UNKNOWN), len(loaded.dictionary))
    assert (content["setup"]["left_out"], content["overall"]["pairs"]) == (3, 2)
    with pytest.raises(UserError, match="no pair of sentences of 3 to 150 tokens"):
        scored(tmp_path, loaded, pairs[1:2])


def test_pairs_of_multiblimp_and_tables_of_blimp(tmp_path, capsys):
    """Their columns, without a phenomenon in the second row; rows with other columns and a second header are counted."""
    (tmp_path / "deu.tsv").write_text(
        "sen\twrong_sen\tphenomenon\na b\ta c\tSV-#\nd e\tf e\t\nx\nsen\twrong_sen\tphenomenon\n"
    )
    found = [(pair.line, pair.good, pair.bad, pair.uid, pair.term) for pair in read_pairs(tmp_path / "deu.tsv")]
    assert found == [(2, "a b", "a c", "SV-#", "-"), (3, "d e", "f e", "deu", "-")]
    assert "deu.tsv: 2 pairs; left out: 2 with another number of columns" in capsys.readouterr().err
    (tmp_path / "b.csv").write_text('UID,linguistics_term,sentence_bad,sentence_good\nu,t,"a, c",b\n')
    assert [(pair.good, pair.bad, pair.uid, pair.term) for pair in read_pairs(tmp_path / "b.csv")] == [
        ("b", "a, c", "u", "t")
    ]


def test_example_writes_minimal_and_balanced_pairs(tmp_path):
    """Two words differ, and each of them is right as often as it is wrong."""
    file = tmp_path / "pairs.jsonl"
    done = run_process([sys.executable, ROOT / "examples" / "minimal_pairs" / "agreement.py", file])
    assert (done.returncode, done.stdout) == (0, f"1000 pairs: {file}\n")
    pairs = read_pairs(file)
    assert len({(pair.good, pair.bad) for pair in pairs}) == 1000
    balance: dict[str, Counter] = {}
    for pair in pairs:
        ((right, wrong),) = [one for one in zip(pair.good.split(), pair.bad.split(), strict=True) if one[0] != one[1]]
        balance.setdefault(pair.uid, Counter()).update({(right, wrong): 1, (wrong, right): -1})
    assert len(balance) == 10
    assert not [uid for uid, counts in balance.items() if any(counts.values())]
