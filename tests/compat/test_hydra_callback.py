"""The Hydra callback that imports the plugin before fairseq chooses ranks and devices."""

import atexit
import os
from pathlib import Path
from types import SimpleNamespace

import fairseq.utils
import pytest
from failures import error_line
from omegaconf import OmegaConf

import amos_fairseq
from amos_fairseq.compat.hydra_callback import ImportPlugin


def test_a_second_path_of_the_package_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "amos_fairseq").symlink_to(Path(amos_fairseq.__file__).parent)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fairseq.utils.import_user_module, "memo", set(), raising=False)
    common = SimpleNamespace(user_dir="amos_fairseq")  # what import_user_module reads of fairseq's settings
    with pytest.raises(ImportError, match="not globally unique"):
        fairseq.utils.import_user_module(common)
    fairseq.utils.import_user_module.memo.clear()
    ImportPlugin(user_dir="amos_fairseq")
    fairseq.utils.import_user_module(common)


def test_jobs_of_a_launcher_import_nothing_from_the_current_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """submitit starts them with "python -m" before fairseq has prepared anything."""
    monkeypatch.setenv("PYTHONSAFEPATH", "")  # restored after the test
    ImportPlugin()
    assert os.environ["PYTHONSAFEPATH"] == "1"


@pytest.mark.parametrize("mode", ["run", "sweep"])
def test_a_folder_that_cannot_be_written_is_refused_before_hydra_writes_there(mode, tmp_path, capsys) -> None:
    (tmp_path / "file").touch()
    settings = {"job": {"name": "hydra_train"}, mode: {"dir": str(tmp_path / "file" / "run")}}
    config = OmegaConf.create({"hydra": settings})
    callback = ImportPlugin()
    start = callback.on_run_start if mode == "run" else callback.on_multirun_start
    line = error_line(capsys, lambda _: start(config))
    assert "file/run cannot be written (Not a directory): make room, permit writing, or give another --save-dir" in line


@pytest.mark.parametrize("is_used", [False, True])
def test_a_run_that_ends_at_its_start_leaves_no_folder(is_used: bool, tmp_path, monkeypatch) -> None:
    """Its parents that are new go too; a checkpoint, or a folder that was there before, stays. A folder of Hydra
    beside SAVE_DIR has only Hydra's files after a complete run as well."""
    at_exit = []
    monkeypatch.setattr(atexit, "register", lambda *call: at_exit.append(call))
    run = tmp_path / "checkpoints" / "mlm_mini"
    config = OmegaConf.create({"hydra": {"job": {"name": "hydra_train"}, "run": {"dir": str(tmp_path / "logs")}}})
    config.checkpoint = {"save_dir": str(run)}
    ImportPlugin().on_run_start(config)
    config.hydra.run.dir = str(run)
    ImportPlugin().on_run_start(config)
    ImportPlugin().on_run_start(config)  # it is there: not to be removed by this process
    (run / ".hydra").mkdir()
    (run / "hydra_train.log").touch()
    if is_used:
        (run / "metrics.jsonl").touch()
    ((remove, *arguments),) = at_exit
    remove(*arguments)
    assert run.exists() == is_used
    assert (tmp_path / "checkpoints").exists() == is_used
