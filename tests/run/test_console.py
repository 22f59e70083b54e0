"""What the console leaves out, and a console that is closed."""

import io
import logging
import logging.config
from typing import Any

import pytest
from omegaconf import OmegaConf

from amos_fairseq.run.console import ConsoleFilter, quiet_console


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
    assert ConsoleFilter().filter(record(name, message)) is is_shown


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
        quiet_console(cfg)
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
    quiet_console({})
    logger.error("a line")
    assert capsys.readouterr().err == ""
