"""When the hooks of each moment are called, and what depends on the order in which they are."""

import math
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tiny_runs import TINY_RUN, run_process

from amos_fairseq.errors import UserError
from amos_fairseq.run import divergence, hooks, metrics_log, save_dir, signals

CFG = SimpleNamespace(save_dir="run")
TRAINER = SimpleNamespace(cfg=SimpleNamespace(common=SimpleNamespace(amp=True)))


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The moments, each with one hook that notes its name, and fairseq's functions."""
    names: list[str] = []
    for moment in hooks.HOOKS:
        monkeypatch.setitem(hooks.HOOKS, moment, (lambda *args, moment=moment: names.append(moment) or True,))
    return names


def stock(happened: list[str], result: Any = None) -> Callable[..., Any]:
    return lambda *args, **kwargs: happened.append("fairseq") or result


EPOCH = (CFG, TRAINER, None, None)
STOPPED = ([None], False)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda stock: hooks.parse_args_and_arch(stock(Namespace()), None, []), "fairseq flags_parsed"),
        (lambda stock: hooks.add_defaults(stock(), CFG), "before_defaults fairseq"),
        (lambda stock: hooks.call_main(stock(), CFG, None), "before_launch fairseq"),
        (lambda stock: hooks.run_rank(stock(), CFG), "before_rank fairseq after_rank"),
        (lambda stock: hooks.make_trainer(stock(), TRAINER, CFG), "before_trainer fairseq after_trainer"),
        (lambda stock: hooks.load_checkpoint(stock(({}, None)), CFG, TRAINER), "before_load fairseq after_load"),
        (lambda stock: hooks.train_epoch(stock(STOPPED), *EPOCH), "may_train before_epoch fairseq after_epoch"),
        (lambda stock: hooks.train_step(stock({}), TRAINER, []), "before_update fairseq after_update"),
        (lambda stock: hooks.clip_grad_norm(stock(torch.ones(())), TRAINER, 2.0), "fairseq after_gradient"),
        (lambda stock: hooks.reduce_and_log_stats(stock({}), TRAINER, [], 1.0), "before_statistics fairseq"),
        (lambda stock: hooks.save_checkpoint(stock("path"), CFG, TRAINER), "may_save fairseq after_save"),
        (lambda stock: hooks.state_dict(stock({}), TRAINER), "fairseq state_to_save"),
        (lambda stock: hooks.validate_and_save(stock(STOPPED), *EPOCH), "fairseq update_completed"),
    ],
)
def test_moments_around_functions_of_fairseq(call: Callable, expected: str, happened: list[str]) -> None:
    with signals.handled():
        call(lambda result=None: stock(happened, result))
    assert happened == expected.split()


def test_moments_of_a_bar(happened: list[str]) -> None:
    def make(**settings: Any) -> Any:
        class Bar(list):
            log = print = staticmethod(stock(happened))

        return hooks.make_bar(lambda iterator, **_: Bar(iterator), range(2), **settings)

    bar = make(aim_param_checkpoint_dir="run", epoch=1)
    for update in bar:
        bar.log({}, step=update)
    bar.print({}, tag="train")
    interval = ["interval_logged", "fairseq", "before_next_batch"]
    assert happened == ["before_bar", "new_epoch_bar", *interval, *interval, "fairseq"]
    happened.clear()
    bar = make(aim_param_checkpoint_dir="run", epoch=1, prefix="valid on 'valid' subset")
    assert list(bar) == [0, 1]
    bar.print({}, tag="valid")
    assert happened == ["validation_logged", "fairseq"]
    happened.clear()
    make().log({})  # of another command
    assert happened == ["fairseq"]


# fairseq-train in this process; prints each hook that it has called.
TRAINING_WITH_NOTES = """
from fairseq_cli.train import cli_main  # as in a command: before the plugin

from amos_fairseq.run import hooks

def noted(moment, hook):
    return lambda *arguments: (called.append(f"{moment} {hook.__name__}"), hook(*arguments))[1]

called = []
for moment, of_moment in hooks.HOOKS.items():
    hooks.HOOKS[moment] = tuple(noted(moment, hook) for hook in of_moment)
cli_main()
print("called", *dict.fromkeys(called), sep="\\n")
"""


@pytest.mark.slow
def test_a_run_calls_all_hooks(binarized_corpus: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", TRAINING_WITH_NOTES, binarized_corpus, *TINY_RUN]
    done = run_process([*command, "--save-dir", tmp_path / "run"])
    assert done.returncode == 0, done.stderr
    called = done.stdout.partition("called\n")[2].splitlines()
    assert set(called) == {f"{moment} {hook.__name__}" for moment, each in hooks.HOOKS.items() for hook in each}


def test_a_save_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a timed save is not due again at once, and the save at a signal is not repeated."""
    trainer = SimpleNamespace(get_num_updates=lambda: 3)
    hooks.at("after_save", trainer)
    assert trainer.update_of_last_save == 3
    assert time.monotonic() - trainer.time_of_last_save < 60


def test_hooks_are_called_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    made = tuple(lambda *args, number=number: calls.append((number, *args)) or number for number in range(3))
    monkeypatch.setitem(hooks.HOOKS, "before_update", made)
    assert hooks.at("before_update", "trainer") == [0, 1, 2]
    assert calls == [(0, "trainer"), (1, "trainer"), (2, "trainer")]


def test_a_hook_can_refuse(happened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for moment in ("may_train", "may_save"):
        monkeypatch.setitem(hooks.HOOKS, moment, (lambda *args: True, lambda *args: False))
    assert hooks.train_epoch(pytest.fail, *EPOCH) == ([None], True)
    assert hooks.save_checkpoint(pytest.fail, CFG, TRAINER) is None


def test_an_error_ends_the_epoch_and_the_rank(happened: list[str]) -> None:
    for call, arguments, last in ((hooks.train_epoch, EPOCH, "after_epoch"), (hooks.run_rank, [CFG], "after_rank")):
        with pytest.raises(ZeroDivisionError):
            call(lambda *args: 1 / 0, *arguments)
        assert happened[-1] == last


def loading(directory: Path) -> tuple[Any, Any]:
    """Settings and a trainer for :func:`hooks.load_checkpoint`."""
    cfg = {"save_dir": str(directory), "restore_file": "checkpoint_last.pt", "finetune_from_model": None}
    resets = {"reset_optimizer": True, "reset_dataloader": True, "reset_meters": False, "no_last_checkpoints": False}
    trainer = SimpleNamespace(
        get_model=lambda: torch.nn.Linear(1, 1),
        should_save_checkpoint_on_current_rank=True,
        checkpoint_suffix="",
        task=SimpleNamespace(cfg=SimpleNamespace(data=""), load_state_dict=lambda state: None),
        cfg=OmegaConf.create({"model": {}, "optimization": {"max_update": 100, "max_epoch": 0}}),
        get_num_updates=lambda: 5,
        get_lr=lambda: 0.0,
    )
    return OmegaConf.create(cfg | resets), trainer


def damaged_run(directory: Path) -> Path:
    """A run whose last checkpoint was cut, beside a complete older one."""
    last, position = directory / "checkpoint_last.pt", {"epoch": 1, "iterations_in_epoch": 5}
    history, extra = [{"num_updates": 5}], {"train_iterator": position}
    complete = {"model": {"weight": torch.ones(2)}, "optimizer_history": history, "extra_state": extra}
    torch.save(complete, directory / "checkpoint_1_5.pt")
    last.write_bytes((directory / "checkpoint_1_5.pt").read_bytes()[:100])
    return last


def test_a_save_dir_of_another_run_is_not_repaired(tmp_path: Path) -> None:
    last = damaged_run(tmp_path)
    reader, writer = os.pipe()
    other = os.fork()
    if other == 0:
        save_dir.claim_save_dir(str(tmp_path))
        os.write(writer, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(reader, 1)
    try:
        with pytest.raises(UserError, match="in use by another run"):
            hooks.load_checkpoint(pytest.fail, *loading(tmp_path))
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    assert last.stat().st_size == 100


def test_a_checkpoint_is_repaired_before_it_is_checked_and_a_refused_run_notes_nothing(tmp_path: Path) -> None:
    """The learning rate of the loaded run is 0."""
    last = damaged_run(tmp_path)
    found = []

    def load(cfg: Any, trainer: Any) -> tuple[Any, Any]:
        found.append(torch.load(last, weights_only=True)["model"])
        return {}, SimpleNamespace(next_epoch_idx=1)

    with pytest.raises(UserError, match="after update 5 the learning rate is 0"):
        hooks.load_checkpoint(load, *loading(tmp_path))
    assert len(found) == 1
    assert str(tmp_path) not in metrics_log._resumed_updates


def test_a_loss_that_is_not_finite_is_not_called_divergence() -> None:
    """After nine suspicious updates."""
    task = SimpleNamespace(cfg=SimpleNamespace(divergence_factor=3.0))
    cfg = OmegaConf.create({"common": {"amp": False}})
    trainer = SimpleNamespace(task=task, cfg=cfg, optimizer=None, get_num_updates=lambda: 30, grad_norm_on_host=1.0)
    trainer.divergence_test = divergence.DivergenceTest(3.0, [[1.0, 1.0]] * 20)
    trainer.divergence_test.num_suspicious = divergence.PATIENCE - 1
    with pytest.raises(UserError, match=r"update 30: the loss is not finite \(loss = inf"):
        hooks.at("after_update", trainer, {"loss": math.inf})


def test_the_time_to_the_end_is_shown_and_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks.progress, "_runs", [SimpleNamespace(show=lambda stats: stats.update(left="2 h"))])
    printed: list[dict] = []
    wrapped = SimpleNamespace(log=lambda stats, **_: printed.append(stats))
    given = {"loss": 2.5}
    hooks.RunBar(wrapped, [], str(tmp_path), True).log(given, "train_inner", 7)
    assert printed == [{"loss": 2.5, "left": "2 h"}]
    assert given == {"loss": 2.5}
    record = '{"split": "train", "update": 7, "epoch": 0.0, "loss": 2.5}\n'
    assert (tmp_path / "metrics.jsonl").read_text() == record
