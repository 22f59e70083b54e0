"""The losses on replaced tokens by depth against a naive loop with the model's own parts, and a case by hand; their figure."""

import math

import numpy as np
import pytest
import torch
from saved_models import CORPUS, write_run

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.data.masked_blocks import MaskedBlockDataset
from amos_fairseq.data.seeding import Purpose, noise_seed
from amos_fairseq.functional.sampling import gumbel_max, gumbel_noise
from amos_fairseq.models.pretraining import PretrainingBatch
from amos_fairseq.report import losses_by_depth
from amos_fairseq.report.losses_by_depth import density, held_out_blocks, loss_distributions, replaced_token_losses

LENGTH = 20


def load(tmp_path, objective="amos", **settings):
    task = {"tokens_per_sample": LENGTH}
    return load_checkpoint(write_run(tmp_path, objective, task=task, kernels="reference", **settings))


def masked(loaded, blocks, seed):
    settings = {"tokens_per_block": LENGTH, "mask_prob": 0.15, "training": False}
    return MaskedBlockDataset(blocks, loaded.dictionary, seed=seed, **settings)


@pytest.mark.parametrize("separate", [False, True])
def test_losses_equal_a_naive_loop(tmp_path, separate, monkeypatch):
    """Two blocks at a time; sampled from the logits of one depth, detected block by block, -log P in double precision."""
    monkeypatch.setattr(losses_by_depth, "TOKENS_AT_ONCE", 2 * LENGTH)
    loaded = load(tmp_path, separate_generators=separate)
    model, text = loaded.model, "\n".join(CORPUS)
    blocks = held_out_blocks(loaded, text)
    assert torch.cat(list(blocks)).tolist() == loaded.tokens(text)[1:].tolist()
    assert max(map(len, blocks)) == LENGTH - 1
    before = torch.get_rng_state()
    found = replaced_token_losses(loaded, blocks, seed=5, num_masked=10_000)
    assert torch.equal(torch.get_rng_state(), before)
    assert [of_depth.depth for of_depth in found] == ["1", "2", "4"]

    dataset = masked(loaded, blocks, seed=5)
    for depth, of_depth in enumerate(found):
        losses, num_masked = [], 0
        for start in range(0, len(blocks), 2):
            batch = dataset.collater([dataset[i] for i in range(start, min(start + 2, len(blocks)))])["net_input"]
            torch.manual_seed(noise_seed(Purpose.VALIDATION_NOISE, 5, depth, start))
            logits = model.predict_logits(PretrainingBatch(**batch))[0][depth]
            logits = logits.masked_fill(model.never_sampled_mask, float("-inf"))
            sampled = gumbel_max(logits, gumbel_noise(logits))
            for row, tokens in enumerate(batch["tokens"]):
                slots = [i for i in range(sampled.size(1)) if batch["masked_weights"][row, i]]
                corrupted = tokens.clone()
                for i in slots:
                    corrupted[batch["masked_positions"][row, i]] = sampled[row, i]
                detected = model.detection_head(model.extract_features(corrupted[None]))[0].detach().double().sigmoid()
                changed = [t for t in range(LENGTH) if corrupted[t] != tokens[t]]
                losses += [-math.log(detected[t]) for t in changed]
                num_masked += len(slots)
        assert of_depth.num_masked == num_masked
        assert losses
        assert of_depth.losses == pytest.approx(losses, rel=1e-4)
        assert of_depth.recall == pytest.approx(np.mean([loss < math.log(2) for loss in losses]))


def test_every_sample_is_one_token_and_every_logit_is_minus_one(tmp_path):
    """By hand: -log P(replaced) = log(1 + e), at masked tokens that are not the sampled one."""
    loaded = load(tmp_path)
    model = loaded.model
    always = int(loaded.tokens("the")[1])
    with torch.no_grad():
        model.mlm_heads[0].bias[always] += 1e4
        model.detection_head.output.weight.zero_()
        model.detection_head.output.bias.fill_(-1)
    blocks = held_out_blocks(loaded, "the dog and the fox " * 12)
    dataset = masked(loaded, blocks, seed=1)
    originals = [int(dataset[n]["tokens"][i]) for n in range(len(blocks)) for i in dataset[n]["positions"]]
    replaced = sum(token != always for token in originals)
    assert 0 < replaced < len(originals)
    for of_depth in replaced_token_losses(loaded, blocks, seed=1, num_masked=10_000):
        assert of_depth.num_masked == len(originals)
        assert of_depth.losses == pytest.approx([math.log(1 + math.e)] * replaced)
        assert of_depth.recall == 0


REPLACE_MLM = {"main_objective": "replace_mlm"}


@pytest.mark.parametrize(
    ("objective", "settings"),
    [("electra", {}), ("electra", REPLACE_MLM), ("teams", {"encoder_layers": 4}), ("electric", {}), ("mlm", {})],
)
def test_objectives(tmp_path, objective, settings):
    loaded = load(tmp_path, objective, **settings)
    losses = replaced_token_losses(loaded, held_out_blocks(loaded, CORPUS[0]), seed=1, num_masked=1)
    detects = objective != "mlm" and settings != REPLACE_MLM
    assert [of_depth.depth for of_depth in losses] == ["2"] * detects
    assert all(np.isfinite(of_depth.losses).all() and len(of_depth.losses) for of_depth in losses)


def test_density_is_a_sum_of_gaussians_reflected_at_zero():
    values, points = np.array([0.05, 0.4, 0.5, 2.0]), np.linspace(0, 8, 4001)
    width = values.std(ddof=1) * len(values) ** (-1 / 5)  # Scott's rule

    def kernel(x: float, at: float) -> float:
        return math.exp(-0.5 * ((x - at) / width) ** 2) / (width * math.sqrt(2 * math.pi))

    expected = [sum(kernel(x, at) + kernel(x, -at) for at in values) / len(values) for x in points]
    found = density(values, points)
    assert found == pytest.approx(expected)
    assert np.trapezoid(found, points) == pytest.approx(1, abs=1e-4)
    for equal in ([1.5, 1.5], []):
        assert density(np.array(equal), points) is None


def test_each_group_has_a_histogram_a_curve_and_its_mean():
    values = np.array([0.5, 1.0, 3.0])
    figure = loss_distributions({"a $run": {"depth 1": values, "depth 2": np.array([2.0, 2.0])}, "b": {}})
    first, second = figure.axes[:2]
    assert first.get_title() == r" a \$run"
    assert sum(patch.get_height() * patch.get_width() for patch in first.patches[:40]) == pytest.approx(1)
    curve, mean, mean_without_curve = first.get_lines()
    assert len(curve.get_xdata()) == 400
    assert (mean.get_xdata()[0], mean_without_curve.get_xdata()[0]) == (1.5, 2.0)
    labels = [text.get_text() for text in first.get_legend().get_texts()]
    assert labels == [" depth 1, mean 1.50", " depth 2, mean 2.00"]
    assert second.get_lines() == []
