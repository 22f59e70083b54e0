"""``amos_fairseq.load``: batches, pairs, pooling and dtype against one text at a time; truncation and errors."""

import copy
import multiprocessing
import pickle

import numpy as np
import pytest
import torch
from saved_models import change_checkpoint, write_run

import amos_fairseq
from amos_fairseq.checkpoints.encoder import Encoder
from amos_fairseq.errors import UserError

TEXTS = [
    "the lazy dog jumps over the fox",
    "the end",
    "a quick brown fox and a lazy dog jumps over the end of the brown dog",
    "dog",
    ("the quick fox", "over the lazy dog"),
    "the fox\nthe dog",
    "over",
]
# Batches of other sizes take other ways through the matrix products: some roundings of float32 at states of about 1.
ROUNDING = {"atol": 1e-5, "rtol": 0}


@pytest.fixture(scope="module")
def save_dir(tmp_path_factory):
    """A SAVE_DIR with a pretraining checkpoint, a fine-tuned one of the same encoder, and one with token types."""
    directory = tmp_path_factory.mktemp("run")
    write_run(directory, max_positions=80)
    state = torch.load(directory / "checkpoint_last.pt", weights_only=True)
    weights = {n: t for n, t in state["model"].items() if n.startswith(("embed_tokens", "discriminator"))}
    encoder = {name.replace("discriminator.", "encoder."): tensor for name, tensor in weights.items()}
    shapes = {"dense.weight": (16, 16), "dense.bias": (16,), "output.weight": (3, 16), "output.bias": (3,)}
    head = "classification_heads.sentence_classification_head"
    classifier = {f"{head}.{name}": torch.randn(shape) for name, shape in shapes.items()}
    change_checkpoint(directory, "fine_tuned.pt", model=encoder | classifier)
    settings = {"model": state["cfg"]["model"] | {"token_types": 2}, "task": {"_name": "sentence_prediction"}}
    types = {"encoder.embed_token_types.weight": torch.randn(2, 16)}
    change_checkpoint(directory, "typed.pt", model=encoder | classifier | types, cfg=settings)
    types = {f"{name}.embed_token_types.weight": torch.randn(2, 16) for name in ("discriminator", "generators.0")}
    change_checkpoint(directory, "typed_pretraining.pt", model=state["model"] | types, cfg=settings)
    return directory


@pytest.fixture(scope="module")
def encoder(save_dir):
    return amos_fairseq.load(save_dir, batch_size=3)


def symbols(encoder: Encoder, row: torch.Tensor) -> str:
    """Tokens as text, the tokenizer's word mark as an underscore."""
    return " ".join(encoder.loaded.dictionary[token] for token in row.tolist()).replace("\u2581", "_")


def test_batched_texts_equal_single_texts(encoder, packings):
    """Three batches by length, returned in the given order; padding is zero, and nothing is computed there."""
    one_batch = encoder(TEXTS[:3])
    assert [len(packing.slots) for packing in packings] == [int(one_batch.mask.sum())]
    every = encoder(TEXTS)
    alone = [encoder([text]) for text in TEXTS]
    lengths = [one.tokens.size(1) for one in alone]
    assert len(set(lengths)) > 3
    assert every.mask.sum(1).tolist() == lengths
    assert every.states.shape == (7, max(lengths), 16)
    assert repr(every) == f"Features(7x{max(lengths)}x16, torch.float32, cpu)"
    for row, one in enumerate(alone):
        assert one.mask.all()
        assert every.mask[row, : lengths[row]].all()
        assert torch.equal(every.tokens[row, : lengths[row]], one.tokens[0])
        torch.testing.assert_close(every.states[row, : lengths[row]], one.states[0], **ROUNDING)
    assert every.tokens[~every.mask].unique().tolist() == [encoder.loaded.dictionary.pad()]
    assert every.states[~every.mask].abs().max() == 0


def test_pair_is_two_texts_in_one_sequence(encoder):
    """``<s> A </s> B </s>``; a line break inside a text of a pair is a space, as two sequences are all there are."""
    pair = symbols(encoder, encoder([("the dog", "the\nfox")]).tokens[0])
    first, second = encoder("the dog").tokens[0], encoder("the fox").tokens[0]
    assert pair == f"{symbols(encoder, first)} {symbols(encoder, second[1:])}"
    assert torch.equal(encoder([["the dog", "the fox"]]).tokens, encoder([("the dog", "the fox")]).tokens)


def test_features_of_a_fine_tuned_checkpoint_are_those_of_its_encoder(save_dir, encoder):
    fine_tuned = amos_fairseq.load(save_dir / "fine_tuned.pt")
    lines = [text for text in TEXTS if "\n" not in text]
    torch.testing.assert_close(fine_tuned(lines).states, encoder(lines).states, **ROUNDING)
    # It was trained on one line of text.
    assert torch.equal(fine_tuned("the dog\nthe fox").tokens, fine_tuned("the dog the fox").tokens)


def test_token_types_of_a_pair(save_dir):
    """By separators, as in fine-tuning; the lines of one text are one sequence."""
    typed = amos_fairseq.load(save_dir / "typed.pt")
    pair = typed([("the dog", "the fox"), ("a fox", "over the lazy dog")])
    expected = typed.model.extract_features(pair.tokens).detach()
    torch.testing.assert_close(pair.states[pair.mask], expected[pair.mask], **ROUNDING)
    pretraining = amos_fairseq.load(save_dir / "typed_pretraining.pt")
    table = pretraining.model.encoder.embed_token_types.weight
    lines = pretraining("the dog\nthe fox")
    torch.testing.assert_close(lines.states, pretraining.model.extract_features(lines.tokens).detach(), **ROUNDING)
    before = pretraining([("the dog", "the fox")]).states
    with torch.no_grad():
        table[1] = table[0]
    after = pretraining([("the dog", "the fox")]).states
    torch.testing.assert_close(after, lines.states, **ROUNDING)  # the same tokens, and now the same types
    assert (before - after).abs().max() > 0.01


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_states_of_a_layer(save_dir, encoder, layer):
    """One of ``all_layers``, in batches of texts that differ in length; the layers above it are not computed."""
    every = encoder(TEXTS, all_layers=True)
    assert encoder(TEXTS).layers is None
    assert len(every.layers) == 3
    assert torch.equal(every.layers[2], every.states)
    of_layer = amos_fairseq.load(save_dir, batch_size=3, layer=layer)
    called = []
    for number, module in enumerate(of_layer.model.encoder.layers, start=1):
        module.register_forward_hook(lambda *_, number=number: called.append(number))
    found = of_layer(TEXTS, all_layers=True)
    assert set(called) == set(range(1, layer + 1))
    assert torch.equal(found.states, every.layers[layer])
    assert len(found.layers) == layer + 1
    assert found.layers[0][~found.mask].abs().sum() == 0


def test_pooling_ignores_padding(encoder):
    features = encoder(TEXTS)
    noisy = features._replace(states=features.states + 7.0 * ~features.mask[..., None])
    expected = torch.stack([states[mask].mean(0) for states, mask in zip(features.states, features.mask, strict=True)])
    torch.testing.assert_close(noisy.pooled(), expected, **ROUNDING)
    assert torch.equal(noisy.pooled("first"), features.states[:, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_float32(save_dir, encoder, dtype):
    """Two layers with states of about 1: bfloat16 rounds to 8 bits, float16 to 11. Both run on a CPU."""
    half = amos_fairseq.load(save_dir, dtype=dtype)
    features = half(TEXTS)
    assert features.states.dtype == features.pooled().dtype == dtype
    expected = encoder(TEXTS)
    difference = (features.states.float() - expected.states).abs().max()
    assert 0 < difference < (0.2 if dtype == torch.bfloat16 else 0.03)
    moved = amos_fairseq.load(save_dir).to(dtype)
    torch.testing.assert_close(moved(TEXTS).states, features.states, rtol=0, atol=0)


def test_gradients_only_while_training(save_dir, tmp_path):
    """Also of an encoder that was frozen in a training before, and of ModernBERT's, whose layers are normalized when read."""
    frozen = write_run(tmp_path / "frozen", "electra", classes=2, freeze_encoder=True)
    for run in (save_dir, frozen, write_run(tmp_path / "modern", "mlm", encoder="modernbert")):
        encoder = amos_fairseq.load(run)
        assert not encoder("the end").states.requires_grad
        states = encoder.train()(["the end", "the lazy dog"]).states
        states.sum().backward()
        assert encoder.model.embed_tokens.weight.grad.abs().sum() > 0


def test_a_pickled_encoder_is_a_path_and_settings(save_dir, tmp_path, monkeypatch):
    """In a new process, in another folder; a copy in this one has the weights as they are now."""
    monkeypatch.chdir(save_dir.parent)
    encoder = amos_fairseq.load(save_dir.name, dtype=torch.bfloat16, batch_size=3, layer=1)
    pickled = pickle.dumps(encoder)
    assert len(pickled) < 1000
    monkeypatch.chdir(tmp_path)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        states, *settings = pool.apply(features_elsewhere, [pickled])
    assert torch.equal(torch.tensor(states), encoder("hello world").states.float())
    assert settings == [3, 1, False]
    torch.nn.init.zeros_(next(encoder.parameters()))
    assert not next(copy.deepcopy(encoder).parameters()).any()


def features_elsewhere(pickled):
    encoder = pickle.loads(pickled)
    return encoder("hello world").states.float().tolist(), encoder.batch_size, encoder.layer, encoder.training


def test_length_limit(encoder):
    """80 tokens: refused, or truncated to the first tokens and ``</s>``."""
    long, short = "the end " * 60, "the lazy dog"
    whole = encoder.loaded.tokens(long)
    eos = encoder.loaded.dictionary.eos()
    with pytest.raises(UserError, match=rf"text 2 has {len(whole)} tokens, the encoder takes 80: .*truncate=True"):
        encoder([short, long])
    single = encoder([long], truncate=True).tokens[0]
    assert single.tolist() == [*whole[:79].tolist(), eos]
    assert torch.equal(encoder([short], truncate=True).tokens, encoder([short]).tokens)
    pair = encoder([(short, long)], truncate=True).tokens[0].tolist()
    first = encoder.loaded.tokens(short).tolist()
    assert len(pair) == 80
    assert pair == [*first, *whole[1 : 80 - len(first)].tolist(), eos]
    assert len(encoder([(long, long)], truncate=True).tokens[0]) == 80


def test_settings_that_are_refused(save_dir):
    for arguments, named in (
        ({"device": "cuda:99"}, "device cuda:99 cannot be used"),
        ({"device": "abacus"}, "device abacus cannot be used"),
        ({"dtype": "bfloat16"}, "device cpu, dtype 'bfloat16' cannot be used"),
        ({"dtype": torch.int8}, "device cpu, dtype torch.int8 cannot be used"),
        ({"batch_size": 0}, "batch_size 0: give an int >= 1"),
        ({"layer": 3}, "layer 3 is no layer of this encoder: give a number from 0 to 2"),
        ({"layer": "mix"}, "layer mix is no layer"),
    ):
        with pytest.raises(UserError, match=named):
            amos_fairseq.load(save_dir, **arguments)


def test_what_is_no_text(encoder):
    """The keys of a dictionary would be read in place of its texts."""
    for texts, named in (
        ({"a": "the dog"}, r"text 1: .* got {'a': 'the dog'}"),
        ({"the dog"}, r"text 1: .* got {'the dog'}"),
        (np.array([["the", "dog", "fox"]]), r"text 1: .* got array\("),
        (["the", 3], "text 2: .* got 3"),
    ):
        with pytest.raises(UserError, match=named):
            encoder(texts)
