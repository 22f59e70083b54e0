"""``examples/tour.ipynb``: its code cells run one after the other in one namespace, with few updates; commands are forked."""

import json
import subprocess
import sys

import pytest
from forked_command import run_module
from tiny_runs import ROOT

NOTEBOOK = ROOT / "examples" / "tour.ipynb"


def cells() -> list[dict]:
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def test_outputs_of_a_complete_run_are_stored() -> None:
    code = [cell for cell in cells() if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    types = {kind for cell in code for output in cell["outputs"] for kind in output.get("data", {})}
    assert {"text/plain", "image/png"} <= types
    assert not [output for cell in code for output in cell["outputs"] if output["output_type"] == "error"]
    assert NOTEBOOK.stat().st_size < 150_000


@pytest.mark.slow
def test_every_cell_runs(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last cell compares the states of the exported model with ours."""
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setenv("TOUR_UPDATES", "4")
    monkeypatch.setenv("TOUR_OUT", str(tmp_path))

    def run_forked(command: list[str], **settings: object) -> subprocess.CompletedProcess:
        assert command[:2] == [sys.executable, "-m"]
        return run_module(command[2], command[3:])

    monkeypatch.setattr(subprocess, "run", run_forked)
    namespace: dict = {"__name__": "__main__"}
    for cell in cells():
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), namespace)
    assert namespace["run"].get("train", "loss").updates[-1] == 4
    assert (tmp_path / "exported" / "model.safetensors").is_file()
