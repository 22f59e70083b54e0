"""Whole updates on a fake CUDA device: the trainer of a recipe, batches, and the checks of every update."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fairseq.logging import metrics
from fake_cuda import FakeCuda
from torch._subclasses.fake_tensor import unset_fake_temporarily
from training_step import FairseqStep, set_up

from amos_fairseq.tasks.text_pretraining import TextPretrainingTask

VOCABULARY = 600
BATCH_TENSORS = 5  # id, tokens, masked tokens, masked positions, their weights


def masked_batch(task: TextPretrainingTask, lengths: Sequence[int]) -> dict[str, Any]:
    """Blocks of ``lengths`` tokens, ``<s>`` included, as the task's own dataset masks and collates them."""
    special = set(task.special_ids)
    pieces = torch.tensor([index for index in range(len(task.dictionary)) if index not in special])
    generator = torch.Generator().manual_seed(0)
    blocks = [pieces[torch.randint(len(pieces), (length - 1,), generator=generator)] for length in lengths]
    dataset = task.mask_blocks(blocks, training=True, source="synthetic blocks")
    return dataset.collater([dataset[index] for index in range(len(lengths))])


def full_and_padded(cuda: FakeCuda, task: TextPretrainingTask, num_sequences: int) -> tuple[dict, dict]:
    """Two batches on the fake CPU: of full blocks, and with a last block of half the length."""
    length = task.cfg.tokens_per_sample
    with unset_fake_temporarily():
        full = masked_batch(task, [length] * num_sequences)
        padded = masked_batch(task, [length] * (num_sequences - 1) + [max(2, length // 2)])
    return cuda.fake(full), cuda.fake(padded)


@dataclass
class FakeRun:
    """The trainer of a recipe on a fake device, batches on the fake CPU, and which parameters this update has reached."""

    cuda: FakeCuda
    step: FairseqStep
    full: dict[str, Any]
    padded: dict[str, Any]
    reached: set[str]

    @classmethod
    def of(cls, cuda: FakeCuda, recipe: str, overrides: Sequence[str] = (), precision: str = "bf16") -> "FakeRun":
        metrics.reset()  # keys of another objective in this process may be of another kind
        with unset_fake_temporarily():
            settings = {"precision": precision, "vocabulary_size": VOCABULARY}
            setup = set_up(recipe, ["dataset.batch_size=2", *overrides], **settings)
            assert setup.device.type == "cuda"
        run = cls(cuda, FairseqStep(setup), *full_and_padded(cuda, setup.task, 2), set())
        for name, parameter in run.step.module.named_parameters():
            assert parameter.device.type == "cuda"
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: run.reached.add(name))
        return run

    def check(self) -> None:
        """Two updates, the second with padding, and a validation."""
        self.check_update(self.full)
        self.check_update(self.padded)
        self.check_validation(self.full)

    def check_update(self, batch: dict[str, Any]) -> None:
        """Train one update; assert that all parameters get gradients and that the host reads only the statistics."""
        self.reached.clear()
        reads, uploads = self.cuda.host_reads, self.cuda.uploads
        self.step.step(batch)
        learning = {name for name, parameter in self.step.module.named_parameters() if parameter.requires_grad}
        assert learning
        assert self.reached == learning, learning ^ self.reached
        # --fp16 needs the norm of the gradient for its loss scale before the optimizer's step.
        assert self.cuda.host_reads - reads == (2 if self.step.trainer.cfg.common.fp16 else 1)
        assert self.cuda.uploads - uploads == BATCH_TENSORS

    def check_validation(self, batch: dict[str, Any]) -> None:
        """Validate one batch; assert that the host reads the device once."""
        reads = self.cuda.host_reads
        with metrics.aggregate(new_root=True):
            self.step.trainer.valid_step(batch)
        assert self.cuda.host_reads - reads == 1
