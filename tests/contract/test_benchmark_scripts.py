"""examples/benchmark: the scripts that measure on a CPU, from end to end at tiny size.

Ten benches take four minutes of a core, so they run on request only: AMOS_TEST_BENCHMARK_SCRIPTS=1.
"""

import json
import os
import re
from pathlib import Path

import pytest
from shell_scripts import run_script

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "AMOS_TEST_BENCHMARK_SCRIPTS" not in os.environ, reason="AMOS_TEST_BENCHMARK_SCRIPTS is not set"
    ),
]
ONE_STEP = ("--steps", "1", "--warmup", "0", "--vocabulary-size", "200", "--threads", "1")


def test_both_objectives_in_both_precisions(tmp_path: Path) -> None:
    result = run_script("examples/benchmark/cpu.sh", tmp_path, tmp_path / "out", *ONE_STEP, SIZE="tiny", SEQUENCES="2")
    assert result.returncode == 0, result.stderr[-3000:]
    pages = [json.loads(path.read_text(encoding="utf-8")) for path in (tmp_path / "out").glob("*.json")]
    assert {(page["settings"]["config"], page["settings"]["precision"]) for page in pages} == {
        (recipe, precision) for recipe in ("electra_tiny", "amos_tiny") for precision in ("float32", "bf16")
    }


def test_speed_on_busy_cores(tmp_path: Path) -> None:
    result = run_script("examples/benchmark/busy.sh", tmp_path, "mlm_tiny", *ONE_STEP, SEQUENCES="2")
    assert result.returncode == 0, result.stderr[-3000:]
    # The memory is that of a process which asks another to fork, so it is not compared.
    rows = re.findall(r"^\| (\w+) \| [\d,]+ \| .* \| \d+ MiB \|$", result.stdout, re.MULTILINE)
    assert rows == [f"{settings}_{load}" for load in ("alone", "busy") for settings in ("stock", "passive", "ours")]
