"""Views of a part of a sentence: what they see, against independent encoders; words that are removed; the divergence of two
predictions."""

import math
from pathlib import Path

import pytest
import torch
from hugging_face_folders import TOLERANCE
from saved_models import write_run
from small_models import ENCODER_SETTINGS, encoder_config, fine_tuning_task
from transformers import BertModel

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.cli.main import main
from amos_fairseq.downstream.words.model import TREES, ParsingModel, WordModel
from amos_fairseq.downstream.words.views import (
    REMOVED,
    WordPlaces,
    directed_states,
    predict_views,
    remove_words,
    summed_divergence,
)
from amos_fairseq.experiments import PARSING_VIEWS, TAGGING_VIEWS
from amos_fairseq.functional.attention import reference_attention
from amos_fairseq.models.electra import ElectraConfig, ElectraModel
from amos_fairseq.modules.encoder import one_sided

MASK = 44
MODERN = {"encoder": "modernbert", "local_attention": 4, "global_attention_every": 2, "embedding_dim": 0}
T5 = {"relative_position_scheme": "t5"}
ENCODERS = {"none": {}, "t5": T5, "modernbert": MODERN, "reference": T5 | {"kernels": "reference"}}
# <s>, words of 1, 3, 2 and 1 pieces, a piece of no word, </s>; and a sentence of two words.
TOKENS = torch.tensor([[0, 5, 6, 7, 8, 9, 10, 11, 12, 2], [0, 20, 21, 22, 2, 1, 1, 1, 1, 1]])
LENGTHS = [10, 5]
WORDS = WordPlaces(torch.tensor([[1, 2, 5, 7], [1, 3, 0, 0]]), torch.tensor([[1, 4, 6, 7], [2, 3, 0, 0]]))


def fine_tuned(views: tuple[str, ...], layers: str = "all", **settings) -> WordModel:
    torch.manual_seed(0)
    of_trees = "forward-forward" in views
    task = fine_tuning_task(ParsingModel if of_trees else WordModel)
    model = ElectraModel.build_model(ElectraConfig(**(ENCODER_SETTINGS | settings)), task)
    model.register_word_head(*((TREES, 2) if of_trees else ("upos_labels", 3)))
    model.register_cross_views(views, MASK)
    if layers == "all":
        model.cross_views.num_layers = len(model.encoder.layers)
    return model


def views_of(model: WordModel, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    (views,) = predict_views(model, tokens, LENGTHS, *WORDS)[1].values()
    return views


def seen(view: str, word: int, row: int = 0) -> set[int]:
    """The tokens that a view of a word may depend on, from its definition; ``<s>`` and ``</s>`` belong to their side."""
    count = int(WORDS.is_word[row].sum())
    first, last = WORDS.first[row].tolist(), WORDS.last[row].tolist()
    if view == "forward":
        return set(range(last[word] + 1))
    if view == "backward":
        return set(range(first[word], LENGTHS[row]))
    if view == "future":
        return set(range(last[word - 1] + 1)) if word else set()
    return set(range(first[word + 1], LENGTHS[row])) if word + 1 < count else set()


@pytest.mark.parametrize("layers", ["half", "all"])
@pytest.mark.parametrize("encoder", ENCODERS)
def test_a_view_depends_on_what_it_sees_alone(encoder: str, layers: str) -> None:
    """The gradient of a view's logits for a word is 0 at each hidden token, and not at all of the others; other hidden tokens
    leave the bits of the logits as they are."""
    model = fine_tuned(TAGGING_VIEWS, layers, **ENCODERS[encoder]).eval()
    caught = []

    def catch(module, inputs, output):
        if output.requires_grad:  # not for the fixed prediction
            output.retain_grad()
            caught.append(output)

    model.embed_tokens.register_forward_hook(catch)
    with torch.enable_grad():
        views = views_of(model, TOKENS)
    embeddings = caught[-1]  # of both directions, after those of the view of everything
    weights = torch.randn(3, generator=torch.Generator().manual_seed(2))
    for view in ("forward", "backward", "future", "past"):
        for row, words in enumerate(([0, 1, 2, 3], [0, 1])):
            for word in words:
                visible = seen(view, word, row)
                embeddings.grad = None
                (views[view][row, word] @ weights).backward(retain_graph=True)
                reached = set()
                if embeddings.grad is not None:
                    reached = set(embeddings.grad[row].any(-1).nonzero().flatten().tolist())
                assert reached <= visible, (view, word)
                assert bool(reached) == bool(visible)
                if encoder != "modernbert":  # whose local layers see no more than two tokens to a side
                    assert reached == visible, (view, word)
                changed = TOKENS.clone()
                hidden = sorted(set(range(LENGTHS[row])) - visible)
                changed[row, hidden] = 43
                with torch.no_grad():
                    other = views_of(model, changed)
                assert torch.equal(other[view][row, word], views[view][row, word]), (view, word)


def test_views_of_edges_combine_two_sides() -> None:
    """The score of an edge by forward-backward: the head from the left, the dependent from the right."""
    model = fine_tuned(PARSING_VIEWS).eval()
    with torch.no_grad():
        before = views_of(model, TOKENS)
        after = views_of(model, TOKENS.index_put((torch.tensor(0), torch.tensor(7)), torch.tensor(43)))  # the last word
    # The first word as a head of the second: from the left it does not see the last word, from the right the second does.
    edges = {view: (before[view][0, 1, 1], after[view][0, 1, 1]) for view in PARSING_VIEWS}
    unchanged = {view for view, (one, other) in edges.items() if torch.equal(one, other)}
    assert unchanged == {"forward-forward"}
    # The last word as a head of the second, from both sides.
    assert all(not torch.equal(before[view][0, 1, 4], after[view][0, 1, 4]) for view in PARSING_VIEWS)


@torch.no_grad()
def test_the_past_is_that_of_the_exported_encoder_as_a_decoder(tmp_path: Path) -> None:
    """``BertModel(is_decoder=True)`` of an encoder without relative positions: it sees what precedes a token."""
    write_run(tmp_path / "run", "mlm", labels=3, relative_position_scheme="none", encoder_layers=2)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "folder"), "--part", "encoder"]) == 0
    decoder = BertModel.from_pretrained(tmp_path / "folder", is_decoder=True, add_pooling_layer=False)
    model = load_checkpoint(tmp_path / "run").model
    model.register_cross_views(("forward",), MASK)
    model.cross_views.num_layers = 2
    tokens, mask = TOKENS.clamp(max=30), torch.arange(10) < torch.tensor(LENGTHS)[:, None]
    expected = decoder.eval()(tokens, attention_mask=mask.long()).last_hidden_state[mask]
    found = directed_states(model.eval(), tokens, LENGTHS)["past"][mask]
    assert (found - expected).abs().max() < TOLERANCE * expected.abs().max()


@torch.no_grad()
def test_a_piece_of_two_words_is_seen_by_neither_neighbour() -> None:
    """Words of the pieces 1 and 2, 2 and 3, and 4: the shared piece 2 changes no view of the first two from beside them."""
    model = fine_tuned(("forward", "future", "past")).eval()
    words = WordPlaces(torch.tensor([[1, 2, 4]]), torch.tensor([[2, 3, 4]]))
    tokens = torch.tensor([[0, 5, 6, 7, 8, 2]])
    found = []
    for piece in (6, 43):
        tokens[0, 2] = piece
        (views,) = predict_views(model, tokens, [6], *words)[1].values()
        found.append(views)
    before, after = found
    same = {view: [torch.equal(*pair) for pair in zip(before[view][0], after[view][0], strict=True)] for view in before}
    assert same == {"forward": [False] * 3, "future": [True, True, False], "past": [True] * 3}


@torch.no_grad()
@pytest.mark.parametrize("side", ["past", "future"])
def test_relative_positions_stay_and_a_mask_is_added(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With t5 positions: the same encoder with a dense mask, given to every layer by hand."""
    encoder = encoder_config(position_scheme="t5", num_layers=2, kernels="reference").build().eval()
    embeddings = torch.randn(2, 7, 8)
    found = one_sided(encoder, side, 2)(embeddings)[-1]
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    hidden = hidden if side == "past" else hidden.T

    def masked(heads, bias, dropout):
        own = bias.learned + torch.zeros(7, 7).masked_fill(hidden, -1e9)
        return reference_attention(heads, bias._replace(learned=own), dropout)

    for layer in encoder.layers:
        monkeypatch.setattr(layer.attention, "attend", masked)
    torch.testing.assert_close(found, encoder(embeddings)[-1])


def test_removed_words_are_removed_whole() -> None:
    """All pieces of some words, a tenth of them, and nothing else; 4 standard deviations."""
    tokens, words = TOKENS.repeat(500, 1), WordPlaces(WORDS.first.repeat(500, 1), WORDS.last.repeat(500, 1))
    torch.manual_seed(1)
    kept = remove_words(tokens, words, MASK)
    removed = 0
    for row in range(len(tokens)):
        expected = tokens[row].clone()
        for word in range(int(words.is_word[row].sum())):
            first, last = int(words.first[row, word]), int(words.last[row, word])
            if kept[row, first] == MASK:
                expected[first : last + 1] = MASK
                removed += 1
        assert torch.equal(kept[row], expected)
    count = 500 * 6
    assert abs(removed - REMOVED * count) < 4 * (REMOVED * (1 - REMOVED) * count) ** 0.5


def test_the_divergence_of_two_words_by_hand() -> None:
    """p = (3/4, 1/4) and q = (1/2, 1/2): 3/4 ln 3/2 + 1/4 ln 1/2. The second word is predicted alike; a third slot is
    padded."""
    fixed = torch.tensor([[[math.log(3), 0.0], [5.0, 5.0], [9.0, 0.0]]])
    scores = torch.tensor([[[1.0, 1.0], [-2.0, -2.0], [0.0, 9.0]]])
    found = summed_divergence(fixed, scores, torch.tensor([[True, True, False]]))
    assert float(found) == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel=1e-6)


def test_the_divergence_is_that_of_a_loop_in_float64() -> None:
    """Edges of trees: classes in two dimensions, some of them excluded on both sides; the gradient reaches q alone."""
    generator = torch.Generator().manual_seed(1)
    fixed, scores = (torch.randn(2, 3, 4, 2, generator=generator).requires_grad_() for _ in range(2))
    is_word = torch.tensor([[True, True, True], [True, False, False]])
    excluded = torch.zeros(2, 3, 4, 1, dtype=torch.bool)
    excluded[:, :, 3], excluded[0, 1, 2] = True, True
    total = summed_divergence(*(own.masked_fill(excluded, -math.inf) for own in (fixed, scores)), is_word)
    expected = 0.0
    for row, word in is_word.nonzero().tolist():
        kept = [candidate for candidate in range(4) if not excluded[row, word, candidate]]
        p, q = (own[row, word, kept].double().flatten().softmax(0) for own in (fixed, scores))
        expected += sum(float(a * (a / b).log()) for a, b in zip(p, q, strict=True))
    assert float(total.detach()) == pytest.approx(expected, rel=1e-5)  # float32 sums of 4 words
    total.backward()
    assert fixed.grad is None
    assert scores.grad.isfinite().all()
    # d KL / d scores = q - p, 0 at padded slots and excluded classes.
    own = [fixed.detach().masked_fill(excluded, -math.inf), scores.detach().masked_fill(excluded, -math.inf)]
    p, q = (one.flatten(2).softmax(-1).view_as(one) for one in own)
    torch.testing.assert_close(scores.grad, (q - p) * is_word[..., None, None])
