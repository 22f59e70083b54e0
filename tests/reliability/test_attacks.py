"""The small version of ``run.sh``: a few attacks of each kind, with the same code."""

from pathlib import Path

import attacks
import pytest

pytestmark = pytest.mark.slow


def test_no_attack_succeeds(tmp_path: Path) -> None:
    results = attacks.attack(tries=1, seed=7, folder=tmp_path)
    assert {result.kind for result in results} == set(attacks.KINDS)
    assert [result for result in results if result.harm] == []


def test_the_table_counts_what_succeeds() -> None:
    results = [attacks.Attack("a", "x", ""), attacks.Attack("a", "y", "harm"), attacks.Attack("b", "z", "")]
    assert attacks.table(results).splitlines()[2:] == ["| a | 2 | 1 |", "| b | 1 | 0 |"]
