"""The wheel works away from the checkout: the command, and training through --user-dir from site-packages.

The fresh environment sees the dependencies of the present one, but neither the checkout nor its editable installation.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
        shutil.copytree(present / name, site_packages / name, ignore=shutil.ignore_patterns("__pycache__"))
    # A .pth file adds the folder without reading the .pth files in it: the editable installation stays unseen.
    (site_packages / "dependencies.pth").write_text(f"{present}\n", encoding="utf-8")
    return root


def run_there(environment: Path, folder: Path, *command: str, check: bool = True) -> subprocess.CompletedProcess:
    """Run a command of the fresh environment in ``folder``, which is outside the checkout."""
    variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables |= {"OMP_NUM_THREADS": "1", "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=300
    )
    if check and result.returncode != 0:
        raise AssertionError(f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}")
    return result


def files_of_package() -> set[str]:
    """Every module of the checkout, its recipes and tables, as a wheel names them."""
    files = (
        path for path in (ROOT / "amos_fairseq").rglob("*") if path.is_file() and path.parent.name != "__pycache__"
    )
    return {"amos_start.py", *(str(path.relative_to(ROOT)) for path in files)}


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == files_of_package()


@pytest.mark.slow
def test_command_and_training_from_site_packages(fresh_environment: Path, binarized_corpus: Path, tmp_path: Path):
    python = str(fresh_environment / "bin" / "python")
    where = run_there(fresh_environment, tmp_path, python, "-c", "import amos_fairseq; print(amos_fairseq.__file__)")
    assert Path(where.stdout.strip()).is_relative_to(fresh_environment)

    usage = run_there(fresh_environment, tmp_path, str(fresh_environment / "bin" / "amos"), "--help").stdout
    assert "plot" in usage
    assert "inspect" in usage

    flags = (
        "--user-dir amos_fairseq --task text_pretraining --arch amos_tiny --criterion amos --tokens-per-sample 32 "
        "--max-positions 32 --optimizer grouped_adam --lr 0.002 --lr-scheduler fixed --batch-size 8 --max-update 3 "
        "--num-workers 0 --disable-validation --log-interval 1 --log-format simple --save-dir run"
    )
    training = run_there(
        fresh_environment, tmp_path, python, "-m", "fairseq_cli.train", str(binarized_corpus), *flags.split()
    )
    assert str(ROOT) not in training.stdout + training.stderr
    assert (tmp_path / "run" / "checkpoint_last.pt").is_file()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 3
