"""Random numbers of a micro-batch that depend on what it is, not on who computes it or what came before."""

from typing import Any, Dict, Tuple

import torch

from amos_fairseq.data.seeding import Purpose, noise_seed


class MicroBatchNoise:
    """Before ``FairseqTask`` among the bases of a task whose samples hold ``first_id``, a Python int.

    fairseq seeds all ranks alike once per update, so that they would share dropout and Gumbel noise, and a micro-batch
    would see other noise when it comes second on one rank than when it comes first on another.
    """

    def train_step(
        self,
        sample: Dict[str, Any],
        model: Any,
        criterion: Any,
        optimizer: Any,
        update_num: int,
        ignore_grad: bool = False,
    ) -> Tuple[torch.Tensor, int, Dict[str, Any]]:
        """fairseq's step with noise from (seed, update, first sample)."""
        torch.manual_seed(noise_seed(Purpose.TRAINING_NOISE, self.cfg.seed, update_num, sample["first_id"]))
        return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)
