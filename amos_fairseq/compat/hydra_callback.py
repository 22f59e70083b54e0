"""Import the plugin before fairseq's Hydra entry point decides how to launch.

``fairseq-train`` imports ``--user-dir`` before it parses the flags. ``fairseq-hydra-train`` imports ``common.user_dir`` only
in ``fairseq_cli.train.main``: by then ``distributed_utils.call_main`` and ``infer_init_method`` have already chosen ranks and
devices with stock code, and ``hydra_train.add_defaults`` has skipped this package's config classes. Hydra creates its
callbacks before all of that, so a YAML that names this class gets the same plugin as the flags do:

    hydra:
      callbacks:
        import_plugin: {_target_: amos_fairseq.compat.hydra_callback.ImportPlugin, user_dir: "${common.user_dir}"}

To locate the class, Hydra imports ``amos_fairseq``, which applies every patch. A launcher that pickles the callback
(submitit) imports the plugin in its job in the same way.
"""

import os
from pathlib import Path

import fairseq.utils
from hydra.experimental.callback import Callback

from amos_fairseq.errors import UserError

PACKAGE = Path(__file__).parents[1]


class ImportPlugin(Callback):
    """Check that ``common.user_dir`` is the package that Python has imported.

    Args:
        user_dir: value of ``common.user_dir``; None where the plugin is used without it.

    Raises:
        UserError: ``user_dir`` does not exist, or is another copy of the plugin (an edited checkout next to an installed
            wheel), which fairseq would refuse later with a misleading message.
    """

    def __init__(self, user_dir: str | None = None) -> None:
        if user_dir is not None:
            _accept_user_dir(user_dir)


def _accept_user_dir(user_dir: str) -> None:
    """Register ``user_dir``, in any spelling, as already imported by fairseq."""
    found = _path_in_fairseq(user_dir)
    if found is None:
        raise UserError(f"common.user_dir={user_dir} does not exist: start from the checkout or set it to {PACKAGE}")
    if not os.path.samefile(found, PACKAGE):
        raise UserError(
            f"common.user_dir={user_dir} is {found}, but Python imports amos_fairseq from {PACKAGE}: "
            "install the checkout with 'pip install -e .', or set common.user_dir to the installed package"
        )
    # import_user_module compares spellings, not directories, and calls a second spelling "not globally unique".
    fairseq.utils.import_user_module.memo = getattr(fairseq.utils.import_user_module, "memo", set()) | {found}


def _path_in_fairseq(user_dir: str) -> str | None:
    """Return the path that ``fairseq.utils.import_user_module`` uses: relative to here, in fairseq, or next to fairseq."""
    fairseq_dir = os.path.dirname(fairseq.utils.__file__)
    paths = (
        os.path.abspath(user_dir),
        os.path.join(fairseq_dir, user_dir),
        os.path.join(fairseq_dir, "..", user_dir),
    )
    return next((path for path in paths if os.path.exists(path)), None)
