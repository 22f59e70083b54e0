"""The Hydra callback that imports the plugin before fairseq chooses ranks and devices."""

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


def test_a_sweep_and_a_folder_that_cannot_be_written_are_refused_before_hydra_writes_there(tmp_path, capsys) -> None:
    (tmp_path / "file").touch()
    config = OmegaConf.create({"hydra": {"run": {"dir": str(tmp_path / "file" / "run")}}})
    for start, message in (
        ("on_run_start", "file/run cannot be written (Not a directory): make room, permit writing, or give another"),
        ("on_multirun_start", "--multirun is not supported: start one command after the other"),
    ):
        assert message in error_line(capsys, lambda _, start=start: getattr(ImportPlugin(), start)(config))
