"""A piece of work ends in time, with its processes' state saved."""

import signal
import sys
import time

import pytest
from pieces import piece_of

from amos_fairseq.finetuning.benchmark import Stopped
from amos_fairseq.finetuning.training import RunFailed

# Trains until it is told to stop, then saves and asks to be started again, as a training of ours does.
PROGRAM = """
import pathlib, signal, sys, time
def save(number, frame):
    pathlib.Path("{0}/saved").write_text("state")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
pathlib.Path("{0}/started").touch()
time.sleep(60)
"""


def run(piece, directory, program):
    piece.run("a run", [sys.executable, "-c", program], directory, {}, 10, lambda updates: updates)


def test_a_piece_ends_by_its_clock_with_the_state_saved(tmp_path):
    with piece_of(2.0 / 60) as piece:
        begin = time.monotonic()
        with pytest.raises(Stopped):
            run(piece, tmp_path, PROGRAM.format(tmp_path))
        assert 1.5 < time.monotonic() - begin < 30
        assert (tmp_path / "saved").read_text() == "state"
        # What would come next does not begin.
        with pytest.raises(Stopped):
            run(piece, tmp_path / "next", PROGRAM.format(tmp_path))
    assert not (tmp_path / "next").exists()
    assert piece.exit_code == 75


def test_interrupted_by_ctrl_c_it_is_not_to_be_started_again(tmp_path):
    with piece_of(0) as piece:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Stopped):
            run(piece, tmp_path, PROGRAM.format(tmp_path))
    assert piece.exit_code == 130


def test_a_failed_process_is_named_by_its_last_line(tmp_path):
    with piece_of(0) as piece, pytest.raises(RunFailed, match="amos has no such thing"):
        run(piece, tmp_path, "import sys; sys.exit('amos_fairseq: error: amos has no such thing')")
    assert not piece.stop.is_set()


def test_handlers_are_those_of_the_program_again():
    before = signal.getsignal(signal.SIGTERM)
    with piece_of(1):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) is before
