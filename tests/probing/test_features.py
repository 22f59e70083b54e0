"""Stored features against the inputs and outputs of the layers in the model's own forward pass."""

from pathlib import Path

import pytest
import torch
from failures import full_disk
from saved_models import write_run
from torch import Tensor, nn

from amos_fairseq.checkpoints.read import LoadedCheckpoint, load_checkpoint
from amos_fairseq.errors import UserError
from amos_fairseq.probing import features
from amos_fairseq.probing.features import encode_split, parts_of, stored_features
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
        "electric": dict,
    }.get(objective, lambda: {"generator": model.generator.layers})
    return generators() | {"discriminator": model.discriminator.layers}


def features_of(folder: Path, loaded: LoadedCheckpoint, part: str, layers: list[int]):
    """A context with the states of all texts, by split and layer."""
    encoded = {"train": encode_split(loaded, EXAMPLES)}
    return stored_features(folder, parts_of(loaded.model)[part], layers, encoded, loaded.dictionary.pad(), "cpu")


def test_nothing_is_computed_at_padding(tmp_path, packings):
    """Four texts of different lengths in one batch."""
    loaded = load_checkpoint(write_run(tmp_path / "run", "mlm"))
    with features_of(tmp_path / "x", loaded, "encoder", [1]):
        pass
    assert [len(packing.slots) for packing in packings] == [sum(len(loaded.tokens(text)) for text in TEXTS)]


def test_separate_generators_have_the_last_layer_of_each(tmp_path: Path):
    loaded = load_checkpoint(write_run(tmp_path / "run", separate_generators=True, generator_depths="1,2"))
    with features_of(tmp_path / "features", loaded, "generator", [1, 2]) as stored:
        for depth, generator in zip((1, 2), loaded.model.generators, strict=True):
            forward = lambda ids: generator(loaded.model.embed_tokens(ids))  # noqa: B023, E731
            texts = [outputs_of(generator.layers[-1], forward, loaded.tokens(text))[1:-1] for text in TEXTS]
            assert len(generator.layers) == depth
            torch.testing.assert_close(stored["train"][depth], torch.cat(texts), **ROUNDING)


@pytest.mark.parametrize("objective", ["amos", "electra", "teams", "mlm", "electric", "fine-tuned"])
def test_features_are_the_states_of_a_forward_pass(objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two batches, the texts of one of them padded, against one text at a time."""
    monkeypatch.setattr(features, "TOKENS_PER_BATCH", 40)
    name, settings = ("electra", {"classes": 2}) if objective == "fine-tuned" else (objective, {})
    loaded = load_checkpoint(write_run(tmp_path / "run", name, **settings))
    parts, modules = parts_of(loaded.model), modules_of(loaded.model, objective)
    assert modules.keys() <= parts.keys()
    for part_name, layers in modules.items():
        part, wanted = parts[part_name], list(range(len(layers) + 1))
        with features_of(tmp_path / part_name, loaded, part_name, wanted) as found:
            stored = {layer: states.clone() for layer, states in found["train"].items()}
        assert not (tmp_path / part_name).exists()
        encoder, start = part.layers[1][0], 0
        for text in TEXTS:
            tokens = loaded.tokens(text)
            forward = lambda ids: encoder(part.embed_tokens(ids))  # noqa: B023, E731
            rows = slice(start, start + len(tokens) - 2)
            start = rows.stop
            expected = {number: outputs_of(layer, forward, tokens) for number, layer in enumerate(layers, start=1)}
            expected[0] = encoder.embed(part.embed_tokens(tokens[None]), None)[0]
            for layer, states in expected.items():
                torch.testing.assert_close(stored[layer][rows], states[1:-1], **ROUNDING)


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
    found = features_of(tmp_path / "out" / "x", loaded, "generator", [1])
    with (
        full_disk(1000),
        pytest.raises(UserError, match=r"features of generator cannot be written .*File too large"),
        found,
    ):
        pass
    assert list((tmp_path / "out").iterdir()) == []


def test_states_that_are_not_finite_are_refused(tmp_path: Path):
    loaded = load_checkpoint(write_run(tmp_path / "run"))
    parts_of(loaded.model)["generator"].layers[1][0].layers[0].ffn_norm.weight.data.fill_(float("inf"))
    found = features_of(tmp_path / "features", loaded, "generator", [1])
    with pytest.raises(UserError, match="layer 1, are not finite"), found:
        pass
    assert not (tmp_path / "features").exists()
