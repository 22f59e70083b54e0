"""Import the plugin before fairseq's Hydra entry decides how to launch.

``fairseq-train`` imports ``--user-dir`` before it parses the flags. ``fairseq-hydra-train`` imports ``common.user_dir``
only inside ``fairseq_cli.train.main``: by then ``distributed_utils.call_main`` and ``infer_init_method`` have already
chosen ranks and devices with stock code, and ``hydra_train.add_defaults`` has passed over our config classes. Hydra
builds its callbacks before all of that, so a YAML that names this class gets the same plugin as the flags do:

    hydra:
      callbacks:
        import_plugin: {_target_: amos_fairseq.compat.hydra_callback.ImportPlugin, user_dir: "${common.user_dir}"}

Locating the class imports ``amos_fairseq`` and so applies every patch. A launcher that pickles the callback (submitit)
imports the plugin in its job in the same way.
"""

import os
from pathlib import Path

import fairseq.utils
from hydra.experimental.callback import Callback

import amos_fairseq
from amos_fairseq.errors import UserError


class ImportPlugin(Callback):
    """Checks that ``common.user_dir`` is the package that Python has imported.

    Args:
        user_dir: value of ``common.user_dir``; None where the plugin is used without it.

    Raises:
        UserError: ``user_dir`` is another copy of the plugin (an edited checkout beside an installed wheel), so that
            fairseq would refuse it later in words that do not help.
    """

    def __init__(self, user_dir: str | None = None) -> None:
        if user_dir is not None:
            _accept_user_dir(user_dir)


def _accept_user_dir(user_dir: str) -> None:
    """Tell fairseq that ``user_dir``, however it is spelled, is imported already."""
    package = Path(amos_fairseq.__file__).parent
    found = _as_fairseq_finds_it(user_dir)
    if found is None:
        raise UserError(f"common.user_dir={user_dir} does not exist: start from the checkout or set it to {package}")
    if not os.path.samefile(found, package):
        raise UserError(
            f"common.user_dir={user_dir} is {found}, but Python imports amos_fairseq from {package}: "
            "install the checkout with 'pip install -e .', or set common.user_dir to the installed package"
        )
    # import_user_module compares spellings, not directories, and calls a second spelling "not globally unique".
    fairseq.utils.import_user_module.memo = getattr(fairseq.utils.import_user_module, "memo", set()) | {found}


def _as_fairseq_finds_it(user_dir: str) -> str | None:
    """The spelling that ``fairseq.utils.import_user_module`` arrives at: from here, in fairseq, beside fairseq."""
    fairseq_dir = os.path.dirname(fairseq.utils.__file__)
    spellings = (
        os.path.abspath(user_dir),
        os.path.join(fairseq_dir, user_dir),
        os.path.join(fairseq_dir, "..", user_dir),
    )
    return next((spelling for spelling in spellings if os.path.exists(spelling)), None)
