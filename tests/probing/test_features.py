"""Stored features against the inputs and outputs of the layers in the model's own forward pass."""

from pathlib import Path

import pytest
import torch
from failures import full_disk
from saved_models import write_run
from torch import Tensor, nn

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.errors import UserError
from amos_fairseq.probing import features
from amos_fairseq.probing.features import PIECES, ProbedPart, encode_split, parts_of, stored_features
from amos_fairseq.probing.tasks import AnnotatedText

TEXTS = ["the quick brown fox", "a lazy dog", "jumps over the end of the brown dog and the fox", "the"]
EXAMPLES = [AnnotatedText(text.split(), []) for text in TEXTS]
# float32: batches of other shapes sum in another order.
ROUNDING = {"rtol": 1e-4, "atol": 1e-5}


def outputs_of(layer: nn.Module, forward, tokens: Tensor) -> Tensor:
    """What a layer returns while ``forward`` runs on tokens [T]: [T,D]."""
    seen = []
    handle = layer.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.no_grad():
        forward(tokens[None])
    handle.remove()
    return seen[0][0]


def modules_of(model: nn.Module, objective: str) -> dict[str, nn.ModuleList]:
    """The lists of layers of a model by part, named here a second time."""
    if objective in ("mlm", "fine-tuned"):
        return {"encoder": (model.transformer if objective == "mlm" else model.encoder).layers}
    generators = {
        "amos": lambda: {"generator": model.generators[0].layers},
        "separate": lambda: {f"generator_{number}": model.generators[number - 1].layers for number in (1, 2)},
        "electric": dict,
    }.get(objective, lambda: {"generator": model.generator.layers})
    return generators() | {"discriminator": model.discriminator.layers}


def test_nothing_is_computed_at_padding(tmp_path, packings):
    """Four texts of different lengths in one batch."""
    loaded = load_checkpoint(write_run(tmp_path / "run", "mlm"))
    encoded = encode_split(loaded, EXAMPLES)
    part = parts_of(loaded.model)["encoder"]
    with stored_features(tmp_path / "x", part, [1], {"train": encoded}, loaded.dictionary.pad(), "cpu", "x"):
        pass
    assert [len(packing.slots) for packing in packings] == [encoded.num_pieces + 2 * len(TEXTS)]


SEPARATE = {"separate_generators": True, "generator_depths": "1,2"}
SETTINGS = {"separate": ("amos", SEPARATE), "fine-tuned": ("electra", {"classes": 2})}


@pytest.mark.parametrize("objective", ["amos", "separate", "electra", "teams", "mlm", "electric", "fine-tuned"])
def test_features_are_the_states_of_a_forward_pass(objective: str, tmp_path: Path):
    name, settings = SETTINGS.get(objective, (objective, {}))
    loaded = load_checkpoint(write_run(tmp_path / "run", name, **settings))
    parts, pad = parts_of(loaded.model), loaded.dictionary.pad()
    encoded = {"train": encode_split(loaded, EXAMPLES)}
    modules = modules_of(loaded.model, objective)
    assert modules.keys() <= parts.keys()
    for part_name, layers in modules.items():
        part = parts[part_name]
        wanted = [*range(1, len(layers) + 1), PIECES]
        with stored_features(tmp_path / part_name, part, wanted, encoded, pad, "cpu", part_name) as features_of:
            stored = {layer: states.clone() for layer, states in features_of["train"].items()}
        assert not (tmp_path / part_name).exists()
        encoder = part.layers[1][0]
        for text in TEXTS[:2]:  # one text at a time: no padding
            tokens = loaded.tokens(text)
            forward = lambda ids: encoder(part.embed_tokens(ids))  # noqa: B023, E731
            start = 0 if text == TEXTS[0] else len(loaded.tokens(TEXTS[0])) - 2
            rows = slice(start, start + len(tokens) - 2)
            for number, layer in enumerate(layers, start=1):
                expected = outputs_of(layer, forward, tokens)[1:-1]
                torch.testing.assert_close(stored[number][rows].float(), expected, **ROUNDING)
            torch.testing.assert_close(stored[PIECES][rows].float(), part.embed_tokens.weight[tokens[1:-1]], **ROUNDING)


def test_batches_and_padding_do_not_change_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    loaded = load_checkpoint(write_run(tmp_path / "run"))
    part, encoded = parts_of(loaded.model)["generator"], {"train": encode_split(loaded, EXAMPLES)}
    stored = []
    for size in (1, 30, 8192):
        monkeypatch.setattr(features, "TOKENS_PER_BATCH", size)
        with stored_features(tmp_path / "x", part, [0, 4], encoded, loaded.dictionary.pad(), "cpu", "x") as found:
            stored.append({layer: states.clone() for layer, states in found["train"].items()})
    for other in stored[1:]:
        for layer in (0, 4):
            torch.testing.assert_close(other[layer], stored[0][layer], **ROUNDING)


def test_words_beyond_the_maximum_length_have_no_features(tmp_path: Path):
    loaded = load_checkpoint(write_run(tmp_path, max_positions=10))
    encoded = encode_split(loaded, EXAMPLES)
    assert [len(sentence) <= 10 for sentence in encoded.sentences] == [True] * 4
    read = [word is not None for word in encoded.word_pieces[2]]
    assert (read[0], read[-1]) == (True, False)
    assert read == sorted(read, reverse=True)
    assert encoded.num_pieces == sum(len(sentence) - 2 for sentence in encoded.sentences)


def test_features_that_find_no_room_are_one_line(tmp_path: Path):
    """Before they are written: later the process would end by SIGBUS."""
    loaded = load_checkpoint(write_run(tmp_path / "run"))
    part, encoded = parts_of(loaded.model)["generator"], {"train": encode_split(loaded, EXAMPLES)}
    found = stored_features(tmp_path / "out" / "x", part, [1], encoded, loaded.dictionary.pad(), "cpu", "x")
    with full_disk(1000), pytest.raises(UserError, match=r"features of x cannot be written .*File too large"), found:
        pass
    assert list((tmp_path / "out").iterdir()) == []


def test_states_that_are_not_finite_are_refused(tmp_path: Path):
    loaded = load_checkpoint(write_run(tmp_path / "run"))
    part: ProbedPart = parts_of(loaded.model)["generator"]
    part.layers[1][0].layers[0].ffn_norm.weight.data.fill_(float("inf"))
    encoded = {"train": encode_split(loaded, EXAMPLES)}
    found = stored_features(tmp_path / "features", part, [1], encoded, loaded.dictionary.pad(), "cpu", "x")
    with pytest.raises(UserError, match="layer 1, are not finite"), found:
        pass
    assert not (tmp_path / "features").exists()
