"""Settings of the smallest training runs, and new processes with the variables of the tests."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# As small as a run can be that still has two depths, a mixture to learn, dropout, and several updates an epoch.
TINY_RUN = shlex.split(
    "--user-dir amos_fairseq --task text_pretraining --arch amos_tiny --criterion amos --encoder-embed-dim 32 "
    "--encoder-ffn-embed-dim 64 --tokens-per-sample 32 --max-positions 32 --optimizer grouped_adam --lr 0.002 "
    "--lr-scheduler polynomial_decay --warmup-updates 2 --total-num-update 100 --clip-norm 2.0 --batch-size 16 "
    "--max-update 6 --num-workers 0 --log-interval 1 --log-format simple --no-epoch-checkpoints --seed 7 "
    "--validate-interval-updates 6"
)


def run_of(out: Path, task: str) -> Path:
    """The directory of a fine-tuning run, where a command with one set of settings wrote OUT."""
    (directory,) = (out / "runs" / task).glob("*/seed1")
    return directory


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """One thread per process: tests run beside each other, and sums then have one order. Aborted processes print stacks."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **(extra or {})}


def run_process(
    command: Sequence[object], cwd: Path = ROOT, env: Mapping[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a command in a new process, with the variables ``env`` alone (None: those of :func:`environment`)."""
    words, variables = [str(word) for word in command], environment() if env is None else env
    return subprocess.run(words, cwd=cwd, env=variables, timeout=timeout, capture_output=True, text=True, check=False)


def run_script(script: str, folder: Path, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script of the checkout offline in ``folder``, in the active environment; OUT is there, and no GPU."""
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    settings = environment(
        {**proxies, "AMOS_ENVIRONMENT": "active", "OUT": str(folder / "out"), "CUDA_VISIBLE_DEVICES": ""} | variables
    )
    settings["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), settings["PATH"]])
    return run_process(["bash", ROOT / script, *arguments], folder, settings, timeout=1200)


def wait_until(condition: Callable[[], object]) -> None:
    """Return when ``condition`` holds: what another process does after a signal takes some time."""
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "not within 120 s"
        time.sleep(0.02)
