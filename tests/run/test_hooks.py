"""When the methods of hooks are called, and what depends on the order of the hooks."""

import inspect
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fairseq.dataclass.configs import FairseqConfig
from omegaconf import OmegaConf

from amos_fairseq.errors import UserError
from amos_fairseq.run import ending, hooks
from amos_fairseq.run.health import Divergence
from amos_fairseq.run.hook import Hook
from amos_fairseq.run.progress import MetricsLog

TRAINER = SimpleNamespace(cfg=SimpleNamespace(common=SimpleNamespace(amp=True)))
MOMENTS = [name for name, _ in inspect.getmembers(Hook, inspect.isfunction) if not name.startswith("_")]


def noting(happened: list[str], answer: bool = True) -> Hook:
    """A hook that notes each moment."""
    hook = Hook()
    for moment in MOMENTS:
        setattr(hook, moment, lambda *args, moment=moment: happened.append(moment) or answer)
    return hook


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The moments, and fairseq's functions; a new trainer gets no other hooks, and no setting is checked."""
    moments: list[str] = []
    monkeypatch.setattr(hooks, "active", [noting(moments)])
    monkeypatch.setattr(hooks, "new_run", lambda: None)
    for name in ("arrange_ranks", "check_connection"):
        monkeypatch.setattr(hooks.distribution, name, lambda *args: None)
    monkeypatch.setattr(hooks, "check_configuration", lambda *args: None)
    monkeypatch.setattr(hooks, "check_flags", lambda *args: None)
    return moments


def stock(happened: list[str], result: Any = None) -> Callable[..., Any]:
    return lambda *args, **kwargs: happened.append("fairseq") or result


EPOCH = (None, TRAINER, SimpleNamespace(cfg={}), None)
STOPPED = ([None], False)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda stock: hooks.parse_args_and_arch(stock(Namespace()), None, []), "fairseq"),
        (lambda stock: hooks.call_main(stock(), None, None), "before_launch fairseq"),
        (lambda stock: hooks.run_rank(stock(), None), "before_rank fairseq"),
        (lambda stock: hooks.make_trainer(stock(), TRAINER, None), "before_trainer fairseq after_trainer"),
        (lambda stock: hooks.load_checkpoint(stock(({}, None)), None, TRAINER), "before_load fairseq after_load"),
        (lambda stock: hooks.train_epoch(stock(STOPPED), *EPOCH), "may_train before_epoch fairseq after_epoch"),
        (lambda stock: hooks.train_step(stock({}), TRAINER, []), "before_update fairseq after_update"),
        (lambda stock: hooks.reduce_and_log_stats(stock({}), TRAINER, [], 1.0), "before_statistics fairseq"),
        (lambda stock: hooks.save_checkpoint(stock("path"), None, TRAINER), "may_save fairseq after_save"),
        (lambda stock: hooks.state_dict(stock({}), TRAINER), "fairseq before_save"),
        (lambda stock: hooks.validate_and_save(stock(STOPPED), *EPOCH), "before_completion fairseq update_completed"),
    ],
)
def test_moments_around_functions_of_fairseq(call: Callable, expected: str, happened: list[str]) -> None:
    with ending.handled():
        call(lambda result=None: stock(happened, result))
    assert happened == expected.split()


def test_a_hook_can_refuse(happened: list[str]) -> None:
    hooks.active.append(noting([], answer=False))
    assert hooks.train_epoch(pytest.fail, *EPOCH) == ([None], True)
    assert hooks.save_checkpoint(pytest.fail, None, TRAINER) is None
    hooks.active[:] = [Divergence()]
    cfg, trainer = SimpleNamespace(restore_file="FILE", reset_meters=False), SimpleNamespace(get_num_updates=lambda: 1)
    with pytest.raises(UserError, match=r"FILE cannot be loaded \(TypeError: .*give another checkpoint"):
        hooks.load_checkpoint(lambda *_: ({Divergence.STATE: [None]}, None), cfg, trainer)


@pytest.mark.parametrize(("epoch", "ends", "seen"), [(2, True, 7), (2, False, 0), (1, True, 0)])
def test_the_last_update_of_max_epoch_is_validated_and_saved(epoch, ends, seen, monkeypatch) -> None:
    """fairseq does so where an update reaches its limit of updates, not where an epoch is the last one."""
    cfg = OmegaConf.structured(FairseqConfig)
    cfg.optimization.max_epoch = 2
    monkeypatch.setattr(hooks, "active", [])
    trainer, limits = SimpleNamespace(get_num_updates=lambda: 7), []

    def validate_and_save(settings: Any, *args: Any) -> tuple[list[None], bool]:
        limits.append(settings.optimization.max_update)
        return [None], False

    hooks.validate_and_save(validate_and_save, cfg, trainer, None, SimpleNamespace(epoch=epoch), ["valid"], ends)
    assert limits == [seen]


def test_moments_of_a_bar(happened: list[str]) -> None:
    def make(**settings: Any) -> Any:
        class Bar(list):
            log = print = staticmethod(stock(happened))

        return hooks.make_bar(lambda iterator, **_: Bar(iterator), range(2), **settings)

    bar = make(aim_param_checkpoint_dir="run", epoch=1)
    for update in bar:
        bar.log({}, step=update)
    bar.print({}, tag="train")
    interval = ["before_logging", "fairseq", "before_next_batch"]
    assert happened == ["before_bar", *interval, *interval, "fairseq"]
    happened.clear()
    bar = make(aim_param_checkpoint_dir="run", epoch=1, prefix="valid on 'valid' subset")
    assert list(bar) == [0, 1]
    bar.print({}, tag="valid")
    assert happened == ["before_logging", "fairseq"]
    happened.clear()
    make().log({})  # of another command
    assert happened == ["fairseq"]


def test_hooks_are_new_for_each_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Hook] = []
    monkeypatch.setattr(hooks, "HOOKS", (Hook,))
    monkeypatch.setattr(hooks, "active", [])
    monkeypatch.setattr(hooks.distribution, "check_connection", lambda cfg: None)
    for _ in range(2):
        hooks.make_trainer(lambda trainer, cfg: None, TRAINER, None)
        found += hooks.active
    assert len(set(found)) == 2


def test_a_refused_run_notes_nothing(tmp_path, monkeypatch) -> None:
    """The learning rate of the loaded run is 0."""
    cfg = OmegaConf.structured(FairseqConfig)
    cfg.checkpoint.save_dir = str(tmp_path)
    monkeypatch.setattr(hooks, "active", [])
    hooks.new_run()
    limits = {"max_update": 100, "max_epoch": 0, "stop_time_hours": 0.0}
    trainer = SimpleNamespace(
        get_model=lambda: SimpleNamespace(set_num_updates=lambda number: None),
        cfg=OmegaConf.create({"model": {}, "optimization": limits}),
        get_num_updates=lambda: 5,
        get_lr=lambda: 0.0,
        task=SimpleNamespace(),
    )
    loaded = {}, SimpleNamespace(next_epoch_idx=1)
    with pytest.raises(UserError, match="after update 5 the learning rate is 0"):
        hooks.load_checkpoint(lambda cfg, trainer: loaded, cfg.checkpoint, trainer)
    (metrics_log,) = (hook for hook in hooks.active if isinstance(hook, MetricsLog))
    assert metrics_log.resumed_update is None
