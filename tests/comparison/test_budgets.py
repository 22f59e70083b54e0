"""Equal budgets: their numbers of updates, and the checkpoints at their shares."""

import budgets
import pytest
from budgets import Budget

from amos_fairseq.errors import UserError


def test_updates_of_a_budget():
    def never() -> float:
        raise AssertionError("only a budget of minutes needs a timing")

    assert Budget("flops", 6e12).updates(2e9, never) == 3000
    assert Budget("updates", 3200).updates(2e9, never) == 3200
    assert Budget("minutes", 2).updates(2e9, lambda: 0.25) == 480


@pytest.mark.parametrize(
    ("wanted", "per_epoch", "expected"),
    [
        (1000, 5000, 992),  # 62 sixteenths are nearest
        (1010, 5000, 1008),
        (9, 5000, 16),
        (240, 60, 224),  # at 240, 25 % would be the end of the first epoch; 224 and 256 are as near
    ],
)
def test_nearest_number_of_updates_without_a_share_at_the_end_of_an_epoch(wanted, per_epoch, expected):
    assert budgets.divisible_updates(Budget("flops", 1.0), "mlm", wanted, per_epoch) == expected
    for share in (1 / 16, 1 / 8, 1 / 4, 1 / 2):
        assert (expected * share) % per_epoch != 0


def test_indivisible_budgets_are_refused():
    for budget, wanted, per_epoch, message in (
        (Budget("updates", 1000), 1000, 5000, "--budget-updates 1,000 cannot be divided into sixteenths"),
        (Budget("updates", 240), 240, 60, "give 224"),
        (Budget("flops", 1e9), 3.0, 5000, r"1e\+09 FLOPs are 3.0 updates"),
        (Budget("flops", 1e9), 160, 2, "an epoch of this text is 2 updates"),
    ):
        with pytest.raises(UserError, match=message):
            budgets.divisible_updates(budget, "mlm", wanted, per_epoch)
