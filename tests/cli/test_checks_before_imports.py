"""A path, column or setting that is not there, or a folder that is, ends a command before PyTorch and fairseq are imported."""

from pathlib import Path

import pytest
from failures import error_line

import amos_fairseq
from amos_fairseq.adaptation import OPTIONS
from amos_fairseq.cli.main import main

TABLES = "--checkpoint start.pt --out out --train rows.tsv"
ADAPT = "adapt folder rows.tsv --out out --set"
ABSENT = "absent: no such file"
MISTAKES = {
    f"classify {TABLES} --label class": "rows.tsv has no column 'class', it has text, label: choose with --text and --label",
    f"classify {TABLES} --text x": "rows.tsv has no column 'x', it has text, label: choose with --text and --label",
    f"classify {TABLES} --dev absent.tsv": "absent.tsv: no such file",
    f"classify {TABLES} --dev other.tsv": "other.tsv has no column 'label'",
    "classify --checkpoint folder --predict absent --out labels.tsv": ABSENT,
    "classify --checkpoint out --predict rows.tsv --out other.tsv": "other.tsv exists: give the name of a new file",
    "classify --checkpoint out --predict rows.tsv --out absent/labels.tsv": "absent, which is no folder: give the name",
    f"tag {TABLES} --dev absent": ABSENT,
    "tag --checkpoint absent --predict rows.tsv --out labels": ABSENT,
    "tag --checkpoint out --predict rows.tsv --out start.pt": "start.pt exists: give the name of a new file as --out",
    "parse --checkpoint out --predict rows.tsv --out start.pt": "start.pt exists: give the name of a new file as --out",
    "squad --checkpoint out --predict rows.tsv --out answers.txt": "give a name that ends with .json, .jsonl",
    "squad --checkpoint out --predict absent --out answers.json": ABSENT,
    "tag --checkpoint start.pt --out out --data rows.tsv absent": ABSENT,
    f"parse {TABLES} --dev absent": ABSENT,
    f"squad {TABLES} --dev absent": ABSENT,
    "glue --checkpoint start.pt --out out --data absent": ABSENT,
    "glue --checkpoint start.pt --out out --data folder --teachers absent": ABSENT,
    "glue --checkpoint start.pt --out out --data folder --tasks CoLa,RTX": "unknown task 'RTX': choose ALL or, separated by",
    "glue --checkpoint start.pt --out out --data folder --recipe amoss": "there is no recipe amoss: give the path of a .yaml",
    f"classify {TABLES} --recipe own.yaml": "there is no recipe own.yaml: give the path of a .yaml file or one of amos,",
    "glue --checkpoint absent --out out --data folder": "absent is missing",
    "probe --checkpoint start.pt --out out --data absent": "absent",
    "export start.pt folder": "folder exists: give another folder, or --force to replace it",
    "import absent out.pt": ABSENT,
    "import folder start.pt": "start.pt exists",
    "adapt absent rows.tsv --out out": ABSENT,
    "adapt folder absent --out out": ABSENT,
    "adapt folder rows.tsv --out .": "is not empty and was not written by amos adapt: give another directory",
    f"{ADAPT} optimization.learning_rate=1": "has no setting optimization.learning_rate; did you mean optimization.lr?",
    f"{ADAPT} model.generator_sise=1": "amos adapt has no setting model.generator_sise; did you mean model.generator_size or",
    f"{ADAPT} model.generator_size=1 --objective mlm": "--objective mlm has no setting model.generator_size",
    f"{ADAPT} optimization.lr": "--set optimization.lr: give KEY=VALUE",
    **{f"{ADAPT} {name}=5": f"--set {name}=5: give {option} instead" for name, option in OPTIONS.items()},
    f"{ADAPT} optimization.lr=[1": "--set optimization.lr=[1: the value cannot be read",
    "score start.pt absent": ABSENT,
    "report folder --text absent": "absent is missing: give a text in UTF-8",
    "report folder absent": ABSENT,
}


@pytest.mark.parametrize("command", MISTAKES)
def test_mistakes_end_before_the_imports(command: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(amos_fairseq, "register", None)  # it would import PyTorch and fairseq
    monkeypatch.chdir(tmp_path)
    Path("rows.tsv").write_text("text\tlabel\nfine\tgood\npoor\tbad\n")
    Path("other.tsv").write_text("text\tclass\nfine\tgood\n")
    Path("start.pt").touch()
    Path("folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert MISTAKES[command] in error_line(capsys, main, *command.split(), reports_progress=True)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["adapt", "classify", "glue", "squad", "tag", "parse", "probe"])
def test_a_command_that_starts_its_trainings_itself_is_no_rank(name: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.tsv").write_text("text\tlabel\na\tb\n", encoding="utf-8")
    monkeypatch.setenv("WORLD_SIZE", "2")
    data = "--data ." if name in ("glue", "probe") else "--train rows.tsv --dev rows.tsv"
    arguments = "m rows.tsv --out o" if name == "adapt" else f"--checkpoint c --out o {data}"
    assert f"amos {name} starts its trainings itself" in error_line(capsys, main, name, *arguments.split())


def test_an_unknown_flag_names_a_similar_one(capsys: pytest.CaptureFixture) -> None:
    """Of another command, a part of one, a misspelt one; before an option that it leaves missing. A text may begin with --."""
    for arguments, named in {
        "adapt folder text.txt --out out --max-update 10": "amos adapt: error: unrecognized arguments: --max-update; did you "
        "mean --updates?",
        "tag --train a.conll --seed 3": "amos tag: error: unrecognized arguments: --seed; did you mean --seeds?",
        "prepare text.txt --outt=out": "amos prepare text: error: unrecognized arguments: --outt; did you mean --out?",
        "flops amos_base more": "amos flops: error: unrecognized arguments: more",
    }.items():
        assert error_line(capsys, main, *arguments.split()) == named
    assert "no: no such file" in error_line(
        capsys, main, "report", "no", "--sentence", "--- a text", reports_progress=True
    )
    with pytest.raises(SystemExit):
        main(["clasify"])
    assert "no subcommand 'clasify' (amos --help lists all); did you mean classify?\n" in capsys.readouterr().err
