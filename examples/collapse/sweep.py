"""Train short runs that differ in one setting each, and show which discriminators collapse.

    python examples/collapse/sweep.py DATA OUT [--study FILE] [--rows NAME,...] [--parallel 2] [KEY=VALUE ...]

The rows are those of rows.yaml beside this file, or of FILE, such as screen.yaml. Each is a run of `amos train` in OUT/NAME on
one thread; a row that is finished is not trained again. OUT/collapse.md is the table: held-out values at some updates, of each
row. `amos report OUT/*` draws all curves.
"""

import argparse
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from amos_fairseq.errors import UserError
from amos_fairseq.files import write_text
from amos_fairseq.process import python_command
from amos_fairseq.run.metrics_file import read_records

ROWS = Path(__file__).with_name("rows.yaml")
COLUMNS = {
    "rtd_auc": "AUC",
    "rtd_loss_above_prior": "loss above prior",
    "rtd_logit_std": "logit std",
    "rtd_state_variance": "variance",
    "rtd_first_component": "first component",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", metavar="DATA", help="corpus of amos prepare")
    parser.add_argument("out", metavar="OUT", type=Path)
    parser.add_argument(
        "settings", nargs="*", metavar="KEY=VALUE", help="for every run, such as optimization.max_update=200"
    )
    parser.add_argument("--study", type=Path, default=ROWS, help="YAML file with the rows (default: rows.yaml)")
    parser.add_argument("--rows", help="names, separated by commas (default: all)")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time (default: 2)")
    arguments = parser.parse_intermixed_args()
    if arguments.parallel < 1:
        parser.error("--parallel must be 1 or more")
    if not arguments.study.is_file():
        parser.error(f"--study {arguments.study} is missing")
    study = yaml.safe_load(arguments.study.read_text(encoding="utf-8"))
    names = arguments.rows.split(",") if arguments.rows else list(study["rows"])
    try:
        unknown = sorted(set(names) - set(study["rows"]))
        if unknown:
            raise UserError(f"there is no row {', '.join(unknown)}: {arguments.study} has {', '.join(study['rows'])}")
        with ThreadPoolExecutor(arguments.parallel) as pool:
            jobs = [
                pool.submit(train, name, study, arguments.data, arguments.out, arguments.settings) for name in names
            ]
            failed = [name for name, job in zip(names, jobs, strict=True) if job.result()]
        write_text(arguments.out / "collapse.md", table(arguments.out, names))
        if failed:
            logs = ", ".join(str(arguments.out / name / "train.log") for name in failed)
            raise UserError(f"{', '.join(failed)} ended with an error: see {logs}")
    except UserError as error:
        parser.exit(1, f"sweep.py: error: {error}\n")
    print(f"wrote {arguments.out / 'collapse.md'}")


def train(name: str, study: dict[str, Any], data: str, out: Path, settings: list[str]) -> int:
    """Train one row to its end and return its exit code; a finished run trains no update."""
    recipe, own = settings_of(name, study)
    (out / name).mkdir(parents=True, exist_ok=True)
    command = [*python_command("amos_fairseq.cli.main"), "train", recipe, f"task.data={data}"]
    command += [f"checkpoint.save_dir={out / name}", "common.log_interval=50", *own, *settings]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    print(f"{name}: starts", flush=True)
    with open(out / name / "train.log", "ab") as log:
        return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False).returncode


def settings_of(name: str, study: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the recipe of a row and its settings, as on the command line of ``amos train``."""
    row = dict(study["rows"][name])
    recipe = row.pop("recipe", study["recipe"])
    settings = {**study["base"], **row}
    return recipe, [f"{key}={_as_text(value)}" for key, value in settings.items()]


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")


def table(out: Path, names: list[str]) -> str:
    """Return a Markdown table with the values of every row's validations."""
    lines = [
        f"| row | update | generator loss | {' | '.join(COLUMNS.values())} |",
        "|---|---:|" + "---:|" * (len(COLUMNS) + 1),
    ]
    for name in names:
        for record in (record for record in read_records(out / name) if record["split"] != "train"):
            losses = [value for key, value in record.items() if key.startswith("mlm_loss_")]
            shown = [_shown(losses[-1]), *(_shown(record.get(key)) for key in COLUMNS)]
            lines.append(f"| {name} | {record['update']:,} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    main()
