"""A frozen generator: nothing changes it, samples have its distribution at every temperature, losses are the joint model's."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from frequencies import FALSE_ALARM, chi_square_p
from small_models import (
    AMOS_SETTINGS,
    ELECTRA_SETTINGS,
    GENERATORS,
    bf16_optimizer,
    build_randomized,
    logged,
    model_and_criterion,
    set_gumbel_noise,
    small_amos,
    small_batch,
    small_electra,
    small_mlm,
    small_task,
)

from amos_fairseq.errors import UserError
from amos_fairseq.models.amos import AmosConfig, AmosModel
from amos_fairseq.models.electra import ElectraConfig
from amos_fairseq.models.pretraining import PretrainingBatch
from amos_fairseq.optim.grouped_adam import GroupedAdam, GroupedAdamConfig

SOURCES = [("electra", name) for name in GENERATORS] + [("amos", name) for name in (*GENERATORS, "mlm:modern:narrow")]
BATCH = PretrainingBatch(**small_batch()["net_input"])


def states_of(generator: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in generator.state_dict().items()}


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("objective", "source"), [("electra", "electra"), ("amos", "mlm:modern:narrow")])
def test_three_updates_change_everything_else(objective: str, source: str, precision: torch.dtype) -> None:
    """In bf16 with fairseq's float32 masters. Moved and cast with the model, the generator is in neither its state nor its
    optimizer, and has no dropout."""
    model, criterion = model_and_criterion(objective, generator_checkpoint=source, dropout=0.1)
    model.to(precision).train()
    frozen = model.frozen_generator
    generated, before, learning = states_of(frozen), states_of(model), list(model.parameters())
    assert {value.dtype for value in generated.values()} == {precision}
    flags = GroupedAdamConfig(weight_decay=0.5, decay_all_parameters=True, lr=[0.1])
    if precision == torch.bfloat16:
        optimizer = bf16_optimizer(flags, learning)
    else:
        optimizer = GroupedAdam(flags, learning)
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.backward(criterion(model, small_batch())[0])
        optimizer.step()
    assert all(value.equal(generated[name]) for name, value in frozen.state_dict().items())
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in frozen.parameters())
    assert all(not parameter.equal(before[name]) for name, parameter in model.named_parameters())
    assert len(optimizer.state_dict()["state"]) == len(learning)
    assert {name.partition(".")[0] for name in before} <= {"embed_tokens", "discriminator", "detection_head", "mixture"}
    (one, *_), (other, *_) = (frozen.train()(BATCH, None)[1] for _ in range(2))
    assert one.equal(other)


@pytest.mark.parametrize(("objective", "source"), SOURCES)
def test_predictions_are_those_of_the_checkpoints(objective: str, source: str) -> None:
    """Encoders, widths and depths that are not the discriminator's; ELECTRA has the deepest head, AMOS all of all files."""
    model, _ = model_and_criterion(objective, generator_checkpoint=source)
    models = [GENERATORS[name]().eval() for name in source.split(":")]
    logits = torch.cat([each.predict_logits(BATCH)[0] for each in models])
    names = [name for each in models for name in each.depth_names]
    if objective == "electra":
        logits, names = logits[-1:], names[-1:]
    is_masked = BATCH.masked_weights.bool()
    output = model(BATCH)
    nll = -logits.log_softmax(-1).gather(-1, BATCH.originals.expand(len(logits), -1, -1).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(output.mlm_nll.view_as(nll)[:, is_masked], nll[:, is_masked], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.predict_logits(BATCH)[0][:, is_masked], logits[:, is_masked], rtol=1e-4, atol=1e-4)
    assert [name.partition("_")[0] for name in model.depth_names] == names
    assert len(set(model.depth_names)) == len(names)


TEXT = small_batch((12,))["net_input"] | {"masked_positions": torch.tensor([[5]]), "masked_weights": torch.ones(1, 1)}


def sampled(model: Any, updates: int, number: int = 20_000) -> tuple[torch.Tensor, Any]:
    """Counts of the samples at a position of a text that is seen ``number`` times, and the model's output.

    The generator computes one of them, and the discriminator none.
    """

    def repeated(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.expand(number, *value.shape[1:])
        return [repeated(each) for each in value]

    name = "generate" if isinstance(model, AmosModel) else "encode_masked"
    states = getattr(model, name)(PretrainingBatch(**TEXT))
    setattr(model, name, lambda batch: repeated(states))
    model.discriminator.forward = lambda embeddings, padding_mask: (embeddings,)
    model.set_num_updates(updates)
    torch.manual_seed(3)
    with torch.no_grad():
        output = model(PretrainingBatch(**{name: repeated(tensor) for name, tensor in TEXT.items()}))
    return torch.bincount(output.sampled_tokens.flatten(), minlength=len(model.never_sampled_mask)), output


@pytest.mark.parametrize("kernels", ["fast", "reference"])
@pytest.mark.parametrize(("objective", "source"), [("electra", "mlm"), ("amos", "amos"), ("amos", "mlm:narrow")])
def test_samples_have_the_distribution_of_a_temperature_that_falls(objective: str, source: str, kernels: str) -> None:
    """Float64 loops: T = 1.1 + (3 - 1.1) exp(-u / 0.2) at 0, 6 and 30 of 30 updates; then 1, which is the generator's own
    distribution. Special tokens and the padding of the vocabulary are never sampled."""
    settings = {
        "generator_checkpoint": source,
        "kernels": kernels,
        "max_update": 30,
        "generator_temperature_decay": 0.2,
        "embedding_dim": 0,  # the discriminator returns its input
    }
    falling = {"generator_temperature_start": 3.0, "generator_temperature": 1.1}
    models = [GENERATORS[name]().eval() for name in source.split(":")]
    logits = torch.cat([each.predict_logits(PretrainingBatch(**TEXT))[0][:, 0, 0] for each in models]).double()
    for updates, temperature, extra in (
        (0, 3.0, falling),
        (6, 1.1 + 1.9 / math.e, falling),
        (30, 1.1 + 1.9 * math.exp(-5), falling),
        (6, 1.0, {}),
    ):
        model, criterion = model_and_criterion(objective, **settings, **extra)
        counts, output = sampled(model, updates)
        gamma = [1.0] if objective == "electra" else output.mixture_weights[0, 0].tolist()
        assert sum(gamma) == pytest.approx(1)
        weights = torch.zeros_like(logits[0])
        for token in (~model.never_sampled_mask).nonzero().flatten().tolist():
            mixed = sum(weight * one[token].item() for weight, one in zip(gamma, logits[-len(gamma) :], strict=True))
            weights[token] = math.exp(mixed / temperature)
        assert chi_square_p(counts, weights / weights.sum()) > FALSE_ALARM
        batch = {"ntokens": 12, "nsentences": 1, "num_masked": 1, "net_input": TEXT}
        again = model_and_criterion(objective, **settings, **extra)[0]
        again.set_num_updates(updates)
        log = logged(type(criterion), criterion(again, batch)[2])
        assert log["generator_temperature"] == pytest.approx(temperature, abs=1e-4)


def test_a_model_that_trains_its_generator_samples_at_a_temperature_too() -> None:
    """AMOS's MLM heads share a bias, which the temperature divides as it does the rest, with every kernel."""
    tempered = [small_amos(kernels=kernels, generator_temperature=2.0) for kernels in ("fast", "reference")]
    logits, gamma = tempered[0].eval().predict_logits(PretrainingBatch(**TEXT))
    mixed = torch.einsum("kv,k->v", logits[:, 0, 0].double(), gamma[0, 0].double()) / 2
    probabilities = mixed.masked_fill(tempered[0].never_sampled_mask, -math.inf).softmax(-1)
    for model in tempered:
        assert chi_square_p(sampled(model, 0)[0], probabilities) > FALSE_ALARM


@pytest.mark.parametrize("kernels", ["fast", "reference"])
@pytest.mark.parametrize(
    ("objective", "settings"), [("electra", {}), ("amos", {}), ("amos", {"separate_generators": True})]
)
def test_losses_and_gradients_are_those_of_the_joint_model(objective: str, settings: dict, kernels: str) -> None:
    """At update 0, without dropout, but for L_GEN, which is left out of the loss and logged; v learns the same."""
    joint, criterion = model_and_criterion(objective, kernels=kernels, **settings)
    task = SimpleNamespace(**vars(small_task()) | {"load_generator": lambda cfg: joint.generator_networks()})
    own = AMOS_SETTINGS if objective == "amos" else ELECTRA_SETTINGS
    config = (AmosConfig if objective == "amos" else ElectraConfig)(
        **own, generator_checkpoint="joint", kernels=kernels
    )
    model = build_randomized(type(joint), config, task, seed=1)
    model.load_state_dict(joint.state_dict())
    if objective == "amos":
        model.mixture.load_state_dict(joint.mixture.state_dict())
    results = []
    for each in (joint, model):
        torch.manual_seed(2)
        loss, _, log = criterion(each, small_batch())
        loss.backward()
        results.append((loss, log))
    (joint_loss, joint_log), (loss, log) = results
    assert log.keys() == joint_log.keys() | {"generator_temperature"}
    for key in joint_log.keys() - {"loss"}:
        torch.testing.assert_close(torch.as_tensor(log[key]), torch.as_tensor(joint_log[key]), rtol=1e-5, atol=1e-5)
    mlm_loss = sum(value for key, value in joint_log.items() if key.startswith("mlm_loss"))
    torch.testing.assert_close(loss + mlm_loss, joint_loss)
    found, expected = (dict(each.named_parameters()) for each in (model, joint))
    for name in (name for name in found if name.startswith(("discriminator.layers.", "mixture."))):
        torch.testing.assert_close(found[name].grad, expected[name].grad)


def test_the_mixture_of_several_checkpoints_learns_in_their_own_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """gamma = softmax of v_i . f_i with a part of v for each file, by hand; the reversed gradient of both kernels is equal."""
    settings = {"generator_checkpoint": "mlm:narrow", "gumbel_entries": 0}
    models = [small_amos(kernels=kernels, **settings) for kernels in ("fast", "reference")]
    v, noise = torch.randn(16 + 8), -torch.rand(4, 3, len(models[0].never_sampled_mask)).log().neg().log()
    sources = [GENERATORS[name]().eval() for name in ("mlm", "narrow")]
    scores = [source.encode_masked(BATCH) @ part for source, part in zip(sources, v.split([16, 8]), strict=True)]
    set_gumbel_noise(monkeypatch, noise)
    for model in models:
        model.mixture.v.data = v.clone()
        torch.testing.assert_close(model(BATCH).mixture_weights, torch.stack(scores, -1).softmax(-1))
        model_and_criterion("amos")[1](model, small_batch())[0].backward()
    assert models[0].mixture.v.grad.abs().min() > 0
    torch.testing.assert_close(models[0].mixture.v.grad, models[1].mixture.v.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("parent", "taken"),
    [
        (lambda: small_mlm(embedding_dim=8), ("discriminator", "embed_tokens")),
        (lambda: small_electra(seed=4), ("discriminator", "embed_tokens", "detection_head")),
        (lambda: small_electra(seed=4, disentangled_embeddings=True), ("discriminator", "detection_head")),
        (lambda: small_amos(embedding_dim=8), ("discriminator", "embed_tokens")),
    ],
)
def test_the_discriminator_starts_from_any_encoder_of_its_sizes(parent: Any, taken: tuple[str, ...]) -> None:
    """Bit for bit; what the checkpoint lacks keeps its initial values. A resume needs no such thing, and is told apart."""
    model, weights = small_electra(generator_checkpoint="mlm", relative_position_scheme="none"), parent().state_dict()
    weights = {name: value for name, value in weights.items() if "relative_position" not in name}
    width = model.cfg.encoder_embed_dim
    weights |= {"pooler_weight": torch.randn(width, width), "pooler_bias": torch.randn(width)}  # of an imported BERT
    taken = (*taken, "pooler")
    initial, given = (
        states_of(model),
        {name.replace("transformer.", "discriminator."): v for name, v in weights.items()},
    )
    model.load_state_dict(dict(weights))
    for name, value in model.state_dict().items():
        if name.startswith(taken):
            assert value.equal(given[name]), name
        elif not name.startswith("embed_tokens"):
            assert value.equal(initial[name]), name
    if "embed_tokens" not in taken:
        table = given["embed_tokens.weight"] + given["disentangled_embedding.delta.weight"]
        assert model.embed_tokens.weight.equal(table)
    new = {name.partition(".")[0] for name in model.newly_initialized}
    assert new == {"detection_head"} - set(taken)
    again = small_electra(seed=1, generator_checkpoint="mlm")
    again.load_state_dict(model.state_dict())
    assert not again.newly_initialized
    assert all(value.equal(model.state_dict()[name]) for name, value in again.state_dict().items())


def test_an_encoder_of_other_sizes_is_refused() -> None:
    with pytest.raises(UserError, match=r"another encoder than the flags describe: discriminator"):
        small_electra(generator_checkpoint="mlm").load_state_dict(
            small_mlm(embedding_dim=8, encoder_layers=1).state_dict()
        )
