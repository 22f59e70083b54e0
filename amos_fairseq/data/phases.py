"""Phases of a run, such as short blocks first and long ones at the end: their settings, and the blocks of each.

All phases read one stream of tokens. In each epoch it is the corpus in pieces of T - 1 tokens, T the length of the longest
phase, shuffled by (seed, epoch). A phase cuts its blocks, each ``<s>`` and the next tokens, where the phase before it stopped.
In the last phase a block is a piece; a shorter block may hold the end of a piece and the beginning of the next one.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, List, Optional  # noqa: UP035 (OmegaConf reads the types, in typing's spelling)

import numpy as np
import torch
import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from amos_fairseq.data.block_iterator import RESET_HINT, BlockBatchIterator, equal_batches, whole_updates
from amos_fairseq.data.masked_blocks import MaskedBlockDataset
from amos_fairseq.data.seeding import Purpose, keyed_generator
from amos_fairseq.errors import UserError
from amos_fairseq.setting_checks import check_ranges, read_section, setting

EXAMPLE = "[{length: 128, share: 0.9}, {length: 512, share: 0.1, batch_size: 8, mask_prob: 0.2}]"


@dataclass(frozen=True)
class Phase:
    length: int = setting(MISSING, "tokens of a block, <s> included", "2 or more")
    share: float = setting(MISSING, "of the run", "above 0 and at most 1")
    batch_size: Optional[int] = setting(None, "blocks of a micro-batch; None: that of the run", "1 or more")  # noqa: UP045
    mask_prob: Optional[float] = setting(None, "None: that of the run", "above 0 and below 1")  # noqa: UP045


@dataclass
class _Section:
    phases: List[Phase] = field(default_factory=list)  # noqa: UP006


def read_phases(content: Any, longest: int, mask_prob: float) -> list[Phase]:
    """Return the phases of ``task.phases``, which is a list or the text of one; none for None or an empty list.

    ``longest``: ``tokens_per_sample``, the length of the last phase. ``mask_prob``: of phases that state none.
    """
    try:
        entries = yaml.safe_load(content) if isinstance(content, str) else content
        phases = OmegaConf.to_object(read_section("task", _Section, {"phases": entries or []})).phases
        for phase in phases:
            check_ranges(phase, Phase)
        if phases and not math.isclose(sum(phase.share for phase in phases), 1, abs_tol=1e-3):
            raise ValueError("the shares must add up to 1")
        if phases and (phases[-1].length, max(phase.length for phase in phases)) != (longest, longest):
            raise ValueError(
                f"the last phase must be the longest, and have the tokens_per_sample of the run, {longest}"
            )
    except (UserError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"task.phases (--phases): {str(error).partition(chr(10))[0]}; an example: {EXAMPLE}") from error
    return [dataclasses.replace(phase, mask_prob=phase.mask_prob or mask_prob) for phase in phases]


def phase_at(phases: Sequence[Phase], position: float, end: float) -> int:
    """Return the number of the phase, from 0, at ``position`` of a run that goes from 0 to ``end``."""
    borders = [round(share * end) for share in itertools.accumulate(phase.share for phase in phases)]
    return sum(position >= border for border in borders[:-1])


class PhasedBlocks(MaskedBlockDataset):
    """The blocks of a phase, from a position in the stream of the epoch to its end.

    A position counts the tokens before it in the stream. The masks of a block come from (seed, epoch, its first token's place
    in the corpus).

    Args:
        pieces: of T - 1 tokens, T = ``tokens_per_block``; the last one of the corpus may be shorter, and ends the stream.
    """

    def __init__(self, pieces: Any, dictionary: Any, *, tokens_per_block: int, **settings: Any) -> None:
        super().__init__(pieces, dictionary, tokens_per_block=tokens_per_block, **settings)
        self.piece = tokens_per_block - 1
        self.stream_length = (len(pieces) - 1) * self.piece + min(self.piece, len(pieces[len(pieces) - 1]))
        self.start = 0
        self.set_epoch(1)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        whole = self.stream_length // self.piece
        shuffled = keyed_generator(Purpose.BLOCK_ORDER, self.seed, epoch, 0).permutation(whole)
        self._order = np.append(shuffled, np.arange(whole, len(self.blocks)))

    def begin(self, phase: Phase, start: int) -> None:
        """Cut what comes after the position ``start`` into the blocks of ``phase``."""
        self.set_length(phase.length, phase.mask_prob)
        self.start = start

    def position(self, index: int) -> int:
        """Return the position at which a block starts; of the block after the last one, the end of the stream.

        The first block of the longest phase is the rest of a piece, so that each later one is a whole piece.
        """
        size = self.tokens_per_block - 1
        missing = self.start % self.piece if size == self.piece else 0
        return min(max(self.start, self.start - missing + index * size), self.stream_length)

    def num_blocks(self, length: int, start: int) -> int:
        """Return the number of blocks of ``length`` tokens after the position ``start``."""
        missing = start % self.piece if length - 1 == self.piece else 0
        return -(-(self.stream_length - start + missing) // (length - 1))

    def __len__(self) -> int:
        return self.num_blocks(self.tokens_per_block, self.start)

    def ordered_indices(self) -> np.ndarray:
        return np.arange(len(self), dtype=np.int64)

    def read(self, index: int) -> tuple[int, Tensor]:
        start, end = self.position(index), self.position(index + 1)
        first, offset = divmod(start, self.piece)
        parts = []
        for number in range(first, -(-end // self.piece)):
            begin = number * self.piece
            parts.append(self.blocks[int(self._order[number])][max(0, start - begin) : end - begin])
        return int(self._order[first]) * self.piece + offset, torch.cat(parts)


class PhaseIterator(BlockBatchIterator):
    """The rest of an epoch, from the position ``start`` on, in the blocks of the phase that ``due`` returns.

    A run ends an iterator where a phase ends, and makes another one for the same epoch. A phase does not begin in the rest of
    an epoch that is too short for one of its updates: the one before it goes on there. ``batch_sizes``: blocks of a
    micro-batch.
    """

    dataset: PhasedBlocks

    def __init__(
        self,
        dataset: PhasedBlocks,
        phases: Sequence[Phase],
        batch_sizes: Sequence[int],
        due: Callable[[], int],
        start: int,
        *,
        update_freq: int,
        num_shards: int,
        **settings: Any,
    ) -> None:
        self.phases, self.due, self.phase = phases, due, due()
        self.batch_sizes, self.global_batches = batch_sizes, [update_freq * num_shards * size for size in batch_sizes]
        for number, (phase, size) in enumerate(zip(phases, self.global_batches, strict=True), start=1):
            whole_updates(range(dataset.num_blocks(phase.length, 0)), size, f"{dataset.source}, in phase {number},")
        batches = self.cut(dataset, self.phase, start)
        super().__init__(dataset, batches, update_freq=update_freq, num_shards=num_shards, **settings)

    def cut(self, dataset: PhasedBlocks, phase: int, start: int) -> list[list[int]]:
        dataset.begin(self.phases[phase], start)
        used = whole_updates(dataset.ordered_indices(), self.global_batches[phase], dataset.source)
        return equal_batches(used, self.batch_sizes[phase])

    @property
    def position(self) -> int:
        """The position after what was read."""
        return self.dataset.position(self.iterations_in_epoch * self.blocks_per_step)

    def phase_after(self, position: int) -> int:
        """Return the phase of the next update, at ``position``."""
        due = self.due()
        left = self.dataset.num_blocks(self.phases[due].length, position)
        return due if left >= self.global_batches[due] else self.phase

    def state_dict(self) -> dict[str, Any]:
        """Return the entries of other runs, the phase, the length of its blocks, and the position at which it began."""
        phase_entries = {
            "phase": self.phase,
            "phase_length": self.dataset.tokens_per_block,
            "phase_start": self.dataset.start,
        }
        return super().state_dict() | phase_entries

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["iterations_in_epoch"] > 0:
            phase, start = state_dict.get("phase", len(self.phases)), state_dict.get("phase_start", 0)
            if phase >= len(self.phases) or self.phases[phase].length != state_dict.get("phase_length"):
                epoch = state_dict["epoch"]
                raise UserError(
                    f"the checkpoint is inside epoch {epoch} of a run with other task.phases (--phases): {RESET_HINT}"
                )
            self.phase, batches = phase, self.cut(self.dataset, phase, start)
            self._frozen_batches = tuple(batches)
            self._steps_until(state_dict)  # refuses a position of another corpus
            position = self.dataset.position(state_dict["blocks_in_epoch"])
            next_phase = self.phase_after(position)
            if next_phase != self.phase:
                self.phase, self._frozen_batches = next_phase, tuple(self.cut(self.dataset, next_phase, position))
                state_dict = {**state_dict, "iterations_in_epoch": 0}
        if state_dict.get("phase") != self.phase:  # its batches had other sizes, as they should
            state_dict = {name: value for name, value in state_dict.items() if name != "blocks_per_update"}
        super().load_state_dict(state_dict)
