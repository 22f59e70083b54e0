"""ELECTRA's variants as models: what they share, what learns, and which settings exclude one another."""

import pytest
import torch
from device_synchronization import WAITING
from fairseq.optim.fp16_optimizer import FP16Optimizer
from omegaconf import OmegaConf
from small_electra import EQUAL_SIZES, VARIANTS, small_electra, small_electra_criterion
from small_models import SETTINGS, small_batch, small_task

from amos_fairseq.errors import UserError
from amos_fairseq.models.configuration import EncoderConfig
from amos_fairseq.models.electra import ElectraConfig, ElectraModel
from amos_fairseq.models.mlm import MlmModel
from amos_fairseq.optim.grouped_adam import GroupedAdam, GroupedAdamConfig
from tests.compat.test_no_waiting import Recorder

SHARED_EMBEDDINGS = ("embed_positions", "embed_token_types", "embedding_norm")
FROZEN = {"generator", "generator_embed_tokens", "mlm_head"}  # parts of a model with a frozen generator


def step(model: ElectraModel, **settings) -> torch.Tensor:
    """Loss of one batch, its gradients left in the model."""
    loss, _, _ = small_electra_criterion(**settings)(model, small_batch())
    loss.backward()
    return loss


def own_gradients(model: ElectraModel) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_that_learns_receives_a_gradient(variant: str) -> None:
    """Ranks that wait for the gradient of an unused parameter would wait forever. Frozen ones receive none."""
    model = small_electra(**VARIANTS[variant])
    step(model)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        assert not parameter.requires_grad or parameter.grad.any(), name
    frozen = {name.partition(".")[0] for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == (FROZEN if variant == "frozen" else set())


@pytest.mark.parametrize(
    ("variant", "positions"), [*((name, "all") for name in VARIANTS), ("plain", "masked"), ("plain", "random")]
)
def test_a_step_waits_for_nothing(variant: str, positions: str) -> None:
    model, criterion, batch = (
        small_electra(**VARIANTS[variant]),
        small_electra_criterion(detection_positions=positions),
        small_batch(),
    )
    with Recorder() as recorder:
        loss, _, _ = criterion(model, batch)
        loss.backward()
    assert "aten::embedding_dense_backward" in recorder.operations
    assert not recorder.operations & WAITING


def test_what_is_shared_is_one_object_and_receives_both_gradients() -> None:
    none, embeddings, everything = (small_electra(**VARIANTS[name]) for name in ("none", "plain", "all"))
    for name in SHARED_EMBEDDINGS:
        if getattr(none.generator, name) is not None:
            assert getattr(none.generator, name) is not getattr(none.discriminator, name)
        assert getattr(embeddings.generator, name) is getattr(embeddings.discriminator, name)
    assert none.generator_embedding is not none.embed_tokens
    assert embeddings.generator_embedding is embeddings.embed_tokens
    assert embeddings.generator.layers[0] is not embeddings.discriminator.layers[0]
    assert everything.generator is everything.discriminator
    assert everything.mlm_head is not None

    # Without a detection loss only what is the generator's, or shared with it, learns.
    for model, shares in ((none, False), (embeddings, True), (everything, True)):
        step(model, discriminator_loss_weight=0.0)
        gradients = own_gradients(model)
        assert gradients["embed_tokens.weight"].any() == shares
        assert gradients["discriminator.embed_positions.weight"].any() == shares
        assert gradients["discriminator.layers.0.ffn_in.weight"].any() == (model is everything)
        assert gradients["generator.layers.0.ffn_in.weight"].any()


def test_sharing_all_has_the_parameters_of_one_encoder() -> None:
    """Beside token embeddings and the three heads."""
    model = small_electra(**VARIANTS["all"])
    names = {name.partition(".")[0] for name, _ in model.named_parameters()}
    assert names == {"embed_tokens", "discriminator", "mlm_head", "detection_head"}


def test_the_generator_has_its_own_number_of_layers() -> None:
    model = small_electra(generator_layers=1)
    assert (len(model.generator.layers), len(model.discriminator.layers)) == (1, SETTINGS["encoder_layers"])
    assert model.depth_names == ["1"]


def test_reward_trains_the_generator_and_its_baseline_alone() -> None:
    """Without a detection loss the discriminator learns nothing, and the baseline nothing but itself."""
    model = small_electra(adversarial=True)
    step(model, discriminator_loss_weight=0.0)
    gradients = own_gradients(model)
    assert (
        gradients["discriminator.layers.1.ffn_in.weight"] is None
        or not gradients["discriminator.layers.1.ffn_in.weight"].any()
    )
    assert gradients["generator.layers.0.ffn_in.weight"].any()
    model.zero_grad()
    criterion, batch = small_electra_criterion(), small_batch()
    output = model(**batch["net_input"])
    output.baseline_logits.sum().backward()
    learning = {
        name for name, parameter in model.named_parameters() if parameter.grad is not None and parameter.grad.any()
    }
    assert learning == {"baseline.weight"}
    assert not criterion.rewards(output, batch).requires_grad
    assert not output.mlm_nll.requires_grad  # no maximum likelihood in this mode


def mlm_weights(**settings) -> dict[str, torch.Tensor]:
    kept = {name: value for name, value in SETTINGS.items() if name not in ("generator_depths", "max_update")}
    torch.manual_seed(5)
    return MlmModel.build_model(EncoderConfig(**(kept | {"embedding_dim": 8} | settings)), small_task()).state_dict()


def test_the_second_stage_starts_from_the_first_and_leaves_the_generator_as_it_is() -> None:
    """Both networks have the first model's weights; after updates the generator's bits are the same, the others are not."""
    model, first = small_electra(**VARIANTS["frozen"]), mlm_weights()
    head = {name: value.clone() for name, value in model.detection_head.state_dict().items()}
    with pytest.raises(UserError, match="--finetune-from-model"):
        model.check_ready()
    model.set_num_updates(20)  # fairseq tells the first stage's updates before it loads its weights
    model.load_state_dict(dict(first))
    model.check_ready()
    here = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in first.items():
        if name.startswith("transformer."):
            for network in ("generator.", "discriminator."):
                assert here[network + name.removeprefix("transformer.")].equal(value), name
        elif name.startswith("embed_tokens."):
            assert here[name].equal(value)
            assert here["generator_" + name].equal(value)
        else:
            assert here[name].equal(value), name
    assert all(here[f"detection_head.{name}"].equal(value) for name, value in head.items())

    optimizer = torch.optim.Adam([parameter for parameter in model.parameters() if parameter.requires_grad], 1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        step(model)
        optimizer.step()
    for name, value in model.state_dict().items():
        part = name.partition(".")[0]
        is_frozen = part in FROZEN
        assert value.equal(here[name]) == is_frozen or part == "token_noise", name
    # Continued: a checkpoint of this stage holds all that is needed.
    again = small_electra(seed=1, **VARIANTS["frozen"])
    again.load_state_dict(model.state_dict())
    again.check_ready()
    assert all(value.equal(model.state_dict()[name]) for name, value in again.state_dict().items())


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_decay_and_moments_never_reach_a_frozen_generator(precision: torch.dtype) -> None:
    """fairseq's trainer hands what learns to the optimizer; in bf16 there are masters of these parameters alone."""
    model = small_electra(**VARIANTS["frozen"])
    model.load_state_dict(mlm_weights())
    model.to(precision)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    flags = GroupedAdamConfig(weight_decay=0.5, decay_all_parameters=True, lr=[0.1])
    if precision == torch.bfloat16:
        common = {"bf16": True, "fp16_no_flatten_grads": True, "fp16_scale_window": 4}
        cfg = OmegaConf.create({"common": common, "optimizer": vars(flags) | {"_name": "grouped_adam"}})
        optimizer = FP16Optimizer.build_optimizer(cfg, learning)
    else:
        optimizer = GroupedAdam(flags, learning)
    for _ in range(2):
        optimizer.zero_grad()
        loss, _, _ = small_electra_criterion()(model, small_batch())
        optimizer.backward(loss)
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert parameter.equal(before[name]) == (name.partition(".")[0] in FROZEN), name
    assert len(optimizer.state_dict()["state"]) == len(learning)


def test_a_frozen_generator_has_no_dropout_and_the_discriminator_keeps_its_own() -> None:
    model = small_electra(**VARIANTS["frozen"], dropout=0.1, attention_dropout=0.1).train()
    net_input = small_batch()["net_input"]
    masked = net_input["masked_tokens"], net_input["masked_positions"], net_input["tokens"].eq(1)
    assert model.generate(*masked).equal(model.generate(*masked))
    assert not model.extract_features(net_input["tokens"]).equal(model.extract_features(net_input["tokens"]))


def test_a_first_stage_of_other_sizes_is_refused() -> None:
    with pytest.raises(UserError, match=r"another encoder.*discriminator"):
        small_electra(**VARIANTS["frozen"]).load_state_dict(mlm_weights(encoder_layers=1))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"generator_temperature": 0.0}, "--generator-temperature"),
        ({"generator_layers": -1}, "--generator-layers"),
        ({"share_weights": "all"}, "equal size"),
        ({"share_weights": "all", "generator_layers": 1, **EQUAL_SIZES}, "equal size"),
        ({"share_weights": "all", "adversarial": True, **EQUAL_SIZES}, "train the discriminator to fail"),
        ({"frozen_generator": True, "share_weights": "none"}, "equal size"),
        ({"frozen_generator": True, **EQUAL_SIZES}, "--share-weights none"),
        ({"frozen_generator": True, "adversarial": True}, "one of them"),
        ({"adversarial": True, "main_objective": "replace_mlm"}, "--main-objective detection"),
        ({"generator": "unigram", "adversarial": True}, "--adversarial has no meaning"),
        ({"generator": "uniform", "share_weights": "none"}, "--share-weights has no meaning"),
        ({"generator": "uniform", "generator_layers": 1}, "--generator-layers has no meaning"),
        ({"generator": "unigram", "frozen_generator": True}, "--frozen-generator has no meaning"),
    ],
    ids=str,
)
def test_settings_that_exclude_one_another_are_refused(settings: dict, named: str) -> None:
    with pytest.raises(UserError, match=named) as refused:
        small_electra(**settings)
    assert "\n" not in str(refused.value)


def test_an_encoder_to_fine_tune_needs_nothing_of_the_first_stage() -> None:
    """A task that does not pretrain builds the encoder alone, whatever the variant."""
    task = small_task()
    del task.masked_share
    model = ElectraModel.build_model(
        ElectraConfig(
            frozen_generator=True,
            share_weights="none",
            generator_size=1.0,
            encoder_layers=1,
            encoder_embed_dim=16,
            encoder_ffn_embed_dim=24,
            encoder_attention_heads=2,
        ),
        task,
    )
    assert not isinstance(model, ElectraModel)
