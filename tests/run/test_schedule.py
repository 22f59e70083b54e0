"""A run of a fixed time on a clock that the tests set: its end, its rates, its parts; and its settings."""

import importlib.util
import itertools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils
from omegaconf import OmegaConf
from rank_functions import succeed_on_two_ranks
from small_models import sgd

from amos_fairseq import root_logger_kept
from amos_fairseq.errors import UserError
from amos_fairseq.modules.mixture import MixtureWeights
from amos_fairseq.optim.warmup_stable_decay import WarmupStableDecay, WarmupStableDecayConfig
from amos_fairseq.recipes.composition import compose_with_hydra
from amos_fairseq.run import hooks, schedule
from amos_fairseq.run.resume import finished, refusal
from amos_fairseq.run.schedule import Epochs, TimeBudget

PEAK, BUDGET, WARMUP = 0.5, 600.0, 0.1  # seconds; share
UPDATE, VALIDATION, SAVE = 2.0, 15.0, 5.0  # seconds
MINUTES = {"minutes": BUDGET / 60, "warmup_updates": 10, "total_num_update": 100}


def settings(**of_schedule: Any) -> Any:
    cfg = {
        "optimization": {"max_update": 0, "max_epoch": 0, "stop_time_hours": 0.0, "lr": [PEAK]},
        "dataset": {"disable_validation": False, "validate_after_updates": 0, "validate_interval": 10**9},
        "checkpoint": {"save_interval": 10**9, "save_interval_updates": 0, "patience": -1, "restore_file": "x"},
    }
    cfg["checkpoint"]["reset_lr_scheduler"] = False
    cfg["dataset"]["validate_interval_updates"] = 0
    cfg["lr_scheduler"] = vars(WarmupStableDecayConfig(lr=[PEAK])) | {"_name": "warmup_stable_decay"}
    return OmegaConf.merge(cfg, {"lr_scheduler": of_schedule})


def make_schedule(cfg: Any) -> WarmupStableDecay:
    return WarmupStableDecay(cfg.lr_scheduler, sgd(PEAK))


class Run:
    """fairseq's loop, its validate_and_save and our schedule, with a stand-in for the model, on a clock of its own."""

    def __init__(self, script: ModuleType, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        self.script, self.cfg, self.now = script, settings(**changes), 1000.0
        self.state: dict[str, Any] | None = None
        self.rates: list[tuple[float, float]] = []  # time at the start of an update, and its rate
        self.happened: list[tuple[str, int]] = []  # validations and checkpoints, with their update
        self.counted = self.saved_at = 0.0  # of the clock, without the time that kills have lost
        self.epoch = 0  # its updates; 0: all of the run are one
        self.change = 1.0  # of the time of an update and a validation, in the second half of the budget
        monkeypatch.setattr(schedule, "clock", lambda: self.now)
        monkeypatch.setattr(script, "validate", self.validate)
        monkeypatch.setattr(checkpoint_utils, "save_checkpoint", self.save)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.counted += seconds

    def compute(self, seconds: float) -> None:
        self.wait(seconds * (self.change if self.counted > BUDGET / 2 else 1.0))

    def validate(self, *_: Any) -> list[float]:
        self.compute(VALIDATION)
        hooks.active[0].before_logging("", "valid", self.updates, {})
        self.happened.append(("validation", self.updates))
        return [1.0]

    def save(self, cfg: Any, trainer: Any, *_: Any) -> None:
        def stock(trainer: Any) -> dict[str, Any]:
            history = {"num_updates": self.updates, "lr_scheduler_state": trainer.lr_scheduler.state_dict()}
            return {"optimizer_history": [history]}

        def write(*_: Any) -> None:
            self.state, self.saved_at = hooks.state_dict(stock, trainer), self.counted
            self.wait(SAVE)

        hooks.save_checkpoint(write, cfg, trainer)
        self.happened.append(("checkpoint", self.updates))

    def start(self) -> Any:
        hooks.active[:] = [TimeBudget()]
        self.updates, self.counted, lr_scheduler = 0, self.saved_at, make_schedule(self.cfg)
        if self.state is not None:
            history = self.state["optimizer_history"][-1]
            self.updates = history["num_updates"]
            lr_scheduler.load_state_dict(history["lr_scheduler_state"])
        trainer = SimpleNamespace(cfg=self.cfg, lr_scheduler=lr_scheduler, get_num_updates=lambda: self.updates)
        trainer.cumulative_training_time = lambda: 0.0
        self.wait(4.0)  # a checkpoint is loaded
        hooks.load_checkpoint(lambda cfg, trainer: ({}, None), self.cfg.checkpoint, trainer)
        return trainer

    def train(self, killed_at: float = float("inf")) -> Any:
        """Train from the last checkpoint until the run ends, or without warning once so much time has been counted."""

        def update(trainer: Any, *_: Any) -> None:
            self.rates.append((self.counted, trainer.lr_scheduler.optimizer.get_lr()))
            self.compute(UPDATE)
            self.updates += 1

        trainer, is_last, position = self.start(), False, SimpleNamespace(epoch=1)
        while not is_last and self.counted < killed_at:
            hooks.train_step(update, trainer, [])
            ends_epoch = bool(self.epoch and self.updates % self.epoch == 0)
            arguments = self.cfg, trainer, None, position, ["valid"], ends_epoch
            _, is_last = hooks.validate_and_save(self.script.validate_and_save, *arguments)
            position.epoch += ends_epoch
        self.now += 1000.0  # nobody starts it again at once
        return trainer


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """``run(KEY=VALUE of lr_scheduler, ...)``. fairseq's script is loaded beside its name: nothing else finds it."""
    with root_logger_kept():
        origin = importlib.util.find_spec("fairseq_cli.train").origin
        spec = importlib.util.spec_from_file_location("script_of_fairseq", origin)
        script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
    monkeypatch.setattr(hooks, "active", [])
    return lambda **changes: Run(script, monkeypatch, **changes)


def test_a_run_that_is_killed_twice_ends_in_time_with_a_decayed_rate(run: Callable[..., Run]) -> None:
    """Nothing is validated or saved by updates: the first pair is made after a tenth of the time, the last at its end."""
    timed = run(**MINUTES)
    timed.train(killed_at=200)  # loses 120 s, what comes after the pair
    in_first_part = len(timed.rates)
    timed.train(killed_at=300)  # from the same checkpoint
    trainer = timed.train()
    first, last = next(n for _, n in timed.happened), timed.updates
    assert timed.happened == [(what, n) for n in (first, last) for what in ("validation", "checkpoint")]
    assert timed.counted == pytest.approx(BUDGET, rel=0.01)
    assert finished(trainer, SimpleNamespace(next_epoch_idx=1)) == f"{last} updates in --minutes 10"
    assert finished(timed.start(), SimpleNamespace(next_epoch_idx=1)) is not None
    for number, (seconds, rate) in enumerate(timed.rates):
        # The checkpoint from which the later parts start does not know yet how long it took to write.
        known = 0 if seconds <= 0.1 * BUDGET + UPDATE else VALIDATION + (SAVE if number < in_first_part else 0)
        share = seconds / (BUDGET - known)
        assert rate == pytest.approx(PEAK * (share / WARMUP if share <= WARMUP else (1 - share) / (1 - WARMUP)))
    assert 0 < timed.rates[-1][1] < 0.01 * PEAK


def test_pairs_of_the_recipe_are_used_and_a_larger_budget_continues(run: Callable[..., Run]) -> None:
    timed = run(**MINUTES)
    timed.cfg.checkpoint.save_interval_updates = 25  # after 54 s, before a tenth of the time
    timed.train()
    assert {n for _, n in timed.happened} == {*range(25, timed.updates, 25), timed.updates}
    assert 0.99 * BUDGET < timed.counted <= BUDGET
    timed.cfg.lr_scheduler.minutes = 20
    timed.train()
    assert 0.99 * 2 * BUDGET < timed.counted <= 2 * BUDGET


@pytest.mark.parametrize("interval", [22, 23, 27, 31])
@pytest.mark.parametrize("by", ["updates", "validation", "epoch"])
def test_what_is_due_near_the_end_is_left_out(by: str, interval: int, run: Callable[..., Run]) -> None:
    """After a validation and a checkpoint there would be no time for another update and the last ones."""
    timed = run(**MINUTES)
    if by == "updates":
        timed.cfg.checkpoint.save_interval_updates = interval
    elif by == "validation":
        timed.cfg.dataset.validate_interval_updates = interval
    else:
        timed.epoch = interval
        timed.cfg.checkpoint.save_interval = timed.cfg.dataset.validate_interval = 1
    timed.train()
    # A save alone is not known before the end.
    assert 0.99 * BUDGET < timed.counted <= BUDGET + (SAVE if by == "validation" else 0)
    left_out = set(range(interval, timed.updates, interval)) - {n for _, n in timed.happened}
    assert by == "validation" or len(left_out) == 1
    assert all(UPDATE * (timed.updates - n) <= UPDATE + VALIDATION + SAVE for n in left_out)
    assert 0 < timed.rates[-1][1] < 0.02 * PEAK


@pytest.mark.parametrize("change", [0.5, 2.0])
@pytest.mark.parametrize("killed_at", [[], [400.0]])
def test_a_machine_that_becomes_faster_or_slower(change, killed_at, run) -> None:
    """The only validation before the last one is made after a tenth of the time, at the first speed. A checkpoint of a later
    time knows the new one."""
    timed = run(**MINUTES)
    timed.change = change
    for seconds in killed_at:
        trainer = timed.train(killed_at=seconds)
        timed.now -= 1000.0  # it was saved before that
        timed.save(timed.cfg.checkpoint, trainer)
    timed.train()
    assert [what for what, _ in timed.happened if what == "validation"] == ["validation"] * 2
    assert timed.counted == pytest.approx(BUDGET, rel=0.01)
    assert 0 < timed.rates[-1][1] < 0.02 * PEAK


def test_a_run_without_validation_ends_in_time(run: Callable[..., Run]) -> None:
    timed = run(**MINUTES)
    timed.cfg.dataset.disable_validation = True
    timed.train()
    assert [what for what, _ in timed.happened] == ["checkpoint"] * 2
    assert 0.99 * BUDGET < timed.counted <= BUDGET


def test_updates_of_another_phase_do_not_say_how_long_a_validation_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at a border: the checkpoint is of updates of 1 s, those of the new phase take 6 s, and a validation 100 s."""
    monkeypatch.setattr(schedule, "clock", lambda: 50.0)
    cfg = settings(**MINUTES)
    saved = make_schedule(cfg)
    saved.validation_seconds, saved.update_seconds, saved.update_phase = 100.0, 1.0, 0
    for phase, expected in ((0, 600.0), (1, 100.0)):
        budget, resumed = TimeBudget(), make_schedule(cfg)
        resumed.load_state_dict(saved.state_dict())
        task = SimpleNamespace(phase_iterator=SimpleNamespace(phase=phase))
        trainer = SimpleNamespace(cfg=cfg, lr_scheduler=resumed, task=task, get_num_updates=lambda: 3)
        budget.after_load(None, trainer, None, None)
        budget.before_epoch(None, trainer)
        budget.durations.extend([6.0] * 5)
        assert budget.plan(trainer)[1] == expected


def rates_on_two_ranks(rank: int) -> None:
    """The clock of the second rank is slower and began earlier; it has seen no validation."""
    ticks = itertools.count()
    schedule.clock = lambda: 100.0 * (1 - rank) + next(ticks) * (3.0 - rank)
    cfg = settings(**MINUTES)
    budget, trainer = TimeBudget(), SimpleNamespace(cfg=cfg, lr_scheduler=make_schedule(cfg), get_num_updates=lambda: 3)
    budget.after_load(None, trainer, None, None)
    trainer.lr_scheduler.validation_seconds = 20.0 * (1 - rank)
    mine = []
    while not budget.is_last:
        budget.before_update(trainer)
        mine += [trainer.lr_scheduler.optimizer.get_lr(), trainer.lr_scheduler.seconds]
    of_all = [None, None]
    torch.distributed.all_gather_object(of_all, mine)
    assert of_all[0] == of_all[1]
    assert mine[1::2] == [3.0 * n for n in range(1, 1 + len(mine) // 2)]
    assert mine[-1] + 6.0 + 20.0 > BUDGET


def test_ranks_with_different_clocks_have_equal_rates() -> None:
    succeed_on_two_ranks(rates_on_two_ranks)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (["optimization.stop_time_hours=1"], "ends the run: set it to 0, or leave out stop_time_hours"),
        (["optimization.max_update=5"], "ends the run: set it to 0, or leave out max_update"),
        (["optimization.max_epoch=5"], "ends the run: set it to 0, or leave out max_epoch"),
        (["lr_scheduler.total_num_update=10"], "here 10 / 10: give --total-num-update above --warmup-updates"),
        (["optimization.lr=[0.1,0.2]"], "warmup_stable_decay has one peak, give one rate"),
        (["lr_scheduler.minutes=0", "lr_scheduler.total_num_update=0"], "is 0: give optimization.max_update"),
    ],
)
def test_refusals(changes: list[str], line: str) -> None:
    TimeBudget().before_launch(settings(**MINUTES))
    with pytest.raises(UserError, match=line):
        TimeBudget().before_launch(OmegaConf.merge(settings(**MINUTES), OmegaConf.from_dotlist(changes)))


def test_a_run_of_updates_is_not_continued_with_minutes() -> None:
    """Its schedule would begin again. A branch begins one where it starts; a run of minutes has seconds."""
    lr_scheduler = make_schedule(settings(**MINUTES))
    trainer = SimpleNamespace(cfg=settings(), lr_scheduler=lr_scheduler, get_num_updates=lambda: 5)
    trainer.get_lr, trainer.get_model = lr_scheduler.optimizer.get_lr, SimpleNamespace
    found = []
    for lr_scheduler.seconds, lr_scheduler.decay_start in ((0.0, None), (0.0, 4), (9.0, None), (9.0, 4), (0.0, 5)):
        found.append((refusal(trainer, "x") or "").partition(",")[0])
    assert found == 2 * ["the 5 updates of the checkpoint had no budget of time"] + 3 * [""]
    trainer.cfg.checkpoint.reset_lr_scheduler, lr_scheduler.decay_start = True, None
    assert refusal(trainer, "x") is None, "a new schedule is asked for"


def test_time_replaces_the_updates_of_a_recipe_before_other_settings_follow_them() -> None:
    cfg = compose_with_hydra("mlm_tiny", ["lr_scheduler.minutes=6", "+model.max_update=${optimization.max_update}"])
    for _ in range(2):  # in the command and in each rank
        schedule.stop_at_time_limit(cfg)
        found = cfg.optimization.max_update, cfg.model.max_update, cfg.lr_scheduler.total_num_update
        assert found == (0, 0, 1750)


class Epoch(list):
    """Ten batches of an epoch; of the second one, which is resumed, four are done."""

    def __init__(self, is_resumed: bool) -> None:
        super().__init__(range(10))
        self.next_epoch_idx, self.iterations_in_epoch = (2, 4) if is_resumed else (1, 0)


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize(
    ("words", "max_update", "end", "expected"),
    [
        ([], 100, 100, (30, 3, 30)),  # a recipe's warm-up is a share
        (["lr_scheduler.warmup_updates=10"], 100, 100, (30, 10, 30)),
        (None, 100, 100, (30, 10, 30)),  # flags
        ([], 0, 0, (30, 10, 30)),
        ([], 20, 20, (20, 10, 20)),  # ends the run before the epochs do
        ([], 100, 60, (30, 10, 60)),  # an end of its own remains, and is said
    ],
)
def test_three_epochs_of_ten_updates(words, max_update, end, expected, is_resumed, monkeypatch, caplog) -> None:
    caplog.set_level("INFO")
    hydra = SimpleNamespace(initialized=lambda: words is not None)
    hydra.get = lambda: SimpleNamespace(overrides=SimpleNamespace(task=words))
    monkeypatch.setattr(schedule, "HydraConfig", hydra)
    cfg = settings(warmup_updates=10, total_num_update=end)
    of_run = {"max_update": max_update, "max_epoch": 3, "update_freq": [1]}
    follows = {"model": {"max_update": max_update}, "task": {}, "dataset": {"train_subset": "train"}}
    cfg = OmegaConf.merge(cfg, {"optimization": of_run}, follows)
    for hook in (Epochs(), TimeBudget()):
        hook.before_launch(cfg)
    task = SimpleNamespace(cfg=cfg.task, datasets={}, has_sharded_data=lambda split: False)
    model = MixtureWeights("layer_switch", 2, 4, max_update=max_update or 1)
    trainer = SimpleNamespace(cfg=cfg, lr_scheduler=make_schedule(cfg), task=task, get_model=lambda: model)
    trainer.get_num_updates = lambda: 12 * is_resumed
    trainer.lr_step_update = lambda: trainer.lr_scheduler.step_update(trainer.get_num_updates())
    for _ in range(2 * is_resumed):
        Epochs().after_update(trainer, None)  # has been left out after an overflow
    Epochs().after_load(None, trainer, Epoch(is_resumed), None)
    rate = trainer.lr_scheduler.cfg
    assert (trainer.planned_updates, rate.warmup_updates, rate.total_num_update) == expected
    assert {cfg.model.max_update, model.max_update} <= {expected[0], *[0, 1] * (not max_update)}
    assert caplog.records[-1].levelname == ("WARNING" if expected[2] == 60 else "INFO")
    assert (
        "the decay at 60: give --warmup-updates and --total-num-update (of lr_scheduler) for 30" in caplog.text
    ) == (end == 60)


def test_a_warm_up_longer_than_the_run_is_said(caplog) -> None:
    for warmup, is_said in ((10, True), (9, False)):
        caplog.clear()
        TimeBudget().before_launch(settings(total_num_update=10, warmup_updates=warmup))
        assert ("reaches 1 of its peak and never falls: the warm-up has 10 of 10 updates" in caplog.text) == is_said
