"""Starts that are refused, that do nothing, and that continue; damaged checkpoints, and those of other models; the lock."""

import hashlib
import os
import signal
import socket
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.optim.lr_scheduler import polynomial_decay_schedule as polynomial
from omegaconf import OmegaConf
from small_models import sgd, small_electra

from amos_fairseq.checkpoint_files import HeadOutputs
from amos_fairseq.errors import UserError
from amos_fairseq.run import resume
from amos_fairseq.run.resume import Resume, check_fits, check_optimizer, finished, refusal


def trainer_at(
    updates: int, max_update: int, total: int, warmup: int = 2, max_epoch: int = 0, stop_time_hours: float = 0.0
) -> Any:
    """A trainer whose learning rate is that of fairseq's own polynomial decay after ``updates``."""
    config = polynomial.PolynomialDecayLRScheduleConfig(warmup_updates=warmup, total_num_update=total, lr=[0.1])
    scheduler = polynomial.PolynomialDecayLRSchedule(config, sgd(0.1))
    learning_rate = scheduler.step_update(updates)
    limits = {"max_update": max_update, "max_epoch": max_epoch, "stop_time_hours": stop_time_hours}
    return SimpleNamespace(
        _previous_training_time=7300.0,
        get_num_updates=lambda: updates,
        get_lr=lambda: learning_rate,
        get_model=lambda: torch.nn.Linear(1, 1),
        cfg=OmegaConf.create({"optimization": limits}),
    )


@pytest.mark.parametrize(("updates", "max_update", "total"), [(0, 100, 100), (99, 100, 100), (100, 200, 200)])
def test_other_runs_continue(updates: int, max_update: int, total: int) -> None:
    """Among them the first update of a warm-up, whose learning rate is 0 as well."""
    trainer = trainer_at(updates, max_update, total)
    assert (trainer.get_lr() == 0) == (updates == 0)
    for restore_file in ("checkpoint_last.pt", "elsewhere.pt"):
        assert refusal(trainer, restore_file) is None
    assert finished(trainer, SimpleNamespace(next_epoch_idx=9)) is None


def test_a_run_is_finished_by_updates_epochs_or_hours() -> None:
    at_end = trainer_at(100, max_update=100, total=100, max_epoch=3)
    assert finished(at_end, SimpleNamespace(next_epoch_idx=1)) == "100 updates of --max-update 100"
    assert refusal(at_end, "checkpoint_last.pt") is None
    assert not Resume().may_train(at_end, SimpleNamespace(next_epoch_idx=1))
    early = trainer_at(50, max_update=100, total=100, max_epoch=3)
    assert finished(early, SimpleNamespace(next_epoch_idx=3)) is None
    assert Resume().may_train(early, SimpleNamespace(next_epoch_idx=3))
    assert finished(early, SimpleNamespace(next_epoch_idx=4)) == "3 epochs of --max-epoch 3"
    for hours, limit in ((2.5, None), (2.0, "50 updates in --stop-time-hours 2")):  # after 2 hours and 100 seconds
        timed = trainer_at(50, max_update=100, total=100, stop_time_hours=hours)
        assert finished(timed, SimpleNamespace(next_epoch_idx=1)) == limit


def test_an_optimizer_of_other_weights_is_refused() -> None:
    """Adam's moments are kept by their place, so that new weights would get those of others."""
    trainer = trainer_at(50, max_update=100, total=100)
    trainer.get_model = lambda: SimpleNamespace(newly_initialized=["cross_views.heads.upos.backward.output.weight"])
    problem = refusal(trainer, "checkpoint_last.pt")
    assert problem.startswith("the checkpoint of update 50 lacks weights of this run, such as cross_views.heads.")
    assert "output.weight (1 in all), " in problem
    assert "--views" in problem


def checkpoint_config(tmp_path: Path, **changes: Any) -> Any:
    defaults = {"save_dir": str(tmp_path), "restore_file": "checkpoint_last.pt", "finetune_from_model": None}
    defaults |= {"checkpoint_suffix": "", "reset_optimizer": False}
    return OmegaConf.create({**defaults, **changes})


def test_a_start_from_elsewhere_does_not_overwrite_the_run_that_it_made(tmp_path: Path) -> None:
    elsewhere, step_back = tmp_path / "old" / "checkpoint_last.pt", tmp_path / "run" / "checkpoint_1_5.pt"
    for path in (elsewhere, step_back, tmp_path / "run" / "checkpoint_last.pt"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    new = checkpoint_config(tmp_path / "new", finetune_from_model=str(elsewhere))
    assert resume.checkpoint_to_load(new) == str(elsewhere)
    with pytest.raises(UserError, match=r"would start again and overwrite .*--finetune-from-model"):
        resume.checkpoint_to_load(checkpoint_config(tmp_path / "run", restore_file=str(elsewhere)))
    cfg = checkpoint_config(tmp_path / "run", restore_file=str(step_back))
    assert resume.checkpoint_to_load(cfg) == str(step_back)
    torch.save(
        {"model": {}, "cfg": {"checkpoint": {"restore_file": str(step_back)}}}, tmp_path / "run/checkpoint_last.pt"
    )
    with pytest.raises(UserError, match="would start again and overwrite"):  # a scheduler repeats the command
        resume.checkpoint_to_load(cfg)


@pytest.mark.parametrize(
    ("of_file", "of_last", "changes", "expected"),
    [
        ({"share_of_peak": 1.0}, None, {}, True),
        ({"share_of_peak": 1.0}, {"decay_start": 7}, {}, False),
        (None, {"decay_start": 7}, {}, False),  # the run that it began from is deleted
        (None, None, {}, "cannot be read .No such file"),
        ({"share_of_peak": 1.0}, {"decay_start": None}, {}, "is of another run, not of the decay from"),
        ({"share_of_peak": 0.5}, None, {}, "but the rate is 0.5 of its peak there: give a checkpoint between"),
        ({"best": None}, None, {}, "but the rate is nan of its peak there: give a checkpoint"),
        ({"share_of_peak": 1.0}, None, {"restore_file": "x.pt"}, "exclude each other: leave out the former"),
        ({"share_of_peak": 1.0}, {"decay_start": 4}, {}, "is of another run, not of"),  # an earlier branch
    ],
)
def test_a_branch_begins_in_a_constant_part_and_once(of_file, of_last, changes, expected, tmp_path) -> None:
    file, last = tmp_path / "trunk" / "checkpoint_1_7.pt", tmp_path / "branch" / "checkpoint_last.pt"
    for path, state in ((file, of_file), (last, of_last)):
        path.parent.mkdir()
        if state is not None:
            history = [HISTORY | {"lr_scheduler_state": state}]
            cfg = {"lr_scheduler": {"decay_from": "another name"}}
            torch.save({"model": {}, "cfg": cfg, "optimizer_history": history}, path)
    cfg = checkpoint_config(tmp_path / "branch", **changes)
    if isinstance(expected, bool):
        assert resume.begins_branch(cfg, str(file)) is expected
    else:
        with pytest.raises(UserError, match=expected):
            resume.begins_branch(cfg, str(file))


POSITIONS = {"relative_position_scheme": "t5", "relative_position_buckets": 32, "relative_position_max_distance": 128}
POSITIONS["layer_norm_eps"] = 1e-5
NO_POSITIONS = {**POSITIONS, "relative_position_scheme": "none"}
HISTORY = {"num_updates": 7, "criterion_name": "A", "optimizer_name": "B", "lr_scheduler_state": {}}


def test_weights_alone_start_a_new_run(tmp_path: Path) -> None:
    """They do not continue one: its schedule would begin again. Those of amos import have no update."""
    path = str(tmp_path / "a.pt")
    for optimizer, updates, start in (({}, 7, {}), (None, 0, {}), (None, 7, {"reset_optimizer": True})):
        torch.save({"optimizer_history": [{"num_updates": updates}], "last_optimizer_state": optimizer}, path)
        check_optimizer(path, checkpoint_config(tmp_path, **start))
    check_optimizer(path, checkpoint_config(tmp_path, finetune_from_model=path))
    with pytest.raises(UserError, match="has no optimizer state"):
        check_optimizer(path, checkpoint_config(tmp_path))


class Task:
    """Knows its vocabulary as ``text_pretraining`` does."""

    cfg = SimpleNamespace(data="")

    def state_dict(self) -> dict[str, Any]:
        return {"generator_sha256": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("dictionary_sha256", "here") != "here":
            raise UserError("the checkpoint was trained with another dictionary")


def saved(tmp_path: Path, task_state: Any, model: Any) -> str:
    path = str(tmp_path / "checkpoint1.pt")
    torch.save({"task_state": task_state, "cfg": model and {"model": model}, "model": {}}, path)
    return path


@pytest.mark.parametrize(
    ("here", "there", "line"),
    [
        (POSITIONS, POSITIONS, None),
        (POSITIONS, None, None),  # a checkpoint that says nothing
        (POSITIONS, {"_name": "roberta"}, None),
        ({"_name": "roberta"}, POSITIONS, None),
        (NO_POSITIONS, {**NO_POSITIONS, "relative_position_buckets": 64}, None),  # the sizes then mean nothing
        (POSITIONS, POSITIONS | {"relative_position_scheme": "amos"}, "--relative-position-scheme amos, not t5"),
        (POSITIONS, POSITIONS | {"layer_norm_eps": 1e-12}, "--layer-norm-eps 1e-12, not 1e-05"),
        (POSITIONS | {"local_attention": 128}, POSITIONS | {"local_attention": 64}, "--local-attention 64, not 128"),
    ],
)
def test_a_checkpoint_has_the_positions_and_epsilon_of_the_model(here, there, line, tmp_path: Path) -> None:
    config = OmegaConf.create(here)
    OmegaConf.set_struct(config, True)
    with pytest.raises(UserError, match=line) if line else nullcontext():
        check_fits(saved(tmp_path, {"dictionary_sha256": "here"}, there), Task(), config)


def test_the_inputs_of_sentence_prediction_need_the_vocabulary_of_the_checkpoint(tmp_path: Path) -> None:
    """The stock task compares nothing itself."""
    task = SimpleNamespace(cfg=SimpleNamespace(data=str(tmp_path)), load_state_dict=lambda state: None, state_dict=dict)
    (tmp_path / "input0").mkdir()
    dictionary = tmp_path / "input0" / "dict.txt"
    dictionary.write_text("a 1\nb 1\n", encoding="utf-8")
    path = saved(tmp_path, {"dictionary_sha256": hashlib.sha256(b"a 1\nb 1\n").hexdigest()}, None)
    check_fits(path, task, OmegaConf.create(POSITIONS))
    dictionary.write_text("b 1\na 1\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"checkpoint1\.pt does not fit: .*input0/dict\.txt is not the dictionary"):
        check_fits(path, task, OmegaConf.create(POSITIONS))


def test_a_run_continues_with_its_labels_and_its_frozen_generator(tmp_path: Path, monkeypatch) -> None:
    """One that starts from the checkpoint may have others, as in intermediate-task training."""
    here, there = (
        {"heads": {"text": vars(HeadOutputs("classes", labels))}} for labels in (["no", "yes"], ["yes", "no"])
    )
    generator = {"generator_sha256": "0123456789abcdef"}
    monkeypatch.setattr(Task, "state_dict", lambda task: {"generator_sha256": None} | here)
    for known, starts_anew in ((here, False), ({}, False), (there, True), (generator, True)):
        check_fits(saved(tmp_path, known, None), Task(), OmegaConf.create(POSITIONS), starts_anew)
    for known, line in (
        (there, "trained with other labels of text: give its data"),
        (generator, "0123456789ab, here none"),
    ):
        with pytest.raises(UserError, match=f"does not fit: .*{line}"):
            check_fits(saved(tmp_path, known, None), Task(), OmegaConf.create(POSITIONS))


def test_a_model_counts_the_updates_of_a_new_schedule() -> None:
    """fairseq tells it those of the checkpoint that it starts from."""
    model = small_electra(generator_temperature_start=2.0, max_update=100)
    model.set_num_updates(90)
    trainer = trainer_at(0, max_update=100, total=100)
    trainer.get_model = lambda: model
    Resume().after_load(SimpleNamespace(restore_file="checkpoint_last.pt"), trainer, SimpleNamespace(), None)
    assert model.temperature == 2
    assert trainer._previous_training_time == 0, "that of the checkpoint is not the time of this run"


def test_a_step_back_behind_its_limit_is_refused() -> None:
    trainer = trainer_at(50, max_update=100, total=100, stop_time_hours=2.0)
    trainer.get_model = lambda: SimpleNamespace(set_num_updates=lambda number: None)
    with pytest.raises(UserError, match=r"x\.pt has reached its limit \(50 updates in --stop-time-hours 2\): raise it"):
        Resume().after_load(SimpleNamespace(restore_file="x.pt"), trainer, SimpleNamespace(next_epoch_idx=1), None)


def test_a_save_dir_belongs_to_one_process(tmp_path: Path) -> None:
    """The second process is refused with the name of the first, and repairs nothing; one that was killed holds nothing."""
    run, last = str(tmp_path / "run"), tmp_path / "run" / "checkpoint_last.pt"
    reader, writer = os.pipe()
    first = os.fork()
    if first == 0:
        resume.claim_save_dir(run)
        os.write(writer, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(reader, 1)
    last.write_bytes(b"damaged")
    with pytest.raises(UserError, match=f"in use by another run .process {first} on {socket.gethostname()}"):
        resume.claim_and_repair(checkpoint_config(tmp_path / "run", no_last_checkpoints=False))
    assert last.read_bytes() == b"damaged"
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    resume.claim_save_dir(run)
    resume.claim_save_dir(run)
