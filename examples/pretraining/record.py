"""Print the row of docs/records.md for a finished record.sh: date, commit, machine, minutes, tokens and scores.

python examples/pretraining/record.py RECIPE MINUTES OUT
"""

import datetime
import json
import platform
import subprocess
import sys
from pathlib import Path

from amos_fairseq.run.metrics_file import read_records


def main() -> None:
    recipe, minutes, out = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
    commit = subprocess.run(
        ["git", "-C", Path(__file__).parent, "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    updates = max(record["update"] for record in read_records(out / "run"))
    tokens = updates * read_records(out / "run")[-1]["wpb"]
    scores = [
        _median(out / "scores/glue/glue.json", "CoLA", "matthews"),
        json.loads((out / "scores/blimp.json").read_text())["accuracy"]["all"],
        _median(out / "scores/upos/tagging.json", "upos", "accuracy"),
        _median(out / "scores/glue/glue.json", "SST-2", "accuracy"),
    ]
    facts = [datetime.date.today().isoformat(), commit.stdout.strip(), recipe, f"{platform.machine()}", f"{minutes:g}"]
    print(f"| {' | '.join([*facts, f'{tokens / 1e6:,.0f} M', *(f'{score:.1f}' for score in scores)])} |")


def _median(file: Path, task: str, score: str) -> float:
    return json.loads(file.read_text())["tasks"][task]["scores"][score]["median"]


if __name__ == "__main__":
    main()
