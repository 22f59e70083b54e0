"""Features of text, and predictions, from the model of a checkpoint: pretrained, fine-tuned or imported."""

import copy
import importlib
import itertools
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import amos_fairseq
from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.errors import UserError
from amos_fairseq.functional.positions import mean_state
from amos_fairseq.models.pretraining import PretrainingModel
from amos_fairseq.modules.encoder import with_layers

# One text, or a pair: <s> A </s>, <s> A </s> B </s>, or <s> A </s> </s> B </s> if the model was fine-tuned so.
Text = str | tuple[str, str]

BATCH_SIZE = 32


class Features(NamedTuple):
    """The output of ``Encoder`` for B texts; T is the number of tokens of the longest.

    Attributes:
        states: [B,T,D] hidden states of the last layer, or of the layer that ``load`` was asked for, in the encoder's dtype
            and on its device; 0 at padding.
        mask: [B,T] bool, True at real tokens, False at padding.
        tokens: [B,T] int64, the input: ``<s>``, pieces, ``</s>``.
        layers: with ``all_layers``, a tuple of such states: item 0 is the input of the first layer, item k the output of
            layer k, as in ``hidden_states`` of Hugging Face; else None. Those of ModernBERT have all been through its last
            LayerNorm, which Hugging Face applies to the last layer alone.
    """

    states: Tensor
    mask: Tensor
    tokens: Tensor
    layers: tuple[Tensor, ...] | None = None

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.states.shape))
        return f"Features({shape}, {self.states.dtype}, {self.states.device})"

    def pooled(self, how: str = "mean") -> Tensor:
        """Return one vector per text: [B,D].

        Args:
            how: ``mean`` over the text's tokens, ``<s>`` and ``</s>`` included, as in sentence-transformers; or ``first``,
                the state of ``<s>``, which is the input of classification heads.
        """
        if how == "first":
            return self.states[:, 0]
        if how != "mean":
            raise UserError(f"there is no pooling {how!r}: give 'mean' or 'first'")
        return mean_state(self.states, self.mask)


class Encoder(nn.Module):
    """The encoder of a checkpoint: text in, features out.

    In eval mode, the mode in which ``load`` returns it, no gradients are recorded; after ``.train()`` they are, with
    dropout. ``.to(...)`` moves it and changes its dtype, as for any module. ``batch_size`` and ``layer``: see ``load``.
    Pickled, it is a path and settings: weights that were changed since are not kept.
    """

    def __init__(self, loaded: LoadedCheckpoint, batch_size: int = BATCH_SIZE, layer: int | None = None) -> None:
        super().__init__()
        num_layers = len(loaded.model.encoder.layers)  # raises now, not at the first text, if the model has no encoder
        problem = "" if type(batch_size) is int and batch_size > 0 else f"batch_size {batch_size!r}: give an int >= 1"
        if layer is not None and not (type(layer) is int and 0 <= layer <= num_layers):
            problem = f"layer {layer} is no layer of this encoder: give a number from 0 to {num_layers}"
        if problem:
            raise UserError(problem)
        self.model, self.loaded = loaded.model, loaded
        self.source: tuple[Path, Path | None] = (loaded.file.absolute(), None)  # checkpoint and tokenizer, to pickle
        self.batch_size, self.layer = batch_size, layer
        self.is_fine_tuned = not isinstance(loaded.model, PretrainingModel)

    def __reduce__(self) -> tuple[Any, ...]:
        weights, settings = next(self.model.parameters()), (self.batch_size, self.layer)
        return (
            amos_fairseq.load,
            (*self.source, str(weights.device), weights.dtype, *settings),
            {"training": self.training},
        )

    def __setstate__(self, state: dict[str, bool]) -> None:
        self.train(state["training"])

    def __deepcopy__(self, memo: dict[int, Any]) -> "Encoder":
        """Copy the weights as they are now, not those of the file."""
        copied = Encoder(copy.deepcopy(self.loaded, memo), self.batch_size, self.layer).train(self.training)
        copied.source = self.source
        return copied

    def forward(self, texts: str | Iterable[Text], truncate: bool = False, all_layers: bool = False) -> Features:
        """Return the features of all texts, in their order, padded to the longest; texts of similar length share a batch.

        Each line of a text ends in ``</s>``, as in pretraining. In a pair, and for a fine-tuned model, a line end is a space.

        Args:
            texts: one string, or any iterable of strings and of pairs of strings.
            truncate: cut inputs that are longer than ``max_positions``; of a pair the longer text first.
            all_layers: return the states of all layers too, in ``layers``, up to the layer that ``load`` was asked for.

        Raises:
            UserError: there is no text, one is empty, or too long while ``truncate`` is off.
        """
        inputs = list(self._inputs(texts, truncate))
        if not inputs:
            raise UserError("there is no text to encode: give at least one")
        return self.encode(inputs, all_layers)

    def encode(self, inputs: list[tuple[Tensor, Tensor]], all_layers: bool = False) -> Features:
        """Return the features of texts in tokens, each as its tokens with the special ones and their types, [L] int64."""
        states: list[tuple[Tensor, ...]] = [()] * len(inputs)
        by_length = sorted(range(len(inputs)), key=lambda i: len(inputs[i][0]), reverse=True)
        for start in range(0, len(inputs), self.batch_size):
            batch = by_length[start : start + self.batch_size]
            for i, encoded in zip(batch, self._run([inputs[i] for i in batch], all_layers), strict=True):
                states[i] = encoded
        tokens = self._padded(inputs)
        last, *layers = (pad_sequence(list(each), batch_first=True) for each in zip(*states, strict=True))
        return Features(last, tokens.ne(self.loaded.dictionary.pad()), tokens, tuple(layers) or None)

    def predict(self, texts: str | Iterable[Text], head: str | None = None) -> list[Any]:
        """Return what a model that was fine-tuned on labels predicts for each text, as ``--predict`` of its command does.

        - Classes: ``{"prediction": "pos", "probability": 0.97, "probabilities": {"neg": 0.03, "pos": 0.97}}``.
        - Several labels: ``{"prediction": ["a", "b"], "probabilities": {"a": 0.9, "b": 0.8, "c": 0.1}}``.
        - A number: ``{"prediction": 3.5}``.
        - Labels of words: a list with a dictionary for each span, or for each word where labels mark no spans:
          ``{"start": 0, "end": 3, "label": "PER", "probability": 0.9}``, in characters of the text.

        A text that is empty, or spaces alone, has None. A classifier cuts texts that are too long; a warning counts them.

        Args:
            texts: one string, or any iterable of strings; pairs of strings for a model that was trained on pairs.
            head: the name of a head, of several.

        Raises:
            UserError: the model has no such head, or there is one text where the model reads pairs, or the reverse.
        """
        names, inputs = list(self.loaded.heads), list(parts_of(texts))
        if head is None and len(names) > 1:
            raise UserError(f"{self.loaded.file} has several heads: give one, such as head={names[-1]!r}")
        head = head or "".join(names) or "for labels"
        outputs = self.loaded.head(head)
        where = amos_fairseq.PREDICTED_BY.get(outputs.kind)
        if where is None or not (outputs.labels or outputs.kind == "number"):
            raise UserError(
                f"{self.loaded.file} predicts {outputs.kind} without names: fine-tune it with amos classify or tag"
            )
        expected = 1 if where.startswith("words") else len(outputs.text_columns or (inputs[:1] and inputs[0]))
        for number, parts in enumerate(inputs, start=1):
            if len(parts) != expected:
                wanted = "a pair of texts" if expected == 2 else "one text"
                raise UserError(f"text {number}: expected {wanted}, got {parts!r:.60}")
        module = importlib.import_module(f"amos_fairseq.downstream.{where}")
        filled = [any(map(str.strip, parts)) for parts in inputs]
        if not any(filled):
            return [None] * len(inputs)
        device, read = str(next(self.parameters()).device), list(itertools.compress(inputs, filled))
        predictions, num_cut = module.predict_texts(self.loaded, head, read, device)
        if num_cut:
            limit = self.model.max_positions()
            warnings.warn(f"{num_cut:,} of {len(inputs):,} texts are cut to {limit} tokens", stacklevel=2)
        rest = iter(predictions)
        return [next(rest) if is_filled else None for is_filled in filled]

    def __repr__(self) -> str:
        weights, file = next(self.model.parameters()), self.loaded.file
        named = ((head.kind, ", ".join(head.labels)) for head in self.loaded.heads.values())
        heads = "".join(f", {kind} ({labels})" if labels else f", {kind}" for kind, labels in named)
        shape = f"{len(self.model.encoder.layers)} layers of width {self.model.cfg.encoder_embed_dim}"
        line = f"Encoder({file}: {shape}, {weights.dtype}, {weights.device}{heads})"
        return textwrap.shorten(line, 300, placeholder=" ...)")

    def _inputs(self, texts: str | Iterable[Text], truncate: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the tokens of each text or pair, [L] int64, and their types: 0 in the first text, its ``</s>`` included."""
        loaded, limit = self.loaded, self.model.max_positions()
        for number, parts in enumerate(parts_of(texts), start=1):
            is_whole = len(parts) == 1 and not self.is_fine_tuned
            lines = parts if is_whole else [" ".join(part.splitlines()) for part in parts]
            try:
                pieces = [loaded.token_ids(each)[1:-1] for each in lines]
            except UserError as error:
                raise UserError(f"text {number}: {error}") from error
            length = loaded.num_special(len(pieces)) + sum(map(len, pieces))
            if length > limit and not truncate:
                advice = "shorten or split it, or pass truncate=True"
                raise UserError(f"text {number} has {length} tokens, the encoder takes {limit}: {advice}")
            ids = loaded.framed(pieces, limit)
            first_length = ids.index(loaded.dictionary.eos()) + 1 if len(pieces) == 2 else len(ids)
            yield torch.tensor(ids), (torch.arange(len(ids)) >= first_length).long()

    def _run(self, inputs: list[tuple[Tensor, Tensor]], all_layers: bool) -> list[tuple[Tensor, ...]]:
        """Run one batch: returns [L,D] for each input, first the states to return, then those of all layers if asked for."""
        tokens, encoder, num_types = self._padded(inputs), self.model.encoder, self.model.cfg.token_types
        types = None
        if num_types:
            types = pad_sequence([each for _, each in inputs], batch_first=True, padding_value=1)
            types = types.clamp(max=num_types - 1).to(tokens.device)
        if self.layer is not None:
            encoder = with_layers(encoder, encoder.layers[: self.layer])
        with torch.set_grad_enabled(self.training and torch.is_grad_enabled()):
            outputs = encoder(
                self.model.encoder_embedding(tokens),
                token_types=types,
                with_input=True,
                lengths=[len(each) for each, _ in inputs],
            )
            # Here, because ModernBERT's states are normalized when they are read.
            wanted = [outputs[-1], *outputs] if all_layers else [outputs[-1]]
        return [tuple(each[row, : len(tokens)] for each in wanted) for row, (tokens, _) in enumerate(inputs)]

    def _padded(self, inputs: list[tuple[Tensor, Tensor]]) -> Tensor:
        tokens = pad_sequence(
            [each for each, _ in inputs], batch_first=True, padding_value=self.loaded.dictionary.pad()
        )
        return tokens.to(next(self.model.parameters()).device)


def parts_of(texts: str | Iterable[Text]) -> Iterator[tuple[str, ...]]:
    """Yield each text as one string, or as the two of a pair."""
    # A dictionary and a table would give their keys and names of columns, a set another order each time.
    is_one = isinstance(texts, (str, Mapping, Set)) or getattr(texts, "ndim", 1) != 1
    for number, text in enumerate([texts] if is_one else texts, start=1):
        parts = (text,) if isinstance(text, str) else text
        is_pair = isinstance(text, (tuple, list)) and len(text) == 2
        if not (isinstance(text, str) or is_pair) or not all(isinstance(part, str) for part in parts):
            raise UserError(f"text {number}: expected a string or a pair of strings, got {text!r:.60}")
        yield tuple(parts)


def check_device(device: str | torch.device | None, dtype: torch.dtype | None = None) -> None:
    """Raise ``UserError`` unless tensors can be created on the device, and read (the device meta stores no values)."""
    try:
        torch.nn.Module().to(device=device, dtype=dtype)  # which refuses integer dtypes
        torch.zeros(1, device=device, dtype=dtype).item()
    except (RuntimeError, AssertionError, TypeError) as error:
        reason, named = str(error).partition("\n")[0], f"device {device or 'cpu'!s}"
        advice = "give 'cpu', or a device of this machine"
        if dtype is not None:
            named, advice = f"{named}, dtype {dtype!r}", f"{advice}, and a dtype such as torch.bfloat16"
        raise UserError(f"{named} cannot be used ({reason}): {advice}") from error
