"""A vocabulary of a few words, models that read it, and checkpoints as scoring gets them, without files."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.data import Dictionary
from small_models import small_dictionary

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.models.pretraining import PretrainingModel

SIZES = {
    "encoder_layers": 2,
    "encoder_embed_dim": 16,
    "encoder_ffn_embed_dim": 32,
    "encoder_attention_heads": 2,
    "max_positions": 12,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    # Large values: tokens and contexts then matter to an untrained model.
    "init_std": 0.3,
    "linear_init_std": 0.3,
}


class Words:
    """A tokenizer whose pieces are the words between spaces."""

    def encode_lines(self, lines: list[str]) -> list[list[str]]:
        return [line.split() for line in lines]


def pretrained(
    model_class: type[PretrainingModel], config: Any, num_words: int, mask_prob: float = 0.15, **criterion: str
) -> LoadedCheckpoint:
    """An untrained model in eval mode that knows ``word0`` to ``word{num_words - 1}``, ids from 4 on."""
    dictionary = small_dictionary(num_words)
    torch.manual_seed(0)
    model = model_class.build_model(config, SimpleNamespace(source_dictionary=dictionary, masked_share=mask_prob))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return LoadedCheckpoint(Path("tiny.pt"), model.eval(), dictionary, Words(), {"mask_prob": mask_prob}, 7, criterion)


def sequences(dictionary: Dictionary, lengths: tuple[int, ...], num_words: int, seed: int = 0) -> list[torch.Tensor]:
    """``<s>``, random words, ``</s>``: a sequence for each number of words."""
    draw = torch.Generator().manual_seed(seed)
    start, end = torch.tensor([dictionary.bos()]), torch.tensor([dictionary.eos()])
    return [torch.cat([start, torch.randint(4, 4 + num_words, (n,), generator=draw), end]) for n in lengths]
