"""Teachers, several tasks in one run, and rows beside, on synthetic rows without the training process."""

import dataclasses
import json
import threading
import zipfile

import numpy as np
import pytest
from failures import error_line
from scipy.stats import mannwhitneyu, norm, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from synthetic_glue import INFERENCE, session

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.cli.main import main
from amos_fairseq.downstream.classification.glue.benchmark import Glue, GlueOptions
from amos_fairseq.downstream.classification.glue.data import read_glue_data
from amos_fairseq.downstream.classification.glue.differences import (
    MEAN_SCORES,
    NUM_RESAMPLES,
    Difference,
    difference_table,
    holm,
    paired_bootstrap,
    read_results_of_glue,
)
from amos_fairseq.downstream.classification.glue.predictions import predict_splits
from amos_fairseq.downstream.multi_task.command import MultiTaskGlue
from amos_fairseq.downstream.multi_task.teachers import Teachers, read_predictions
from amos_fairseq.downstream.recipes import load_recipe
from amos_fairseq.downstream.results import read_results
from amos_fairseq.downstream.runner import run_benchmark
from amos_fairseq.errors import UserError

ROWS = {"CoLA": 40, "STS-B": 20, "RTE": 16}


def write_teacher(folder, task, columns, rows):
    folder.mkdir(exist_ok=True)
    lines = ["\t".join(["index", *columns]), *("\t".join(map(str, [index, *row])) for index, row in enumerate(rows))]
    (folder / f"{task}.tsv").write_text("\n".join(lines) + "\n")


def teachers(folder, *options):
    write_teacher(folder, "CoLA", ["1", "0"], [[0.25, 0.75]] * 40)
    write_teacher(folder, "STS-B", ["score"], [[index / 4] for index in range(20)])
    return Teachers(folder, "annealed", *options)


def test_predictions_of_any_program_are_read_by_the_names_of_the_labels(data, tmp_path):
    found = teachers(tmp_path / "t")
    for seed in (1, 7):
        np.testing.assert_array_equal(found.predictions(read_glue_data(data, "CoLA"), seed), [[0.75, 0.25]] * 40)
    np.testing.assert_array_equal(found.predictions(read_glue_data(data, "STS-B"), 1)[:, 0], np.arange(20) / 4)
    # Three decimals: the sum is 1 again.
    write_teacher(tmp_path / "t", "CoLA", ["0", "1"], [[0.333, 0.666]] * 40)
    rounded = read_predictions(tmp_path / "t" / "CoLA.tsv", read_glue_data(data, "CoLA")).values
    np.testing.assert_allclose(rounded.sum(1), 1, rtol=1e-6)


def test_predictions_that_do_not_fit_are_refused(data, tmp_path):
    cola = read_glue_data(data, "CoLA")
    good = [[0.25, 0.75]] * 40
    for columns, rows, message in (
        (["0", "1"], good[:39], "has 39 rows, the training set 40"),
        (["0", "1"], [*good, [0.5, 0.5]], "is row 40, expected were 40 rows"),
        (["no", "yes"], good, "has the columns index, no, yes"),
        (["0"], [[0.5]] * 40, "has the columns index, 0,"),
        (["0", "1"], [[0.5, 0.7], *good[1:]], "row 0: the probabilities have the sum 1.2"),
        (["0", "1"], [[-0.5, 1.5], *good[1:]], "no probabilities"),
        (["0", "1"], [["nan", 0.5], *good[1:]], "line 2: .*each row needs an index and finite numbers"),
        (["0", "1"], [["x", 0.5], *good[1:]], "line 2: .*each row needs an index and finite numbers"),
    ):
        write_teacher(tmp_path / "t", "CoLA", columns, rows)
        with pytest.raises(UserError, match=message):
            read_predictions(tmp_path / "t" / "CoLA.tsv", cola)
    write_teacher(tmp_path / "t", "CoLA", ["0", "1"], good)
    record = cola.rows_identity()
    (tmp_path / "t" / "CoLA.json").write_text(json.dumps(record))
    read_predictions(tmp_path / "t" / "CoLA.tsv", cola)
    (tmp_path / "t" / "CoLA.json").write_text(json.dumps(record | {"source_sha256": "0" * 64}))
    with pytest.raises(UserError, match="other rows than those to train on"):
        read_predictions(tmp_path / "t" / "CoLA.tsv", cola)


def test_mistakes_are_one_line_and_start_nothing(start, data, tmp_path, fake_training, capsys, glue):
    glue(tmp_path / "finished", "CoLA")
    teachers(tmp_path / "t")
    (tmp_path / "empty").mkdir()
    (tmp_path / "own.yaml").write_text("RTE: {train: own.tsv}\n")
    (tmp_path / "bad.yaml").write_text("mine: {train: own.tsv, colour: red}\n")
    (tmp_path / "own.tsv").write_text("text\tlabel\na\tx\nb\ty\n")
    for name, content in {
        "module": "half: {train: own.tsv}",
        "texts": "mine: {train: own.tsv, text: {a: 1}}",
        "header": "mine: {train: own.tsv, no_header: 'false'}",
        "separator": "mine: {train: own.tsv, kind: labels, label_separator: ''}",
        "dev": "mine: {train: own.tsv, dev: nothing.tsv}",
        "kind": "mine: {train: own.tsv, kind: words}",
        "list": "[mine]",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(content)
    own = ["--tasks", "CoLA", "--own-tasks"]
    command = ["glue", "--checkpoint", str(start), "--out", str(tmp_path / "out"), "--cpu", "--data", str(data)]
    before = len(fake_training.commands)
    for arguments, message in (
        (["--tasks", "CoLA", "--max-rows", "0"], "--max-rows 0 must be at least 1"),
        (["--tasks", "CoLA", "--ensemble"], "--ensemble has no effect without --teachers"),
        (["--tasks", "CoLA", "--gold-weight", "0"], "--gold-weight has no effect without --teachers"),
        (["--tasks", "CoLA", "--teachers", tmp_path / "absent"], "is no directory"),
        (["--tasks", "CoLA", "--teachers", tmp_path / "empty"], "repeat its command with --write-train"),
        (["--tasks", "CoLA", "--teachers", tmp_path / "finished"], "repeat its command with --write-train"),
        (["--tasks", "RTE", "--teachers", tmp_path / "t"], "has no predictions for RTE (it has CoLA, STS-B)"),
        (["--tasks", "CoLA", "--teachers", tmp_path / "t", "--gold-weight", "2"], "a number from 0 to 1"),
        (["--tasks", "CoLA", "--teachers", tmp_path / "t", "--ensemble"], "has one teacher for each task"),
        (["--tasks", "CoLA", "--teachers", tmp_path / "t", "--max-rows", "10"], "is row 10, expected were 10 rows"),
        (["--tasks", "CoLA", "--beside", tmp_path / "empty"], "holds no results of amos glue"),
        (["--tasks", "CoLA", "--multi-task"], "the recipe amos has no settings for multi"),
        (["--tasks", "CoLA,RTE", "--multi-task", "--recipe", "bam", "--intermediate"], "--intermediate has no effect"),
        (["--tasks", "CoLA", "--own-tasks", tmp_path / "own.yaml"], "'RTE' has a name that is taken"),
        (["--tasks", "CoLA", "--own-tasks", tmp_path / "bad.yaml"], "needs train, and may only have"),
        ([*own, tmp_path / "module.yaml"], "'half' has a name that is taken"),
        ([*own, tmp_path / "texts.yaml"], "files, columns and label_separator are texts"),
        ([*own, tmp_path / "header.yaml"], "no_header is true or false"),
        ([*own, tmp_path / "separator.yaml"], "the separator of labels is empty"),
        ([*own, tmp_path / "dev.yaml"], "nothing.tsv: no such file"),
        ([*own, tmp_path / "kind.yaml"], "kind is one of classes, labels, number"),
        ([*own, tmp_path / "list.yaml"], ""),
        (["--tasks", "RTE", "--multi-task", "--recipe", "bam"], "has 16 rows, fewer than the 128 of one update"),
    ):
        assert message in error_line(capsys, main, *command, *arguments, reports_progress=True)
    message = "was finished without --write-train"
    again = ["glue", "--checkpoint", start, "--out", tmp_path / "finished", "--cpu", "--data", data, "--seeds", 1]
    assert message in error_line(capsys, main, *again, "--tasks", "CoLA", "--write-train", reports_progress=True)
    assert "--head RTE" in error_line(
        capsys, main, "export", tmp_path / "finished" / "runs" / "CoLA" / "seed1" / "checkpoint_best.pt", tmp_path / "hf",
        "--head", "RTE", reports_progress=True,
    )  # fmt: skip
    assert len(fake_training.commands) == before
    assert not (tmp_path / "out").exists()


def test_each_seed_learns_from_its_own_or_from_the_mean(start, data, tmp_path, fake_training):
    out = tmp_path / "single"
    options = GlueOptions(with_train=True)
    run_benchmark(Glue(session(start, out), data, ["CoLA", "STS-B"], options))
    found = Teachers(out, "annealed")
    cola = read_glue_data(data, "CoLA")
    one, two = (found.predictions(cola, seed) for seed in (1, 2))
    assert np.abs(one - two).max() > 1e-3
    np.testing.assert_allclose(one.sum(1), 1, rtol=1e-6)
    np.testing.assert_allclose(Teachers(out, "annealed", True).predictions(cola, 5), (one + two) / 2, rtol=1e-6)
    with pytest.raises(UserError, match="of the seeds 1, 2 and none of seed 3: give --seeds 2, or --ensemble"):
        found.predictions(cola, 3)
    with pytest.raises(UserError, match="rows: 40 there, 30 here"):
        found.predictions(read_glue_data(data, "CoLA", 30), 1)

    # Other teachers make another run: run.json names them, and the run has their predictions as a file.
    students = [
        Glue(session(start, tmp_path / name), data, ["CoLA"], GlueOptions(teachers=Teachers(out, *given)))
        for name, given in (("own", ("annealed",)), ("mean", ("annealed", True)), ("half", ("0.5",)))
    ]
    identities = [run.identity for student in students for run in student.plan(student.tasks.values())]
    assert len({json.dumps(identity) for identity in identities}) == 6
    run_benchmark(students[0])
    flags = fake_training.commands[-1]
    assert fake_training.flag(flags, "--gold-weight") == "annealed"
    updates = fake_training.flag(flags, "--total-num-update")
    assert fake_training.flag(flags, "--max-update") == updates == str(10 * 2)  # 40 rows in batches of 32, 10 epochs
    beside = tmp_path / "own" / "runs" / "CoLA" / "seed2" / "teacher.npy"
    np.testing.assert_array_equal(np.load(beside), two.ravel())
    with pytest.raises(UserError, match="'folder': 'single'"):
        run_benchmark(Glue(session(start, tmp_path / "own"), data, ["CoLA"]))


@pytest.fixture
def multi(start, data, tmp_path, monkeypatch):
    """The results of three runs on two tasks, with given scores."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("extends: bam\nsizes: {}\ntasks: {multi: {epochs: 6, batch_size: 16}}\n")
    scores = {1: (70.0, 10.0), 2: (60.0, 40.0), 3: (65.0, 20.0)}  # means of 40, 50 and 42.5
    opened = session(start, tmp_path / "out", num_seeds=3)
    opened = dataclasses.replace(opened, recipe=load_recipe(str(recipe), "base"))
    benchmark = MultiTaskGlue(opened, data, ["RTE", "STS-B"])

    def evaluate(task, checkpoint, directory, device, stop):
        rte, stsb = scores[int(directory.name.removeprefix("seed"))]
        return {"average": (rte + stsb) / 2, "RTE accuracy": rte, "STS-B spearman": stsb, "STS-B pearson": 1.0}

    monkeypatch.setattr(benchmark, "evaluate", evaluate)
    return benchmark


def test_a_run_of_all_tasks_has_a_row_of_single_tasks(multi, tmp_path, fake_training):
    outcome = run_benchmark(multi)
    assert outcome.table.rows == [
        ["amos (7 updates), one model for all tasks", "65.0 ± 5.0", "20.0 ± 15.3", "42.5"],
    ]
    assert outcome.table.columns == ["", "RTE", "STS-B (Spearman)", "AVG of 2"]
    content = json.loads((tmp_path / "out" / "glue.json").read_text())
    # The weights that stay are those of the best mean, and the best run of each task.
    assert {task: own["best_run"]["seed"] for task, own in content["tasks"].items()} == {"RTE": 2, "STS-B": 2}
    assert [path.parent.name for path in tmp_path.rglob("*.pt") if "multi" in str(path)] == ["seed2"]
    assert sorted({run["task"] for run in content["runs"]}) == ["RTE", "STS-B"]
    assert len(read_results(tmp_path / "out")) == 3
    flags = fake_training.commands[0]
    assert fake_training.flag(flags, "--task") == "multi_task"
    rows = 17 + 20  # 20^0.25 * 16^0.75 is 16.9
    assert fake_training.flag(flags, "--total-num-update") == str(rows * 6 // 16)


def test_holm_by_hand():
    """Three p values: the smallest times 3, the next times 2 but not below it, the largest once."""
    assert holm([0.02, 0.01, None, 0.5]) == pytest.approx([0.04, 0.03, None, 0.5])
    assert holm([0.04, 0.03, 0.9]) == pytest.approx([0.09, 0.09, 0.9])
    assert holm([0.6, 0.7]) == pytest.approx([1, 1])


def test_paired_bootstrap_is_near_the_normal_approximation():
    """Of 1,000 rows ours is right in 40 where theirs is wrong, theirs in 20 where ours is wrong."""
    labels = np.array(["a", "b"] * 500)
    ours, theirs = labels.copy(), labels.copy()
    theirs[:40] = "c"
    ours[100:120] = "c"
    drawn = paired_bootstrap("accuracy", np.array([ours, ours]), np.array([theirs]), labels)
    deviation = 100 * np.sqrt((60 / 1000 - 0.02**2) / 1000)
    assert drawn.mean() == pytest.approx(2, abs=4 * deviation / np.sqrt(NUM_RESAMPLES))
    assert drawn.std() == pytest.approx(deviation, rel=0.05)  # its error is 1/sqrt(2 N), 1 %
    assert Difference(2.0, None, drawn).bootstrap == pytest.approx(2 * norm.sf(2 / deviation), abs=0.01)
    same = Difference(0.0, None, paired_bootstrap("accuracy", np.array([ours]), np.array([ours]), labels))
    assert same.bootstrap == 1
    assert same.cells(1.0, None) == ["+0.0", "+0.0 to +0.0", "1.000", "-"]
    # Never 0: the data count as one more resample.
    sure = Difference(9.0, None, np.full(NUM_RESAMPLES, 9.0))
    assert sure.bootstrap == pytest.approx(2 / (NUM_RESAMPLES + 1))


def test_mean_scores_of_repeated_rows_are_those_of_the_libraries():
    """Accuracy, Matthews, Spearman and micro-F1 of the same rows as scikit-learn and scipy."""
    generator = np.random.default_rng(1)
    rows = generator.integers(0, 60, 200)
    classes = np.array(["no", "yes"])
    gold, found = classes[generator.integers(0, 2, 60)], classes[generator.integers(0, 2, (2, 60))]
    accuracy = np.mean([accuracy_score(gold[rows], own[rows]) for own in found])
    assert MEAN_SCORES["accuracy"](found, gold)(rows) == pytest.approx(100 * accuracy)
    matthews = np.mean([matthews_corrcoef(gold[rows], own[rows]) for own in found])
    assert MEAN_SCORES["matthews"](found, gold)(rows) == pytest.approx(100 * matthews)
    assert MEAN_SCORES["matthews"](np.full((1, 60), "no"), gold)(rows) == 0
    gold, found = (generator.normal(size=size).round(1).astype(str) for size in (60, (2, 60)))
    spearman = np.mean([spearmanr(gold[rows].astype(float), own[rows].astype(float))[0] for own in found])
    assert MEAN_SCORES["spearman"](found, gold)(rows) == pytest.approx(100 * spearman)
    names = np.array(["a", "b", "c"])
    gold, found = (generator.random(size) < 0.5 for size in ((60, 3), (2, 60, 3)))
    spelled = [[json.dumps(names[row].tolist()) for row in part] for part in (gold, *found)]
    micro = np.mean([f1_score(gold[rows], own[rows], average="micro") for own in found])
    score = MEAN_SCORES["micro_f1"](np.array(spelled[1:]), np.array(spelled[0]))
    assert score(rows) == pytest.approx(100 * micro)


def test_differences_of_two_outputs(start, data, tmp_path, fake_training):
    for name, seeds in (("one", 3), ("two", 4)):
        run_benchmark(Glue(session(start, tmp_path / name, num_seeds=seeds), data, ["CoLA", "STS-B"]))
    one, two = read_results_of_glue(tmp_path / "one"), read_results_of_glue(tmp_path / "two")
    prepared = {task: read_glue_data(data, task) for task in ("CoLA", "STS-B")}
    rows = {row[0]: row[1:] for row in difference_table(two, [one], prepared).rows}
    assert list(rows) == ["CoLA, from one", "STS-B, from one", "AVG of 2, from one"]
    scores = {task: [[run.main for run in side.runs[task]] for side in (two, one)] for task in prepared}
    ours, theirs = scores["STS-B"]
    assert rows["STS-B, from one"][0] == f"{np.mean(ours) - np.mean(theirs):+.1f}"
    alone = mannwhitneyu(ours, theirs).pvalue
    found = float(rows["STS-B, from one"][-1])
    assert found in (pytest.approx(alone, abs=1e-3), pytest.approx(min(1, 2 * alone), abs=1e-3))
    averages = [np.mean([scores[task][side] for task in prepared], axis=0) for side in (0, 1)]
    difference, _, _, p_value = rows["AVG of 2, from one"]
    assert difference == f"{averages[0].mean() - averages[1].mean():+.1f}"
    assert float(p_value) == pytest.approx(mannwhitneyu(*averages).pvalue, abs=1e-3)
    # Any seed with other rows is refused before a run is started.
    file = tmp_path / "one" / "runs" / "CoLA" / "seed1" / "predictions.valid.tsv"
    file.write_text("\n".join(file.read_text().splitlines()[:-1]) + "\n")
    with pytest.raises(UserError, match="other dev rows of CoLA"):
        Glue(session(start, tmp_path / "two"), data, ["CoLA"], GlueOptions(beside=[tmp_path / "one"]))


def test_the_archive_of_one_model_has_all_test_sets(start, data, tmp_path, fake_training):
    """AX, which has no head of its own, is predicted by that of MNLI."""
    opened = dataclasses.replace(
        session(start, tmp_path, num_seeds=1), recipe=load_recipe("bam", "base", {"batch_size": 8})
    )
    benchmark = MultiTaskGlue(opened, data, ["CoLA", "MNLI"], GlueOptions(with_test=True))
    outcome = run_benchmark(benchmark)
    assert outcome.failures == []
    filled = [notice for notice in outcome.notices if "constant" in notice]
    assert not any(notice.startswith(("CoLA", "MNLI", "AX")) for notice in filled)
    loaded = load_checkpoint(tmp_path / "runs" / "multi" / "seed1" / "checkpoint_last.pt")
    expected = predict_splits(read_glue_data(data, "AX"), loaded, ["test"], 80, "cpu", threading.Event())["test"]
    with zipfile.ZipFile(tmp_path / "glue_submission.zip") as archive:
        lines = archive.read("AX.tsv").decode().splitlines()[1:]
    assert [line.split("\t")[1] for line in lines] == [INFERENCE[index] for index in expected]


def test_the_trial_of_a_grid_is_that_of_the_best_average(start, data, tmp_path, fake_training, monkeypatch):
    recipe = tmp_path / "grid.yaml"
    recipe.write_text(
        "extends: bam\ngrid: {layer_wise_lr_decay: [1.0, 0.9]}\ntasks: {multi: {epochs: 6, batch_size: 8}}\n"
    )
    opened = dataclasses.replace(session(start, tmp_path / "out"), recipe=load_recipe(str(recipe), "base"))
    benchmark = MultiTaskGlue(opened, data, ["RTE", "STS-B"])
    scores = {"1.0": (90.0, 10.0), "0.9": (60.0, 50.0)}  # means of 50 and 55; RTE alone is better with the first

    def evaluate(task, checkpoint, directory, device, stop):
        rte, stsb = next(own for decay, own in scores.items() if decay in directory.parent.name)
        return {"average": (rte + stsb) / 2, "RTE accuracy": rte, "STS-B spearman": stsb}

    monkeypatch.setattr(benchmark, "evaluate", evaluate)
    outcome = run_benchmark(benchmark)
    assert outcome.table.rows[0][1:] == ["60.0 ± 0.0", "50.0 ± 0.0", "55.0"]
    assert any("selected from 2 combinations" in note for note in outcome.table.notes)
