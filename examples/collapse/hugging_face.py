"""Train ELECTRA with Hugging Face's networks in a plain PyTorch loop, on the batches and from the weights of an ELECTRA recipe.

    python examples/collapse/hugging_face.py electra_tiny --out OUT task.data=DATA [KEY=VALUE ...]

The networks are ElectraForMaskedLM and ElectraForPreTraining with tied embeddings, the optimizer is torch.optim.AdamW, and
the areas under the ROC curve are scikit-learn's. Data, order, masked positions, initial weights, rate, warm-up, decay and
clipping are those of `amos train` with the same settings; only samples and dropout are drawn from another generator.
OUT/metrics.jsonl has the keys of a run of this package, so that `amos report RUN OUT` draws both.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from fairseq import models, tasks
from omegaconf import DictConfig, OmegaConf
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from tqdm import tqdm

import amos_fairseq
from amos_fairseq.errors import UserError
from amos_fairseq.hugging_face.weights import Head, to_hugging_face
from amos_fairseq.models.electra import ElectraModel
from amos_fairseq.recipes.composition import compose_recipe
from amos_fairseq.run.precision import set_precision

# The networks are those of the benchmark.
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmark"))
from hugging_face_peers import HuggingFaceObjective, build_objective, fused_adamw

TOKEN_TYPES = "electra.embeddings.token_type_embeddings.weight"
INPUTS = ("tokens", "masked_tokens", "masked_positions")


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_intermixed_args()
    amos_fairseq.register()
    try:
        cfg = compose_recipe(arguments.recipe, arguments.settings)
        check(cfg)
        train(cfg, arguments.out)
    except UserError as error:
        parser.exit(1, f"hugging_face.py: error: {error}\n")


# Settings that this loop does not have, with the value that leaves them out.
LEFT_OUT = {
    "criterion.detection_positions": "all",
    "model.adversarial": False,
    "model.disallow_true_token": False,
    "model.discriminator_lr_scale": 1.0,
    "model.encoder_mlm_weight": 0.0,
    "model.generator_temperature": 1.0,
    "model.main_objective": "detection",
    "model.disentangled_embeddings": False,
    "optimizer.bias_correction": True,
    "optimizer.layer_wise_lr_decay": 1.0,
}


def check(cfg: DictConfig) -> None:
    """Refuse what Hugging Face's ELECTRA or this loop does not have."""
    for key, neutral in LEFT_OUT.items():
        if OmegaConf.select(cfg, key, default=neutral) != neutral:
            raise UserError(f"this loop does not have {key}: give {key}={str(neutral).lower()}")
    if cfg.model._name != "electra" or cfg.model.share_weights != "embeddings" or cfg.model.generator != "masked_lm":
        raise UserError("only ELECTRA with shared embeddings can be built from Hugging Face's classes")
    if cfg.model.relative_position_scheme != "none" or cfg.model.token_types or cfg.model.encoder != "bert":
        raise UserError("give model.encoder=bert model.relative_position_scheme=none model.token_types=0")
    schedule = cfg.lr_scheduler
    if cfg.optimization.update_freq != [1] or schedule.decay_share != 1 or schedule.decay_from or schedule.minutes:
        raise UserError("give optimization.update_freq=[1], and no decay_share, decay_from or minutes of lr_scheduler")


def train(cfg: DictConfig, out: Path) -> None:
    task = tasks.setup_task(cfg.task)
    torch.manual_seed(cfg.common.seed)
    objective = with_weights_of(models.build_model(cfg.model, task), cfg, task.source_dictionary.pad())
    optimizer = fused_adamw(objective, cfg)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: share_of_peak(cfg, update))
    in_bf16 = set_precision(cfg, on_gpu=False) == "bf16"
    precision = torch.autocast("cpu", torch.bfloat16) if in_bf16 else contextlib.nullcontext()
    task.load_dataset("valid")
    out.mkdir(parents=True, exist_ok=True)
    meter = Meter()
    bar = tqdm(batches(task, cfg), total=cfg.optimization.max_update, mininterval=5)
    with open(out / "metrics.jsonl", "w", encoding="utf-8") as file:
        for update, batch in enumerate(bar, start=1):
            objective.train()
            with precision:
                loss = detection_step(objective, batch, meter)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            if cfg.optimization.clip_norm > 0:
                nn.utils.clip_grad_norm_(objective.parameters(), cfg.optimization.clip_norm)
            optimizer.step()
            schedule.step()
            records = []
            if update % cfg.common.log_interval == 0:
                records.append({"split": "train"} | meter.summary(len(objective.masked_lm.electra.encoder.layer)))
                meter = Meter()
            if update % cfg.dataset.validate_interval_updates == 0:
                records.append({"split": "valid"} | validate(objective, task, cfg, precision))
            for record in records:
                file.write(json.dumps({"update": update, "epoch": 0.0} | record) + "\n")
                file.flush()


def with_weights_of(model: ElectraModel, cfg: DictConfig, pad: int) -> HuggingFaceObjective:
    """Return Hugging Face's networks with the weights of ``model``; their one token type is 0 and stays so."""
    objective = build_objective(cfg, model.vocabulary.padded_size, pad)
    state = model.state_dict()
    for network, prefix, head, kind in (
        (objective.masked_lm, "generator.", "mlm_head.", Head.MASKED_LM),
        (objective.discriminator, "discriminator.", "detection_head.", Head.PRETRAINING),
    ):
        part = {f"encoder.{name.removeprefix(prefix)}": t for name, t in state.items() if name.startswith(prefix)}
        part |= {name: tensor for name, tensor in state.items() if name.startswith(("embed_tokens.", head))}
        weights = to_hugging_face("electra", kind, part)
        weights[TOKEN_TYPES] = weights[TOKEN_TYPES][:1]  # zeros
        network.load_state_dict(weights, strict=True)
        network.electra.embeddings.token_type_embeddings.weight.requires_grad_(False)
    return objective


def share_of_peak(cfg: DictConfig, update: int) -> float:
    """Linear warm-up from 0, then polynomial decay to 0, as fairseq counts updates."""
    warmup, total = cfg.lr_scheduler.warmup_updates, cfg.lr_scheduler.total_num_update
    if update < warmup:
        return update / warmup
    return max(0.0, 1 - (update - warmup) / (total - warmup)) ** cfg.lr_scheduler.power


def batches(task, cfg: DictConfig) -> Iterator[dict[str, Tensor]]:
    """Yield the inputs of as many updates as the recipe has, in the order of fairseq's trainer."""
    left, epoch = cfg.optimization.max_update, 1
    while left:
        task.load_dataset("train", epoch=epoch)
        iterator = task.get_batch_iterator(
            task.dataset("train"),
            max_sentences=cfg.dataset.batch_size,
            max_positions=cfg.model.max_positions,
            seed=cfg.common.seed,
            epoch=epoch,
        )
        for batch in iterator.next_epoch_itr(shuffle=True):
            yield {name: batch["net_input"][name] for name in INPUTS}
            left -= 1
            if not left:
                return
        epoch += 1


class Meter:
    """Sums of the logged values since the last record."""

    def __init__(self) -> None:
        self.mlm_losses, self.rtd_losses, self.logits, self.replaced = [], [], [], []
        self.squared_deviations = []  # from the mean of the batch, as rtd_logit_std of amos_fairseq

    def summary(self, num_layers: int) -> dict[str, float]:
        logits, replaced = np.concatenate(self.logits), np.concatenate(self.replaced)
        share = replaced.mean()
        loss = float(np.mean(self.rtd_losses))
        return {
            f"mlm_loss_{num_layers}": float(np.mean(self.mlm_losses)),
            "rtd_loss": loss,
            "rtd_auc": float(roc_auc_score(replaced, logits)),
            "rtd_logit_std": float(np.mean(self.squared_deviations)) ** 0.5,
            "rtd_loss_above_prior": loss + float(share * np.log(share) + (1 - share) * np.log(1 - share)),
        }


def detection_step(objective: HuggingFaceObjective, batch: dict[str, Tensor], meter: Meter) -> Tensor:
    """Return mean MLM loss + lambda * mean detection loss of a batch and add them to ``meter``."""
    tokens, positions = batch["tokens"], batch["masked_positions"]
    logits = objective.predict_masked(batch["masked_tokens"], positions).flatten(0, 1).float()
    mlm_loss = F.cross_entropy(logits, tokens.gather(1, positions).flatten())
    corrupted = tokens.scatter(1, positions, objective.sample(logits.detach()).view_as(positions))
    states = objective.encode(objective.discriminator, corrupted)
    detected = objective.discriminator.discriminator_predictions(states).float()
    replaced = corrupted.ne(tokens)
    rtd_loss = F.binary_cross_entropy_with_logits(detected, replaced.float())
    meter.mlm_losses.append(mlm_loss.item())
    meter.rtd_losses.append(rtd_loss.item())
    meter.logits.append(detected.detach().flatten().numpy())
    meter.squared_deviations.append(meter.logits[-1].var())
    meter.replaced.append(replaced.flatten().numpy())
    return mlm_loss + objective.detection_weight * rtd_loss


@torch.no_grad()
def validate(objective: HuggingFaceObjective, task, cfg: DictConfig, precision) -> dict[str, float]:
    """Return how far the states of the original held-out text differ in the discriminator's last layer."""
    objective.eval()
    found, blocks = [], task.dataset("valid")
    size, steps = cfg.dataset.batch_size, cfg.dataset.max_valid_steps
    for start in range(0, min(len(blocks), size * (steps or len(blocks))), size):
        batch = blocks.collater([blocks[i] for i in range(start, min(start + size, len(blocks)))])
        tokens = batch["net_input"]["tokens"]
        with precision:
            states = objective.encode(objective.discriminator, tokens)
        found.append(states[tokens.ne(task.source_dictionary.pad())].float().numpy())
    states = np.concatenate(found).astype(np.float64)
    eigenvalues = np.linalg.eigvalsh(np.cov(states.T, bias=True))
    return {
        "rtd_state_variance": float(eigenvalues.sum() / (states**2).sum(1).mean()),
        "rtd_first_component": float(eigenvalues[-1] / eigenvalues.sum()),
        "rtd_participation_ratio": float(eigenvalues.sum() ** 2 / (eigenvalues**2).sum()),
    }


if __name__ == "__main__":
    main()
