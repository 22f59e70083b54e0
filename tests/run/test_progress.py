"""What a run prints: its first lines, its cost, the time to the end, the bar on a terminal; what the console leaves out."""

import io
import logging
import logging.config
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq import models
from fairseq.logging import metrics, progress_bar
from omegaconf import OmegaConf

from amos_fairseq.criterions.detection import area_under_curve
from amos_fairseq.flops.configuration import build_task
from amos_fairseq.recipes.composition import compose_recipe
from amos_fairseq.run import hooks, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that a test sets itself."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture(autouse=True)
def only_progress(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hooks of other topics are left out."""
    monkeypatch.setattr(hooks, "active", [progress.Progress()])
    yield
    metrics.reset()


def settings(**changes: Any) -> Any:
    cfg = {
        "checkpoint": {"save_dir": "runs/a", "save_interval_updates": 400, "save_interval": 10**9, "no_save": False},
        "optimization": {"max_update": 1750, "max_epoch": 0, "update_freq": [2]},
        "dataset": {"batch_size": 16},
        "task": {"tokens_per_sample": 64, "save_interval_minutes": 30.0},
        "distributed_training": {"distributed_world_size": 4, "distributed_rank": 0},
    }
    return OmegaConf.merge(cfg, OmegaConf.from_dotlist([f"{key}={value}" for key, value in changes.items()]))


BATCH = "128 sequences x 64 = 8,192 tokens, on 4 ranks"
EPOCHS = f"3 epochs of {BATCH}; no checkpoints"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, f"1,750 updates of {BATCH}; a checkpoint every 400 updates and every 30 minutes"),
        (
            {"dataset.batch_size": "null", "task.save_interval_minutes": 0},
            "1,750 updates; a checkpoint every 400 updates",
        ),
        ({"optimization.max_update": 0, "optimization.max_epoch": 3, "checkpoint.no_save": True}, EPOCHS),
        ({"optimization.max_update": 0}, None),  # fairseq-validate
    ],
)
def test_first_line(changes: dict, line: str | None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        progress.Progress().before_launch(settings(**changes))
    assert caplog.messages == ([] if line is None else [f"runs/a: {line}"])


@pytest.fixture(scope="module")
def pretraining() -> SimpleNamespace:
    """A stand-in for the trainer of mlm_tiny before its first update, with what the cost depends on."""
    cfg = compose_recipe("mlm_tiny", ["distributed_training.distributed_world_size=2", "optimization.update_freq=[3]"])
    task = build_task(cfg.task, 405)
    model = models.build_model(cfg.model, task)
    return SimpleNamespace(cfg=cfg, task=task, get_model=lambda: model, get_num_updates=lambda: 0)


def cost_lines(caplog: pytest.LogCaptureFixture, trainer: SimpleNamespace, **changes: Any) -> list[str]:
    """The messages about the cost of a run, whose settings and position are changed."""
    changed = SimpleNamespace(**vars(trainer) | {"cfg": trainer.cfg.copy()})
    changed.cfg.merge_with_dotlist([f"{key}={value}" for key, value in changes.items() if "." in key])
    vars(changed).update({key: value for key, value in changes.items() if "." not in key})
    caplog.clear()
    with caplog.at_level(logging.INFO):
        hooks.load_checkpoint(lambda cfg, trainer: (None, None), changed.cfg.checkpoint, changed)
    return caplog.messages


def test_cost_is_that_of_the_updates_that_are_left(
    pretraining: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """Products of one sequence by hand, in 2 layers of width 64 and length 64: 10 positions are predicted from 448 rows."""
    length, width, masked, rows = 64, 64, 10, 448
    layer = 24 * length * width**2 + 4 * length**2 * width
    forward = 2 * layer + 2 * masked * width * width + 2 * masked * width * rows
    flops = 3 * forward * 128 * 3 * 2 * 1750
    state = torch.random.get_rng_state()
    (line,) = cost_lines(caplog, pretraining)
    assert torch.equal(state, torch.random.get_rng_state())
    assert (
        line == f"this run: 1,750 updates, {1750 * 6 * 128 * 64:,} tokens, {flops:.2g} FLOPs (amos flops --reference)"
    )
    (line,) = cost_lines(caplog, pretraining, get_num_updates=lambda: 1050)
    assert line.startswith(f"the rest of this run: 700 updates, 34,406,400 tokens, {0.4 * flops:.2g} FLOPs (")


@pytest.mark.parametrize(
    "changes",
    [
        {"optimization.max_update": 10},  # over before its FLOPs would be counted
        {"optimization.max_update": 0},
        {"optimization.update_freq": "[1,2]"},
        {"get_num_updates": lambda: 1750},
        {"task": object()},  # fine-tuning
    ],
)
def test_no_cost_is_told(changes: dict, pretraining: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    assert cost_lines(caplog, pretraining, **changes) == []


DURATIONS = {0: "0 s", 59.6: "1 min 0 s", 3599: "59 min 59 s", 7800: "2 h 10 min", 90000: "1 d 1 h", 86400: "1 d 0 h"}


def test_duration() -> None:
    assert {seconds: progress.duration(seconds) for seconds in DURATIONS} == DURATIONS


def epoch(
    clock: list[float],
    updates: int,
    seconds: float,
    log_format: str | None = "simple",
    log_interval: int = 3,
    first: Sequence[float] = (),
    max_update: int = 10,
) -> None:
    """What fairseq's ``train`` does in an epoch of a run of ten updates, of ``seconds`` each but for the ``first`` ones; update
    n has the loss n."""
    done = [0]
    trainer = SimpleNamespace(get_num_updates=lambda: done[0])

    def train(cfg: Any, trainer: Any, task: Any, epoch_itr: Any) -> tuple[list[None], bool]:
        formats = {"log_format": log_format, "log_interval": log_interval, "default_log_format": "tqdm"}
        bar = progress_bar.progress_bar(range(updates), epoch=1, aim_param_checkpoint_dir="runs/a", **formats)
        for _ in bar:
            clock[0] += first[done[0]] if done[0] < len(first) else seconds
            done[0] += 1
            with metrics.aggregate("train_inner"):
                metrics.log_scalar("loss", done[0])
            if done[0] % log_interval == 0:
                stats = {**metrics.get_smoothed_values("train_inner"), "tokens_per_second": 21_300.0}
                bar.log(stats, tag="train_inner", step=done[0])
                metrics.reset_meters("train_inner")
        return [None], True

    cfg = settings(**{"optimization.max_update": max_update})
    trainer.cfg = cfg
    hooks.train_epoch(train, cfg, trainer, None, SimpleNamespace(next_epoch_idx=1))


def test_lines_tell_the_time_to_the_end(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    """The loss is the mean of the updates since fairseq's line, whose own loss remains the mean of its three updates."""
    with caplog.at_level(logging.INFO):
        epoch(clock, updates=9, seconds=40.0)
    lines = [message.partition(" / 9 ")[2] or message for message in caplog.messages]
    # The first update does not end within 30 seconds. Later, two updates without a line take more than a minute.
    assert lines == [
        "update 1 of 10: loss 1.000",
        "loss=2, tokens_per_second=21300",
        "update 5 of 10: loss 4.500, 40 s per update, first estimate: 3 min 20 s to the end",
        "loss=5, tokens_per_second=21300, left=2 min 40 s",
        "update 8 of 10: loss 7.500, 40 s per update, about 1 min 20 s to the end",
        "loss=8, tokens_per_second=21300, left=40 s",
    ]


@pytest.mark.parametrize(
    ("seconds", "lines"),
    [
        (0.01, ["update 5 of 10: loss 3.000, 100 updates/s, first estimate: 0 s to the end"]),
        (9.0, ["update 3 of 10: loss 2.000, 9 s per update, first estimate: 1 min 3 s to the end"]),
        # The third update ends after 36 seconds. The first two tell no rate.
        (
            12.0,
            [
                "update 2 of 10: loss 1.500",
                "update 5 of 10: loss 3.000, 12 s per update, first estimate: 1 min 0 s to the end",
            ],
        ),
        (
            20.0,
            [
                "update 1 of 10: loss 1.000",
                "update 5 of 10: loss 3.000, 20 s per update, first estimate: 1 min 40 s to the end",
            ],
        ),
    ],
)
def test_first_loss_appears_within_30_seconds(
    seconds: float, lines: list[str], clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        epoch(clock, updates=5, seconds=seconds, log_interval=100)
    assert caplog.messages == lines


def test_slow_first_updates_are_not_in_the_estimate(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        epoch(clock, updates=10, seconds=20.0, log_interval=100, first=[5.0, 4.0, 3.0, 3.0, 3.0])
    assert caplog.messages == [
        "update 5 of 10: loss 3.000, 3 s per update, first estimate: 15 s to the end",
        # (3 x 3 + 4 x 20) / 7 seconds
        "update 9 of 10: loss 5.000, 13 s per update, about 13 s to the end",
    ]


def test_the_time_of_the_run_is_told_after_twenty_measured_updates(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """Of 0.1 s each, the first estimate excepted, which sees the slow ones."""
    with caplog.at_level(logging.INFO):
        epoch(clock, updates=30, seconds=0.1, log_interval=1000, first=[3.0, 2.0, 2.0, 2.0, 2.0], max_update=10_022)
    assert caplog.messages == [
        "update 5 of 10,022: loss 3.000, 2 s per update, first estimate: 5 h 33 min to the end",
        # (3 x 2 + 17 x 0.1) / 20 seconds
        "update 22 of 10,022: loss 11.500, 0.38 s per update, about 1 h 4 min to the end",
    ]


def test_a_validation_of_minutes_after_an_interval_was_logged(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """fairseq logs update 3, empties the interval and validates; the next line would be due before there is another update.

    rtd_auc is derived from sums of the interval, which are the number 0 then, not histograms.
    """
    done = [0]
    trainer = SimpleNamespace(get_num_updates=lambda: done[0], cfg=settings(**{"optimization.max_update": 10}))

    def train(cfg: Any, trainer: Any, task: Any, epoch_itr: Any) -> tuple[list[None], bool]:
        formats = {"log_format": "simple", "log_interval": 100, "aim_param_checkpoint_dir": "runs/a"}
        for _ in progress_bar.progress_bar(range(5), epoch=1, **formats):
            clock[0] += 1.0
            done[0] += 1
            with metrics.aggregate("train_inner"):
                metrics.log_scalar("loss", done[0])
                for name in ("_replaced_logits", "_original_logits"):
                    metrics.log_scalar_sum(name, torch.ones(4))
                metrics.log_derived("rtd_auc", area_under_curve)
            if done[0] == 3:
                metrics.get_smoothed_values("train_inner")
                metrics.reset_meters("train_inner")
                clock[0] += 600.0
        return [None], True

    with caplog.at_level(logging.INFO):
        hooks.train_epoch(train, trainer.cfg, trainer, None, SimpleNamespace(next_epoch_idx=1))
    assert caplog.messages == ["update 4 of 10: loss 4.000, 301 s per update, first estimate: 30 min 6 s to the end"]


def test_bar_of_the_whole_run_on_a_terminal(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with caplog.at_level(logging.INFO):
        epoch(clock, updates=9, seconds=40.0, log_format=None)
    assert caplog.messages == []
    last = terminal.getvalue().replace("\n", "\r").rstrip("\r").split("\r")[-1]
    assert " 9/10 " in last
    assert "21,300 tokens/s, loss 8.000" in last
    assert "update/s, loss 1.000]" in terminal.getvalue()  # before the first interval has ended


def record(name: str, message: Any) -> logging.LogRecord:
    return logging.LogRecord(name, logging.INFO, "", 0, message, (), None)


@pytest.mark.parametrize(
    ("name", "message", "is_shown"),
    [
        ("fairseq_cli.train", {"common": 1}, False),
        ("fairseq_cli.train", "task: TextPretrainingTask", False),
        ("fairseq_cli.train", "num. shared model params: 408,449 (num. trained: 408,449)", True),
        ("fairseq.trainer", "Loaded checkpoint run/checkpoint_last.pt (epoch 2 @ 4 updates)", True),
        ("fairseq.trainer", "Saving checkpoint to run/checkpoint_last.pt", False),
        ("fairseq.checkpoint_utils", "Saved checkpoint run/checkpoint_last.pt", True),
        ("train_inner", "epoch 001:     50 / 1154 loss=39.566", True),
    ],
)
def test_console_leaves_out_what_says_little(name: str, message: Any, is_shown: bool) -> None:
    assert progress.ConsoleFilter().filter(record(name, message)) is is_shown


def test_console_of_hydra_is_quiet_and_its_file_complete(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """fairseq configures logging a second time, from the job's settings."""
    console = {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"}
    handlers = {"console": console, "file": {"class": "logging.FileHandler", "filename": str(tmp_path / "log")}}
    root = {"level": "INFO", "handlers": ["console", "file"]}
    settings = {"version": 1, "disable_existing_loggers": False, "handlers": handlers, "root": root}
    cfg = OmegaConf.create({"job_logging_cfg": settings})
    OmegaConf.set_struct(cfg, True)
    stdout = io.StringIO()
    monkeypatch.setattr("sys.stdout", stdout)
    before = logging.root.handlers[:], logging.root.level
    try:
        progress.Console().before_rank(cfg)
        logging.config.dictConfig(OmegaConf.to_container(cfg.job_logging_cfg))
        logging.getLogger("fairseq_cli.train").info({"a": 1})
        logging.getLogger("fairseq_cli.train").info("done training")
    finally:
        for handler in logging.root.handlers:
            handler.close()
        logging.root.handlers[:], level = before
        logging.root.setLevel(level)
    assert stdout.getvalue() == "done training\n"
    assert (tmp_path / "log").read_text() == "{'a': 1}\ndone training\n"


def test_a_log_that_cannot_be_printed_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """As with ``amos train RECIPE | head -1``, once for each line of the log."""
    monkeypatch.setattr(logging, "raiseExceptions", True)  # as a new process has it
    stream = io.StringIO()
    stream.close()  # writing raises ValueError
    logger = logging.Logger("run")
    logger.addHandler(logging.StreamHandler(stream))
    logger.error("a line")
    assert "Traceback" in capsys.readouterr().err
    progress.Console().before_rank({})
    logger.error("a line")
    assert capsys.readouterr().err == ""
