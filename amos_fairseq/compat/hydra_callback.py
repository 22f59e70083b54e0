"""Import the plugin before fairseq's Hydra entry point decides how to launch.

``fairseq-train`` imports ``--user-dir`` before it parses the flags. ``fairseq-hydra-train`` imports ``common.user_dir`` only
in ``fairseq_cli.train.main``: by then ``distributed_utils.call_main`` and ``infer_init_method`` have already chosen ranks and
devices with stock code, and ``hydra_train.add_defaults`` has skipped this package's config classes. Hydra creates its
callbacks before all of that, so a YAML that names this class gets the same plugin as the flags do:

    hydra:
      callbacks:
        import_plugin: {_target_: amos_fairseq.compat.hydra_callback.ImportPlugin, user_dir: "${common.user_dir}"}

To locate the class, Hydra imports ``amos_fairseq``, which applies every patch.
"""

import os
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import fairseq.utils
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from amos_fairseq.errors import UserError, report_user_errors, save_dir_not_writable

PACKAGE = Path(__file__).parents[1]


class ImportPlugin(Callback):
    """Check that ``common.user_dir``, if it is set, is the package that Python has imported."""

    def __init__(self, user_dir: str | None = None) -> None:
        # The package above this folder, which Hydra has imported: register at once, unless `amos` has postponed it.
        import_module(PACKAGE.name).register()
        if user_dir is not None:
            with report_user_errors():  # Hydra would wrap the message in three lines of its own
                _accept_user_dir(user_dir)

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check that the folder of the run can be written before Hydra writes there."""
        with report_user_errors():  # Hydra turns exceptions of a callback into warnings
            folder = config.hydra.run.dir
            try:
                os.makedirs(folder, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder):
                    pass
            except OSError as error:
                raise save_dir_not_writable(folder, error) from error

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuse a sweep: its jobs train in one process, in which fairseq keeps what belongs to a run, and in one folder."""
        with report_user_errors():
            raise UserError(
                "--multirun is not supported: start one command after the other, each with its own checkpoint.save_dir"
            )


def _accept_user_dir(user_dir: str) -> None:
    """Register ``user_dir``, in any spelling, as already imported by fairseq."""
    fairseq_dir = os.path.dirname(fairseq.utils.__file__)  # where fairseq.utils.import_user_module looks, too
    paths = (os.path.abspath(user_dir), os.path.join(fairseq_dir, user_dir), os.path.join(fairseq_dir, "..", user_dir))
    existing = next((path for path in paths if os.path.exists(path)), None)
    if existing is None or not os.path.samefile(existing, PACKAGE):
        raise UserError(
            f"common.user_dir={user_dir} is missing, or not the package that Python imports: set it to {PACKAGE}"
        )
    # import_user_module compares spellings, not directories, and calls a second spelling "not globally unique".
    fairseq.utils.import_user_module.memo = getattr(fairseq.utils.import_user_module, "memo", set()) | {existing}
