"""Shell scripts of the checkout, run offline in the active environment."""

import os
import subprocess
import sys
from pathlib import Path

from tiny_runs import ROOT, environment, run_process


def run_script(script: str, folder: Path, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script, named by its path in the checkout, in ``folder``; OUT is a folder in it, and there is no GPU."""
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    settings = environment(
        {**proxies, "AMOS_ENVIRONMENT": "active", "OUT": str(folder / "out"), "CUDA_VISIBLE_DEVICES": ""} | variables
    )
    settings["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), settings["PATH"]])
    command = ["bash", ROOT / script, *arguments]
    return run_process(command, folder, settings, timeout=1200)
