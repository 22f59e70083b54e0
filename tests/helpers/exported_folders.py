"""Folders written by ``amos export``, loaded with the Auto classes, to be compared with our own code.

Tolerance: float32 on both sides, the same formulas in another order; 1e-5 of the largest output is some fifty roundings.
"""

from pathlib import Path

import torch
import transformers
from torch import Tensor

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.cli.main import main

TOLERANCE = 1e-5
LONGEST = 150


def export(run: Path, out: Path, *flags: str, check: bool = False) -> None:
    """Without the command's own comparison, because these tests compare independently."""
    assert main(["export", str(run), str(out), *flags, *([] if check else ["--no-check"])]) == 0


def padded_tokens(pretrained: LoadedCheckpoint) -> Tensor:
    """Random tokens in our ids, right-padded, of lengths 1 to the maximum."""
    lengths = (1, 2, 3, 7, 40, 127, 128, 129, LONGEST - 1, LONGEST)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.full((len(lengths), LONGEST), pretrained.dictionary.pad())
    for row, length in enumerate(lengths):
        tokens[row, :length] = torch.randint(3, len(pretrained.dictionary), (length,), generator=draw)
    return tokens


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert ours.abs().max() > 0.1, "the outputs are not all near 0"
    assert (ours - theirs).abs().max() < TOLERANCE * ours.abs().max()


@torch.no_grad()
def outputs(folder: Path, auto_class: str, tokens: Tensor, pad: int = 1, **settings) -> transformers.utils.ModelOutput:
    model = getattr(transformers, auto_class).from_pretrained(folder, **settings).eval()
    return model(input_ids=tokens, attention_mask=tokens.ne(pad).long())
