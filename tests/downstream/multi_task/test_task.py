"""The task of several tasks: the order of rows on two ranks and after a stop, teachers, heads of other checkpoints, and what is
refused."""

import dataclasses

import numpy as np
import pytest
import torch
from fine_tuning_tasks import epoch_batches, epoch_ids, set_up
from synthetic_glue import write_glue

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.downstream.model import TEXT_HEAD, TextModel
from amos_fairseq.errors import UserError

ROWS = {"RTE": 16, "CoLA": 81, "STS-B": 300}
NUMBERS = 16 * 2 + 81 * 2 + 300  # that teachers predict: probabilities of two classes, and scores
IN_EPOCH = round(300**0.25 * 16**0.75) + round(300**0.25 * 81**0.75) + 300


@pytest.fixture(scope="module")
def data(start, tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    for name, labels in (("RTE", ["entailment", "not_entailment"]), ("CoLA", ["0", "1"]), ("STS-B", [])):
        write_glue(directory, start, name, labels, {"train": ROWS[name], "valid": 5}, pair=name != "CoLA")
    return directory


def make_task(data, names=tuple(ROWS), kind="multi_task", split=None, **settings):
    directories = ":".join(str(data / name) for name in names)
    task = set_up(kind, directories, **{"tokens_per_text": 16, "max_update": 0} | settings)
    if split is not None:
        task.load_dataset(split)
    return task


def test_ranks_and_micro_batches_read_the_updates_of_one(data):
    """32 rows an update: one batch, 2 ranks of 16, and 2 micro-batches on each of 2 ranks; over three epochs. A stop continues
    with the next row."""
    one, two, four = (make_task(data, split="train", update_freq=[number]) for number in (1, 1, 2))
    updates = 0
    for epoch in (1, 2, 3):
        whole = epoch_ids(one, epoch, 32)
        updates += len(whole)
        assert updates == epoch * IN_EPOCH // 32
        for task, size in ((two, 16), (four, 8)):
            of_ranks = [epoch_ids(task, epoch, size, num_shards=2, shard_id=rank) for rank in (0, 1)]
            joined = [row for pair in zip(*of_ranks, strict=True) for part in pair for row in part]
            assert joined == [row for rows in whole for row in rows]
    assert epoch_ids(make_task(data, split="train"), 3, 32, 4) == whole[4:]


def test_teachers_are_divided_by_task(data, tmp_path):
    np.save(tmp_path / "teacher.npy", np.arange(NUMBERS, dtype=np.float32))
    task = make_task(data, split="train", teacher=str(tmp_path / "teacher.npy"), max_update=40)
    rows = task.datasets["train"]
    labels = rows.collater([rows[index] for index in (396, 0, 16)])["labels"]
    expected = {"RTE": [[0, 1]], "CoLA": [[32, 33]], "STS-B": [[493]]}
    assert {name: of_task["teacher"].tolist() for name, of_task in labels.items()} == expected
    assert labels["RTE"]["teacher"].dtype == torch.float64, "fairseq halves float32 tensors with --fp16"
    task.load_dataset("valid")
    valid = task.datasets["valid"]
    assert "teacher" not in valid.collater([valid[0]])["labels"]["RTE"]


def test_what_cannot_be_used_is_refused(data, tmp_path):
    (tmp_path / "text.npy").write_text("no array")
    np.save(tmp_path / "short.npy", np.zeros(NUMBERS - 1, dtype=np.float32))
    np.save(tmp_path / "nan.npy", np.full(NUMBERS, np.nan, dtype=np.float32))
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    for teacher in ("text.npy", "objects.npy", "short.npy", "nan.npy"):
        with pytest.raises(UserError, match=rf"{teacher}: give predictions .* finite float32 numbers \[494\]"):
            make_task(data, split="train", teacher=str(tmp_path / teacher), max_update=40)
    for settings, message in (
        ({"teacher": "t.npy"}, "needs --max-update"),
        ({"teacher": "t.npy", "gold_weight": "1.5"}, "give annealed, or a number from 0 to 1"),
        ({"gold_weight": "0.5"}, "needs --teacher"),
        ({"names": ("RTE", "RTE")}, "there is another task 'RTE', or no head"),
        ({"names": ("RTE", "absent")}, "task.json is missing"),
        ({"separator_token": 5}, "--separator-token 5 is not </s>"),
    ):
        with pytest.raises(UserError, match=message):
            make_task(data, **settings)
    task = make_task(data, split="train")
    assert not task.has_sharded_data("train"), "fairseq would load the rows again in each epoch"
    with pytest.raises(UserError, match="fewer than the 4096 of one update"):
        epoch_batches(task, size=4096)
    task.cfg.update_freq = [1, 2]
    with pytest.raises(UserError, match="give one number"):
        epoch_batches(task, size=32)


def fine_tuned(start, task):
    loaded = load_checkpoint(start)
    torch.manual_seed(2)
    model = TextModel(loaded.model.cfg, loaded.model.vocabulary)
    task.add_head(model)
    return model.eval()


@pytest.mark.parametrize("name", ["RTE", "STS-B"])
def test_one_task_starts_from_its_head_among_several(start, data, name):
    """A checkpoint of several tasks, loaded for one of them, predicts as before; the score of STS-B has no scale there."""
    task = make_task(data)
    task.text_tasks["STS-B"] = dataclasses.replace(task.text_tasks["STS-B"], scale=(1.5, 3.0))
    several = fine_tuned(start, task)
    for parameter in several.classification_heads.parameters():
        torch.nn.init.normal_(parameter)
    one = fine_tuned(start, make_task(data, [name], "text_classification"))
    state = {key: value.clone() for key, value in several.state_dict().items()}
    one.upgrade_state_dict_named(state, "")
    one.load_state_dict(state, strict=True)
    tokens = torch.tensor([[0, 5, 6, 2], [0, 7, 2, 1]])
    with torch.no_grad():
        expected, _ = several(tokens, classification_head_name=name)
        found, _ = one(tokens, classification_head_name=TEXT_HEAD)
    torch.testing.assert_close(found, expected)
    if name == "STS-B":
        assert one.classification_heads[TEXT_HEAD].scale_bits is None
        assert several.classification_heads[name].scale_bits is not None
