"""The discriminator's loss on the tokens that each generator depth has replaced: Figure 1a of the AMOS paper.

B blocks, T tokens per block, K depths.
"""

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.stats import gaussian_kde
from torch import Tensor
from torch.nn.functional import softplus

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.data.corpus import read_blocks, require_split
from amos_fairseq.data.masked_blocks import MaskedBlockDataset
from amos_fairseq.data.seeding import Purpose, noise_seed
from amos_fairseq.models.amos import AmosModel
from amos_fairseq.models.pretraining import PretrainingBatch, PretrainingModel
from amos_fairseq.modules.mixture import MixtureWeights
from amos_fairseq.output.pictures import depth_colours, figure_of_panels, legend_label, run_style
from amos_fairseq.output.terminal import progress_bar

TOKENS_AT_ONCE = 4096  # in one forward pass
NUM_BINS, NUM_POINTS = 40, 400  # of a histogram; of a curve that looks smooth


@dataclass(frozen=True)
class DepthLosses:
    """The discriminator's losses on the replaced tokens of one generator depth."""

    depth: str  # its name in log keys
    losses: np.ndarray  # [N] float64, -log P(replaced) in nats; only sampled tokens that differ from the original
    num_masked: int  # N of them were replaced

    @property
    def recall(self) -> float:
        """Fraction of the replaced tokens with P(replaced) above 1/2; nan for none."""
        return float(np.mean(self.losses < math.log(2))) if len(self.losses) else math.nan


def held_out_blocks(loaded: LoadedCheckpoint, text: str | None) -> Sequence[Tensor]:
    """Return blocks without ``<s>`` of ``text``, or of the run's validation split for None."""
    size = tokens_per_block(loaded)
    if text is not None:
        return loaded.tokens(text)[1:].split(size - 1)
    path = validation_split(loaded)
    require_split(path, "give a held-out text with --text FILE")
    return read_blocks(path, loaded.dictionary, size, str(loaded.task.get("sample_break_mode") or "none"))


def validation_split(loaded: LoadedCheckpoint) -> str:
    """Return the path of the run's validation split, without a suffix."""
    return os.path.join(str(loaded.task.get("data") or "").split(os.pathsep)[0], "valid")


def tokens_per_block(loaded: LoadedCheckpoint) -> int:
    """Return T of the run, or the maximum input of the model where the checkpoint does not contain it."""
    longest = loaded.model.max_positions()
    return min(loaded.task.get("tokens_per_sample") or longest, longest)


@torch.no_grad()
def replaced_token_losses(
    loaded: LoadedCheckpoint, blocks: Sequence[Tensor], seed: int, num_masked: int
) -> list[DepthLosses]:
    """Replace the masked tokens by samples of one depth after the other, and compute the discriminator's loss on them.

    For each depth, all masked tokens of a block are samples of its MLM head, and the discriminator reads the whole block. Its
    loss on a replaced token is -log P(replaced) (the second term of AMOS Eq. 1). For Electric it is -log P(noise).

    Blocks at equal distances are used, until they have ``num_masked`` masked tokens. All depths have the same masks, each has
    noise of its own. The result is empty if the model has no discriminator that detects replaced tokens.

    Departures: the paper trains one discriminator with each generator ("we train BERT-Base-sized discriminators with
    4/6/8-layer generators", section 3.2). That is one call for each such run. A model with K depths has a single
    discriminator, which was trained on the mixture of the depths.
    """
    model = loaded.model
    masking = {"tokens_per_block": tokens_per_block(loaded), "mask_prob": loaded.task["mask_prob"], "seed": seed}
    dataset = MaskedBlockDataset(blocks, loaded.dictionary, **masking, training=False)
    num_blocks = min(len(blocks), math.ceil(num_masked / dataset.slots))
    indices = np.linspace(0, len(blocks) - 1, num_blocks).round().astype(int)
    step = max(1, TOKENS_AT_ONCE // dataset.tokens_per_block)
    losses: list[list[Tensor]] = [[] for _ in model.depth_names]
    device, masked = model.embed_tokens.weight.device, 0
    with progress_bar(num_blocks, "losses by depth", "block", delay=2) as bar:
        for start in range(0, num_blocks, step):
            batch = dataset.collater([dataset[index] for index in indices[start : start + step]])
            net_input = {name: tensor.to(device) for name, tensor in batch["net_input"].items()}
            for depth in range(len(losses)):
                output = forward_of_depth(model, net_input, depth, seed, block=start)
                if getattr(output, "rtd_logits", None) is None:
                    return []
                losses[depth].append(softplus(-output.rtd_logits[output.replaced].float()).cpu())
            masked += batch["num_masked"]
            bar.update(batch["nsentences"])
    return [
        DepthLosses(name, torch.cat(of_depth).double().numpy(), masked)
        for name, of_depth in zip(model.depth_names, losses, strict=True)
    ]


def forward_of_depth(
    model: PretrainingModel, net_input: dict[str, Tensor], depth: int, seed: int, block: int = 0
) -> Any:
    """Run the model on a batch with all replacements sampled from one depth, by (seed, depth, block); return its output."""
    device = net_input["tokens"].device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), _only_depth(model, depth):
        torch.manual_seed(noise_seed(Purpose.VALIDATION_NOISE, seed, depth, block))
        return model(PretrainingBatch(**net_input))


@contextlib.contextmanager
def _only_depth(model: PretrainingModel, depth: int) -> Iterator[None]:
    if not isinstance(model, AmosModel):
        yield
        return
    num_depths, mixture = len(model.depth_names), model.mixture
    weights = [float(other == depth) for other in range(num_depths)]
    model.mixture = MixtureWeights("fixed", num_depths, model.cfg.encoder_embed_dim, weights)
    try:
        yield
    finally:
        model.mixture = mixture


def loss_distributions(panels: dict[str, dict[str, np.ndarray]]) -> Figure:
    """Draw a histogram, a density and the mean of groups of losses [N], which are not negative; by title and label."""
    figure, axes = figure_of_panels(len(panels), 2)
    largest = max((losses.max() for groups in panels.values() for losses in groups.values() if len(losses)), default=1)
    bins, points = np.linspace(0, largest, NUM_BINS + 1), np.linspace(0, largest, NUM_POINTS)
    for (title, groups), ax in zip(panels.items(), axes, strict=True):
        for index, (name, losses) in enumerate(groups.items()):
            if not len(losses):
                continue
            style = {"color": depth_colours(len(groups))[index], "linestyle": run_style(index)[0]}
            ax.hist(losses, bins, density=True, color=style["color"], alpha=0.22)
            if (curve := density(losses, points)) is not None:
                ax.plot(points, curve, linewidth=1.6, **style)
            label = f"{legend_label(name)}, mean {losses.mean():.2f}"
            ax.axvline(losses.mean(), linewidth=1, alpha=0.8, label=label, **style)
        ax.set_title(legend_label(title) if len(panels) > 1 else "")
        ax.set(xlabel="discriminator loss on a replaced token (nats)", ylabel="density", xlim=(0, largest))
        if ax.get_legend_handles_labels()[0]:
            ax.legend(frameon=False, fontsize=8)
    return figure


def density(values: np.ndarray, points: np.ndarray) -> np.ndarray | None:
    """Estimate the density of values that are not negative: a Gaussian kernel (Scott's rule), reflected at 0.

    A loss cannot be negative. Without the reflection, the mass of the kernels below 0 would be lost there.

    Returns:
        The density at ``points`` [P]; None for fewer than two different values.
    """
    if len(np.unique(values)) < 2:
        return None
    estimate = gaussian_kde(values)
    return estimate(points) + estimate(-points)
