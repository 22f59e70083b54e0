"""The phases of a run: their settings, and the blocks of each, in which every token of a corpus occurs once."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
from block_datasets import Lines
from fairseq.data import TokenBlockDataset, iterators
from omegaconf import OmegaConf
from small_models import small_dictionary

from amos_fairseq.data.phases import Phase, PhasedBlocks, PhaseIterator, phase_at, read_phases
from amos_fairseq.errors import UserError

LONGEST, NUM_TOKENS = 32, 997  # 997 = 32 * 31 + 5: the last piece is short
# Positions in updates of 40: borders after 13, 25 and 31 updates, in pieces and between them.
PHASES = [Phase(8, 0.325, 4, 0.15), Phase(12, 0.3, 2, 0.15), Phase(20, 0.15, 2, 0.3), Phase(32, 0.225, 1, 0.15)]
BORDERS, END = (13, 25, 31), 40


def dataset() -> PhasedBlocks:
    """A corpus in which no token occurs twice: token t is at place t - 4."""
    lines = Lines([list(range(4 + start, min(4 + start + 50, 4 + NUM_TOKENS))) for start in range(0, NUM_TOKENS, 50)])
    pieces = TokenBlockDataset(lines, lines.sizes, LONGEST - 1, pad=1, eos=2, break_mode="none")
    settings = {"tokens_per_block": LONGEST, "mask_prob": 0.15, "seed": 7, "training": True}
    return PhasedBlocks(pieces, small_dictionary(NUM_TOKENS), **settings)


class Reader:
    """The part of a run that reads: fairseq's iterators, and their end where a phase ends; ``update`` counts from 0."""

    def __init__(self, update: int = 0, state: dict[str, Any] | None = None, **settings: int) -> None:
        self.update, self.position, self.epoch = update, 0, state["epoch"] if state else 1
        self.epochs: list[int] = []  # of each update
        defaults = {"num_shards": 1, "shard_id": 0, "num_workers": 0, "update_freq": 1, "buffer_size": 0}
        self.settings = defaults | settings
        self.new_iterator()
        if state is not None:
            self.iterator.load_state_dict(state)

    def new_iterator(self) -> None:
        def due() -> int:
            return phase_at(PHASES, self.update, END)

        data = dataset()
        data.set_epoch(self.epoch)
        sizes = [phase.batch_size for phase in PHASES]
        self.iterator = PhaseIterator(data, PHASES, sizes, due, self.position, epoch=self.epoch, **self.settings)

    def read(self, until: int = END) -> list[list[dict]]:
        """The micro-batches of each update. Afterwards the iterator stands behind the last one."""
        updates = []
        while self.update < until:
            groups = iterators.GroupedIterator(self.iterator.next_epoch_itr(), self.settings["update_freq"])
            for group in groups:
                updates.append(group)
                self.epochs.append(self.epoch)
                self.update += 1
                if self.iterator.phase_after(self.iterator.position) != self.iterator.phase or self.update == until:
                    groups.take(groups.n)
            if self.update < until:
                is_same = self.iterator.next_epoch_idx == self.epoch
                self.position = self.iterator.position if is_same else 0
                self.epoch = self.iterator.next_epoch_idx
                self.new_iterator()
        return updates


def contents(updates: Sequence[Sequence[dict]]) -> list[list[tuple]]:
    return [
        [(batch["first_id"], *(part.tolist() for part in batch["net_input"].values())) for batch in update]
        for update in updates
    ]


def test_each_phase_has_its_shapes_and_no_token_is_lost_or_read_twice() -> None:
    """Counted token by token: updates of one block at the end leave nothing out, so an epoch is the corpus."""
    reader = Reader()
    updates = reader.read()
    num_masked = {8: 2, 12: 2, 20: 6, 32: 5}  # ceil(0.15 T), of 20 tokens 0.3
    found: list[int] = []
    for number, (batch,) in enumerate(updates):
        phase = PHASES[sum(number >= border for border in BORDERS)]
        tokens = batch["net_input"]["tokens"]
        assert tokens.shape == (phase.batch_size, phase.length)
        assert batch["net_input"]["masked_positions"].shape == (phase.batch_size, num_masked[phase.length])
        assert tokens[:, 0].tolist() == [0] * phase.batch_size
        if reader.epochs[number] == 1:
            found += tokens[tokens > 3].tolist()
    assert sorted(found) == list(range(4, 4 + NUM_TOKENS))
    assert BORDERS[-1] < reader.epochs.index(2) < END


def test_blocks_of_the_longest_phase_are_pieces_of_the_corpus() -> None:
    """But for the first one, which is the rest of a piece, and the last one, which is the end of the corpus."""
    data = dataset()
    data.begin(PHASES[-1], 100)
    blocks = [(data[index]["tokens"][1:] - 4).tolist() for index in data.ordered_indices()]
    assert [len(block) for block in blocks] == [24, *[31] * 28, 5]
    for block in blocks:
        assert block == list(range(block[0], block[0] + len(block)))
        assert block[-1] % 31 == 30 or block[-1] == NUM_TOKENS - 1
    assert [data[index]["id"] for index in data.ordered_indices()] == [block[0] for block in blocks]


def test_a_run_that_stops_anywhere_reads_the_same() -> None:
    """At each update around the borders, and across an epoch, in new iterators, some with loader processes or a buffer."""
    whole, workers, buffer = contents(Reader().read()), {"num_workers": 2}, {"buffer_size": 2}
    settings = {13: workers, 14: buffer, 25: buffer, 26: workers}
    for stopped in (1, 12, 13, 14, 24, 25, 26, 30, 31, 32, 39):
        first = Reader()
        first.read(stopped)
        rest = Reader(stopped, first.iterator.state_dict(), **settings.get(stopped, {}))
        assert contents(rest.read()) == whole[stopped:], stopped


def test_ranks_and_micro_batches_read_the_same() -> None:
    """Two ranks, continued by one with update_freq 2: the same blocks in each update, on either side of a border."""
    ranks = [Reader(num_shards=2, shard_id=rank) for rank in range(2)]
    by_ranks = [reader.read(20) for reader in ranks]
    whole = contents(Reader(update_freq=2).read(30))
    assert contents([[*first, *second] for first, second in zip(*by_ranks, strict=True)]) == whole[:20]
    for state in (reader.iterator.state_dict() for reader in ranks):
        assert contents(Reader(20, state, update_freq=2).read(30)) == whole[20:]


def test_positions_that_do_not_fit_and_phases_without_an_update_are_refused() -> None:
    reader = Reader()
    reader.read(3)
    state = reader.iterator.state_dict()
    for change, message in (
        ({"phase_length": 16}, "run with other task.phases (--phases): add --reset-dataloader"),
        ({"phase": 4}, "run with other task.phases"),
        ({"blocks_in_corpus": 7}, "a run on 7 blocks"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            Reader(3, state | change)
    del state["phase"]
    with pytest.raises(UserError, match="run with other task"):
        Reader(3, state)
    with pytest.raises(UserError, match=r"in phase 3, has 53 blocks, fewer than the 64 of one update"):
        Reader(update_freq=32)


def test_a_phase_does_not_begin_where_no_update_of_it_is_left() -> None:
    """The second phase is due; its updates are two blocks of 11 tokens, the second one perhaps shorter."""
    reader = Reader(BORDERS[0] - 1)
    reader.update += 1
    assert [reader.iterator.phase_after(NUM_TOKENS - left) for left in (22, 12, 11)] == [1, 1, 0]


def test_phases_follow_their_shares() -> None:
    """By hand, with a border that is no whole number."""
    updates = (0, 12, 13, 24, 25, 30, 31, 39, 40)
    assert [phase_at(PHASES, update, END) for update in updates] == [0, 0, 1, 1, 2, 2, 3, 3, 3]
    thirds = [Phase(8, 1 / 3, None, 0.15)] * 3
    assert [phase_at(thirds, update, 10) for update in range(10)] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]


def test_spellings() -> None:
    text = "[{length: 8, share: 0.9}, {length: 32, share: 0.1, batch_size: 2, mask_prob: 0.3}]"
    expected = [Phase(8, 0.9, None, 0.15), Phase(32, 0.1, 2, 0.3)]
    for given in (text, text.replace("length", '"length"'), OmegaConf.create(text)):
        assert read_phases(given, 32, 0.15) == expected
    assert read_phases(None, 32, 0.15) == read_phases("", 32, 0.15) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[{length: 32, share: 1, lr: 1}]", "task.lr: Key 'lr' not in 'Phase'"),
        ("[{length: 32}]", "Structured config of type `Phase` has missing mandatory value: share"),
        ("[{length: 32, share: 0.9}]", "the shares must add up to 1"),
        ("[{length: 64, share: 0.5}, {length: 32, share: 0.5}]", "the last phase must be the longest"),
        ("[{length: 32, share: 0}]", "--share 0.0 must be above 0 and at most 1"),
        ("[{length: 32, share: 1, mask_prob: .nan}]", "--mask-prob nan must be a finite number"),
        ("[{length: 32, share: 1, batch_size: 0}]", "--batch-size 0 must be 1 or more"),
        ("[{length", "while parsing a flow mapping"),
    ],
)
def test_refusals(content: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"task.phases (--phases): {message}")) as refused:
        read_phases(content, 32, 0.15)
    assert "\n" not in str(refused.value)
