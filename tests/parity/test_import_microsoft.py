"""The AMOS authors' checkpoint: a file with its names and its tokenizer, written here, through ``amos import --from``.

The released file itself is not available. The encoder is compared with a second computation, written from the names.
"""

import argparse
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import sentencepiece
import torch
from fairseq.models import build_model
from omegaconf import DictConfig, OmegaConf
from tokenizer_text import SPLIT_LINES, train_bpe
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

from amos_fairseq.checkpoints.read import load_checkpoint, read_state
from amos_fairseq.cli.main import main
from amos_fairseq.errors import UserError
from amos_fairseq.hugging_face.import_released import import_release, read_release
from amos_fairseq.models.pretraining import PretrainingBatch

WIDTH, FFN, HEADS, LAYERS, GENERATOR_LAYERS, POSITIONS, BUCKETS = 12, 20, 3, 3, 4, 150, 64
TEXT = "The fox isn't (too) lazy, it\u2019s quick \u2014 and the dog\u2026"


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("vocabulary")
    (directory / "sp.model").write_bytes(train_bpe(SPLIT_LINES, 90))
    processor = sentencepiece.SentencePieceProcessor(model_file=str(directory / "sp.model"))
    pieces = [processor.id_to_piece(i) for i in range(1, len(processor))]
    (directory / "dict.txt").write_text("".join(f"{piece} 7\n" for piece in pieces), encoding="utf-8")
    return directory


def released_weights(num_tokens: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    weights = {}
    embedding = random(num_tokens, WIDTH)
    for side, layers in (("encoder", LAYERS), ("auxiliary", GENERATOR_LAYERS)):
        stem = f"{side}.sentence_encoder"
        weights[f"{stem}.embed_tokens.weight"] = embedding
        weights[f"{stem}.embed_positions.weight"] = random(POSITIONS, WIDTH)
        weights[f"{stem}.relative_attention_bias.weight"] = random(BUCKETS, HEADS)
        shapes = {f"{stem}.emb_layer_norm": (WIDTH,)}
        for n in range(layers):
            layer = f"{stem}.layers.{n}"
            shapes |= {f"{layer}.self_attn.in_proj": (3 * WIDTH, WIDTH), f"{layer}.self_attn.out_proj": (WIDTH, WIDTH)}
            shapes |= {f"{layer}.self_attn_layer_norm": (WIDTH,), f"{layer}.final_layer_norm": (WIDTH,)}
            shapes |= {f"{layer}.fc1": (FFN, WIDTH), f"{layer}.fc2": (WIDTH, FFN)}
        for name, shape in shapes.items():
            weights[f"{name}.weight"], weights[f"{name}.bias"] = random(*shape) + (len(shape) == 1), random(shape[0])
    head = {"out_proj.weight": random(1, WIDTH), "out_proj.bias": random(1)}
    weights |= {f"encoder.binary_head.{name}": tensor for name, tensor in head.items()}
    mlm = {"weight": embedding, "bias": random(num_tokens), "layer_mixture.weight": random(1, WIDTH)}
    mlm |= {"dense.weight": random(WIDTH, WIDTH), "dense.bias": random(WIDTH)}
    mlm |= {"layer_norm.weight": 1 + random(WIDTH), "layer_norm.bias": random(WIDTH)}
    return weights | {f"auxiliary.lm_head.{name}": tensor for name, tensor in mlm.items()}


def settings() -> argparse.Namespace:
    return argparse.Namespace(arch="amos_base", generator_mlm_layers="[1, 4]", max_rel_pos=128, rel_pos_bins=64)


@pytest.fixture(scope="module")
def released(vocabulary, tmp_path_factory) -> Path:
    """As fairseq 1.0.0a0 writes it, with the flags in an omegaconf container object."""
    num_tokens = 4 + len((vocabulary / "dict.txt").read_text(encoding="utf-8").splitlines()) + 1
    file = tmp_path_factory.mktemp("released") / "model.pt"
    weights = released_weights(num_tokens) | {"encoder.sentence_encoder.version": torch.tensor([3.0])}
    config = OmegaConf.create({"model": {"_name": "amos_base"} | vars(settings()), "task": {"data": "x"}, "lr": [0.1]})
    torch.save({"args": None, "cfg": config, "model": weights, "extra_state": {"epoch": 1}}, file)
    return file


@pytest.fixture(scope="module")
def imported(released, vocabulary, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("imported") / "model.pt"
    flags = ["--from", "microsoft-amos", "--tokenizer", str(vocabulary), "--depths", "1,4"]
    main(["import", str(released), str(out), *flags])
    return out


def released_states(weights: dict[str, Tensor], side: str, tokens: Tensor) -> list[Tensor]:
    """Their encoder for one sequence [T], by the released names: the output of every layer, [T, width] each."""

    def named(name: str) -> tuple[Tensor, Tensor]:
        return weights[f"{side}.sentence_encoder.{name}.weight"], weights[f"{side}.sentence_encoder.{name}.bias"]

    def norm(states: Tensor, name: str) -> Tensor:
        return layer_norm(states, (WIDTH,), *named(name), 1e-5)

    length = len(tokens)
    # Their rows count from the smallest bucket of all positions that the model has.
    positions = weights[f"{side}.sentence_encoder.embed_positions.weight"]
    smallest = signed_bucket(1 - len(positions))
    rows = [[signed_bucket(key - query) - smallest for key in range(length)] for query in range(length)]
    table = weights[f"{side}.sentence_encoder.relative_attention_bias.weight"]
    bias = table[torch.tensor(rows)].permute(2, 0, 1)  # [H,T,T]
    embedded = weights["encoder.sentence_encoder.embed_tokens.weight"][tokens]
    states = norm(embedded + positions[:length], "emb_layer_norm")
    outputs = []
    for n in range(LAYERS if side == "encoder" else GENERATOR_LAYERS):
        q, k, v = linear(states, *named(f"layers.{n}.self_attn.in_proj")).chunk(3, dim=-1)
        heads = [
            ((a @ b.t() / (WIDTH / HEADS) ** 0.5 + bias[h]).softmax(-1) @ c)
            for h, (a, b, c) in enumerate(zip(q.chunk(HEADS, -1), k.chunk(HEADS, -1), v.chunk(HEADS, -1), strict=True))
        ]
        attended = linear(torch.cat(heads, -1), *named(f"layers.{n}.self_attn.out_proj"))
        states = norm(states + attended, f"layers.{n}.self_attn_layer_norm")
        inner = linear(gelu(linear(states, *named(f"layers.{n}.fc1"))), *named(f"layers.{n}.fc2"))
        states = norm(states + inner, f"layers.{n}.final_layer_norm")
        outputs.append(states)
    return outputs


def signed_bucket(distance: int) -> int:
    """Exact below 16, then one bucket up to each of 15 logarithmic steps that end at 127; the sign of the distance."""
    size = abs(distance)
    if size >= 16:
        edges = [16 * (127 / 16) ** (step / 15) for step in range(16)]
        size = 16 + next((step for step, edge in enumerate(edges) if size <= edge * (1 + 1e-6)), 15)
    return (size > 0) * min(size, 31) * (1 if distance > 0 else -1)


@torch.no_grad()
def test_encoders_and_heads_equal_the_second_computation(released, imported):
    """150 tokens, beyond the largest distance. Tolerance 1e-5 of the largest value: the same float32 formulas in another
    order, some fifty roundings."""
    weights = read_release(released)
    model = load_checkpoint(imported).model
    tokens = torch.randint(4, 60, (POSITIONS,), generator=torch.Generator().manual_seed(1))
    for side, encoder in (("encoder", model.discriminator), ("auxiliary", model.generators[0])):
        expected = released_states(weights, side, tokens)
        for ours, theirs in zip(encoder(model.embed_tokens(tokens)[None]), expected, strict=True):
            assert (ours[0] - theirs).abs().max() < 1e-5 * theirs.abs().max(), side
    states = released_states(weights, "encoder", tokens)[-1]
    original = linear(states, *(weights[f"encoder.binary_head.out_proj.{kind}"] for kind in ("weight", "bias")))
    detected = model.detection_head(model.discriminator(model.embed_tokens(tokens)[None])[-1])[0]
    torch.testing.assert_close(detected, -original[:, 0], rtol=0, atol=1e-4)  # of logits up to 3
    features = [released_states(weights, "auxiliary", tokens)[depth - 1] for depth in (1, 4)]
    everywhere = torch.arange(POSITIONS)[None]
    logits, gamma = model.predict_logits(
        PretrainingBatch(tokens[None], tokens[None], everywhere, torch.ones(1, POSITIONS))
    )
    mixed = torch.stack([linear(f, weights["auxiliary.lm_head.layer_mixture.weight"])[:, 0] for f in features], -1)
    torch.testing.assert_close(gamma[0], mixed.softmax(-1), rtol=0, atol=1e-5)
    for depth, feature in enumerate(features):
        dense, norm, output = (
            [weights[f"auxiliary.lm_head.{part}{kind}"] for kind in ("weight", "bias")]
            for part in ("dense.", "layer_norm.", "")
        )
        hidden = layer_norm(gelu(linear(feature, *dense)), (WIDTH,), *norm, 1e-5)
        theirs = linear(hidden, *output).log_softmax(-1)
        ours = logits[depth, 0].log_softmax(-1)[:, : theirs.size(-1)]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)  # of log-probabilities down to -20


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("num_positions", [2, 127])
def test_a_model_with_few_positions_finds_its_buckets(num_positions, released, vocabulary, tmp_path):
    """Below 128 the smallest bucket is not that of the scheme."""
    weights = read_release(released)
    for side in ("encoder", "auxiliary"):
        name = f"{side}.sentence_encoder.embed_positions.weight"
        weights[name] = weights[name][:num_positions]
    torch.save({"args": settings(), "model": weights}, tmp_path / "model.pt")
    model = import_release(tmp_path / "model.pt", vocabulary, depths="1,4").model.eval()
    tokens = torch.randint(4, 60, (num_positions,), generator=torch.Generator().manual_seed(1))
    expected = released_states(weights, "encoder", tokens)[-1]
    features = model.extract_features(tokens[None])[0]
    assert (features - expected).abs().max() < 1e-5 * expected.abs().max()


@torch.no_grad()
def test_encodes_text_and_becomes_a_fine_tuned_model(imported):
    pretrained = load_checkpoint(imported)
    assert pretrained.tokenizer.kind == "microsoft_amos"
    tokens = pretrained.tokens(TEXT)[None]
    assert tokens[0, 0] == pretrained.dictionary.bos()
    assert tokens.numel() > 20
    state = read_state(imported)
    task = SimpleNamespace(source_dictionary=pretrained.dictionary)
    model = build_model(OmegaConf.create(state["cfg"]["model"]), task, from_checkpoint=True).eval()
    model.load_state_dict(state["model"])
    assert torch.equal(model.extract_features(tokens), pretrained.model.extract_features(tokens))
    model.register_classification_head("sentence_classification_head", 3)
    logits, _ = model(tokens, features_only=True, classification_head_name="sentence_classification_head")
    assert logits.shape == (1, 3)


def test_depths_are_given(released, vocabulary):
    """The default is that of the release."""
    with pytest.raises(UserError, match=r"4 layers, its MLM heads are said to be at 4,6,8 \(--depths\)"):
        import_release(released, vocabulary)
    given = import_release(released, vocabulary, depths="2,3,4")
    assert given.config.model.generator_depths == "2,3,4"
    assert given.newly_initialized == []
    assert given.unexpected_keys == ["encoder.sentence_encoder.version"]


class Malicious:
    def __reduce__(self):
        return os.system, ("touch executed",)


class Foreign:
    pass


def test_no_code_in_the_file_runs(released, vocabulary, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    allowed = set(torch.serialization.get_safe_globals())
    monkeypatch.setattr(DictConfig, "__setstate__", lambda *_: pytest.fail("code of omegaconf runs"))
    weights = read_release(released)
    for name, harm in (("system", Malicious()), ("class", Foreign()), ("function", os.path.join)):
        torch.save({"model": weights, "extra_state": harm}, tmp_path / "model.pt")
        with pytest.raises(UserError, match="could run code of the author of the file"):
            import_release(tmp_path / "model.pt", vocabulary)
        assert not (tmp_path / "executed").exists(), name
    assert set(torch.serialization.get_safe_globals()) == allowed
    with pytest.raises(pytest.fail.Exception, match="code of omegaconf runs"):
        torch.load(released, weights_only=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("encoder.sentence_encoder.layers.1.fc2.bias"), "layers.1.fc2.bias is missing"),
        (lambda w: w.pop("encoder.sentence_encoder.relative_attention_bias.weight"), "lacks the matrix"),
        (lambda w: w.update({"auxiliary.lm_head.weight": w["auxiliary.lm_head.weight"] + 1}), "differs from"),
        (lambda w: w.pop("encoder.sentence_encoder.embed_tokens.weight"), "is not the checkpoint"),
    ],
)
def test_files_other_than_the_release_are_refused(change, message, released, vocabulary, tmp_path):
    weights = read_release(released)
    change(weights)
    torch.save({"args": settings(), "model": weights}, tmp_path / "model.pt")
    with pytest.raises(UserError, match=message):
        import_release(tmp_path / "model.pt", vocabulary, depths="1,4")
    (tmp_path / "sp.model").write_bytes((vocabulary / "sp.model").read_bytes())
    (tmp_path / "dict.txt").write_text("a 1\nb 1\n")
    with pytest.raises(UserError, match="rows of vocabulary"):
        import_release(released, tmp_path, depths="1,4")
