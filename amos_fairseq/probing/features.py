"""Hidden states of frozen encoders, computed once per text into memory-mapped files.

Shapes: B sequences, T tokens, D width of an encoder, E width of the token embeddings, P pieces of all sentences of a split.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from fairseq.models import BaseFairseqModel
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.data.block_iterator import batches_by_length
from amos_fairseq.errors import UserError
from amos_fairseq.files import NO_ROOM
from amos_fairseq.models.amos import AmosModel
from amos_fairseq.models.electra import ElectraModel
from amos_fairseq.models.pretraining import PretrainingModel
from amos_fairseq.models.teams import TeamsModel
from amos_fairseq.modules.encoder import TransformerEncoder
from amos_fairseq.output.terminal import progress_bar
from amos_fairseq.probing.targets import AnnotatedText

PIECES = "pieces"  # the "layer" of token embeddings that are only looked up
MIXTURE = "mix"  # all layers, mixed by learned weights
TOKENS_PER_BATCH = 8192
STORED = np.float32  # where most of the variance has one direction, float16 rounds the others away

Layer = int | str


@dataclass(frozen=True)
class ProbedPart:
    """A network of a checkpoint whose layers can be probed.

    Attributes:
        layers: number of a layer -> the encoder that has it, and its number there; 0 is the input of the first layer.
        default_layers: the generator's depths, or the last layer.
    """

    name: str
    embed_tokens: nn.Module
    layers: dict[int, tuple[TransformerEncoder, int]]
    default_layers: list[int]

    @property
    def mixed_layers(self) -> list[int]:
        """The layers of :data:`MIXTURE`; empty if they are of several networks."""
        return sorted(self.layers) if len({id(encoder) for encoder, _ in self.layers.values()}) == 1 else []

    def check_layers(self, layers: Sequence[Layer]) -> None:
        """Raise :class:`UserError` for a layer that this part does not have."""
        for layer in layers:
            if layer == MIXTURE and not self.mixed_layers:
                raise UserError(f"the layers of {self.name} are of several networks: give --part {self.name}_N to mix")
            if layer != MIXTURE and layer not in self.layers:
                known = ", ".join(map(str, sorted(self.layers)))
                raise UserError(f"{self.name} has no layer {layer}: give some of {known}, or choose with --part")


def parts_of(model: BaseFairseqModel) -> dict[str, ProbedPart]:
    """Return the parts of a model by name.

    ``generator`` and ``discriminator``; ``encoder`` for a masked language model and for fine-tuned models. Separate
    generators of AMOS are ``generator_DEPTH``, and ``generator`` has the last layer of each (AMOS Table 8). Electric's
    generator, which reads each side of a token apart, is not probed.
    """
    parts = []
    main = "encoder"
    if isinstance(model, AmosModel):
        main = "discriminator"
        if model.cfg.separate_generators:
            if len(set(model.depths)) == len(model.depths):
                last = {depth: (one, depth) for depth, one in zip(model.depths, model.generators, strict=True)}
                parts.append(ProbedPart("generator", model.embed_tokens, last, model.depths))
            for name, one in zip(model.depth_names, model.generators, strict=True):
                parts.append(_part(f"generator_{name}", model.embed_tokens, one))
        else:
            parts.append(_part("generator", model.embed_tokens, model.generators[0], model.depths))
    elif isinstance(model, ElectraModel | TeamsModel):
        main = "discriminator"
        if model.mlm_encoder is not None:
            parts.append(_part("generator", model.generator_embedding, model.mlm_encoder))
    elif isinstance(model, PretrainingModel) and hasattr(model, "discriminator"):
        main = "discriminator"
    parts.append(_part(main, model.encoder_embedding, model.encoder))
    return {part.name: part for part in parts}


def _part(
    name: str, embed_tokens: nn.Module, encoder: TransformerEncoder, default_layers: list[int] | None = None
) -> ProbedPart:
    layers = {number: (encoder, number) for number in range(len(encoder.layers) + 1)}
    return ProbedPart(name, embed_tokens, layers, default_layers or [len(encoder.layers)])


def default_parts(parts: dict[str, ProbedPart]) -> list[str]:
    """Return the parts of AMOS "Figure 4" and Table 8: without the single generators where ``generator`` has them all."""
    return [name for name in parts if not (name.startswith("generator_") and "generator" in parts)]


def random_weights(model: BaseFairseqModel, seed: int) -> BaseFairseqModel:
    """Return a model of the same architecture, newly initialized as for pretraining, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return type(model)(model.cfg, model.vocabulary).eval()


@torch.no_grad()
def hidden_states(
    part: ProbedPart, layers: Sequence[Layer], tokens: Tensor, pad: int, lengths: Sequence[int] | None = None
) -> dict[Layer, Tensor]:
    """Compute states of unmasked text in eval mode: [B,T] int64 -> [B,T,D] for each layer, [B,T,E] for the pieces.

    ``layers``: numbers of ``part.layers``, or :data:`PIECES`; ``lengths``: number of tokens of each text.
    """
    embeddings, padding_mask = part.embed_tokens(tokens), tokens.eq(pad) if lengths is None else None
    states: dict[Layer, Tensor] = {PIECES: embeddings}
    for encoder in {id(part.layers[layer][0]): part.layers[layer][0] for layer in layers if layer != PIECES}.values():
        outputs = encoder(embeddings, padding_mask, with_input=True, lengths=lengths)
        states |= {number: outputs[own] for number, (owner, own) in part.layers.items() if owner is encoder}
    return {layer: states[layer] for layer in layers}


class EncodedSplit(NamedTuple):
    """The pieces of a split's sentences.

    Attributes:
        sentences: ids [T] int64 with ``<s>`` and ``</s>``, cut to the model's ``max_positions``.
        word_pieces: for every word of every sentence its pieces (start, end), counted over the whole split; None for a word
            that was cut off.
        num_pieces: P, without ``<s>`` and ``</s>``.
    """

    sentences: list[Tensor]
    word_pieces: list[list[tuple[int, int] | None]]
    num_pieces: int


def encode_split(
    loaded: LoadedCheckpoint, examples: Sequence[AnnotatedText], on_sentence: Callable[[], object] = lambda: None
) -> EncodedSplit:
    """Encode the texts as in pretraining, one sentence per sequence; ``on_sentence`` is called after each."""
    dictionary = loaded.dictionary
    limit = loaded.model.max_positions() - 2
    sentences, word_pieces, start = [], [], 0
    for example in examples:
        pieces, ranges = loaded.tokenizer.encode_words(example.words)
        ids = pieces[:limit]
        sentences.append(torch.tensor([dictionary.bos(), *ids, dictionary.eos()]))
        word_pieces.append([(start + a, start + b) if b <= limit else None for a, b in ranges])
        start += len(ids)
        on_sentence()
    return EncodedSplit(sentences, word_pieces, start)


@contextlib.contextmanager
def stored_features(
    folder: Path,
    part: ProbedPart,
    layers: Sequence[Layer],
    splits: dict[str, EncodedSplit],
    pad: int,
    device: str,
    name: str,
) -> Iterator[dict[str, dict[Layer, Tensor]]]:
    """Compute features [P,D] float32 by split and layer as memory maps in ``folder``, which is removed behind the body."""
    shutil.rmtree(folder, ignore_errors=True)  # of a command that was killed
    try:
        try:
            folder.mkdir(parents=True)
            total = sum(split.num_pieces for split in splits.values())
            with progress_bar(total, f"features of {name}", "piece", delay=2) as bar:
                for split, encoded in splits.items():
                    _write_features(folder, split, part, layers, encoded, pad, device, bar.update)
        except OSError as error:
            help_ = "make room" if error.errno in NO_ROOM else "permit writing"
            raise UserError(
                f"the features of {name} cannot be written to {folder} ({error.strerror}): {help_}, or give another --out"
            ) from error
        yield {split: {layer: _open(folder, split, layer) for layer in layers} for split in splits}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _path(folder: Path, split: str, layer: Layer) -> Path:
    return folder / f"{split}.{layer}.npy"


def _open(folder: Path, split: str, layer: Layer) -> Tensor:
    return torch.from_numpy(np.load(_path(folder, split, layer), mmap_mode="c"))


def _write_features(folder, split, part, layers, encoded, pad, device, on_pieces) -> None:
    files: dict[Layer, np.memmap] = {}
    num_pieces = [len(sentence) - 2 for sentence in encoded.sentences]
    starts = np.concatenate([[0], np.cumsum(num_pieces)])
    for batch in batches_by_length([len(sentence) for sentence in encoded.sentences], TOKENS_PER_BATCH):
        sentences = [encoded.sentences[i] for i in batch]
        tokens = pad_sequence(sentences, batch_first=True, padding_value=pad).to(device)
        lengths = [len(sentence) for sentence in sentences]
        for layer, states in hidden_states(part, layers, tokens, pad, lengths).items():
            stored = states.float().cpu().numpy().astype(STORED)
            if layer not in files:
                shape = (encoded.num_pieces, stored.shape[-1])
                files[layer] = _reserve(_path(folder, split, layer), shape)
            for row, i in zip(stored, batch, strict=True):
                files[layer][starts[i] : starts[i + 1]] = row[1 : 1 + num_pieces[i]]
            if not np.isfinite(stored).all():
                raise UserError(
                    f"the states of {part.name}, layer {layer}, are not finite: its "
                    "training diverged; give an earlier checkpoint"
                )
        on_pieces(sum(num_pieces[i] for i in batch))
    for file in files.values():
        file.flush()


def _reserve(path: Path, shape: tuple[int, int]) -> np.memmap:
    """Create an array with all of its space on the disk: writing to a memory map of a full disk ends the process (SIGBUS)."""
    array = np.lib.format.open_memmap(path, "w+", STORED, shape)  # a file of this size, without space
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array
