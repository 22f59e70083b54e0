"""SAVE_DIR: locked by one process, with a file that leads nowhere else, in a folder that can be written."""

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from amos_fairseq.errors import UserError
from amos_fairseq.run.resume import claim_save_dir


def test_a_save_dir_belongs_to_one_process(tmp_path: Path) -> None:
    """The second process is refused with the name of the first; a process that was killed holds nothing."""
    run = str(tmp_path / "run")
    reader, writer = os.pipe()
    first = os.fork()
    if first == 0:
        claim_save_dir(run)
        os.write(writer, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(reader, 1)
    with pytest.raises(UserError, match=f"in use by another run .process {first} on {socket.gethostname()}"):
        claim_save_dir(run)
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    claim_save_dir(run)
    claim_save_dir(run)


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_lock_that_leads_elsewhere_is_refused(link: Any, tmp_path: Path) -> None:
    """As a link, and as another name of a file, which keeps its content."""
    precious, run = tmp_path / "precious", tmp_path / "run"
    run.mkdir()
    precious.write_text("precious\n")
    link(precious, run / ".lock")
    with pytest.raises(UserError, match=r"run/\.lock is (a link|not a file of this lock alone)"):
        claim_save_dir(str(run))
    assert precious.read_text() == "precious\n"
