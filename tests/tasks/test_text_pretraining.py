"""The pretraining task: invalid settings, shards, exact resume, noise per micro-batch."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from fairseq.data import iterators
from synthetic_corpus import TOKENS_PER_SAMPLE, make_task, write_corpus, write_tokenizer

from amos_fairseq.errors import UserError
from amos_fairseq.text.tokenization import load_tokenizer


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


def train_iterator(data: Path | str, epoch: int = 1, *, update_freq: int = 1, batch_size: int = 4, **settings):
    task = make_task(data, update_freq=[update_freq])
    task.load_dataset("train", epoch=epoch)
    return task.get_batch_iterator(task.dataset("train"), max_sentences=batch_size, epoch=epoch, **settings)


def state_after(num_batches: int, *arguments, **settings) -> dict:
    """The state of an interrupted epoch."""
    iterator = train_iterator(*arguments, **settings)
    batches = iterator.next_epoch_itr(shuffle=True)
    for _ in range(num_batches):
        next(batches)
    return iterator.state_dict()


def contents(batch: dict) -> tuple:
    return (batch["id"].tolist(), *(tensor.tolist() for tensor in batch["net_input"].values()))


def test_refusals(corpus: Path, tmp_path: Path) -> None:
    """Settings, then files that are missing or empty, then batches that cannot be made."""
    unknown = write_corpus(tmp_path / "unknown", tokenizer=False)
    for settings, message in (
        ({"data": f"{corpus}/nowhere"}, r"nowhere is not a directory"),
        ({"data": ""}, r"an empty path is not a directory"),
        ({"data": f"{corpus}/.."}, r"dict.txt is missing, or not .*: give a directory that amos prepare"),
        ({"tokenizer_directory": f"{corpus}/other"}, r"other/dict.txt is missing"),
        ({"mask_prob": 15.0}, r"--mask-prob 15.0 must be above 0 and below 1"),
        ({"tokens_per_sample": 1}, r"--tokens-per-sample 1 must be 2 or more"),
        ({"whole_words": True, "mask_rare_tokens": 0.5}, r"--whole-words and --mask-rare-tokens choose"),
        (
            {"whole_words": True, "data": unknown},
            r"--whole-words needs the tokenizer of .*unknown, which has only a dict",
        ),
    ):
        with pytest.raises(UserError, match=message):
            make_task(**({"data": corpus} | settings))
    second = shutil.copytree(corpus, tmp_path / "second")
    (second / "train.idx").unlink()
    for data, settings, message in (
        (f"{corpus}:{second}", {}, r"second/train.idx is missing"),
        (corpus, {"max_positions": 12}, r"model of --max-positions 12 has no room .* --tokens-per-sample 16"),
        (corpus, {"max_tokens": 15}, r"--max-tokens 15 .* has no room for a sequence of --tokens-per-sample"),
    ):
        with pytest.raises(UserError, match=message):
            train_iterator(data, **settings)


def test_batch_size_by_sentences_or_tokens(corpus: Path) -> None:
    """Stock fairseq makes batches of 8 from --batch-size 12 (a multiple of 8); here 12 is 12."""
    assert len(train_iterator(corpus, batch_size=12).frozen_batches[0]) == 12
    assert len(train_iterator(corpus, batch_size=12, max_tokens=5 * TOKENS_PER_SAMPLE + 3).frozen_batches[0]) == 5


def test_epochs_cycle_through_the_shards(corpus: Path, tmp_path: Path) -> None:
    second = write_corpus(tmp_path / "second", seed=1, num_lines=50, tokenizer=False)
    task, tokens = make_task(f"{corpus}:{second}"), []
    assert task.has_sharded_data("train")
    for one, epoch in ((task, 1), (task, 2), (task, 3), (make_task(second), 1)):
        one.load_dataset("train", epoch=epoch)
        dataset = one.dataset("train")
        tokens.append([dataset[index]["tokens"].tolist() for index in range(len(dataset))])
    assert tokens[0] == tokens[2] != tokens[1]
    assert tokens[1] == tokens[3], "the second shard alone"


def test_the_folder_of_several_shards_is_all_of_them(tmp_path: Path) -> None:
    """As amos prepare leaves them: the tokenizer and corpus.json one level up."""
    shards = [write_corpus(tmp_path / f"shard{number}", seed=number, tokenizer=False) for number in range(3)]
    write_tokenizer(tmp_path / "tokenizer")
    shutil.copy(shards[0] / "dict.txt", tmp_path / "tokenizer")
    manifest = {
        "shards": [{"directory": shard.name} for shard in shards],
        "tokenizer": {"sha256": load_tokenizer(tmp_path / "tokenizer").sha256},
    }
    (tmp_path / "corpus.json").write_text(json.dumps(manifest))
    task = make_task(tmp_path)
    assert task.cfg.data == ":".join(map(str, shards))
    assert task.has_sharded_data("train")
    assert task.vocabulary.tokenizer_directory == tmp_path / "tokenizer"
    assert make_task(shards[1]).vocabulary.tokenizer_directory == tmp_path / "tokenizer"


def test_validation_on_the_training_data_leaves_the_masks_of_the_epoch(corpus: Path) -> None:
    """Within epoch 3, as fairseq validates: on the same data set, in epoch 1."""
    undisturbed = [contents(batch) for batch in train_iterator(corpus, 3).next_epoch_itr(shuffle=True)]
    task = make_task(corpus)
    task.load_dataset("train", epoch=3)
    of_training = task.get_batch_iterator(task.dataset("train"), max_sentences=4, epoch=3)
    batches = of_training.next_epoch_itr(shuffle=True)
    before = [contents(next(batches)) for _ in range(2)]
    task.get_batch_iterator(task.dataset("train"), max_sentences=4, epoch=1).next_epoch_itr(shuffle=False)
    assert before + [contents(batch) for batch in batches] == undisturbed


@pytest.mark.parametrize(("batches_before", "num_workers"), [(3, 0), (7, 2)])
def test_resume_in_the_middle_of_an_epoch(corpus: Path, batches_before: int, num_workers: int) -> None:
    """Epoch 2, in a new process, with other loader processes: the rest of the epoch as if nothing had happened."""
    whole = [contents(batch) for batch in train_iterator(corpus, 2).next_epoch_itr(shuffle=True)]
    state = state_after(batches_before, corpus, 2)
    assert state["epoch"] == 2
    resumed = train_iterator(corpus, 2, num_workers=num_workers)
    resumed.load_state_dict(state)
    assert [contents(batch) for batch in resumed.next_epoch_itr(shuffle=True)] == whole[batches_before:]
    assert all(isinstance(value, (int, bool)) for value in state.values())


@pytest.mark.parametrize(("num_shards", "update_freq", "batch_size"), [(2, 2, 2), (4, 1, 2), (1, 1, 8), (8, 1, 1)])
def test_resume_with_another_number_of_ranks(corpus: Path, num_shards: int, update_freq: int, batch_size: int) -> None:
    """Saved by 1 rank x update_freq 4 x batch 2 after 3 updates; continued by others with a global batch of 8. Update u takes
    the u-th eight blocks of the order."""
    whole = train_iterator(corpus, update_freq=4, batch_size=2)
    order = whole.dataset.ordered_indices().tolist()
    updates = [order[first : first + 8] for first in range(0, len(order) // 8 * 8, 8)]
    state = state_after(3 * 4, corpus, update_freq=4, batch_size=2)
    taken: list[list[int]] = [[] for _ in updates[3:]]
    for rank in range(num_shards):
        settings = {"update_freq": update_freq, "batch_size": batch_size, "num_shards": num_shards}
        resumed = train_iterator(corpus, shard_id=rank, **settings)
        resumed.load_state_dict(state)
        groups = list(iterators.GroupedIterator(resumed.next_epoch_itr(shuffle=True), update_freq))
        assert len(groups) == len(taken)
        for update, group in enumerate(groups):
            taken[update] += [block for batch in group for block in batch["id"].tolist()]
    assert [sorted(update) for update in taken] == [sorted(update) for update in updates[3:]]


def test_positions_that_do_not_fit_are_refused(corpus: Path) -> None:
    state = state_after(6, corpus, update_freq=2, batch_size=2)  # 12 blocks
    others = [{"update_freq": 2, "batch_size": 2, "num_shards": 2}, *({"batch_size": size} for size in (2, 6, 12))]
    for settings, size in zip(others, (8, 2, 6, 12), strict=True):
        with pytest.raises(
            UserError, match=rf"with 4 per update .* with {size}: .*\(dataset.batch_size\).* --reset-dat"
        ):
            train_iterator(corpus, **settings).load_state_dict(state)
    for other in (
        {**state, "blocks_in_corpus": 5},
        {"version": 2, "epoch": 1, "iterations_in_epoch": 3, "shuffle": True},
    ):
        with pytest.raises(UserError, match=r"keep the data, .* --tokens-per-sample.*--reset-dataloader"):
            train_iterator(corpus).load_state_dict(other)
    at_the_start = train_iterator(corpus, num_shards=2)
    at_the_start.load_state_dict({**state, "iterations_in_epoch": 0, "blocks_in_epoch": 0})
    assert at_the_start.iterations_in_epoch == 0


def return_noise(model, sample) -> tuple:
    """The criterion returns the noise that a model would see."""
    return torch.rand(4, requires_grad=True), 1, {}


IDLE = Mock()  # model and optimizer


def test_noise_depends_on_seed_update_and_first_block(corpus: Path) -> None:
    """A function of (seed, update, first block): independent of earlier samples, and different for two micro-batches."""

    def train_noise(seed: int, update: int, first_id: int, samples_before: int = 0) -> tuple:
        torch.manual_seed(samples_before)
        sample = {"first_id": first_id}
        task = make_task(corpus, seed=seed)
        return tuple(task.train_step(sample, IDLE, return_noise, IDLE, update)[0].tolist())

    keys = [(seed, update, first_id) for seed in (1, 2) for update in (0, 1, 5) for first_id in (0, 1, 5)]
    noises = [train_noise(*key) for key in keys]
    assert len(set(noises)) == len(keys)
    assert noises == [train_noise(*key, samples_before=9) for key in keys]


def test_validation_noise_does_not_change_training_noise(corpus: Path) -> None:
    task = make_task(corpus)

    def valid_noise(first_id: int) -> list[float]:
        sample = {"first_id": first_id, "net_input": {"tokens": torch.zeros(1, 1)}}
        return task.valid_step(sample, IDLE, return_noise)[0].tolist()

    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = valid_noise(3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert valid_noise(3) == first != valid_noise(4)
