"""Layer-wise learning-rate decay: rates by hand, steps against one plain AdamW per parameter, its way through fairseq."""

import re

import pytest
import torch
from fairseq.optim import AMPOptimizer
from fairseq.optim.fp16_optimizer import FP16Optimizer
from omegaconf import OmegaConf
from small_models import small_model
from torch import nn

from amos_fairseq.errors import UserError
from amos_fairseq.models.configuration import EncoderConfig, encoder_shape
from amos_fairseq.modules.encoder import TransformerEncoder
from amos_fairseq.modules.initialization import mark_layer_depths, mark_undecayed
from amos_fairseq.optim.grouped_adam import GroupedAdam, GroupedAdamConfig

LEARNING_RATE, WEIGHT_DECAY = 0.01, 0.1


class ModelWithHead(nn.Module):
    """What a fine-tuned model consists of, as far as depths are concerned: its heads stand in for any other."""

    def __init__(self, num_layers: int):
        super().__init__()
        torch.manual_seed(0)
        shape = encoder_shape(
            EncoderConfig(
                encoder_layers=num_layers, encoder_embed_dim=8, encoder_ffn_embed_dim=12, encoder_attention_heads=2,
                max_positions=10, relative_position_scheme="t5",
            )
        )  # fmt: skip
        self.embed_tokens = nn.Embedding(20, 8)
        self.encoder = TransformerEncoder(shape)
        self.classification_heads = nn.ModuleDict({"sentence": nn.Linear(8, 3)})
        mark_undecayed(self, also=("relative_position",))
        mark_layer_depths(self)


def config(decay: float, **settings) -> GroupedAdamConfig:
    return GroupedAdamConfig(lr=[LEARNING_RATE], weight_decay=WEIGHT_DECAY, layer_wise_lr_decay=decay, **settings)


def exponent_by_name(name: str, num_layers: int) -> int:
    """The power of the decay, read off a parameter's name: the rule of the documentation once more, by other means."""
    if layer := re.match(r"encoder\.layers\.(\d+)\.", name):
        return num_layers - int(layer.group(1))  # names count from 0
    return num_layers + 1 if name.startswith(("encoder.", "embed_tokens.")) else 0


def rates_by_name(optimizer: GroupedAdam, model: nn.Module) -> dict[str, float]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}


def test_rates_of_twelve_layers_by_hand():
    """Base size with 0.8. The released ELECTRA code would give the top layer 0.64 and the embeddings 0.8^14 = 0.0440."""
    model = ModelWithHead(12)
    optimizer = GroupedAdam(config(0.8), model.parameters())
    optimizer.set_lr(1.0)
    rates = rates_by_name(optimizer, model)
    expected = {
        "classification_heads.sentence.weight": 1.0,
        "classification_heads.sentence.bias": 1.0,
        "encoder.layers.11.ffn_out.weight": 0.8,
        "encoder.layers.11.attention_norm.bias": 0.8,
        "encoder.layers.10.attention.query_key_value.weight": 0.64,
        "encoder.layers.9.ffn_norm.weight": 0.512,
        "encoder.layers.0.ffn_in.bias": 0.068719476736,
        "encoder.embedding_norm.weight": 0.0549755813888,
        "encoder.embed_positions.weight": 0.0549755813888,
        "encoder.relative_position.table.weight": 0.0549755813888,
        "embed_tokens.weight": 0.0549755813888,
    }
    assert {name: rates[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert set(rates) == {name for name, _ in model.named_parameters()}
    assert len(set(rates.values())) == 14  # heads, twelve layers, what lies below them


def test_schedule_sees_its_own_rate():
    """fairseq writes one rate and reads one rate, whatever the shares are; it is what the log shows."""
    model = ModelWithHead(2)
    optimizer = GroupedAdam(config(0.8), model.parameters())
    assert optimizer.get_lr() == LEARNING_RATE
    for rate in (0.3, 0.0, 1e-5):
        optimizer.set_lr(rate)
        assert optimizer.get_lr() == rate
    model.classification_heads.requires_grad_(False)
    frozen = GroupedAdam(config(0.5), [parameter for parameter in model.parameters() if parameter.requires_grad])
    frozen.set_lr(0.3)
    assert frozen.get_lr() == pytest.approx(0.3, rel=1e-12)
    assert rates_by_name(frozen, model)["encoder.layers.1.ffn_in.weight"] == pytest.approx(0.15, rel=1e-12)


def gradients(model: nn.Module, step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(parameter.shape, generator=draw) for parameter in model.parameters()]


def is_undecayed(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim < 2 or "relative_position" in name


def separate_optimizers(model: nn.Module, decay: float) -> list[tuple[torch.optim.Optimizer, float]]:
    """One unfused AdamW per parameter, with its share of the rate."""
    num_layers = len(model.encoder.layers)
    optimizers = []
    for name, parameter in model.named_parameters():
        weight_decay = 0.0 if is_undecayed(name, parameter) else WEIGHT_DECAY
        optimizer = torch.optim.AdamW(
            [parameter], betas=(0.9, 0.98), eps=1e-6, weight_decay=weight_decay, foreach=False
        )
        optimizers.append((optimizer, decay ** exponent_by_name(name, num_layers)))
    return optimizers


@pytest.mark.parametrize("decay", [0.8, 1.0])
def test_steps_are_those_of_one_adamw_per_parameter(decay):
    """Five steps on a schedule, against float64: 1e-6 is some rounding errors of float32 at values up to 3."""
    model, reference = ModelWithHead(3), ModelWithHead(3).double()
    optimizer, separate = GroupedAdam(config(decay), model.parameters()), separate_optimizers(reference, decay)
    for step, rate in enumerate([0.0, 0.01, 0.02, 0.01, 0.001]):
        optimizer.set_lr(rate)
        drawn = gradients(model, step)
        for parameter, twin, gradient in zip(model.parameters(), reference.parameters(), drawn, strict=True):
            parameter.grad, twin.grad = gradient, gradient.double()
        optimizer.step()
        for plain, share in separate:
            plain.param_groups[0]["lr"] = rate * share
            plain.step()
    for (name, parameter), twin in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.double(), twin, atol=1e-6, rtol=0, msg=name)


def test_weight_decay_keeps_its_parameters_at_every_depth():
    model = ModelWithHead(2)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decays = {
        names[id(parameter)]: group["weight_decay"]
        for group in GroupedAdam(config(0.8), model.parameters()).param_groups
        for parameter in group["params"]
    }
    assert decays == {
        name: 0.0 if is_undecayed(name, parameter) else WEIGHT_DECAY for name, parameter in model.named_parameters()
    }
    everything = GroupedAdam(config(0.8, decay_all_parameters=True), model.parameters()).param_groups
    assert [group["weight_decay"] for group in everything] == [WEIGHT_DECAY] * 4


def test_a_head_that_was_added_is_marked_again():
    model = ModelWithHead(2)
    model.classification_heads["other"] = nn.Linear(8, 2)
    with pytest.raises(UserError, match="needs a fine-tuning task"):
        GroupedAdam(config(0.8), model.parameters())
    mark_layer_depths(model)
    rates = rates_by_name(GroupedAdam(config(0.8), model.parameters()), model)
    assert rates["classification_heads.other.weight"] == LEARNING_RATE
    assert rates["encoder.layers.1.ffn_in.weight"] == pytest.approx(0.8 * LEARNING_RATE)


def test_pretraining_models_have_one_rate():
    model = small_model()
    assert {group["lr"] for group in GroupedAdam(config(1.0), model.parameters()).param_groups} == {LEARNING_RATE}
    with pytest.raises(UserError, match=r"--layer-wise-lr-decay 0\.8 needs a fine-tuning task"):
        GroupedAdam(config(0.8), model.parameters())


@pytest.mark.parametrize("decay", [0.0, -0.5, 1.25, float("nan")])
def test_a_decay_that_is_none_is_refused(decay):
    with pytest.raises(UserError, match=r"--layer-wise-lr-decay \S+ must be above 0 and at most 1"):
        GroupedAdam(config(decay), ModelWithHead(1).parameters())


def wrapped(wrapper: type, decay: float) -> tuple[ModelWithHead, FP16Optimizer | AMPOptimizer]:
    """A model of two layers under one of fairseq's mixed-precision optimizers."""
    model = ModelWithHead(2)
    common = {"fp16_no_flatten_grads": True, "fp16_scale_window": 4, "fp16_init_scale": 4, "min_loss_scale": 0.1}
    if wrapper is FP16Optimizer:
        model.bfloat16()
        common["bf16"] = True
    cfg = OmegaConf.create({"common": common, "optimizer": {**vars(config(decay)), "_name": "grouped_adam"}})
    return model, wrapper.build_optimizer(cfg, list(model.parameters()))


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled")
@pytest.mark.parametrize("wrapper", [FP16Optimizer, AMPOptimizer], ids=["bf16", "amp"])
def test_depths_reach_the_optimizer_through_mixed_precision(wrapper):
    """bf16 trains float32 copies, which know of their parameter what its one attribute says."""
    model, optimizer = wrapped(wrapper, 0.5)
    copies = optimizer.fp32_params if wrapper is FP16Optimizer else model.parameters()
    names = {id(copy): name for copy, (name, _) in zip(copies, model.named_parameters(), strict=True)}
    optimizer.set_lr(1.0)
    assert optimizer.get_lr() == 1.0
    rates = {names[id(copy)]: group["lr"] for group in optimizer.param_groups for copy in group["params"]}
    assert rates == {name: 0.5 ** exponent_by_name(name, 2) for name, _ in model.named_parameters()}


def test_bf16_updates_are_as_large_as_the_rates_say():
    """Adam's first step moves every weight by its rate. Powers of two, so that rounding to bfloat16 hides nothing."""
    model, optimizer = wrapped(FP16Optimizer, 0.5)
    for parameter, copy in zip(model.parameters(), optimizer.fp32_params, strict=True):
        parameter.data.zero_()
        copy.data.zero_()  # at 0 weight decay adds nothing
    optimizer.set_lr(0.25)
    optimizer.zero_grad()
    optimizer.backward(sum(parameter.float().sum() for parameter in model.parameters()))
    optimizer.step()
    for name, parameter in model.named_parameters():
        step = torch.full_like(parameter, -0.25 * 0.5 ** exponent_by_name(name, 2))
        torch.testing.assert_close(parameter, step, atol=0, rtol=1e-2, msg=name)  # epsilon of Adam, bfloat16


def one_update(model: nn.Module, optimizer: GroupedAdam, step: int) -> None:
    for parameter, gradient in zip(model.parameters(), gradients(model, step), strict=True):
        parameter.grad = gradient
    optimizer.step()


def test_saved_state_continues_exactly():
    straight, first, second = ModelWithHead(2), ModelWithHead(2), ModelWithHead(2)
    optimizer = GroupedAdam(config(0.8), straight.parameters())
    for step in range(4):
        one_update(straight, optimizer, step)
    optimizer = GroupedAdam(config(0.8), first.parameters())
    for step in range(2):
        one_update(first, optimizer, step)
    second.load_state_dict(first.state_dict())
    resumed = GroupedAdam(config(0.8), second.parameters())
    resumed.load_state_dict(optimizer.state_dict())
    for step in range(2, 4):
        one_update(second, resumed, step)
    for (name, expected), got in zip(straight.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(expected, got), name


def test_flags_win_over_the_checkpoint_and_other_groups_are_refused():
    model = ModelWithHead(2)
    optimizer = GroupedAdam(config(0.8), model.parameters())
    optimizer.set_lr(0.5)
    saved = optimizer.state_dict()
    changed = GroupedAdam(config(0.5), model.parameters())
    changed.load_state_dict(saved)
    rates = rates_by_name(changed, model)
    assert (changed.get_lr(), rates["encoder.layers.0.ffn_in.weight"], rates["embed_tokens.weight"]) == (
        0.5,
        0.125,
        0.0625,
    )
    changed.load_state_dict(saved, {"lr": 4.0})
    assert (changed.get_lr(), rates_by_name(changed, model)["embed_tokens.weight"]) == (4.0, 0.5)
    with pytest.raises(UserError, match="whether there is a --layer-wise-lr-decay as they were"):
        GroupedAdam(config(1.0), model.parameters()).load_state_dict(saved)


def test_state_from_before_there_were_shares_is_read():
    """Checkpoints of pretraining runs have no ``lr_scale`` in their groups."""
    model = small_model()
    optimizer = GroupedAdam(config(1.0), model.parameters())
    optimizer.set_lr(0.25)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["lr_scale"]
    resumed = GroupedAdam(config(1.0), model.parameters())
    resumed.load_state_dict(saved)
    assert [group["lr"] for group in resumed.param_groups] == [0.25, 0.25]
