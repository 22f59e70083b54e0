"""``amos squad`` without training: settings, errors."""

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from failures import error_line
from synthetic_glue import session as open_session
from synthetic_squad import make_squad, prepare_squad, untrained_checkpoint

from amos_fairseq.cli.main import build_parser, main
from amos_fairseq.downstream.spans.command import SquadSettings, open_squad, read_settings
from amos_fairseq.downstream.spans.dataset import WindowLimits


@pytest.fixture(scope="module")
def squad_data(tmp_path_factory) -> Path:
    """``data`` (2.0), ``squad.json``, and a SAVE_DIR ``start`` of a model that reads 64 tokens."""
    directory = tmp_path_factory.mktemp("squad")
    data = prepare_squad(directory, make_squad())
    untrained_checkpoint(directory / "start", data)
    return directory


def settings_of(max_positions: int, *flags: str) -> SquadSettings:
    parsed = build_parser().parse_args(["squad", "--checkpoint", "c", "--data", "d", "--out", "o", *flags])
    return read_settings(parsed, max_positions)


def test_lengths_follow_the_maximum_input_of_the_encoder():
    assert settings_of(512) == SquadSettings("independent", WindowLimits(512, 128, 64, 1), 30)
    assert settings_of(1024).windows.tokens == 512
    assert settings_of(128).windows == (128, 32, 64, 1)
    assert settings_of(64).windows == (64, 16, 32, 1)
    assert settings_of(64, "--tokens-per-window", "60", "--doc-stride", "9").windows == (60, 9, 30, 1)
    assert settings_of(512, "--recipe", "electra").span_head == "joint"
    assert settings_of(512, "--recipe", "electra", "--span-head", "independent").span_head == "independent"


def test_what_cannot_be_used_is_refused_in_one_line(squad_data, tmp_path, capsys):
    settings = "{lr: 1e-4, epochs: 1, batch_size: 8, warmup: 0}"
    (tmp_path / "grid.yaml").write_text(f"tasks: {{SQuAD: {settings}}}\ngrid: {{num_separators: [1, 2]}}\n")
    other = prepare_squad(tmp_path / "other", make_squad(seed=5))
    train = ["--checkpoint", squad_data / "start", "--out", tmp_path / "out", "--cpu", "--data"]
    for flags, message in (
        ([*train, squad_data / "data", "--tokens-per-window", 65], "--tokens-per-window 65 is more than the 64 tokens"),
        ([*train, squad_data / "data", "--doc-stride", 0], "--doc-stride: 0 must be at least 1"),
        ([*train, squad_data / "data", "--max-question-length", 61], "leaves no room for a context"),
        ([*train, squad_data / "data", "--recipe", tmp_path / "grid.yaml"], "several num_separators for SQuAD"),
        ([*train, tmp_path], "squad.json is missing"),
        ([*train, other], "the data do not fit the checkpoint"),
    ):
        assert message in error_line(capsys, main, "squad", *flags, reports_progress=True), flags
    assert not (tmp_path / "out").exists()


def test_benchmark_settings_for_the_runner(squad_data, tmp_path):
    """Rows are the windows of training; dev questions that train too have a note."""

    def benchmark(recipe, *flags):
        session = open_session(squad_data / "start", tmp_path, "squad", recipe=recipe)
        return open_squad(session, squad_data / "data", settings_of(64, *flags))

    best = "tasks: {SQuAD: {lr: 1e-4, epochs: 1, batch_size: 8, warmup: 0, checkpoint: best}}"
    (tmp_path / "best.yaml").write_text(best)
    squad = benchmark("amos")
    task = squad.tasks["SQuAD2.0"]
    assert (task.main_score, task.num_examples > 40) == ("f1", True)
    assert len(task.notes) == 1
    assert "40 of 40 dev questions train too" in task.notes[0]
    assert "--disable-validation" in squad.train_flags(SimpleNamespace(task=task))
    other = benchmark(str(tmp_path / "best.yaml"), "--doc-stride", "8")
    assert other.tasks["SQuAD2.0"].num_examples > task.num_examples
    assert other.tasks["SQuAD2.0"].data_sha256 != task.data_sha256
    assert other.settings.score_by == "words"
    with mock.patch("amos_fairseq.downstream.spans.command.fitting_units", return_value="characters"):
        of_characters = benchmark("amos").tasks["SQuAD2.0"]
    assert of_characters.data_sha256 != task.data_sha256
    assert of_characters.notes[:1] == task.notes
    assert of_characters.notes[1].startswith("SQuAD2.0: EM and F1 compare characters, as MLQA's script")
    assert "--disable-validation" not in other.train_flags(SimpleNamespace(task=other.tasks["SQuAD2.0"]))
