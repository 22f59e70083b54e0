"""Checkpoints under a full disk, a kill, and damage; classes that a checkpoint may contain; compared with stock fairseq."""

import math
import os
import pickle
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from damage import Bomb
from failures import full_disk
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from interrupted_run import assert_same_bits
from omegaconf import OmegaConf

from amos_fairseq.checkpoint_files import DamagedCheckpoint, read_header
from amos_fairseq.checkpoints.read import read_state
from amos_fairseq.compat import checkpoints
from amos_fairseq.compat.checkpoints import repair_last_checkpoint
from amos_fairseq.errors import UserError

LIMIT = 40_000


def checkpoint(updates: int, size: int = 100) -> dict[str, Any]:
    return {"model": {"weight": torch.full((size,), float(updates))}, "optimizer_history": [{"num_updates": updates}]}


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_full_disk_leaves_the_older_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint_last.pt")
    checkpoint_utils.torch_persistent_save(checkpoint(1), path)
    before = content(tmp_path)
    line = r"checkpoint_last\.pt cannot be written \(File too large\).*make room"
    with full_disk(LIMIT), pytest.raises(UserError, match=line):
        checkpoint_utils.torch_persistent_save(checkpoint(2, size=LIMIT), path)
    assert content(tmp_path) == before
    checkpoint_utils.torch_persistent_save(checkpoint(3, size=LIMIT), path)
    assert torch.load(path)["model"]["weight"].sum() == 3 * LIMIT


def test_content_reaches_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync"))
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *names: (calls.append("replace"), replace(*names)))
    checkpoint_utils.torch_persistent_save(checkpoint(1), str(tmp_path / "a.pt"))
    PathManager.copy(str(tmp_path / "a.pt"), str(tmp_path / "b.pt"))
    assert calls == ["fsync", "replace"] * 2


@pytest.fixture
def save_dir(tmp_path: Path) -> Path:
    """Updates 5 and 10 whole, update 12 and the last one cut short, and a file that a kill left unfinished."""
    for name, updates in (("1_5", 5), ("2_10", 10), ("2_12", 12), ("_last", 12), ("_best", 5)):
        torch.save(checkpoint(updates), tmp_path / f"checkpoint{'' if name[0] == '_' else '_'}{name}.pt")
    for name in ("checkpoint_2_12.pt", "checkpoint_last.pt"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-200])
    torch.save(checkpoint(13), tmp_path / "checkpoint_2_13.unfinished.pt")
    torch.save({"model": {}}, tmp_path / "checkpoint_odd.pt")
    return tmp_path


def assert_resumed_from_update_10(save_dir: Path, log: str, fault: str) -> None:
    assert (save_dir / "checkpoint_last.pt").read_bytes() == (save_dir / "checkpoint_2_10.pt").read_bytes()
    assert f"checkpoint_last.pt is {fault}: resuming from the newest complete checkpoint" in log
    assert "checkpoint_2_10.pt (10 updates)" in log


def test_a_flipped_bit_is_damage(save_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the middle of the tensor, so that the file still loads."""
    last, expected = save_dir / "checkpoint_last.pt", checkpoint(10)["model"]["weight"]
    torch.save(checkpoint(10), last)
    content = bytearray(last.read_bytes())
    content[content.index(expected.numpy().tobytes()[:40]) + 41] ^= 4
    last.write_bytes(content)
    assert not torch.equal(torch.load(last)["model"]["weight"], expected)
    line = r"damaged \(the checksum of checkpoint_last/data/0 in it is wrong\)"
    for read in (read_header, checkpoint_utils.load_checkpoint_to_cpu, lambda path: read_state(Path(path))):
        with pytest.raises(DamagedCheckpoint, match=line):
            read(str(last))
    repair_last_checkpoint(str(save_dir))
    assert_resumed_from_update_10(save_dir, caplog.text, "damaged")
    assert torch.equal(read_header(str(last))["model"]["weight"], expected)


def test_a_compressed_archive_is_not_unpacked(tmp_path: Path) -> None:
    """A few kilobytes could become any number of bytes."""
    torch.save(checkpoint(1), tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "bomb.pt", "w", 8) as bomb:
        for name in plain.namelist():
            bomb.writestr(name, plain.read(name))
    with pytest.raises(DamagedCheckpoint, match=r"not written by torch\.save"):
        read_header(str(tmp_path / "bomb.pt"))


def test_a_checkpoint_that_was_saved_and_not_yet_copied_is_found(save_dir: Path, caplog) -> None:
    """The kill came between the two; checkpoint_2_12.pt, damaged, is not taken."""
    torch.save(checkpoint(7), save_dir / "checkpoint_last.pt")
    for name in ("checkpoint_2_10.pt", "checkpoint_2_12.pt"):
        written_after(save_dir / "checkpoint_last.pt", save_dir / name)
    repair_last_checkpoint(str(save_dir))
    assert_resumed_from_update_10(save_dir, caplog.text, "older")


def test_a_run_that_went_back_is_not_replaced(save_dir: Path) -> None:
    """checkpoint_1_5.pt was written later, but it has fewer updates."""
    last = save_dir / "checkpoint_last.pt"
    torch.save(checkpoint(7), last)
    before = last.read_bytes()
    for path in save_dir.glob("checkpoint_*.pt"):
        if path != last:
            os.utime(path, ns=(0, 0))
    written_after(last, save_dir / "checkpoint_1_5.pt")
    repair_last_checkpoint(str(save_dir))
    assert last.read_bytes() == before


def written_after(older: Path, path: Path) -> None:
    moment = older.stat().st_mtime_ns + 1_000_000
    os.utime(path, ns=(moment, moment))


def test_damage_without_a_complete_checkpoint_is_an_error(tmp_path: Path) -> None:
    repair_last_checkpoint(str(tmp_path))  # a new run
    (tmp_path / "checkpoint_last.pt").write_bytes(b"PK\x03\x04")
    with pytest.raises(UserError, match=r"checkpoint_last\.pt is damaged and no other checkpoint is complete"):
        repair_last_checkpoint(str(tmp_path))
    assert content(tmp_path) == {"checkpoint_last.pt": b"PK\x03\x04"}


@pytest.mark.parametrize("others", [True, False])
def test_a_link_to_a_disk_that_is_not_mounted_is_an_error(others: bool, save_dir: Path, tmp_path: Path) -> None:
    """Neither an older checkpoint nor an empty folder: both would be another run under the same name."""
    folder = save_dir if others else tmp_path / "empty"
    folder.mkdir(exist_ok=True)
    last = folder / "checkpoint_last.pt"
    last.unlink(missing_ok=True)
    last.symlink_to("/not/mounted/checkpoint_last.pt")
    line = f"{last} is a link to /not/mounted/checkpoint_last.pt, which does not exist: mount its disk, or remove the link to"
    with pytest.raises(UserError, match=line):
        repair_last_checkpoint(str(folder))
    assert last.is_symlink()


@pytest.mark.parametrize("load", [checkpoint_utils.load_checkpoint_to_cpu, read_header])
def test_a_foreign_class_is_refused_and_its_code_does_not_run(load, tmp_path, monkeypatch) -> None:
    """Whatever the environment says."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path, trace = str(tmp_path / "model.pt"), tmp_path / "trace"
    torch.save(checkpoint(7) | {"surprise": Bomb(os.mkdir, str(trace))}, path)
    with pytest.raises(UserError, match=r"model\.pt contains an object of class \S*mkdir,") as refused:
        load(path)
    assert not isinstance(refused.value, DamagedCheckpoint)
    assert not trace.exists()
    torch.load(path, weights_only=False)  # as older versions loaded it
    assert trace.exists()


@pytest.mark.parametrize("kept", [0, 1, 100, 40_000])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_cut_short_is_called_damaged(kept: int, zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(checkpoint(7, size=40_000), path, _use_new_zipfile_serialization=zipped)
    assert read_header(str(path))["optimizer_history"][-1]["num_updates"] == 7
    path.write_bytes(path.read_bytes()[:kept])
    for load in (read_header, checkpoint_utils.load_checkpoint_to_cpu):
        with pytest.raises(DamagedCheckpoint, match=r"model\.pt is not a complete checkpoint"):
            load(str(path))


def test_a_checkpoint_reaches_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks in one process: the second one receives the messages of the first in order. ``cfg`` is an omegaconf object, as
    after ``load_checkpoint_to_cpu``."""
    sent: list[torch.Tensor] = []

    def broadcast(tensor: torch.Tensor, src: int, group: object) -> None:
        if rank == src:
            sent.append(tensor.clone())
        else:
            tensor.copy_(sent.pop(0).view_as(tensor))

    monkeypatch.setattr(distributed_utils, "get_rank", lambda group: rank)
    monkeypatch.setattr(distributed_utils, "broadcast", broadcast)
    optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"params": [0]}]}
    loaded = checkpoint(7) | {"cfg": OmegaConf.create({"model": {"_name": "amos"}}), "last_optimizer_state": optimizer}
    to_cpu = torch.device("cpu")
    for rank in (0, 1):
        state = loaded if rank == 0 else None
        received = distributed_utils.broadcast_object(state, src_rank=0, group=None, dist_device=to_cpu)
    assert received["cfg"] is None
    for part in ("model", "last_optimizer_state", "optimizer_history"):
        assert_same_bits(received[part], loaded[part], part)


def validated(scores, maximize=True):
    settings = SimpleNamespace(maximize_best_checkpoint_metric=maximize, best_checkpoint_metric="score")
    cfg = SimpleNamespace(checkpoint=settings)
    return checkpoints.return_comparable_scores(lambda cfg, trainer: list(scores), cfg, "trainer")


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [("score", UserError, r"--best-checkpoint-metric score \("), ("other", KeyError, "^'other'$")],
)
def test_a_score_that_is_not_logged_is_named(name, error, message):
    """Another missing key is a fault of the program."""
    with pytest.raises(error, match=message):
        validated({"loss": 1.0}[key] for key in [name])


def test_a_numpy_scalar_becomes_a_python_number(tmp_path):
    torch.save({"best": np.float64(0.5)}, tmp_path / "numpy.pt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(tmp_path / "numpy.pt", weights_only=True)
    torch.save({"best": validated([np.float64(0.5), None])}, tmp_path / "python.pt")
    assert torch.load(tmp_path / "python.pt", weights_only=True) == {"best": [0.5, None]}


@pytest.mark.parametrize(("maximize", "worst"), [(True, -math.inf), (False, math.inf)])
def test_nan_is_worse_than_any_number(maximize, worst):
    assert validated([np.float64("nan"), 1.5], maximize) == [worst, 1.5]
