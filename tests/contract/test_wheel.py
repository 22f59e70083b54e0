"""The wheel is the whole product: in an empty folder, from text to features of a model.

The fresh environment sees the dependencies of the present one, but neither the checkout nor its editable installation.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from tiny_runs import ROOT, run_process

# fairseq looks for --user-dir beside itself, so it must lie in the same site-packages as the wheel, as after pip install.
BESIDE_THE_WHEEL = ("fairseq", "fairseq_cli")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the checkout: the build writes folders that must not appear there."""
    copy = tmp_path_factory.mktemp("sources") / "checkout"
    shutil.copytree(ROOT / "amos_fairseq", copy / "amos_fairseq", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("amos_start.py", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, copy / name)
    out = tmp_path_factory.mktemp("wheel")
    command = ["-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(out), "."]
    subprocess.run([sys.executable, *command], cwd=copy, check=True, capture_output=True)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def fresh_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds the wheel; everything else that it needs it reads from the present one."""
    root = tmp_path_factory.mktemp("fresh") / "environment"
    venv.create(root, with_pip=False, symlinks=True)
    site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(root)}))
    present = Path(sysconfig.get_path("purelib"))
    install = ["-m", "pip", "--python", str(root / "bin" / "python"), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, *install], check=True, capture_output=True)
    for name in BESIDE_THE_WHEEL:
        shutil.copytree(present / name, site_packages / name)  # with what Python has compiled
    # A .pth file adds the folder without reading the .pth files in it: the editable installation stays unseen.
    (site_packages / "dependencies.pth").write_text(f"{present}\n", encoding="utf-8")
    return root


def run_there(environment: Path, folder: Path, *command: str) -> subprocess.CompletedProcess:
    """Run a command of the fresh environment in ``folder``, which is outside the checkout."""
    variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables |= {"OMP_NUM_THREADS": "1", "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    result = run_process(command, folder, variables)
    assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(wheel: Path):
    """Every module of the checkout, its recipes and tables."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    paths = [path for path in (ROOT / "amos_fairseq").rglob("*") if path.parent.name != "__pycache__"]
    assert names == {str(path.relative_to(ROOT)) for path in paths if path.is_file()} | {"amos_start.py"}


# The installed command, called several times by one Python: starting one takes seconds.
AMOS = """
import os, runpy, sys
def amos(*arguments):
    sys.argv = [os.path.join(os.path.dirname(sys.executable), "amos"), *arguments]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, arguments
"""
TRAIN = """
import amos_fairseq
print(amos_fairseq.__file__)
amos("recipes", "amos_tiny")
amos("prepare", "my.txt", "--out", "D", "--vocab-size", "600")
amos("prepare", "tagging", "words.txt", "words.txt", "D/tokenizer", "--out", "TAGS")
amos("train", "amos_tiny", "task.data=D", "task.precision=float32", "optimization.max_update=4")
"""
USE = """
import amos_fairseq
amos("export", "checkpoints/amos_tiny", "HF")
print(amos_fairseq.load("checkpoints/amos_tiny")(["A text.", "Another."]).pooled().shape)
"""


@pytest.mark.slow
def test_from_text_to_features_in_an_empty_folder(fresh_environment: Path, corpus_text: Path, tmp_path: Path):
    python = str(fresh_environment / "bin" / "python")
    shutil.copyfile(corpus_text, tmp_path / "my.txt")
    (tmp_path / "words.txt").write_text("A B-NP\ntext I-NP\n. O\n", encoding="utf-8")
    first = run_there(fresh_environment, tmp_path, python, "-c", AMOS + TRAIN)
    last = run_there(fresh_environment, tmp_path, python, "-c", AMOS + USE)
    assert Path(first.stdout.splitlines()[0]).is_relative_to(fresh_environment)
    assert re.search(r"^amos_tiny +2 x 64 +64 +1,750 +1.4e\+07 ", first.stdout, re.MULTILINE)
    printed = "".join(done.stdout + done.stderr for done in (first, last))
    assert not [name for name in ("amos_fairseq", "examples") if str(ROOT / name) in printed]
    records = (tmp_path / "checkpoints/amos_tiny/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(records[-1])["update"] == 4
    assert (tmp_path / "HF" / "model.safetensors").is_file()
    assert last.stdout.splitlines()[-1] == "torch.Size([2, 64])"
    assert {path.name for path in tmp_path.iterdir()} == {"my.txt", "words.txt", "D", "TAGS", "checkpoints", "HF"}
