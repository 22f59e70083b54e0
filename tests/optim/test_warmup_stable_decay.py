"""The schedule beside fairseq's polynomial decay, and beside numbers by hand where fairseq has none."""

from typing import Any

import pytest
from fairseq.optim.lr_scheduler.polynomial_decay_schedule import (
    PolynomialDecayLRSchedule,
    PolynomialDecayLRScheduleConfig,
)
from small_models import sgd

from amos_fairseq.optim.warmup_stable_decay import WarmupStableDecay, WarmupStableDecayConfig


def schedule(**settings: Any) -> WarmupStableDecay:
    return WarmupStableDecay(WarmupStableDecayConfig(lr=[0.8], **settings), sgd(0.8))


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize(("power", "end"), [(1.0, 0.0), (0.5, 0.03)])
def test_without_a_constant_part_the_rates_have_the_bits_of_polynomial_decay(
    warmup: int, power: float, end: float
) -> None:
    settings = {"warmup_updates": warmup, "total_num_update": 100, "power": power, "end_learning_rate": end}
    ours = schedule(**settings)
    theirs = PolynomialDecayLRSchedule(PolynomialDecayLRScheduleConfig(lr=[0.8], **settings), sgd(0.8))
    assert [ours.step_update(n) for n in range(105)] == [theirs.step_update(n) for n in range(105)]


def test_warm_up_constant_part_and_decay() -> None:
    """Of 40 updates the first 4 and the last 16: 1 - sqrt(n / 16) is 3/4, 1/2, 1/4 at n = 1, 4, 9."""
    trapezoid = schedule(warmup_updates=4, total_num_update=40, decay_share=0.4)
    rates = {n: trapezoid.step_update(n) for n in (0, 1, 4, 5, 23, 24, 25, 28, 33, 40, 41)}
    expected = {0: 0, 1: 0.2, 4: 0.8, 5: 0.8, 23: 0.8, 24: 0.8, 25: 0.6, 28: 0.4, 33: 0.2, 40: 0, 41: 0}
    assert rates == pytest.approx(expected)
    constant = schedule(warmup_updates=4, total_num_update=0, decay_share=0)
    assert [constant.step_update(n) for n in (2, 4, 10_000)] == pytest.approx([0.4, 0.8, 0.8])


def test_over_time_the_shares_are_those_of_the_updates() -> None:
    """Of 10 minutes 40 seconds are for the last validation: the warm-up is a tenth of the rest, the decay a quarter."""
    timed = schedule(warmup_updates=4, total_num_update=40, decay_share=0.25, minutes=10.0)
    timed.validation_seconds, timed.save_seconds = 30.0, 10.0
    rates = {}
    for timed.seconds in (0, 28, 56, 420, 455, 560):
        rates[timed.seconds] = timed.step_update(num_updates=12345)
    assert rates == pytest.approx({0: 0, 28: 0.4, 56: 0.8, 420: 0.8, 455: 0.4, 560: 0})


@pytest.mark.parametrize("minutes", [0.0, 10.0])
def test_a_branch_decays_from_its_start_and_continues(minutes: float) -> None:
    settings = {"warmup_updates": 4, "decay_share": 0.0, "minutes": minutes}
    trunk = schedule(total_num_update=40, **settings)
    trunk.seconds = 333.0 if minutes else 0.0
    assert trunk.step_update(100) == 0.8
    branch = schedule(total_num_update=116, decay_from="FILE", **settings)
    branch.load_state_dict(trunk.state_dict())
    branch.begin_branch(100)
    again = schedule(total_num_update=116, decay_from="FILE", **settings)
    again.load_state_dict(branch.state_dict())
    for each in (branch, again):
        rates = []
        for update in (100, 101, 104, 109, 116):
            each.seconds = (update - 100) * 600 / 16 if minutes else 0.0
            rates.append(each.step_update(update))
        assert rates == pytest.approx([0.8, 0.6, 0.4, 0.2, 0])


def test_a_state_of_polynomial_decay_is_taken_over() -> None:
    ours = schedule(total_num_update=100)
    ours.load_state_dict({"best": 2.5})
    state = dict.fromkeys(WarmupStableDecay.STATE, 0) | {"update_phase": None, "decay_start": None}
    assert ours.state_dict() == state | {"best": 2.5, "share_of_peak": 1.0}
