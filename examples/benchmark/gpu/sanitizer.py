"""Run every Triton kernel of this package at a small shape under compute-sanitizer, where that is installed. Prints Markdown.

``memcheck`` finds accesses outside of a tensor, ``racecheck`` threads that use the same shared memory without a barrier.
PyTorch's allocator gives each tensor its own memory here: an access beside a tensor is not one into another tensor.
"""

# The standard library alone: an import of the package would take seconds of the script's time.
import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

NAME = "compute-sanitizer"
TOOLKIT = "/usr/local/cuda"  # where NVIDIA's installer puts it
# Seconds. It loads every library of PyTorch and instruments each kernel; racecheck is the slower one.
LIMITS = {"memcheck": 90, "racecheck": 60}


def find_sanitizer() -> str | None:
    """Return the path of compute-sanitizer: of PATH or of the CUDA toolkit."""
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), TOOLKIT]
    folders = [f"{toolkit}/{folder}" for toolkit in toolkits if toolkit for folder in ("bin", "compute-sanitizer")]
    return shutil.which(NAME) or shutil.which(NAME, path=os.pathsep.join(folders))


def check(sanitizer: str, tool: str, device: str) -> str:
    """Return what ``tool`` found in one run of all kernels, such as "0 errors"."""
    kernels = [sys.executable, str(Path(__file__).with_name("sweep.py")), "once", "--device", device]
    variables = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_MODULE_LOADING": "LAZY"}
    # Not in the processes that Triton starts to compile.
    flags = ["--target-processes", "application-only", "--error-exitcode", "99", "--print-limit", "20"]
    command = [sanitizer, "--tool", tool, *flags, *kernels]
    # A session of its own, so that the program that compute-sanitizer starts ends with it.
    process = subprocess.Popen(
        command,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        written, _ = process.communicate(timeout=LIMITS[tool])
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        print(process.communicate()[0], file=sys.stderr)
        return f"not finished after {LIMITS[tool]} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    print(written, file=sys.stderr)
    # "ERROR SUMMARY: 0 errors"; racecheck: "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)".
    summary = re.search(r"SUMMARY: .*?(\d+) error", written)
    if process.returncode == 0 and summary is not None:
        return f"{summary.group(1)} errors"
    if summary is not None and int(summary.group(1)):
        return f"FAILED: {summary.group(1)} errors, see the log"
    return f"FAILED: ended with status {process.returncode}, see the log"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    arguments = parser.parse_args()
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print(f"Decided: {NAME}: not installed")
        return
    # When the step is stopped, what it has started is too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = {tool: check(sanitizer, tool, arguments.device) for tool in LIMITS}
    print(f"Decided: {NAME}: {', '.join(f'{tool} {result}' for tool, result in results.items())}")
    failed = [result for result in results.values() if result.startswith("FAILED")]
    if failed:
        what = "found errors in" if any("errors" in result for result in failed) else "could not run"
        sys.exit(f"amos_fairseq: error: {NAME} {what} the Triton kernels: see above")


if __name__ == "__main__":
    main()
