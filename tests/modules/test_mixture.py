"""Eq. 3 of AMOS and the ablations of the mixture weights, against loops, frequencies and hand values."""

import math
from types import SimpleNamespace

import pytest
import torch
from fairseq.dataclass.configs import FairseqConfig
from fairseq.optim.lr_scheduler.fixed_schedule import FixedLRScheduleConfig
from fairseq.trainer import Trainer
from omegaconf import OmegaConf
from small_models import amos_criterion, small_amos, small_batch, small_task

from amos_fairseq.functional.mixture import mixture_entropy
from amos_fairseq.models.pretraining import PretrainingBatch
from amos_fairseq.modules.mixture import MixtureWeights
from amos_fairseq.optim.grouped_adam import GroupedAdamConfig

B, M, K, D, V = 2, 3, 3, 4, 10


def test_entropy_by_hand():
    weights = torch.tensor([[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3], [0.5, 0.5, 0.0]])
    assert mixture_entropy(weights).tolist() == pytest.approx([0.0, math.log(3), math.log(2)], abs=1e-6)


def features(num_depths: int = K, copies: int = M) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(B, copies, D, generator=generator) for _ in range(num_depths)]


def test_v_exists_only_where_it_is_learned():
    torch.manual_seed(0)
    named = dict(MixtureWeights("learned", K, 10_000).named_parameters())
    assert list(named) == ["v"]
    assert named["v"].std().item() == pytest.approx(0.02, rel=0.05)
    for strategy in ("uniform", "random_layer", "layer_switch", "fixed"):
        assert not list(MixtureWeights(strategy, K, D, max_update=9, fixed_weights=[1, 0, 0]).parameters())
    alone = MixtureWeights("learned", 1, D)
    assert not list(alone.parameters())
    assert torch.equal(alone(features(1)), torch.ones(B, M, 1))


def test_random_layer_samples_one_depth_per_position_uniformly():
    """60,000 positions: each depth a third of the time, within five standard deviations; neighbours independent."""
    torch.manual_seed(3)
    gamma = MixtureWeights("random_layer", K, D)(features(copies=30_000))
    assert torch.equal(gamma.sum(-1), torch.ones(B, 30_000))
    assert set(gamma.unique().tolist()) == {0.0, 1.0}
    spread = 5 * math.sqrt(60_000 * (1 / 3) * (2 / 3))
    assert (gamma.sum((0, 1)) - 20_000).abs().max() < spread
    depth = gamma.argmax(-1)
    agreeing = int((depth[:, 1:] == depth[:, :-1]).sum()) + int((depth[0] == depth[1]).sum())
    assert abs(agreeing - 89_998 / 3) < 5 * math.sqrt(89_998 * (1 / 3) * (2 / 3))


@pytest.mark.parametrize(("max_update", "second", "third"), [(30, 10, 20), (100, 34, 67), (125_000, 41_667, 83_334)])
def test_layer_switch_changes_at_equal_parts_of_the_run(max_update, second, third):
    """Depth j from update j / K of max_update on: ceil by hand."""
    mixture = MixtureWeights("layer_switch", K, D, max_update=max_update)
    for depth, update in enumerate((0, second, third)):
        mixture.num_updates = update
        assert mixture(features())[0, 0].tolist() == [float(d == depth) for d in range(K)]
        if update:
            mixture.num_updates = update - 1
            assert mixture(features())[0, 0].tolist() == [float(d == depth - 1) for d in range(K)]
    mixture.num_updates = 3 * max_update
    assert mixture(features())[0, 0].tolist() == [0.0, 0.0, 1.0]


def test_layer_switch_continues_after_a_resume(tmp_path):
    """fairseq's trainer sets the number of updates when it loads, before any update or validation."""
    config = OmegaConf.structured(FairseqConfig)
    config.common.cpu, config.model, config.task = True, {"_name": "amos"}, {}
    config.optimizer = vars(GroupedAdamConfig(lr=[0.1])) | {"_name": "grouped_adam"}
    config.lr_scheduler = vars(FixedLRScheduleConfig(lr=[0.1])) | {"_name": "fixed"}
    task = SimpleNamespace(**vars(small_task()), cfg=None, state_dict=dict, load_state_dict=lambda state: None)
    trainers = [Trainer(config, task, small_amos(mixture="layer_switch"), amos_criterion()) for _ in range(2)]
    trainers[0].set_num_updates(20)
    trainers[0].consolidate_optimizer()  # as fairseq does before it saves
    trainers[0].save_checkpoint(str(tmp_path / "checkpoint.pt"), {"train_iterator": {"epoch": 1}})
    assert trainers[1].model.mixture.num_updates == 0
    trainers[1].load_checkpoint(str(tmp_path / "checkpoint.pt"))
    weights = trainers[1].model(PretrainingBatch(**small_batch()["net_input"])).mixture_weights
    assert weights.argmax(-1).unique().tolist() == [2]
