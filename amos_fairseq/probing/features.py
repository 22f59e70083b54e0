"""Hidden states of frozen encoders, computed once per text into memory-mapped files.

Shapes: B sequences, T tokens, D width of an encoder, P pieces of all sentences of a split.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
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
from amos_fairseq.errors import UserError, explain_os_errors
from amos_fairseq.models.amos import AmosModel
from amos_fairseq.models.electra import ElectraModel
from amos_fairseq.models.pretraining import PretrainingModel
from amos_fairseq.models.teams import TeamsModel
from amos_fairseq.modules.encoder import TransformerEncoder
from amos_fairseq.output.terminal import progress_bar
from amos_fairseq.probing.tasks import AnnotatedText

TOKENS_PER_BATCH = 8192


@dataclass(frozen=True)
class ProbedPart:
    """A network of a checkpoint whose layers can be probed."""

    name: str
    embed_tokens: nn.Module
    # Number of a layer -> the encoder that has it, and its number there; 0 is the input of the first layer.
    layers: dict[int, tuple[TransformerEncoder, int]]
    default_layers: list[int]  # the generator's depths, or the last layer


def parts_of(model: BaseFairseqModel) -> dict[str, ProbedPart]:
    """Return the parts of a model by name: ``generator`` and ``discriminator``, or ``encoder``.

    Of separate generators of AMOS, whose depths must differ, ``generator`` has the last layer of each (AMOS Table 8).
    Electric's generator, which reads each side of a token apart, is not probed.
    """
    parts = []
    if isinstance(model, AmosModel) and model.cfg.separate_generators:
        if len(set(model.depths)) == len(model.depths):
            last = {depth: (generator, depth) for depth, generator in zip(model.depths, model.generators, strict=True)}
            parts.append(ProbedPart("generator", model.embed_tokens, last, model.depths))
    elif isinstance(model, AmosModel) and model.generators:
        parts.append(_part("generator", model.embed_tokens, model.generators[0], model.depths))
    elif isinstance(model, ElectraModel | TeamsModel) and model.generator is not None:
        parts.append(_part("generator", model.generator_embedding, model.mlm_encoder))
    detects = isinstance(model, PretrainingModel) and hasattr(model, "discriminator")
    parts.append(_part("discriminator" if detects else "encoder", model.encoder_embedding, model.encoder))
    return {part.name: part for part in parts}


def _part(
    name: str, embed_tokens: nn.Module, encoder: TransformerEncoder, default_layers: list[int] | None = None
) -> ProbedPart:
    layers = {number: (encoder, number) for number in range(len(encoder.layers) + 1)}
    return ProbedPart(name, embed_tokens, layers, default_layers or [len(encoder.layers)])


def choose_parts(loaded: LoadedCheckpoint, parts: dict[str, ProbedPart], names: Sequence[str] | None) -> list[str]:
    """Return ``names``, by default all parts but a generator that an imported checkpoint did not have."""
    has_generator = not loaded.is_new & {"generator", "generators"}
    names = list(dict.fromkeys(names or [name for name in parts if name != "generator" or has_generator]))
    for name in names:
        if name not in parts:
            raise UserError(f"{loaded.file} has no part {name!r}: give --part some of {', '.join(parts)}")
    return names


@torch.no_grad()
def hidden_states(part: ProbedPart, layers: Sequence[int], tokens: Tensor, lengths: Sequence[int]) -> dict[int, Tensor]:
    """Compute states of text in eval mode: [B,T] int64 -> [B,T,D] for each of ``layers``, numbers of ``part.layers``."""
    embeddings, states = part.embed_tokens(tokens), {}
    for encoder in {part.layers[layer][0] for layer in layers}:
        outputs = encoder(embeddings, with_input=True, lengths=lengths)
        states |= {number: outputs[index] for number, (owner, index) in part.layers.items() if owner is encoder}
    return {layer: states[layer] for layer in layers}


class EncodedSplit(NamedTuple):
    sentences: list[Tensor]  # ids [T] int64 with <s> and </s>, cut to the model's max_positions
    # For every word of every sentence its pieces (start, end), counted over the whole split; None for a word that was cut off.
    word_pieces: list[list[tuple[int, int] | None]]
    num_pieces: int  # P, without <s> and </s>


def encode_split(loaded: LoadedCheckpoint, examples: Sequence[AnnotatedText]) -> EncodedSplit:
    """Encode the texts as in pretraining, one sentence per sequence."""
    dictionary = loaded.dictionary
    limit = loaded.model.max_positions() - 2
    sentences, word_pieces, start = [], [], 0
    with progress_bar(len(examples), "encode", "text", delay=2) as bar:
        for example in examples:
            pieces, ranges = loaded.tokenizer.encode_words(example.words, example.spaces)
            ids = pieces[:limit]
            sentences.append(torch.tensor([dictionary.bos(), *ids, dictionary.eos()]))
            word_pieces.append([(start + a, start + b) if b <= limit else None for a, b in ranges])
            start += len(ids)
            bar.update()
    return EncodedSplit(sentences, word_pieces, start)


class SplitTargets(NamedTuple):
    """The N targets of a split that the model can read, S spans each, and those that count as wrong."""

    starts: Tensor  # [N,S] int64, first piece of each span, counted over the split
    lengths: Tensor  # [N,S] int64, pieces of each span
    labels: Tensor  # [N,C] bool
    # The labels as they are in the file, of the N targets and then of those without features.
    gold: list[tuple[str, ...]]
    num_unread: int  # targets without features, beyond the model's max_positions

    @property
    def num_targets(self) -> int:
        """The number of targets that the scores count."""
        return len(self.starts) + self.num_unread

    @property
    def num_impossible(self) -> int:
        """The number of labels that training has not seen, and of all labels of targets without features."""
        return sum(map(len, self.gold)) - int(self.labels.sum())


def split_targets(examples: Sequence[AnnotatedText], encoded: EncodedSplit, labels: Sequence[str]) -> SplitTargets:
    """Convert spans of words to spans of pieces, and labels to a matrix. A target of which a word was cut off is not read."""
    spans: list[list[tuple[int, int]]] = []
    gold, unread = [], []
    for example, words in zip(examples, encoded.word_pieces, strict=True):
        for target in example.targets:
            if any(words[end - 1] is None for _, end in target.spans):
                unread.append(target.labels)
                continue
            spans.append([(words[start][0], words[end - 1][1]) for start, end in target.spans])
            gold.append(target.labels)
    index = {label: number for number, label in enumerate(labels)}
    matrix = torch.zeros(len(spans), len(labels), dtype=torch.bool)
    for row, names in enumerate(gold):
        matrix[row, [index[name] for name in names if name in index]] = True
    bounds = torch.tensor(spans) if spans else torch.zeros(0, 1, 2, dtype=torch.int64)  # [N,S,2]
    starts, ends = bounds.unbind(-1)
    return SplitTargets(starts, ends - starts, matrix, gold + unread, len(unread))


@contextlib.contextmanager
def stored_features(
    folder: Path, part: ProbedPart, layers: Sequence[int], splits: dict[str, EncodedSplit], pad: int, device: str
) -> Iterator[dict[str, dict[int, Tensor]]]:
    """Compute features [P,D] float32 by split and layer as memory maps in ``folder``, which is removed after the body."""
    shutil.rmtree(folder, ignore_errors=True)  # of a command that was killed
    try:
        problem = f"the features of {part.name} cannot be written to {folder}"
        with explain_os_errors(problem, ": make room, permit writing, or give another --out"):
            folder.mkdir(parents=True)
            stored = {split: _store_split(folder, split, part, layers, splits[split], pad, device) for split in splits}
        yield {
            split: {layer: torch.from_numpy(each) for layer, each in files.items()} for split, files in stored.items()
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _store_split(
    folder: Path, split: str, part: ProbedPart, layers: Sequence[int], encoded: EncodedSplit, pad: int, device: str
) -> dict[int, np.memmap]:
    files: dict[int, np.memmap] = {}
    num_pieces = [len(sentence) - 2 for sentence in encoded.sentences]
    starts = np.concatenate([[0], np.cumsum(num_pieces)])
    with progress_bar(encoded.num_pieces, f"features of {part.name}, {split}", "piece", delay=2) as bar:
        for batch in batches_by_length([len(sentence) for sentence in encoded.sentences], TOKENS_PER_BATCH):
            sentences = [encoded.sentences[i] for i in batch]
            tokens = pad_sequence(sentences, batch_first=True, padding_value=pad).to(device)
            lengths = [len(sentence) for sentence in sentences]
            for layer, states in hidden_states(part, layers, tokens, lengths).items():
                states = states.float().cpu().numpy()
                if not np.isfinite(states).all():
                    raise UserError(f"the states of {part.name}, layer {layer}, are not finite: its training diverged")
                if layer not in files:
                    shape = (encoded.num_pieces, states.shape[-1])
                    files[layer] = _reserve(folder / f"{split}.{layer}.npy", shape)
                for row, i in zip(states, batch, strict=True):
                    files[layer][starts[i] : starts[i + 1]] = row[1 : 1 + num_pieces[i]]
            bar.update(sum(num_pieces[i] for i in batch))
    return files


def _reserve(path: Path, shape: tuple[int, int]) -> np.memmap:
    """Create an array with all of its space on the disk: writing to a memory map of a full disk ends the process (SIGBUS)."""
    # Where most of the variance has one direction, float16 would round the others away.
    array = np.lib.format.open_memmap(path, "w+", np.float32, shape)  # a file of this size, without space
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array
