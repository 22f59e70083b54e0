"""GLUE's data, predictions, intermediate training and archive on made-up rows; the training process is left out."""

import argparse
import json
import shutil
import threading
import zipfile

import numpy as np
import pytest
import torch
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask
from made_up_glue import change_task, write_glue, write_starting_point

from amos_fairseq.cli.main import main
from amos_fairseq.errors import UserError
from amos_fairseq.finetuning import runner as runner_module
from amos_fairseq.finetuning.benchmark import Stopped
from amos_fairseq.finetuning.glue_benchmark import HEAD, Glue, predict
from amos_fairseq.finetuning.glue_data import batches, read_glue_data
from amos_fairseq.finetuning.glue_session import glue_results, run_glue
from amos_fairseq.finetuning.leaderboard import write_submission
from amos_fairseq.finetuning.session import open_session
from amos_fairseq.finetuning.starting_point import read_starting_point
from amos_fairseq.finetuning.statistics import summarize
from amos_fairseq.interop.checkpoint import load_pretrained, read_state
from amos_fairseq.models.fine_tuning import FineTunedModel

INFERENCE = ("entailment", "neutral", "contradiction")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    directory = tmp_path_factory.mktemp("start")
    write_starting_point(directory)
    return directory


@pytest.fixture(scope="module")
def data(start, tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    write_glue(directory, start, "CoLA", ["0", "1"], {"train": 40, "valid": 13, "test": 7}, pair=False)
    write_glue(directory, start, "STS-B", [], {"train": 20, "valid": 9, "test": 5}, pair=True)
    rows = {"train": 30, "valid": 11, "valid1": 10, "test": 6, "test1": 4}
    write_glue(directory, start, "MNLI", INFERENCE, rows, pair=True)
    write_glue(directory, start, "RTE", ["entailment", "not_entailment"], {"train": 16, "valid": 8}, pair=True)
    write_glue(directory, start, "AX", INFERENCE, {"test": 3}, pair=True)
    return directory


@pytest.fixture
def fake_training(monkeypatch):
    """Instead of a process: the model that it would train, with random weights from the seed. Notes each command."""
    commands = []

    def flag(command, name):
        return command[command.index(name) + 1]

    def train(command, directory, variables, stop, report):
        commands.append(command)
        state = read_state(checkpoint_of(command))
        cfg = argparse.Namespace(**state["cfg"]["model"])
        torch.manual_seed(int(flag(command, "--seed")))
        model = FineTunedModel(cfg, load_pretrained(checkpoint_of(command)).model.rows)
        model.register_classification_head(HEAD, int(flag(command, "--num-classes")))
        for parameter in model.classification_heads.parameters():
            torch.nn.init.normal_(parameter)
        state |= {
            "cfg": {"model": vars(cfg), "task": {"_name": "sentence_prediction"}},
            "model": model.state_dict(),
            "last_optimizer_state": {},
        }
        for name in ("best", "last"):
            torch.save(state, directory / f"checkpoint_{name}.pt")

    def checkpoint_of(command):
        return train.start

    monkeypatch.setattr(runner_module, "train", train)
    return argparse.Namespace(commands=commands, flag=flag, train=train)


def session(start, out, **options):
    return open_session(str(start), str(out), "amos", cpu=True, **{"num_seeds": 2, **options})


def test_rows_are_those_of_fairseqs_task(data):
    """The evaluation reads the very tokens that training read: in order, with both special symbols, cut at the end."""
    for task, limit in (("CoLA", 80), ("STS-B", 80), ("STS-B", 12)):
        classes = -1 if task == "STS-B" else 2
        cfg = SentencePredictionConfig(
            data=str(data / task), num_classes=max(classes, 1), init_token=0, max_positions=limit,
            shorten_method="truncate", regression_target=task == "STS-B", no_shuffle=True, seed=1,
        )  # fmt: skip
        theirs = SentencePredictionTask.setup_task(cfg).load_dataset("valid")
        prepared = read_glue_data(data, task)
        for row, label, item in zip(
            prepared.texts("valid", limit),
            prepared.labels("valid"),
            (theirs[i] for i in range(len(theirs))),
            strict=True,
        ):
            assert torch.equal(row, item["net_input.src_tokens"])
            assert float(label) == float(torch.as_tensor(item["target"]).item())
        assert max(map(len, prepared.texts("valid", limit))) <= limit


def test_batches_hold_every_row_once_longest_first():
    texts = [torch.full((length,), length) for length in (3, 9, 1, 9, 5000, 4000, 200)]
    found = list(batches(texts, 1, threading.Event()))
    assert sorted(row for rows, _ in found for row in rows) == list(range(7))
    assert found[0][0] == [4]
    for rows, tokens in found:
        assert tokens.numel() <= 8192
        for row, text in zip(rows, tokens, strict=True):
            assert torch.equal(text[: len(texts[row])], texts[row])
            assert (text[len(texts[row]) :] == 1).all()
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        next(batches(texts, 1, stop))


def test_predictions_are_those_of_single_rows_through_the_model(start, data, tmp_path, fake_training):
    fake_training.train.start = start / "checkpoint_last.pt"
    outcome = run_glue(session(start, tmp_path, num_seeds=1), data, ["STS-B", "MNLI"], None, None, False, False)
    assert outcome.failures == []
    for task, split in (("STS-B", "valid"), ("MNLI", "valid1")):
        directory = tmp_path / "runs" / task / "seed1"
        prepared, loaded = read_glue_data(data, task), load_pretrained(directory / "checkpoint_best.pt")
        rows = [line.split("\t") for line in (directory / f"predictions.{split}.tsv").read_text().splitlines()]
        assert rows.pop(0) == ["index", "prediction", "label"]
        assert [row[0] for row in rows] == [str(i) for i in range(len(rows))]
        for row, text, label in zip(rows, prepared.texts(split, 80), prepared.labels(split), strict=True):
            with torch.no_grad():
                logits, _ = loaded.model(text[None], features_only=True, classification_head_name=HEAD)
            if task == "STS-B":
                # Four digits are written, and padding changes sums by float32 rounding.
                assert float(row[1]) == pytest.approx(logits.item(), abs=1e-3)
                assert float(row[2]) == label
            else:
                assert row[1] == INFERENCE[logits.argmax()]
                assert row[2] == INFERENCE[label]


def test_the_run_directory_serves_export_and_load(start, data, tmp_path, fake_training):
    fake_training.train.start = start / "checkpoint_last.pt"
    run_glue(session(start, tmp_path, num_seeds=1), data, ["MNLI"], None, None, False, False)
    directory = tmp_path / "runs/MNLI/seed1"
    assert (directory / "labels.txt").read_text() == "entailment\nneutral\ncontradiction\n"
    assert {p.name for p in (directory / "tokenizer").iterdir()} == {p.name for p in (start / "tokenizer").iterdir()}
    assert load_pretrained(directory / "checkpoint_best.pt").tokenizer.encode("fox")


def test_flags_describe_the_checkpoint_and_the_task(start, data, tmp_path, fake_training):
    fake_training.train.start = start / "checkpoint_last.pt"
    run_glue(session(start, tmp_path, num_seeds=1), data, ["CoLA", "STS-B"], None, None, False, False)
    (cola, sts), flag = fake_training.commands, fake_training.flag
    settings = read_state(start / "checkpoint_last.pt")["cfg"]["model"]
    for name in ("encoder_layers", "encoder_embed_dim", "max_positions", "layer_norm_eps", "relative_position_scheme"):
        assert flag(cola, f"--{name.replace('_', '-')}") == str(settings[name])
    assert flag(cola, "--arch") == "amos"
    assert flag(cola, "--finetune-from-model") == str(start / "checkpoint_last.pt")
    assert (flag(cola, "--best-checkpoint-metric"), flag(sts, "--best-checkpoint-metric")) == ("mcc", "spearman")
    assert "--regression-target" in sts
    assert "--regression-target" not in cola
    # 40 rows in batches of 32, ten epochs, a tenth of them rising; 20 rows in batches of 16
    assert [flag(cola, f) for f in ("--total-num-update", "--warmup-updates", "--lr")] == ["20", "2", "2e-05"]
    assert [flag(sts, f) for f in ("--total-num-update", "--warmup-updates", "--lr")] == ["20", "1", "4e-05"]


def test_from_scratch_takes_the_architecture_alone_and_says_so(start, data, tmp_path, fake_training):
    fake_training.train.start = start / "checkpoint_last.pt"
    outcome = run_glue(session(start, tmp_path, from_scratch=True), data, ["CoLA"], None, None, False, False)
    assert all("--finetune-from-model" not in command for command in fake_training.commands)
    assert outcome.table.rows[0][0] == "amos (random weights)"
    assert any("nothing of its pretraining" in note for note in outcome.table.notes)
    with pytest.raises(UserError, match="another from_scratch True, not False"):
        run_glue(session(start, tmp_path), data, ["CoLA"], None, None, False, False)


def test_small_tasks_start_from_the_best_mnli_run(start, data, tmp_path, fake_training):
    fake_training.train.start = start / "checkpoint_last.pt"
    out = tmp_path / "out"
    outcome = run_glue(session(start, out), data, ["RTE", "STS-B", "CoLA", "MNLI"], out, None, False, False)
    assert outcome.failures == []
    best = summarize(glue_results(out))["MNLI"].best
    starts = {}
    for command in fake_training.commands:
        task = command[3].rpartition("/")[2]
        starts.setdefault(task, set()).add(fake_training.flag(command, "--finetune-from-model"))
    mnli, original = str(out / best.directory / "checkpoint_best.pt"), str(start / "checkpoint_last.pt")
    assert starts == {"MNLI": {original}, "CoLA": {original}, "RTE": {mnli}, "STS-B": {mnli}}
    assert [command[3].rpartition("/")[2] for command in fake_training.commands[:2]] == ["MNLI", "MNLI"]
    assert any(note.startswith("RTE, STS-B: started from the best dev run of MNLI") for note in outcome.table.notes)
    # Another OUT takes the MNLI runs of this one; without the flag they would be other runs.
    run_glue(session(start, tmp_path / "other"), data, ["RTE"], out, None, False, False)
    assert fake_training.flag(fake_training.commands[-1], "--finetune-from-model") == mnli
    with pytest.raises(UserError, match="intermediate_sha256"):
        run_glue(session(start, out), data, ["RTE"], None, None, False, False)


def test_intermediate_training_without_mnli_is_refused(start, data, tmp_path, fake_training):
    with pytest.raises(UserError, match="holds no finished run of MNLI"):
        run_glue(session(start, tmp_path), data, ["RTE"], tmp_path, None, False, False)
    with pytest.raises(UserError, match="changes nothing"):
        run_glue(session(start, tmp_path), data, ["CoLA"], tmp_path, None, False, False)
    assert fake_training.commands == []


def test_archive_of_the_leaderboard(start, data, tmp_path, fake_training):
    fake_training.train.start = start / "checkpoint_last.pt"
    tasks = ["CoLA", "STS-B", "MNLI", "RTE"]
    outcome = run_glue(session(start, tmp_path), data, tasks, None, None, False, with_test=True)
    with zipfile.ZipFile(tmp_path / "glue_submission.zip") as archive:
        files = {name: archive.read(name).decode().splitlines() for name in archive.namelist()}
    official = {
        "CoLA": 7, "SST-2": 1821, "MRPC": 1725, "STS-B": 5, "MNLI-m": 6, "MNLI-mm": 4, "QNLI": 5463, "QQP": 390965,
        "RTE": 3000, "WNLI": 146, "AX": 3,
    }  # fmt: skip
    assert {name: len(lines) - 1 for name, lines in files.items()} == {f"{n}.tsv": rows for n, rows in official.items()}
    assert {lines[0] for lines in files.values()} == {"index\tprediction"}
    assert [line.split("\t")[0] for line in files["MNLI-mm.tsv"][1:]] == ["0", "1", "2", "3"]
    # RTE was run, but no test file was prepared; SST-2 was not run at all.
    filled = [notice.split()[0] for notice in outcome.notices]
    assert filled == ["QQP.tsv", "QNLI.tsv", "SST-2.tsv", "RTE.tsv", "MRPC.tsv", "WNLI.tsv"]
    assert {line.split("\t")[1] for line in files["RTE.tsv"][1:]} == {"entailment"}
    summaries = summarize(glue_results(tmp_path))
    for task, name, split in (("CoLA", "CoLA", "test"), ("MNLI", "MNLI-mm", "test1"), ("MNLI", "AX", "test")):
        prepared = read_glue_data(data, "AX" if name == "AX" else task)
        best = max((r for r in glue_results(tmp_path) if r.task == task), key=lambda result: result.main)
        assert summaries[task].best.seed == best.seed
        checkpoint = tmp_path / best.directory / "checkpoint_best.pt"
        expected = predict(prepared, checkpoint, [split], 80, "cpu", threading.Event())[split]
        assert [line.split("\t")[1] for line in files[f"{name}.tsv"][1:]] == [prepared.label_names[i] for i in expected]
    assert all(0 <= float(line.split("\t")[1]) <= 5 for line in files["STS-B.tsv"][1:])
    (tmp_path / best.directory / "checkpoint_best.pt").unlink()
    with pytest.raises(UserError, match="is gone, and with it the best run of MNLI"):
        write_submission(tmp_path, data, summaries, 80, "cpu", threading.Event())


def test_data_that_are_not_the_official_ones_are_said_to_be(start, data, tmp_path):
    facts = {"source": "train.tsv", "source_rows": 104_743, "broken": 0, "rows": 10_000}
    valid = {"source": "dev.tsv", "source_rows": 5_463, "broken": 0, "rows": 5_463}
    shutil.copytree(data / "RTE", tmp_path / "QNLI")
    change_task(tmp_path, "QNLI", task="QNLI", splits={"train": facts, "valid": valid})
    assert list(read_glue_data(tmp_path, "QNLI").notes()) == ["QNLI: trained on 10,000 of 104,743 rows"]
    change_task(tmp_path, "QNLI", splits={"train": facts | {"source_rows": 84_794}, "valid": valid}, notes=["rebuilt"])
    notes = list(read_glue_data(tmp_path, "QNLI").notes())
    assert notes[0].startswith("QNLI: the train file (train.tsv) has 84,794 rows, the official one 104,743")
    assert notes[1:] == ["QNLI: trained on 10,000 of 84,794 rows", "rebuilt"]


def test_runs_are_of_the_same_data_until_what_is_trained_or_scored_on_changes(data, tmp_path):
    shutil.copytree(data / "RTE", tmp_path / "RTE")
    before, record = read_glue_data(tmp_path, "RTE").sha256(), read_glue_data(tmp_path, "RTE").record
    change_task(tmp_path, "RTE", splits=record["splits"] | {"test": {"source": "test.tsv", "rows": 5}}, workers=3)
    assert read_glue_data(tmp_path, "RTE").sha256() == before
    for change in (
        {"splits": record["splits"] | {"valid": record["splits"]["valid"] | {"sha256": "0" * 64}}},
        {"splits": record["splits"] | {"train": record["splits"]["train"] | {"rows": 15}}},
        {"labels": record["labels"][::-1]},
        {"tokenizer_sha256": "1" * 64},
        {"seed": 2},
    ):
        change_task(tmp_path, "RTE", **record | change)
        assert read_glue_data(tmp_path, "RTE").sha256() != before, change


def test_mistakes_are_one_line_and_start_nothing(start, data, tmp_path, fake_training, capsys):
    foreign = tmp_path / "foreign"
    shutil.copytree(data, foreign)
    (foreign / "tokenizer" / "dict.txt").write_text("other 1\n")
    (tmp_path / "squad").mkdir()
    setup = {"checkpoint_sha256": read_starting_point(start).sha256, "from_scratch": True}
    (tmp_path / "squad" / "squad.json").write_text(json.dumps({"setup": setup}))
    command = ["glue", "--checkpoint", str(start), "--out", str(tmp_path / "out"), "--cpu", "--data"]
    for arguments, message in (
        ([str(data), "--tasks", "CoLA,XNLI"], "unknown task 'XNLI': choose, with commas between, from MNLI, QQP"),
        ([str(data), "--tasks", "QNLI"], "QNLI holds no prepared data"),
        ([str(tmp_path / "absent")], "absent is no directory"),
        ([str(foreign), "--tasks", "CoLA"], "the data do not fit the checkpoint"),
        ([str(data), "--tasks", "CoLA", "--recipe", "bert"], "there is no recipe bert"),
        ([str(data), "--tasks", "CoLA", "--seeds", "0"], "--seeds 0 makes no run"),
        ([str(data), "--tasks", "CoLA", "--parallel", "0"], "--parallel 0 starts nothing"),
        ([str(data), "--tasks", "CoLA", "--lr", "-1"], "lr -1.0 must be above 0"),
        ([str(data), "--tasks", "CoLA", "--fp16"], "--fp16 needs a GPU"),
        ([str(data), "--tasks", "CoLA", "--squad", str(tmp_path)], "holds no results of amos squad"),
        ([str(data), "--tasks", "CoLA", "--squad", str(tmp_path / "squad")], "from_scratch True, not False"),
        ([str(data), "--tasks", "RTE", "--write-test"], "holds no test set of RTE"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*command, *arguments])
        assert ended.value.code == 1, arguments
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert message in error
    assert fake_training.commands == []
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_another_package_is_refused(tmp_path):
    state = {
        "cfg": {"model": {"_name": "roberta"}},
        "optimizer_history": [{"num_updates": 1}],
        "model": {"w": torch.ones(1)},
    }
    torch.save(state, tmp_path / "checkpoint_last.pt")
    with pytest.raises(UserError, match="architecture is 'roberta', none of this package"):
        read_starting_point(tmp_path)


def test_tasks_of_the_benchmark(start, data):
    glue = Glue(data, ["CoLA", "STS-B"], read_starting_point(start))
    assert {name: (task.rows, task.main_score) for name, task in glue.tasks.items()} == {
        "CoLA": (40, "matthews"), "STS-B": (20, "spearman"),
    }  # fmt: skip
    assert np.unique(read_glue_data(data, "CoLA").labels("valid")).tolist() == [0, 1]


def test_help_states_every_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    with pytest.raises(SystemExit):
        main(["glue", "--help"])
    flags = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("--")]
    silent = [line.split()[0] for line in flags if line.count("(default: ") != 1]
    assert silent == ["--checkpoint", "--data", "--out"], "the three that must be given"
