"""The Hydra callback that imports the plugin before fairseq chooses ranks and devices."""

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
    settings["launcher"] = {"_target_": "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher"}
    config = OmegaConf.create({"hydra": settings})
    callback = ImportPlugin()
    start = callback.on_run_start if mode == "run" else callback.on_multirun_start
    line = error_line(capsys, lambda _: start(config))
    assert "file/run cannot be written (Not a directory): make room, permit writing, or give another --save-dir" in line


def test_a_sweep_in_one_process_is_refused(capsys: pytest.CaptureFixture) -> None:
    launcher = {"_target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher"}
    config = OmegaConf.create({"hydra": {"launcher": launcher}})
    line = error_line(capsys, lambda _: ImportPlugin().on_multirun_start(config))
    assert "--multirun needs a launcher that starts a process for each job" in line
