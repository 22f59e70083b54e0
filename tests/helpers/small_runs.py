"""SAVE_DIRs of tiny models of every kind that can be exported, with random weights everywhere."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel
from small_checkpoint import small_tokenizer

from amos_fairseq.data.fingerprint import directory_sha256
from amos_fairseq.models.amos import AmosConfig, AmosModel
from amos_fairseq.models.configuration import EncoderConfig
from amos_fairseq.models.electra import ElectraConfig, ElectraModel
from amos_fairseq.models.electric import ElectricConfig, ElectricModel
from amos_fairseq.models.mlm import MlmModel
from amos_fairseq.models.teams import TeamsConfig, TeamsModel
from amos_fairseq.tokenization import Tokenizer

SIZES = {
    "encoder_layers": 2,
    "encoder_embed_dim": 16,
    "encoder_ffn_embed_dim": 24,
    "encoder_attention_heads": 2,
    "max_positions": 150,  # past the maximum distance of 128
    # Large values: attention is then far from uniform.
    "init_std": 0.3,
    "linear_init_std": 0.3,
}
# Settings and model of an objective, and what it needs beside the sizes.
OBJECTIVES = {
    "amos": (AmosConfig, AmosModel, {"generator_depths": "1,2,4", "max_update": 30}),
    "electra": (ElectraConfig, ElectraModel, {"embedding_dim": 8, "generator_size": 0.5}),
    "mlm": (EncoderConfig, MlmModel, {}),
    "electric": (ElectricConfig, ElectricModel, {"embedding_dim": 8, "generator_size": 0.5, "mask_prob": 0.15}),
    "teams": (TeamsConfig, TeamsModel, {"generator_layers": 2}),
}
UPDATES = 7


def write_run(
    directory: Path,
    objective: str = "amos",
    tokenizer: Tokenizer | None = None,
    classes: int = 0,
    span_head: str = "",
    task: dict[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """``directory`` with a checkpoint and its tokenizer; a fine-tuned one where it has ``classes`` or a ``span_head``."""
    tokenizer = tokenizer or small_tokenizer()
    tokenizer.save(directory / "tokenizer")
    config_class, model_class, own = OBJECTIVES[objective]
    config = config_class(**(own | SIZES | settings))
    dictionary = Dictionary()
    for symbol in [*tokenizer.dictionary_symbols, "<mask>"]:
        dictionary.add_symbol(symbol)
    torch.manual_seed(0)
    work = SimpleNamespace(source_dictionary=dictionary)
    if not (classes or span_head):
        work.masked_share = 0.15
    model = model_class.build_model(config, work)
    if classes:
        model.register_classification_head("sentence_classification_head", classes)
    if span_head:
        model.register_span_head(span_head)
    randomize(model)
    state = {
        "args": None,
        "cfg": {"model": dataclasses.asdict(config) | {"_name": objective}, "task": {"mask_prob": 0.15} | (task or {})},
        "model": model.state_dict(),
        "optimizer_history": [{"num_updates": UPDATES}],
        "task_state": {"tokenizer_sha256": directory_sha256(directory / "tokenizer")},
    }
    torch.save(state, directory / "checkpoint_last.pt")
    return directory


@torch.no_grad()
def randomize(model: BaseFairseqModel) -> None:
    """LayerNorms and biases too, which start as ones and zeros."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter) * 0.3)
