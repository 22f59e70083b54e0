"""The one place where fairseq's training and validation commands start, by flags or through Hydra.

``call_main`` receives the whole configuration before any rank exists. Here it is completed and checked, and a user's
mistake, now or later in any rank, becomes one line and exit status 1 instead of a traceback.
"""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from fairseq.distributed import utils as distributed_utils
from torch.multiprocessing.spawn import ProcessExitedException

from amos_fairseq.compat.distribution import arrange_ranks
from amos_fairseq.compat.precision import choose_precision
from amos_fairseq.compat.user_errors import exit_on_mistake
from amos_fairseq.errors import report_user_errors


def prepare_launch(cfg: Any) -> None:
    """Check and complete the configuration for the devices of this machine; raises ``UserError``."""
    num_gpus = 0 if cfg.common.cpu else torch.cuda.device_count()
    choose_precision(cfg, has_gpu=num_gpus > 0)
    arrange_ranks(cfg, os.environ, num_gpus)


def run_rank(main: Callable[..., Any], cfg: Any, **kwargs: Any) -> None:
    """``main`` of one rank. A function of this module, so that a spawned rank imports the plugin before it starts."""
    with exit_on_mistake():
        main(cfg, **kwargs)


def apply() -> None:
    """Replace ``fairseq.distributed.utils.call_main``, which all of fairseq's commands call by this name."""
    call_main = distributed_utils.call_main

    @functools.wraps(call_main)
    def prepare_and_call_main(cfg: Any, main: Callable[..., Any], **kwargs: Any) -> None:
        with report_user_errors():
            prepare_launch(cfg)
        try:
            call_main(cfg, functools.partial(run_rank, main), **kwargs)
        except ProcessExitedException as ended:
            # A spawned rank has said why; its status tells a scheduler whether to start the run again.
            sys.exit(ended.exit_code if ended.exit_code >= 0 else 128 - ended.exit_code)

    distributed_utils.call_main = prepare_and_call_main
