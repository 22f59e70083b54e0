"""Settings of all pretraining models: longer sequences, tied and disentangled embeddings, a token loss beside detection."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.dataclass.configs import FairseqConfig
from fairseq.trainer import Trainer
from omegaconf import OmegaConf
from sklearn.decomposition import PCA
from small_models import (
    NUM_TOKENS,
    amos_criterion,
    electra_criterion,
    fine_tuning_task,
    gumbel,
    logged,
    set_gumbel_noise,
    set_samples,
    small_amos,
    small_batch,
    small_electra,
    small_electric,
    small_mlm,
    small_task,
    small_teams,
)
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.functional import embedding as look_up

from amos_fairseq.hugging_face.parts import encoder_part
from amos_fairseq.models.amos import AmosModel
from amos_fairseq.models.pretraining import DELTA, PretrainingBatch
from amos_fairseq.modules.bert_encoder import LearnedPositions
from amos_fairseq.optim.grouped_adam import GroupedAdam, GroupedAdamConfig
from amos_fairseq.probing.features import hidden_states, parts_of
from amos_fairseq.run import precision

BUILDERS = {
    "amos": small_amos,
    "electra": small_electra,  # generator and discriminator share their positions
    "electric": small_electric,
    "mlm": small_mlm,
    "teams": small_teams,
    "modern": lambda **settings: small_mlm(encoder="modernbert", **settings),  # without learned positions
}
SMALL = {"amos": (small_amos, amos_criterion), "electra": (small_electra, electra_criterion)}


SLOWER = {
    "amos": ("discriminator.layers.", "discriminator.relative_position.", "detection_head."),
    "electra": ("discriminator.layers.", "detection_head."),
    # The generator's two layers share one with the discriminator, and its relative positions.
    "teams": (*(f"discriminator.layers.{number}." for number in (1, 2, 3)), "detection_head.", "rtd_layer."),
}


@pytest.mark.parametrize("name", SLOWER)
def test_only_what_the_discriminator_alone_uses_has_a_lower_rate(name: str) -> None:
    positions = {} if name == "electra" else {"relative_position_scheme": "t5"}
    model = BUILDERS[name](discriminator_lr_scale=0.25, **positions)
    optimizer = GroupedAdam(GroupedAdamConfig(lr=[0.02], weight_decay=0.01), list(model.parameters()))
    rates = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    slower = {key for key, parameter in model.named_parameters() if rates[id(parameter)] == pytest.approx(0.005)}
    assert slower == {key for key, _ in model.named_parameters() if key.startswith(SLOWER[name])}
    assert {rates[id(parameter)] for key, parameter in model.named_parameters() if key not in slower} == {0.02}
    assert optimizer.get_lr() == 0.02
    optimizer.set_lr(0.04)
    assert {group["lr"] for group in optimizer.param_groups} == {0.04, 0.01}


@pytest.mark.parametrize("lengths", [(12, 12), (12, 7, 12)])
@pytest.mark.parametrize("name", SMALL)
def test_masked_token_loss_of_the_main_network(name: str, lengths: tuple[int, ...]) -> None:
    """The loss grows by the weight times the cross-entropy at masked positions, from states and embeddings step by step."""
    make, criterion = SMALL[name]
    model, batch = make(encoder_mlm_weight=0.5).eval(), small_batch(lengths)
    inputs = batch["net_input"]
    torch.manual_seed(3)
    output = model(PretrainingBatch(**inputs))
    states, head = model.extract_features(output.corrupted_tokens), model.token_prediction.mlm_head
    expected, correct = 0.0, 0
    for row, slot in inputs["masked_weights"].nonzero().tolist():
        position = inputs["masked_positions"][row, slot]
        logits = model.embed_tokens.weight @ head(states[row, position]) + head.bias
        original = inputs["tokens"][row, position]
        expected += cross_entropy(logits, original).item()
        correct += int(logits.argmax() == original)
    losses = {}
    for weight in (0.5, 2.0):
        torch.manual_seed(3)
        losses[weight], _, log = criterion(encoder_mlm_weight=weight)(model, batch)
        assert log["main_loss"].item() == pytest.approx(expected, rel=1e-4)
        assert (log["main_acc"], log["_predicted"]) == (correct, batch["num_masked"])
    # float32 sums of losses of about 1,000.
    assert (losses[2.0] - losses[0.5]).item() == pytest.approx(1.5 * expected, rel=1e-4)


def validated(model: torch.nn.Module, criterion: torch.nn.Module, *batches: dict) -> dict[str, float]:
    model.eval()
    criterion.eval()
    with torch.no_grad():
        return logged(type(criterion), *(criterion(model, batch)[2] for batch in batches))


def test_validation_logs_the_spread_of_the_states_below_the_head() -> None:
    """Against scikit-learn, over two batches with padding."""
    model, batches = small_electra(), [small_batch((12, 7), seed=1), small_batch((12, 12, 5), seed=2)]
    seen = []
    model.detection_head.register_forward_pre_hook(lambda head, inputs: seen.append(inputs[0]))
    got = validated(model, electra_criterion(), *batches)
    real = [states[batch["net_input"]["tokens"].ne(1)] for states, batch in zip(seen, batches, strict=True)]
    states = torch.cat(real).double().numpy()
    shares = PCA().fit(states).explained_variance_ratio_
    assert got["rtd_first_component"] == pytest.approx(shares[0], rel=1e-3)
    assert got["rtd_participation_ratio"] == pytest.approx(1 / (shares**2).sum(), rel=1e-3)
    assert got["rtd_state_variance"] == pytest.approx(states.var(0).sum() / (states**2).sum(1).mean(), rel=1e-3)


@pytest.mark.parametrize("name", BUILDERS)
def test_positions_start_as_copies_and_short_texts_have_the_same_states(name: str) -> None:
    short, long = BUILDERS[name](max_positions=16), BUILDERS[name](max_positions=40)
    saved = short.state_dict()
    long.may_be_longer = True
    long.load_state_dict(dict(saved))
    tokens = torch.randint(4, 40, (3, 16), generator=torch.Generator().manual_seed(1))
    assert torch.equal(long.eval().extract_features(tokens), short.eval().extract_features(tokens))
    tables = {key: table for key, table in long.state_dict().items() if key.endswith("embed_positions.weight")}
    assert bool(tables) == (name != "modern")
    for key, table in tables.items():
        assert all(torch.equal(table[position], saved[key][position % 16]) for position in range(40))


@pytest.mark.parametrize(("here", "may_be_longer"), [(40, False), (8, True)])
def test_other_lengths_are_refused(here: int, may_be_longer: bool) -> None:
    """A run that continues has moments for its positions; a table that is too long has no row to leave out."""
    model: Any = small_electra(max_positions=here)
    model.may_be_longer = may_be_longer
    with pytest.raises(RuntimeError, match="embed_positions"):
        model.load_state_dict(small_electra(max_positions=16).state_dict())


MASK = 4 + NUM_TOKENS


def saved_state(model: AmosModel, path: Path) -> dict[str, torch.Tensor]:
    """The model's state after saving and loading; the embedding is in it once."""
    state = model.state_dict()
    rows = [name for name, value in state.items() if value.shape == model.embed_tokens.weight.shape]
    assert rows == ["embed_tokens.weight"]
    assert len(state) == len(list(model.parameters()))
    torch.save(state, path)
    return torch.load(path, weights_only=True)


def assert_one_embedding(model: AmosModel) -> None:
    """In place changes of ``embed_tokens.weight`` are seen by the generator's input, output layer and discriminator."""
    matrices = [p for p in model.parameters() if p.shape == model.embed_tokens.weight.shape]
    assert len(matrices) == 1
    assert matrices[0] is model.embed_tokens.weight
    batch = small_batch()["net_input"]
    before, features = model.predict_logits(PretrainingBatch(**batch))[0], model.extract_features(batch["tokens"])
    token = int(batch["tokens"][0, 1])
    absent = next(w for w in range(4, MASK) if not batch["masked_tokens"].eq(w).any() and w != token)
    unread = next(w for w in range(4, MASK) if not batch["tokens"].eq(w).any())
    with torch.no_grad():
        model.embed_tokens.weight[absent] *= -1
    after = model.predict_logits(PretrainingBatch(**batch))[0]
    changed = (after - before).abs().amax((0, 1, 2)).nonzero().flatten().tolist()
    assert changed == [absent]  # only the output layer uses that token
    with torch.no_grad():
        model.embed_tokens.weight[token] *= -1
    assert not torch.allclose(
        model.predict_logits(PretrainingBatch(**batch))[0][:, 0, :, unread], after[:, 0, :, unread]
    )
    assert not torch.allclose(model.extract_features(batch["tokens"])[0], features[0])


DTYPES = {"cpu": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize(("flag", "dtype"), DTYPES.items())
def test_in_the_trainer_of_fairseq(flag, dtype, tmp_path, monkeypatch):
    """fairseq's trainer converts the model and puts shared parameters back in its own way; then a checkpoint is loaded."""
    # The trainer of a CPU refuses fp16, but it converts a model as that of a GPU does.
    monkeypatch.setattr(precision, "visible_gpus", lambda cfg: int(flag == "fp16"))
    config = OmegaConf.structured(FairseqConfig)
    config.common.update({"cpu": True, flag: True})
    model = small_amos(seed=1)
    trainer = Trainer(config, small_task(), model, amos_criterion())
    assert trainer.model is model
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    trainer.model.load_state_dict(saved_state(small_amos(), tmp_path / "state.pt"))
    assert torch.equal(model.embed_tokens.weight, small_amos().embed_tokens.weight.to(dtype))
    assert_one_embedding(model.float())


DISENTANGLED = {"disentangled_embeddings": True}


def disentangled(objective: str, **settings: Any) -> Any:
    """A model with a difference that is not 0, in float64."""
    model = BUILDERS[objective](**DISENTANGLED, **settings)
    with torch.no_grad():
        model.disentangled_embedding.delta.weight.normal_(0, 0.3)
        model.disentangled_embedding.delta.weight[1] = 0  # padding
    return model.double()


def with_samples(model: Any, batch: dict[str, Tensor]) -> None:
    """Replacement tokens, and for TEAMS candidates, that do not depend on the weights."""
    generator = torch.Generator().manual_seed(5)
    sampled = torch.randint(4, 44, batch["masked_positions"].shape, generator=generator)
    candidates = None
    if hasattr(model, "mws_head"):
        others = torch.randint(4, 44, (*sampled.shape, 3), generator=generator)
        candidates = torch.cat([batch["tokens"].gather(1, batch["masked_positions"]).unsqueeze(-1), others], dim=-1)
    set_samples(model, sampled, candidates)


def discriminator_loss(output: Any) -> Tensor:
    """A sum with different gradients for all logits of the discriminator."""
    loss = (output.rtd_logits.double() ** 2).sum()
    if getattr(output, "mws_logits", None) is not None:
        loss = loss + (output.mws_logits.double() ** 3).sum()
    return loss


@pytest.mark.parametrize("objective", ["electra", "teams"])
def test_the_discriminator_trains_the_difference_and_the_generator_its_embeddings(objective: str) -> None:
    """A second writing in float64: the discriminator reads the sum from a separate table, a leaf of the graph."""
    model, batch = disentangled(objective), small_batch()["net_input"]
    with_samples(model, batch)
    discriminator_loss(model(PretrainingBatch(**batch))).backward()
    assert model.embed_tokens.weight.grad is None
    difference = model.disentangled_embedding.delta.weight.grad.clone()
    assert difference.abs().max() > 0
    model.zero_grad()
    model(PretrainingBatch(**batch)).mlm_nll.sum().backward()
    assert model.embed_tokens.weight.grad.abs().max() > 0
    assert model.disentangled_embedding.delta.weight.grad is None
    table = (model.embed_tokens.weight + model.disentangled_embedding.delta.weight).detach().requires_grad_()
    own = type("WithTable", (type(model),), {"encoder_embedding": lambda self, tokens: look_up(tokens, table, 1)})
    model.__class__ = own
    discriminator_loss(model(PretrainingBatch(**batch))).backward()
    torch.testing.assert_close(difference, table.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kernels", ["fast", "reference"])
def test_the_reversed_gradient_of_amos_comes_from_the_table_that_the_discriminator_reads(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of v is that of y, -(dL/dx) (E + Delta)^T at the masked positions, through the softmax of logits and noise.

    Mixture and noise are float32: 1e-4.
    """
    batch, noise = small_batch()["net_input"], gumbel(4, 3, 64)
    set_gumbel_noise(monkeypatch, noise)
    model = disentangled("amos", kernels=kernels, gumbel_entries=0)
    inputs = []

    def keep(module: torch.nn.Module, given: tuple[Tensor, ...]) -> None:
        given[0].retain_grad()
        inputs.append(given[0])

    model.discriminator.register_forward_pre_hook(keep)
    discriminator_loss(model(PretrainingBatch(**batch))).backward()
    found = model.mixture.v.grad.clone()
    positions = batch["masked_positions"]
    grad = inputs[0].grad.gather(1, positions.unsqueeze(-1).expand(-1, -1, 16)) * batch["masked_weights"][..., None]

    features, hidden = model.generate(PretrainingBatch(**batch))
    v = model.mixture.v.detach().clone().requires_grad_()
    gamma = torch.stack([f.detach() @ v for f in features], dim=-1).softmax(-1)
    mixed = sum(gamma[..., d, None] * h.detach() for d, h in enumerate(hidden))
    logits = mixed @ model.embed_tokens.weight.detach().T + model.mlm_heads[0].bias.detach()
    logits = logits.masked_fill(model.never_sampled_mask, -torch.inf)
    y = ((logits + noise) / model.cfg.gumbel_temperature).softmax(-1)
    y.backward(-grad @ model.disentangled_embedding.weight.detach().T)
    torch.testing.assert_close(found, v.grad, rtol=1e-4, atol=1e-4 * found.abs().max().item())


@pytest.mark.parametrize("objective", ["electra", "teams", "amos"])
def test_a_new_model_computes_what_plain_sharing_computes(objective: str) -> None:
    batch, outputs = small_batch()["net_input"], []
    plain, new = BUILDERS[objective]().eval(), BUILDERS[objective](**DISENTANGLED).eval()
    state = plain.state_dict()
    assert DELTA not in state
    new.upgrade_state_dict_named(state, "")
    new.load_state_dict(state)
    assert not new.disentangled_embedding.delta.weight.any()
    for model in (plain, new):
        torch.manual_seed(1)
        outputs.append(vars(model(PretrainingBatch(**batch))).values())
    for with_plain, with_difference in zip(*outputs, strict=True):
        if isinstance(with_plain, Tensor):
            assert torch.equal(with_plain, with_difference)


@torch.no_grad()
@pytest.mark.parametrize("objective", ["electra", "teams", "amos"])
def test_what_is_used_after_pretraining_has_the_sum(objective: str) -> None:
    """Fine-tuning, export, probing and the features read one table: E + Delta."""
    model = disentangled(objective).float().eval()
    table = model.embed_tokens.weight + model.disentangled_embedding.delta.weight
    tokens = small_batch()["net_input"]["tokens"]
    expected = model.encoder(look_up(tokens, table, 1), tokens.eq(1))[-1]
    torch.testing.assert_close(model.extract_features(tokens), expected)
    assert torch.equal(encoder_part(model).weights["embed_tokens.weight"], table)
    probed = parts_of(model)["discriminator"]
    last = len(model.encoder.layers)
    real = tokens.ne(1)
    states = hidden_states(probed, [last], tokens, real.sum(1).tolist())
    torch.testing.assert_close(states[last][real], expected[real])
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tuned = type(model).build_model(model.cfg, fine_tuning_task()).eval()
    tuned.upgrade_state_dict_named(state, "")
    tuned.load_state_dict(state)
    assert torch.equal(tuned.embed_tokens.weight, table)
    torch.testing.assert_close(tuned.extract_features(tokens)[real], expected[real])


def test_copies_of_positions_are_trained_together() -> None:
    """Ten rows, four of which repeat: the first two have three copies, the others two."""
    positions = LearnedPositions(10, 3)
    positions.repeat_first(4)
    first = positions.weight[:4].clone()
    positions.share(4)
    gradient = torch.arange(12.0).view(4, 3)
    (positions.rows(4) * gradient).sum().backward()
    for row in range(10):
        assert torch.allclose(positions.weight.grad[row], gradient[row % 4] / (3 if row % 4 < 2 else 2))
    torch.optim.Adam([positions.weight], lr=0.1).step()
    assert torch.equal(positions.weight[4:], positions.weight[:6])
    assert (positions.weight[:4] - first).abs()[1:].min() > 0.09
    assert torch.allclose(positions.rows(4), positions.weight[:4])
    for length in (3, 6):  # sequences of validation have their own rows, whatever the phase
        assert torch.equal(positions.rows(length), positions.weight[:length])
    positions.weight.data[9] += 1  # of a model that was trained at this length: only the first rows are used
    positions.share(4)
    assert torch.equal(positions.rows(4), positions.weight[:4])
