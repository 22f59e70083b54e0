"""Shell scripts of the checkout, run offline in an active environment whose Python forks instead of starting."""

import shutil
import subprocess
from pathlib import Path

from forked_command import fork_server
from tiny_runs import ROOT, environment


def run_script(script: str, folder: Path, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script, named by its path in the checkout, in ``folder``; OUT is a folder in it, and there is no GPU."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for python in ("python", "python3"):
        if not (tools / python).exists():
            (tools / python).write_text(f'#!/bin/sh\nexec "{fork_server().python}" "$@"\n')
            (tools / python).chmod(0o755)
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    settings = environment(
        {**proxies, "AMOS_ENVIRONMENT": "active", "OUT": str(folder / "out"), "CUDA_VISIBLE_DEVICES": ""} | variables
    )
    settings["PATH"] = f"{tools}:{settings['PATH']}"
    command = [shutil.which("bash"), str(ROOT / script), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, check=False)
