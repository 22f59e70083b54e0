"""Classes that a checkpoint may contain, and the broadcast of a checkpoint between ranks."""

import argparse
import errno
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from omegaconf import OmegaConf

from amos_fairseq import files
from amos_fairseq.compat.checkpoints import UNSAFE_LOADING, restrict_classes
from amos_fairseq.errors import UserError
from amos_fairseq.files import DamagedCheckpoint, read_header


def leave_a_trace(path: str) -> None:
    Path(path).touch()


class Stranger:
    """Runs a function when it is unpickled, as an attacker's class might."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (leave_a_trace, (str(self.path),))


def checkpoint(**more: Any) -> dict[str, Any]:
    return {
        "args": None,
        "cfg": OmegaConf.to_container(OmegaConf.create({"model": {"_name": "amos"}})),
        "model": {"weight": torch.arange(6.0).view(2, 3)},
        "optimizer_history": [{"num_updates": 7, "lr_scheduler_state": {}, "optimizer_name": "Adam"}],
        "extra_state": {"train_iterator": {"epoch": 2}},
        "last_optimizer_state": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"params": [0]}]},
        **more,
    }


@pytest.mark.parametrize("load", [checkpoint_utils.load_checkpoint_to_cpu, read_header])
def test_a_foreign_class_is_refused_and_its_code_does_not_run(load: Any, tmp_path: Path) -> None:
    path, trace = str(tmp_path / "model.pt"), tmp_path / "trace"
    torch.save(checkpoint(surprise=Stranger(trace)), path)
    with pytest.raises(UserError, match=r"model\.pt contains an object of class \S*leave_a_trace,") as refused:
        load(path)
    assert not isinstance(refused.value, DamagedCheckpoint)
    assert not trace.exists()
    torch.load(path, weights_only=False)  # what the loader of older versions did
    assert trace.exists()


def test_arguments_of_old_checkpoints_load(tmp_path: Path) -> None:
    path = str(tmp_path / "model.pt")
    torch.save(checkpoint(cfg={"task": argparse.Namespace(data="corpus", beam=5)}), path)
    assert checkpoint_utils.load_checkpoint_to_cpu(path)["cfg"].task.beam == 5


@pytest.mark.parametrize("kept", [0, 1, 100, 700, 40_000])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_cut_short_is_called_damaged(kept: int, zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(checkpoint(large=torch.zeros(40_000)), path, _use_new_zipfile_serialization=zipped)
    assert read_header(str(path))["optimizer_history"][-1]["num_updates"] == 7
    path.write_bytes(path.read_bytes()[:kept])
    for load in (read_header, checkpoint_utils.load_checkpoint_to_cpu):
        with pytest.raises(DamagedCheckpoint, match=r"model\.pt is not a complete checkpoint"):
            load(str(path))


@pytest.mark.parametrize("load", [checkpoint_utils.load_checkpoint_to_cpu, read_header])
def test_a_file_that_may_not_be_read_is_not_called_damaged(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged checkpoint_last.pt would be replaced; root may read all files, so the answer of the disk is simulated."""
    path = str(tmp_path / "model.pt")
    torch.save(checkpoint(), path)

    def refuse(file: str, *mode: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", file)

    monkeypatch.setattr(files, "open", refuse, raising=False)
    with pytest.raises(UserError, match=r"model\.pt cannot be read \(Permission denied\): permit reading") as refused:
        load(path)
    assert not isinstance(refused.value, DamagedCheckpoint)


def test_environment_cannot_disable_safe_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, trace = str(tmp_path / "model.pt"), tmp_path / "trace"
    torch.save(checkpoint(surprise=Stranger(trace)), path)
    monkeypatch.setenv(UNSAFE_LOADING, "1")
    restrict_classes()
    with pytest.raises(UserError):
        checkpoint_utils.load_checkpoint_to_cpu(path)
    assert not trace.exists()


class LoopBack:
    """Two ranks in one process: what the first one sends is kept, and handed to the second in the same order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[torch.Tensor] = []
        self.rank = 0
        monkeypatch.setattr(distributed_utils, "get_rank", lambda group: self.rank)
        monkeypatch.setattr(distributed_utils, "broadcast", self.broadcast)

    def broadcast(self, tensor: torch.Tensor, src: int, group: object) -> None:
        if self.rank == src:
            self.sent.append(tensor.clone())
        else:
            tensor.copy_(self.sent.pop(0).view_as(tensor))

    def to_second_rank(self, broadcast_object: Any, state: Any) -> Any:
        device = torch.device("cpu")
        broadcast_object(state, src_rank=0, group=None, dist_device=device)
        self.rank = 1
        return broadcast_object(None, src_rank=0, group=None, dist_device=device)


def loaded_state() -> dict[str, Any]:
    """As rank 0 has it after ``load_checkpoint_to_cpu``: ``cfg`` is an omegaconf object."""
    return checkpoint(cfg=OmegaConf.create({"model": {"_name": "amos"}}))


def test_a_checkpoint_reaches_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    received = LoopBack(monkeypatch).to_second_rank(distributed_utils.broadcast_object, loaded_state())
    assert received["cfg"] is None
    torch.testing.assert_close(received["model"], checkpoint()["model"], rtol=0, atol=0)
    torch.testing.assert_close(received["last_optimizer_state"], checkpoint()["last_optimizer_state"], rtol=0, atol=0)
    assert received["optimizer_history"] == checkpoint()["optimizer_history"]


def test_stock_fairseq_fails_in_that_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pickle.UnpicklingError):
        LoopBack(monkeypatch).to_second_rank(distributed_utils.broadcast_object.__wrapped__, loaded_state())


def test_other_broadcasts_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    message = {"cfg": "a word", "numbers": [1, torch.ones(2)]}
    received = LoopBack(monkeypatch).to_second_rank(distributed_utils.broadcast_object, message)
    assert received["cfg"] == "a word"
    assert received["numbers"][1].tolist() == [1, 1]
