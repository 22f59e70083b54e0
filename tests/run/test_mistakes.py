"""Errors of stock fairseq, a loader process and Hydra, and the line that reports each."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from fairseq import optim
from fairseq.data import Dictionary, NestedDictionaryDataset, RawLabelDataset
from fairseq.tasks import FairseqTask
from fairseq.tasks.masked_lm import MaskedLMTask
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from amos_fairseq.errors import UserError
from amos_fairseq.run.mistakes import exit_on_mistake, line_for


def raised_by(call: Callable[[], Any]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("stock fairseq accepts this now")


def test_errors_that_stock_fairseq_raises(tmp_path: Path) -> None:
    """Files that are missing, an optimizer that is not named, a row of a stock task that is longer than the model reads."""
    missing = str(tmp_path / "dict.txt")
    task = MaskedLMTask(OmegaConf.create({"data": str(tmp_path), "mask_whole_words": False}), Dictionary())
    rows = NestedDictionaryDataset({"id": RawLabelDataset([0])}, sizes=[numpy.array([374])])
    for call, line in (
        (lambda: Dictionary.load(missing), f"{missing}: No such file or directory"),
        (lambda: task.load_dataset("valid"), f"Dataset not found: valid ({tmp_path}/valid)"),
        (lambda: optim.build_optimizer(None, []), "optimizer is required!"),
        (
            lambda: FairseqTask(None).filter_indices_by_size(numpy.arange(1), rows, 128),
            "Size of sample #0 is invalid (=374) since max_positions=128",
        ),
    ):
        assert line_for(raised_by(call)).startswith(line)


def test_what_another_library_raises_keeps_its_traceback() -> None:
    assert line_for(raised_by(lambda: int("x"))) is None
    assert line_for(raised_by(lambda: torch.ones(2).view(3))) is None


FULL, TOO_LONG = os.strerror(errno.ENOSPC), os.strerror(errno.ENAMETOOLONG)


class Corpus(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise UserError("block 3 of train.bin holds token 900, but the dictionary ends at 400")


def test_an_error_in_a_loader_process() -> None:
    error = raised_by(lambda: next(iter(torch.utils.data.DataLoader(Corpus(), num_workers=1))))
    assert "Traceback" in str(error)
    assert line_for(error) == "block 3 of train.bin holds token 900, but the dictionary ends at 400"


NO_MEMORY = (
    "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "400000000000 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), "memory is full (DataLoader worker"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nGPU 0 has"), "--update-freq"),
        (
            RuntimeError(NO_MEMORY),
            "allocate 400000000000 bytes. Error code 12 (Cannot allocate memory)): lower --batch-size",
        ),
        (OSError(errno.ENOSPC, FULL, "a/events"), f"a/events cannot be written ({FULL}): make room, then start again"),
        (OSError(errno.ENAMETOOLONG, TOO_LONG, "DATA/dict.txt"), f"DATA/dict.txt: {TOO_LONG}"),
    ],
)
def test_messages_of_fairseq_and_torch(error: Exception, message: str) -> None:
    assert message in line_for(error)
    assert len(line_for(error).splitlines()) == 1


def test_one_line_and_exit_code_one(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended, exit_on_mistake():
        raise UserError("two\n lines")
    assert ended.value.code == 1
    assert capsys.readouterr().err == "amos_fairseq: error: two lines\n"
    with pytest.raises(ZeroDivisionError), exit_on_mistake():
        1 / 0  # noqa: B018
    assert capsys.readouterr().err == ""


def job(error: Exception) -> JobReturn:
    """As Hydra's ``run_job`` leaves it."""
    return JobReturn(overrides=["a=b"], status=JobStatus.FAILED, _return_value=error)


def test_hydra_reports_a_user_error_as_one_line(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        job(UserError("no such corpus")).return_value  # noqa: B018
    assert ended.value.code == 1
    assert capsys.readouterr().err == "amos_fairseq: error: no such corpus\n"
    with pytest.raises(KeyError):
        job(KeyError("bug")).return_value  # noqa: B018
    assert JobReturn(status=JobStatus.COMPLETED, _return_value=0.5).return_value == 0.5
