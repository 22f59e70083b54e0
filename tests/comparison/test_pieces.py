"""``--piece-minutes``: a part of the work ends in time, with the state of its processes saved."""

import signal
import sys
import time

import pytest
from runs import limited_runner

from amos_fairseq.downstream.benchmark import Stopped

# Runs until SIGTERM, then saves and exits with 75, as a training of this package.
PROGRAM = """
import pathlib, signal, sys, time
def save(number, frame):
    pathlib.Path("{0}/saved").write_text("state")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
pathlib.Path("{0}/started").touch()
time.sleep(60)
"""


def run(runner, directory, program):
    runner.run("a run", [sys.executable, "-c", program], directory, {}, 10, lambda updates: updates)


@pytest.mark.slow
def test_piece_ends_in_time_with_the_state_saved(tmp_path):
    with limited_runner(4.0 / 60) as runner:
        begin = time.monotonic()
        with pytest.raises(Stopped):
            run(runner, tmp_path, PROGRAM.format(tmp_path))
        assert 3.5 < time.monotonic() - begin < 55
        assert (tmp_path / "saved").read_text() == "state"
        # The next process is not started.
        with pytest.raises(Stopped):
            run(runner, tmp_path / "next", PROGRAM.format(tmp_path))
    assert not (tmp_path / "next").exists()
    assert runner.exit_code == 75


def test_ctrl_c_exits_with_130(tmp_path):
    with limited_runner(0) as runner:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Stopped):
            run(runner, tmp_path, PROGRAM.format(tmp_path))
    assert runner.exit_code == 130
