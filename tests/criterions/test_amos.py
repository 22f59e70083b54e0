"""Criterion of AMOS: log keys, and metrics that add up over batches."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from fairseq.logging import metrics
from sklearn.metrics import roc_auc_score
from small_models import amos_criterion, batch_of, logged, random_replaced, small_amos, small_batch
from torch.utils._pytree import tree_leaves

from amos_fairseq.criterions.amos import AmosCriterion
from amos_fairseq.models.amos import AmosOutput
from amos_fairseq.models.pretraining import PretrainingBatch

DEPTHS = ("1", "2", "4")
DETECTION = ("loss", "acc", "auc", "recall", "precision", "loss_above_prior", "logit_std")
KEYS = {f"{key}_{depth}" for key in ("mlm_loss", "mlm_acc", "mixture") for depth in DEPTHS}
KEYS |= {f"rtd_{key}" for key in DETECTION} | {"loss", "mixture_entropy", "replaced"}


class GivenOutput(torch.nn.Module):
    depth_names = list(DEPTHS)

    def __init__(self, batch: dict, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        tokens, weights = batch["net_input"]["tokens"], batch["net_input"]["masked_weights"]
        (B, T), M = tokens.shape, weights.size(1)
        replaced = random_replaced(batch, generator)
        self.output = AmosOutput(
            mlm_nll=torch.rand(3, B, M, generator=generator) * 8,
            mlm_correct=torch.rand(3, B, M, generator=generator) < 0.4,
            mixture_weights=torch.randn(B, M, 3, generator=generator).softmax(-1),
            sampled_tokens=torch.zeros(B, M, dtype=torch.int64),
            corrupted_tokens=torch.zeros(B, T, dtype=torch.int64),
            replaced=replaced,
            rtd_logits=torch.randn(B, T, generator=generator) * 2 + replaced,
            rtd_states=torch.randn(B, T, 8, generator=generator) + 1,
        )

    def forward(self, batch: PretrainingBatch) -> AmosOutput:
        self.had_padding = batch.has_padding
        return self.output


@pytest.mark.parametrize(("tokens", "mask_prob", "count"), [(512, 0.15, 77), (128, 0.15, 20), (12, 0.3, 4)])
def test_detection_is_weighted_by_a_constant_not_by_the_batch(tokens, mask_prob, count):
    batch = small_batch()
    model = GivenOutput(batch, seed=0)
    losses = [amos_criterion(w, block_length=tokens, mask_prob=mask_prob)(model, batch)[0].item() for w in (0.0, 1.0)]
    rtd_loss = amos_criterion()(model, batch)[2]["rtd_loss"].item()
    assert losses[1] - losses[0] == pytest.approx(count / tokens * rtd_loss, rel=1e-5)


@pytest.mark.parametrize(("lengths", "has_padding"), [((12, 12), False), ((12, 11), True)])
def test_model_receives_whether_anything_is_padded(lengths, has_padding):
    batch = small_batch(lengths)
    model = GivenOutput(batch, seed=0)
    amos_criterion()(model, batch)
    assert model.had_padding is has_padding


def test_sums_over_batches_are_the_sum_of_the_whole():
    """Loss and sample_size of a batch are the sums of its parts, as gradient accumulation and ranks require."""
    whole = small_batch((12, 7, 12, 10))
    model, criterion = GivenOutput(whole, seed=2), amos_criterion()
    loss, sample_size, log = criterion(model, whole)
    parts = [criterion(*half(whole, model.output, rows)) for rows in (slice(0, 1), slice(1, 4))]
    assert sum(part[0].item() for part in parts) == pytest.approx(loss.item(), rel=1e-6)
    assert sum(part[1] for part in parts) == sample_size
    one, several = logged(AmosCriterion, log), logged(AmosCriterion, *(part[2] for part in parts))
    assert one.keys() == several.keys()
    assert one.pop("rtd_logit_std") != several["rtd_logit_std"]  # around the mean of a batch, so its parts have others
    assert {key: several[key] for key in one} == pytest.approx(one, rel=1e-5)


def test_gumbel_residual_is_a_mean_over_the_measured_positions():
    """Small values, of which four digits would be 0. Without a measurement there is no key."""
    batch, logs = small_batch(), []
    for measured in ([1e-5, 3e-5], [2e-5, 2e-5, 7e-5, 1e-5]):
        model = GivenOutput(batch, seed=2)
        model.output = replace(model.output, truncated_mass=torch.tensor(measured))
        logs.append(amos_criterion()(model, batch)[2])
    assert logged(AmosCriterion, *logs)["gumbel_residual"] == pytest.approx(16e-5 / 6, abs=1e-8)
    assert "gumbel_residual" not in logged(AmosCriterion, amos_criterion()(GivenOutput(batch, seed=2), batch)[2])


def half(batch: dict, output: AmosOutput, rows: slice) -> tuple[GivenOutput, dict]:
    net_input = {name: value[rows] for name, value in batch["net_input"].items()}
    part = batch_of(net_input)
    model = GivenOutput(part, seed=0)
    given = {name: value for name, value in vars(output).items() if torch.is_tensor(value)}
    model.output = AmosOutput(**{n: v[:, rows] if n.startswith("mlm_") else v[rows] for n, v in given.items()})
    return model, part


def test_logged_values_by_hand():
    """Means over masked positions and real tokens, in nats, entropies and areas from their definitions."""
    batch = small_batch()
    model = GivenOutput(batch, seed=3)
    output, got = model.output, logged(AmosCriterion, amos_criterion()(model, batch)[2])
    masked, real = batch["net_input"]["masked_weights"] > 0, batch["net_input"]["tokens"] != 1
    for k, depth in enumerate(DEPTHS):
        assert got[f"mlm_loss_{depth}"] == pytest.approx(output.mlm_nll[k][masked].mean().item(), abs=1e-4)
        assert got[f"mlm_acc_{depth}"] == pytest.approx(output.mlm_correct[k][masked].float().mean().item(), abs=1e-4)
        assert got[f"mixture_{depth}"] == pytest.approx(output.mixture_weights[masked][:, k].mean().item(), abs=1e-4)
    entropies = [-sum(w * math.log(w) for w in gamma) for gamma in output.mixture_weights[masked].tolist()]
    assert got["mixture_entropy"] == pytest.approx(np.mean(entropies), abs=1e-4)
    replaced, logits = output.replaced[real], output.rtd_logits[real]
    assert got["replaced"] == pytest.approx(replaced.sum().item() / 11, abs=1e-4)
    assert got["rtd_auc"] == pytest.approx(roc_auc_score(replaced, logits), abs=0.01)
    assert got["rtd_acc"] == pytest.approx(((logits > 0) == replaced).float().mean().item(), abs=1e-4)
    original = torch.sigmoid(-logits.double())
    right = torch.where(replaced, 1 - original, original)
    assert got["rtd_loss"] == pytest.approx(-right.log().mean().item(), abs=1e-4)


def test_state_of_the_metrics_holds_plain_numbers_and_loads_safely(tmp_path):
    """A numpy scalar in a checkpoint cannot be loaded with weights_only."""
    metrics.reset()
    with metrics.aggregate("train"):
        for seed in range(2):
            AmosCriterion.reduce_metrics([amos_criterion()(small_amos(), small_batch(seed=seed))[2]])
    state = metrics.state_dict()
    kinds = set(map(type, tree_leaves(state)))
    assert kinds <= {int, float, str, bool, torch.Tensor, type(None)}
    torch.save(state, tmp_path / "metrics.pt")
    torch.load(tmp_path / "metrics.pt", weights_only=True)
    expected = dict(metrics.get_smoothed_values("train"))
    metrics.reset()
    metrics.load_state_dict(torch.load(tmp_path / "metrics.pt", weights_only=True))
    assert {k: v for k, v in metrics.get_smoothed_values("train").items() if k in expected}["loss"] == expected["loss"]
    metrics.reset()
