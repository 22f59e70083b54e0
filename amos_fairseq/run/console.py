"""What a run prints on the console: what says little is in the log file only."""

import logging
import re
from typing import Any

from omegaconf import open_dict

# What fairseq logs at every start, validation and checkpoint, by logger. Lines about what was read, written or is wrong remain.
NOISE = re.compile(
    r"fairseq_cli\.train: (task|model|criterion|num\. expert|max tokens|training on|begin |Start |end of epoch)"
    r"|fairseq\.trainer: (Preparing|No existing|loading train|begin |Saving|Finished)"
    r"|fairseq\.(data\.data_utils: loaded|data\.iterators: grouped|checkpoint_utils: Preparing)"
)


class ConsoleFilter(logging.Filter):
    """Keep what says little out of the console: it is in the log file, and the settings are also in every checkpoint.

    Attributes:
        bar: a progress bar on the terminal; a line first removes it, and the bar appears again with the next update.
    """

    bar: Any = None

    def filter(self, record: logging.LogRecord) -> bool:
        # fairseq logs the configuration and the tree of modules as objects.
        if not isinstance(record.msg, str) or NOISE.match(f"{record.name}: {record.getMessage()}"):
            return False
        if self.bar is not None:
            self.bar.clear()
        return True


def console_filters() -> list[ConsoleFilter]:
    """Return the filters of the consoles of this process."""
    return [found for handler in logging.root.handlers for found in handler.filters if isinstance(found, ConsoleFilter)]


def quiet_console(cfg: Any) -> None:
    """Filter what a run prints, where a log file or a terminal shows that the output is not itself the log.

    A line that cannot be printed, on a full disk or to a closed pipe, is lost without a traceback of its own; the run goes on.
    """
    logging.raiseExceptions = False
    if cfg.get("job_logging_cfg"):  # fairseq configures Hydra's logging again from this
        with open_dict(cfg):
            cfg.job_logging_cfg.filters = {"console": {"()": f"{ConsoleFilter.__module__}.{ConsoleFilter.__name__}"}}
            for handler in cfg.job_logging_cfg.handlers.values():
                if handler["class"] == "logging.StreamHandler":
                    handler.filters = ["console"]
                elif handler["class"] == "logging.FileHandler":
                    handler.encoding = "utf-8"
    consoles = [handler for handler in logging.root.handlers if type(handler) is logging.StreamHandler]
    for console in consoles:
        if not console_filters() and (console.stream.isatty() or len(consoles) < len(logging.root.handlers)):
            console.addFilter(ConsoleFilter())
