"""SAVE_DIRs of small untrained models of every objective, and checkpoints as scoring loads them, without files."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY, build_model
from omegaconf import OmegaConf
from small_models import build_randomized, randomize, small_dictionary
from tokenizer_text import train_bpe

from amos_fairseq.checkpoints.read import LoadedCheckpoint, dictionary_of, load_generator
from amos_fairseq.downstream.spans.task import SpanModel
from amos_fairseq.downstream.words.model import WordModel
from amos_fairseq.files import directory_sha256, file_sha256
from amos_fairseq.flops import synthetic_dictionary
from amos_fairseq.models.pretraining import PretrainingModel
from amos_fairseq.recipes.composition import compose_recipe
from amos_fairseq.text.tokenization import Tokenizer
from amos_fairseq.text.tokenization.fast_tokenizer import FastTokenizer
from amos_fairseq.text.vocabulary import from_sentencepiece, sentencepiece_rules

TEXT = "the quick brown fox jumps over the lazy dog & <script>alert(1)</script>\nthe end"
CORPUS = [TEXT, "a lazy fox and a quick dog", "jumps over the end of the brown dog"]
UPDATES = 7

SIZES = {
    "encoder_layers": 2,
    "encoder_embed_dim": 16,
    "encoder_ffn_embed_dim": 24,
    "encoder_attention_heads": 2,
    "max_positions": 150,  # beyond the maximum distance of 128
    # Large values: attention is then far from uniform.
    "init_std": 0.3,
    "linear_init_std": 0.3,
}
OF_OBJECTIVES = {
    "amos": {"generator_depths": "1,2,4", "max_update": 30},
    "electra": {"embedding_dim": 8, "generator_size": 0.5, "max_update": 30},
    "mlm": {},
    "electric": {"embedding_dim": 8, "generator_size": 0.5, "mask_prob": 0.15},
    "teams": {"generator_layers": 2},
}
SCORED_SIZES = SIZES | {"encoder_ffn_embed_dim": 32, "max_positions": 12, "dropout": 0.0, "attention_dropout": 0.0}


def small_tokenizer() -> FastTokenizer:
    """57 pieces learned from three lines: with special symbols, two rows fewer than the embedding's 64."""
    normalizer = sentencepiece_rules(cased=True)
    model = train_bpe(map(normalizer.normalize_str, CORPUS), 58, normalization_rule_name="identity")
    return from_sentencepiece(model, normalizer)


def write_run(
    directory: Path,
    objective: str = "amos",
    tokenizer: Tokenizer | None = None,
    classes: int = 0,
    span_head: str = "",
    labels: int = 0,
    names: Sequence[str] = (),
    task: dict[str, Any] | None = None,
    of_head: dict[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """Write a SAVE_DIR with random values in all parameters; fine-tuned with ``classes``, a ``span_head`` or ``labels``."""
    tokenizer = tokenizer or small_tokenizer()
    tokenizer.save(directory / "tokenizer")
    config = MODEL_DATACLASS_REGISTRY[objective](**(OF_OBJECTIVES[objective] | SIZES | settings))
    setup = SimpleNamespace(source_dictionary=dictionary_of(tokenizer))
    if span_head or labels:
        setup.model_class = SpanModel if span_head else WordModel
    elif not classes:
        setup.masked_share = 0.15
        setup.load_generator = lambda cfg: load_generator(cfg, setup.source_dictionary)[0]
    torch.manual_seed(0)
    model = MODEL_REGISTRY[objective].build_model(config, setup)
    if classes:
        model.register_classification_head("sentence_classification_head", classes)
    if span_head:
        model.register_span_head(span_head)
    if labels:
        model.register_word_head("upos_labels", labels)
    randomize(model)
    cfg = {"model": dataclasses.asdict(config) | {"_name": objective}, "task": {"mask_prob": 0.15} | (task or {})}
    task_state: dict[str, Any] = {
        "tokenizer_sha256": directory_sha256(directory / "tokenizer"),
        "dictionary_sha256": file_sha256(directory / "tokenizer" / "dict.txt"),
    }
    if names:
        kind = "words" if labels else "classes"
        head = {"kind": kind, "labels": [*names], "name": "", "text_columns": []}
        head |= {"header": True, "raw_text": False, "signs": "", "whole": []} | (of_head or {})
        task_state["heads"] = dict.fromkeys(model.heads, head)
    history = [{"num_updates": UPDATES}]
    state = {"args": None, "cfg": cfg, "model": model.state_dict(), "optimizer_history": history}
    torch.save(state | {"task_state": task_state}, directory / "checkpoint_last.pt")
    return directory


def change_checkpoint(directory: Path, name: str = "checkpoint_last.pt", **changes: Any) -> None:
    """Save the last checkpoint with other parts under this name."""
    torch.save(torch.load(directory / "checkpoint_last.pt", weights_only=True) | changes, directory / name)


def add_settings(run: Path, recipe: str) -> None:
    """Give a checkpoint the settings of a recipe that its run would have."""
    model = torch.load(run / "checkpoint_last.pt", weights_only=True)["cfg"]["model"]
    settings = OmegaConf.to_container(compose_recipe(recipe, ["task.data=none", "task.tokens_per_sample=20"]))
    change_checkpoint(run, cfg=settings | {"model": settings["model"] | model})


def write_untrained(file: Path, recipe: str, vocabulary_size: int) -> Path:
    """Write the model of a recipe for a vocabulary of this size, whose tokens have no names, as a checkpoint."""
    cfg = compose_recipe(recipe, ["task.data=none"])
    task = SimpleNamespace(source_dictionary=synthetic_dictionary(vocabulary_size), masked_share=0.15)
    settings, model = OmegaConf.to_container(cfg, enum_to_str=True), build_model(cfg.model, task)
    torch.save({"cfg": settings, "model": model.state_dict(), "optimizer_history": [{"num_updates": 0}]}, file)
    return file


class WordTokenizer:
    """A tokenizer whose tokens are the words between spaces."""

    def encode_lines(self, lines: list[str]) -> list[list[str]]:
        return [line.split() for line in lines]


def pretrained(
    model_class: type[PretrainingModel], config: Any, num_tokens: int, mask_prob: float = 0.15, **criterion: Any
) -> LoadedCheckpoint:
    """An untrained model in eval mode whose tokens are ``word0`` to ``word{num_tokens - 1}``, ids from 4 on."""
    dictionary = small_dictionary(num_tokens)
    task = SimpleNamespace(source_dictionary=dictionary, masked_share=mask_prob)
    model = build_randomized(model_class, config, task).eval()
    return LoadedCheckpoint(
        Path("tiny.pt"), model, dictionary, WordTokenizer(), {"mask_prob": mask_prob}, UPDATES, criterion
    )


def sequences(dictionary: Dictionary, lengths: tuple[int, ...], num_tokens: int) -> list[torch.Tensor]:
    """``<s>``, random tokens, ``</s>``: a sequence for each number of ordinary tokens."""
    generator = torch.Generator().manual_seed(0)
    start, end = torch.tensor([dictionary.bos()]), torch.tensor([dictionary.eos()])
    return [torch.cat([start, torch.randint(4, 4 + num_tokens, (n,), generator=generator), end]) for n in lengths]
