"""Recipes against the values that the papers print, and schedules against values by hand."""

import pytest

from amos_fairseq.errors import UserError
from amos_fairseq.experiments import recipe_names
from amos_fairseq.experiments.recipes import Hyperparameters, load_recipe, size_for_width

GLUE = ("MNLI", "QQP", "QNLI", "SST-2", "CoLA", "RTE", "MRPC", "STS-B")


def only(recipe, task):
    (settings,) = recipe.trials_of(task)
    return settings


RELEASED = [
    ("MNLI", 1e-5, 3, 32, 1 / 16),
    ("QQP", 2e-5, 5, 32, 1 / 16),
    ("QNLI", 2e-5, 3, 32, 1 / 16),
    ("SST-2", 1e-5, 5, 32, 1 / 16),
    ("CoLA", 2e-5, 10, 32, 1 / 10),
    ("RTE", 4e-5, 5, 32, 1 / 10),
    ("MRPC", 4e-5, 10, 32, 1 / 16),
    ("STS-B", 4e-5, 10, 16, 1 / 16),
]


@pytest.mark.parametrize(("task", "lr", "epochs", "batch_size", "warmup"), RELEASED)
def test_amos_has_the_released_settings(task, lr, epochs, batch_size, warmup):
    """The table "Optimal Hyperparameters" in the README of the released code."""
    settings = only(load_recipe("amos", "base"), task)
    assert (settings.lr, settings.epochs, settings.batch_size) == (lr, epochs, batch_size)
    assert settings.warmup == pytest.approx(warmup, rel=1e-12)
    assert (settings.weight_decay, settings.clip_norm, settings.layer_wise_lr_decay) == (0.01, 0.0, 1.0)
    assert (settings.dropout, settings.attention_dropout, settings.pooler_dropout) == (0.1, 0.1, 0.1)
    assert (settings.adam_betas, settings.adam_eps, settings.checkpoint) == ((0.9, 0.98), 1e-6, "best")
    assert (settings.bias_correction, settings.head, settings.num_separators) == (True, "dense", 2)
    flags = settings.train_flags(settings.schedule(100))
    assert flags[flags.index("--separator-token") + 1] == "2"
    assert {"--no-bias-correction", "--pooler-activation-fn"}.isdisjoint(flags)


def test_amos_grid_spans_the_ranges_of_appendix_b():
    recipe = load_recipe("amos_grid", "base")
    for task in GLUE:
        trials = recipe.trials_of(task)
        assert len(set(trials)) == len(trials) == 4 * 5 * 2 * 2
        assert {t.epochs for t in trials} == {2, 3, 5, 10}
        assert {t.lr for t in trials} == {1e-5, 2e-5, 3e-5, 4e-5, 5e-5}
        assert {t.batch_size for t in trials} == {16, 32}
        assert {t.warmup for t in trials} == {0.06, 0.1}
    squad = recipe.trials_of("SQuAD")
    assert len(squad) == 2 * 4 * 2 * 2
    assert {t.epochs for t in squad} == {2, 3}
    assert min(t.lr for t in squad) == 2e-5


@pytest.mark.parametrize("name", ["electra", "electric", "mlm"])
@pytest.mark.parametrize(("size", "lr", "decay"), [("small", 3e-4, 0.8), ("base", 1e-4, 0.8), ("large", 5e-5, 0.9)])
def test_recipes_of_the_thesis_are_its_table_5_2(size, lr, decay, name):
    recipe = load_recipe(name, size)
    for task in (*GLUE, "SQuAD"):
        settings = only(recipe, task)
        assert (settings.lr, settings.layer_wise_lr_decay) == (lr, decay)
        assert (settings.weight_decay, settings.warmup, settings.batch_size) == (0.0, 0.1, 32)
        assert (settings.adam_betas, settings.adam_eps) == ((0.9, 0.999), 1e-6)
        expected = {"RTE": 10, "STS-B": 10, "SQuAD": 2}.get(task, 3)
        assert settings.epochs == expected, task
        # The released code, to which the learning rates belong, and section 5.2.4.
        assert (settings.bias_correction, settings.head, settings.num_separators) == (False, "linear", 1)
        flags = settings.train_flags(settings.schedule(100))
        assert "--no-bias-correction" in flags
        assert flags[flags.index("--pooler-activation-fn") + 1] == "linear"
        assert "--separator-token" not in flags


def test_tagging_has_the_rate_of_its_size_and_a_size_its_widths():
    sizes = {64: "small", 256: "small", 257: "base", 768: "base", 1024: "large", 2048: "large"}
    assert {width: size_for_width(width) for width in sizes} == sizes
    for name, size, lr in (("amos", "small", 3e-4), ("amos", "base", 5e-5), ("electra", "small", 3e-4)):
        assert only(load_recipe(name, size), "tagging").lr == lr


@pytest.mark.parametrize(
    ("size", "lr", "squad"),
    [("small", 1e-4, (8e-5, 48, 5)), ("base", 3e-5, (5e-5, 32, 2)), ("large", 3e-5, (3e-5, 48, 2))],
)
def test_teams_is_its_table_6(size, lr, squad):
    recipe = load_recipe("teams", size)
    for task in GLUE:
        settings = only(recipe, task)
        assert (settings.lr, settings.epochs, settings.batch_size, settings.warmup) == (lr, 5, 32, 0.1)
        assert (settings.layer_wise_lr_decay, settings.checkpoint) == (1.0, "best")
    settings = only(recipe, "SQuAD")
    assert ((settings.lr, settings.batch_size, settings.epochs), settings.checkpoint) == (squad, "last")


@pytest.mark.parametrize(
    ("rows", "batch_size", "epochs", "warmup", "min_updates", "times", "total", "rising"),
    [
        (8551, 32, 10, 0.1, 0, 1, 2680, 268),  # CoLA: 267 whole batches and a rest of 7 rows, ten times
        (5749, 16, 10, 1 / 16, 0, 1, 3600, 225),  # STS-B: 359 whole batches and a rest of 5 rows
        (64, 32, 3, 0.1, 0, 1, 6, 0),
        (320, 32, 10, 0.29, 0, 1, 100, 29),  # 0.29 * 100 is 28.999999999999996 in binary
        (100, 32, 3, 1 / 3, 0, 1, 12, 4),
        (502, 16, 5, 0.1, 0, 1, 160, 16),  # 31 whole batches of 16 and a rest, five times
        (502, 16, 5, 0.1, 160, 1, 160, 16),
        (502, 16, 5, 0.1, 161, 2, 320, 32),
        (502, 16, 5, 0.1, 1000, 7, 1120, 112),  # 1,000 / 160 = 6.25
        (12543, 16, 5, 0.1, 1000, 1, 3920, 392),
    ],
)
def test_schedule_by_hand(rows, batch_size, epochs, warmup, min_updates, times, total, rising):
    """All epochs are repeated until there are ``min_updates``, and validated as often as once."""
    given = {"epochs": epochs, "batch_size": batch_size, "warmup": warmup, "min_updates": min_updates}
    settings = Hyperparameters(lr=1e-4, **given)
    schedule = settings.schedule(rows)
    assert schedule.updates_per_epoch * epochs * times == total == schedule.total_updates
    assert (schedule.num_epochs, schedule.warmup_updates) == (epochs * times, rising)
    flags = settings.train_flags(schedule)
    expected = {"--warmup-updates": rising, "--total-num-update": total, "--max-epoch": epochs * times}
    for name, value in (expected | {"--clip-norm": 0.0}).items():
        assert flags[flags.index(name) + 1] == str(value)
    for name in ("--save-interval", "--validate-interval"):  # in epochs
        assert (flags[flags.index(name) + 1] if name in flags else "1") == str(times)


def test_command_line_replaces_settings_of_a_recipe_and_a_grid():
    assert only(load_recipe("electra", "base", {"lr": 1e-3, "epochs": 1}), "RTE").lr == 1e-3
    trials = load_recipe("amos_grid", "base", {"lr": 1e-3, "batch_size": 8}).trials_of("CoLA")
    assert len(trials) == 4 * 2
    assert {(t.lr, t.batch_size) for t in trials} == {(1e-3, 8)}


def test_recipe_from_a_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "defaults: {epochs: 2, batch_size: 8, warmup: 1/4, lr: 2e-5}\n"
        "grid: {lr: [1e-5, 3e-5], dropout: [0.0, 0.1]}\n"
        "tasks: {CoLA: {dropout: 0.2}, RTE: {lr: 1e-3, dropout: 0}}\n"
    )
    recipe = load_recipe(str(file), "small")
    # The grid replaces a default, but not a setting of a task.
    assert [(t.lr, t.dropout, t.warmup) for t in recipe.trials_of("CoLA")] == [(1e-5, 0.2, 0.25), (3e-5, 0.2, 0.25)]
    assert [(t.lr, t.dropout) for t in recipe.trials_of("RTE")] == [(1e-3, 0.0)]
    with pytest.raises(UserError, match=r"no settings for QNLI.*CoLA, RTE"):
        recipe.trials_of("QNLI")
    # What a recipe extends gives the rest.
    file.write_text("extends: teams\ntasks: {CoLA: {epochs: 7}}\n")
    recipe, teams = load_recipe(str(file), "base"), load_recipe("teams", "base")
    assert (only(recipe, "CoLA").epochs, only(teams, "CoLA").epochs) == (7, 5)
    assert only(recipe, "CoLA").lr == only(teams, "CoLA").lr == 3e-5
    assert list(recipe.trials) == ["CoLA"]


@pytest.mark.parametrize(("width", "lr"), [(128, 7.31966e-4), (384, 1.40867e-4), (768, 4.98040e-5), (1024, 3.23486e-5)])
def test_rate_of_own_labels_by_width(width, lr, tmp_path):
    recipe = load_recipe("own_labels", "base", width=width)
    for task in ("classification", "tagging"):
        settings = only(recipe, task)
        assert (settings.lr, settings.min_updates, settings.num_separators) == (pytest.approx(lr, rel=1e-5), 200, 1)
    assert recipe.size == "", "nothing else depends on the encoder"
    file = tmp_path / "mine.yaml"
    file.write_text("extends: own_labels\ngrid: {lr: [.04/width, 1/width^1.5, 1e-5], epochs: [1]}\n")
    trials = load_recipe(str(file), "base", width=width).trials_of("classification")
    assert [trial.lr for trial in trials] == [0.04 / width, 1 / width**1.5, 1e-5]


@pytest.mark.parametrize(
    ("rows", "labels", "given", "total"),
    [
        (5000, 2, {}, 939),  # 313 batches of 16, three times
        (5000, 50, {}, 1878),  # 30 * 50 = 1,500, so all of it twice
        (100, 2, {}, 210),  # 7 batches, three times, ten times: 200 or more
        (100, 50, {}, 1512),
        (100, 50, {"min_updates": 100}, 105),  # what the command line says is what is done
        (100, 0, {}, 210),  # numbers
    ],
)
def test_updates_of_own_labels_by_their_number(rows: int, labels: int, given: dict[str, int], total: int) -> None:
    (settings,) = load_recipe("own_labels", "base", given).trials_of("classification")
    assert settings.for_labels(labels).schedule(rows).total_updates == total


def test_values_by_size_and_equal_trials_of_an_extended_recipe(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("extends: electra\ndefaults: {lr: 2e-5, epochs: 3, batch_size: 32, warmup: 0.1}\nsizes: {}\n")
    assert only(load_recipe(str(file), "base"), "CoLA").lr == 2e-5
    # Without sizes of its own, what the file sets counts for every size; what it does not set is that of the size.
    file.write_text("extends: electra\ndefaults: {lr: 2e-5, epochs: 3, batch_size: 32, warmup: 0.1}\n")
    for size in ("small", "base", "large"):
        assert only(load_recipe(str(file), size), "CoLA").lr == 2e-5
    file.write_text("extends: electra\ngrid: {lr: [1e-5, 2e-5]}\n")
    assert [trial.lr for trial in load_recipe(str(file), "base").trials_of("CoLA")] == [1e-5, 2e-5]
    file.write_text("extends: teams\ntasks: {SQuAD: {lr: 1e-3, epochs: 9}}\n")
    assert only(load_recipe(str(file), "small"), "SQuAD").epochs == 9
    file.write_text("extends: own_labels\ngrid: {lr: [1e-4, 0.0001, 2e-4]}\n")
    assert len(load_recipe(str(file), "base").trials_of("tagging")) == 2, "equal trials would share a directory"
    assert (load_recipe("amos", "base").size, load_recipe("amos", "small").size) == ("", "small")


COMPLETE = "lr: 1e-4, epochs: 2, batch_size: 8, warmup: 0.1"


def test_errors_of_a_recipe(tmp_path):
    file = tmp_path / "mine.yaml"
    for content, message in (
        ("tasks: {CoLA: {lr: 1e-4, epochs: 2, batch_size: 8}}", "warmup is missing"),
        (f"tasks: {{CoLA: {{{COMPLETE}, momentum: 1}}}}", "CoLA.momentum: Key 'momentum' not in"),
        (f"tasks: {{CoLA: {{{COMPLETE.replace('0.1', '1/0')}}}}}", "CoLA.warmup: Value '1/0'"),
        (f"tasks: {{CoLA: {{{COMPLETE}, head: deep}}}}", "head deep must be dense or linear"),
        (f"tasks: {{CoLA: {{{COMPLETE}, linear: true}}}}", "linear True must be False"),
        (f"tasks: {{CoLA: {{{COMPLETE}, min_updates: -1}}}}", "--min-updates -1 must be 0 or more"),
        (f"tasks: {{CoLA: {{{COMPLETE}, adam_betas: [0.9]}}}}", "must be two numbers"),
        (
            f"tasks: {{CoLA: {{{COMPLETE}}}}}\nsizes: {{base: {{tasks: [1]}}}}",
            "Cannot merge DictConfig with ListConfig",
        ),
        (
            f"tasks: {{CoLA: {{{COMPLETE}}}}}\nsizes: {{medium: {{defaults: {{}}}}}}",
            "sizes: medium must be small, base",
        ),
        (f"settings: {{CoLA: {{{COMPLETE}}}}}", r"recipe\.settings: Key 'settings' not in 'RecipeFile'"),
        (f"defaults: {{{COMPLETE}}}", "needs the section tasks"),
        ("extends: bert", "extends must name a built-in recipe, one of amos, .* not bert"),
        ("tasks: {CoLA: [1, 2]}", r"recipe\.tasks\.CoLA: 'ListConfig' is incompatible"),
        ("extends: electra\ntasks: {tagging: {pooling: most}}", "first or mean"),
        ("extends: electra\ntasks: {tagging: {unlabeled_start: 1}}", "0 or more and below 1"),
        ("tasks: {CoLA: {", "is not YAML that can be read"),
    ):
        file.write_text(content)
        with pytest.raises(UserError, match=message) as caught:
            load_recipe(str(file), "base")
        assert "mine.yaml" in str(caught.value)


def test_batches_are_similar_in_length_where_no_paper_says_otherwise():
    for name in recipe_names():
        for task, trials in load_recipe(name, "base").trials.items():
            expected = task in ("tagging", "classification")
            assert {trial.similar_lengths for trial in trials} == {expected}
            assert ("--similar-lengths" in trials[0].train_flags(trials[0].schedule(100))) is expected
    chosen = load_recipe("amos", "small", {"similar_lengths": False}).trials["tagging"]
    assert {trial.similar_lengths for trial in chosen} == {False}
