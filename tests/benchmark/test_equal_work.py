"""The peer of Hugging Face's modules does equal work: the same number of parameters, loss and gradients."""

import pytest
import torch
from hugging_face_peers import INPUTS, HuggingFaceObjective, ModernBertObjective, build_objective
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from training_step import FairseqStep, Setup, random_batches, set_up

from amos_fairseq.hugging_face.weights import Head, to_hugging_face

# One token type, the minimum of the library; no dropout, so that both sides compute the same values.
EQUAL = ["dataset.batch_size=3", "model.token_types=2", "model.dropout=0", "model.attention_dropout=0"]
# Both run through the layers in float32; sums have another order on the other side.
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def setup_of(recipe: str, *overrides: str) -> Setup:
    return set_up(recipe, [*EQUAL, *overrides], "float32", vocabulary_size=600)


def part(tensors: dict[str, Tensor], encoder: str, *heads: str) -> dict[str, Tensor]:
    """Embeddings, one encoder and its heads, under the names of a model that is this encoder."""
    shared = {name: tensor for name, tensor in tensors.items() if name.startswith(("embed_tokens", *heads))}
    own = {name.removeprefix(encoder): t for name, t in tensors.items() if name.startswith(f"{encoder}.")}
    return shared | {f"encoder{name}": tensor for name, tensor in own.items()}


def give_weights(peer: HuggingFaceObjective, weights: dict[str, Tensor]) -> None:
    is_modern = isinstance(peer, ModernBertObjective)
    family = "modernbert" if is_modern else "electra"
    generator = "transformer" if peer.discriminator is None else "generator"
    peer.masked_lm.load_state_dict(to_hugging_face(family, Head.MASKED_LM, part(weights, generator, "mlm_head")))
    if peer.discriminator is not None:
        discriminator = part(weights, "discriminator", "detection_head")
        state = to_hugging_face(family, Head.DETECTION if is_modern else Head.PRETRAINING, discriminator)
        if is_modern:  # one label: the row of "replaced"
            state |= {name: state[name][1:] for name in ("classifier.weight", "classifier.bias")}
        peer.discriminator.load_state_dict(state)


# ModernBERT has no token types; the generator is as wide as the discriminator, as in the library.
MODERN = ("model.token_types=0", "model.local_attention=8")


RECIPES = {"electra_tiny": (), "mlm_tiny": (), "mlm_modern_mini": MODERN}
RECIPES["electra_modern_mini"] = (*MODERN, "model.generator_size=1")


@pytest.mark.parametrize(("recipe", "overrides"), RECIPES.items())
def test_parameters_loss_and_gradients_are_ours(recipe: str, overrides: tuple[str, ...], monkeypatch) -> None:
    setup = setup_of(recipe, *overrides)
    ours = FairseqStep(setup)
    model, batch = ours.module.train(), random_batches(setup)[0]
    outputs = []
    model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    loss, sample_size, _ = ours.criterion(model, batch)
    (loss / sample_size).backward()

    rows = model.vocabulary
    peer = build_objective(setup.cfg, rows.padded_size, rows.pad)
    assert sum(p.numel() for p in peer.parameters()) == sum(p.numel() for p in model.parameters())
    give_weights(peer, {name: tensor.detach() for name, tensor in model.state_dict().items()})
    if peer.discriminator is not None:
        monkeypatch.setattr(peer, "sample", lambda logits: outputs[0].sampled_tokens.flatten())
    peer_loss = peer.train()(**{name: batch["net_input"][name] for name in INPUTS})
    peer_loss.backward()

    torch.testing.assert_close(peer_loss, loss / sample_size, **CLOSE)
    # The shared embedding receives every gradient.
    theirs = peer.masked_lm.get_input_embeddings().weight.grad
    torch.testing.assert_close(theirs, model.embed_tokens.weight.grad, **CLOSE)
    assert theirs.abs().max() > 100 * CLOSE["atol"]


def test_narrow_generator_on_modernbert_does_equal_work() -> None:
    """As many parameters and FLOPs. Our first layer normalizes the projected embeddings before its attention, theirs before."""
    setup = setup_of("electra_modern_mini", *MODERN)
    ours = FairseqStep(setup)
    rows = ours.module.vocabulary
    peer = build_objective(setup.cfg, rows.padded_size, rows.pad)
    assert sum(p.numel() for p in peer.parameters()) == sum(p.numel() for p in ours.module.parameters())
    batch = random_batches(setup)[0]
    inputs = {name: batch["net_input"][name] for name in INPUTS}
    for network in (peer.masked_lm, peer.discriminator):
        network.set_attn_implementation("eager")  # PyTorch's counter omits its fused attention on a CPU
    counts = []
    for forward in (lambda: ours.criterion(ours.module, batch), lambda: peer(**inputs)):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            forward()
        counts.append(counter.get_total_flops())
    # Ours computes the last layer of the generator at the masked positions alone.
    assert 0.85 < counts[0] / counts[1] <= 1
    assert peer.masked_lm.decoder.weight is peer.discriminator.model.embeddings.tok_embeddings.weight
