"""Features of text from a checkpoint of ours, pretrained, fine-tuned or imported.

encoder = amos_fairseq.load("out/run", device="cuda", dtype=torch.bfloat16)
features = encoder(["A first text.", "And a second one.", ("A question?", "And its answer.")])
vectors = features.pooled()    # [3, D]; features.states[0, features.mask[0]] are the tokens of the first text, [L, D]
"""

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from amos_fairseq.errors import UserError
from amos_fairseq.interop.checkpoint import CheckpointPath, Pretrained, load_pretrained

# One text, or two that belong together: <s> A </s>, <s> A </s> B </s>.
Text = Union[str, tuple[str, str]]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BATCH_SIZE = 32


class Features(NamedTuple):
    """What :class:`Encoder` returns for B texts; T is the number of tokens of the longest.

    Attributes:
        states: [B,T,D] hidden states of the last layer, in the encoder's dtype and on its device; 0 at padding.
        mask: [B,T] bool, True at real tokens, False at padding.
        tokens: [B,T] int64, what was read: ``<s>``, pieces, ``</s>``.
    """

    states: Tensor
    mask: Tensor
    tokens: Tensor

    def pooled(self, how: str = "mean") -> Tensor:
        """One vector a text: [B,D].

        Args:
            how: ``mean`` over the text's tokens, ``<s>`` and ``</s>`` included, as sentence-transformers does; or
                ``first``, the state of ``<s>``, on which classification heads stand.

        Raises:
            UserError: ``how`` is neither.
        """
        if how == "first":
            return self.states[:, 0]
        if how != "mean":
            raise UserError(f"there is no pooling {how!r}: give 'mean' or 'first'")
        return self.states.masked_fill(~self.mask[..., None], 0).sum(1) / self.mask.sum(1, keepdim=True)


class _Row(NamedTuple):
    tokens: Tensor  # [L] int64
    first_length: int  # tokens up to the end of the first text, its </s> included


class Encoder(nn.Module):
    """The encoder of a checkpoint: text in, features out.

    In eval mode, in which :func:`load` returns it, no gradients are recorded; after ``.train()`` they are, with dropout.
    ``.to(...)`` moves it and changes its dtype, as for any module.

    Args:
        pretrained: the checkpoint.
        batch_size: texts that go through the model at once.

    Raises:
        UserError: ``batch_size`` is below 1, or the model keeps no encoder.
    """

    def __init__(self, pretrained: Pretrained, batch_size: int = BATCH_SIZE) -> None:
        super().__init__()
        if batch_size < 1:
            raise UserError(f"batch_size {batch_size} is too small: give 1 or more")
        _ = pretrained.model.encoder  # a model that keeps none says so now, not at the first text
        self.model = pretrained.model
        self.pretrained = pretrained
        self.batch_size = batch_size

    def forward(self, texts: Union[str, Iterable[Text]], truncate: bool = False) -> Features:
        """Features of all texts, in their order, padded to the longest; texts of like length share a batch.

        The lines of a text end in ``</s>`` each, as in pretraining; each text of a pair is read as one line.

        Args:
            texts: one string, or any iterable of strings and of pairs of strings.
            truncate: cut what is longer than the encoder reads (``max_positions``); of a pair the longer text first.

        Raises:
            UserError: there is no text, one is empty, or too long while ``truncate`` is off.
        """
        rows = list(self._rows(texts, truncate))
        if not rows:
            raise UserError("there is no text to encode: give at least one")
        states: list[Optional[Tensor]] = [None] * len(rows)
        by_length = sorted(range(len(rows)), key=lambda place: len(rows[place].tokens), reverse=True)
        for start in range(0, len(rows), self.batch_size):
            places = by_length[start : start + self.batch_size]
            for place, encoded in zip(places, self._encode([rows[place] for place in places]), strict=True):
                states[place] = encoded
        return self._padded(rows, states)

    def stream(self, texts: Union[str, Iterable[Text]], truncate: bool = False) -> Iterator[Features]:
        """Features of ``batch_size`` texts at a time, in their order, for more texts than memory holds.

        Arguments and errors as for calling the encoder; an error comes when its text is reached.
        """
        rows = self._rows(texts, truncate)
        while batch := list(itertools.islice(rows, self.batch_size)):
            yield self._padded(batch, self._encode(batch))

    def _rows(self, texts: Union[str, Iterable[Text]], truncate: bool) -> Iterator[_Row]:
        limit = self.model.max_positions()
        for number, text in enumerate([texts] if isinstance(texts, str) else texts, start=1):
            try:
                parts = self._parts(text)
            except UserError as error:
                raise UserError(f"text {number}: {error}") from error
            length = 1 + sum(len(part) + 1 for part in parts)
            if length > limit and not truncate:
                raise UserError(
                    f"text {number} has {length} tokens, the encoder reads {limit}: shorten or split it, or pass truncate=True"
                )
            lengths = fitting_lengths([len(part) for part in parts], limit - 1 - len(parts))
            yield self._row([part[:keep] for part, keep in zip(parts, lengths, strict=True)])

    def _row(self, parts: list[Tensor]) -> _Row:
        start, end = (
            torch.tensor([symbol]) for symbol in (self.pretrained.dictionary.bos(), self.pretrained.dictionary.eos())
        )
        return _Row(torch.cat([start, *itertools.chain(*((part, end) for part in parts))]), len(parts[0]) + 2)

    def _parts(self, text: Text) -> list[Tensor]:
        """What stands between ``<s>`` and ``</s>``, and between that and another ``</s>`` in a pair."""
        if isinstance(text, str):
            return [self.pretrained.tokens(text)[1:-1]]
        if not (isinstance(text, (tuple, list)) and len(text) == 2 and all(isinstance(part, str) for part in text)):
            raise UserError(f"expected a string or a pair of strings, got {text!r:.60}")
        return [self.pretrained.tokens(re.sub(r"[\r\n]+", " ", part))[1:-1] for part in text]

    def _encode(self, rows: list[_Row]) -> list[Tensor]:
        """One batch through the model: [L,D] for each row."""
        tokens = self._padded_tokens(rows)
        with torch.set_grad_enabled(self.training and torch.is_grad_enabled()):
            states = self.model.encoder(
                self.model.embed_tokens(tokens),
                padding_mask=tokens.eq(self.pretrained.dictionary.pad()),
                token_types=self._token_types(rows, tokens.size(1)),
            )[-1]
        return [row_states[: len(row.tokens)] for row, row_states in zip(rows, states, strict=True)]

    def _token_types(self, rows: list[_Row], length: int) -> Optional[Tensor]:
        """[B,T] int64: 0 in the first text, 1 in the second; None where the encoder has no types."""
        num_types = self.model.cfg.token_types
        if num_types == 0:
            return None
        first_lengths = torch.tensor([[row.first_length] for row in rows])
        types = torch.arange(length) >= first_lengths
        return types.long().clamp(max=num_types - 1).to(self._device())

    def _padded(self, rows: list[_Row], states: list[Tensor]) -> Features:
        tokens = self._padded_tokens(rows)
        mask = tokens.ne(self.pretrained.dictionary.pad())
        return Features(pad_sequence(states, batch_first=True), mask, tokens)

    def _padded_tokens(self, rows: list[_Row]) -> Tensor:
        pad = self.pretrained.dictionary.pad()
        tokens = pad_sequence([row.tokens for row in rows], batch_first=True, padding_value=pad)
        return tokens.to(self._device())

    def _device(self) -> torch.device:
        return next(self.model.parameters()).device


def fitting_lengths(lengths: list[int], limit: int) -> list[int]:
    """``lengths`` cut until their sum is within ``limit``, a token at a time off the longest, the last of equals."""
    lengths = list(lengths)
    for _ in range(sum(lengths) - limit):
        longest = max(reversed(range(len(lengths))), key=lambda place: lengths[place])
        lengths[longest] -= 1
    return lengths


def load(
    checkpoint: CheckpointPath,
    tokenizer: Optional[CheckpointPath] = None,
    device: Union[str, torch.device, None] = None,
    dtype: Optional[torch.dtype] = None,
    batch_size: int = BATCH_SIZE,
) -> Encoder:
    """The encoder of a checkpoint, in eval mode; ``load(path)(texts)`` gives :class:`Features`.

    Args:
        checkpoint: a file, or the SAVE_DIR of a run, whose ``checkpoint_last.pt`` is taken.
        tokenizer: directory of the tokenizer; without it the ``tokenizer`` directory beside the checkpoint.
        device: where to compute, such as ``"cuda"`` or ``"cuda:1"``; the CPU without it.
        dtype: float32 (without it), bfloat16 or float16, on every device.
        batch_size: texts that go through the model at once.

    Raises:
        UserError: as :func:`amos_fairseq.interop.checkpoint.load_pretrained`; or there is no such device, or no such
            dtype for it.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype {dtype} is none to compute in: give one of {', '.join(map(str, DTYPES))}")
    if device is not None:
        check_device(device)
    encoder = Encoder(load_pretrained(checkpoint, tokenizer), batch_size).eval()
    return encoder.to(device=device, dtype=dtype)


def check_device(device: Union[str, torch.device]) -> None:
    """Raise :class:`UserError` unless tensors can lie there."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"device {device!s} cannot be used ({reason}): give 'cpu', or the name of a device here"
        ) from error
