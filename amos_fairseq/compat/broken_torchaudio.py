"""Hide a torchaudio that cannot be imported.

fairseq requires torchaudio for its speech tasks. The wheel on PyPI is built for CUDA, and beside a CPU build of torch its
import fails (``libcudart`` is missing). ``transformers`` 5 imports torchaudio wherever it is installed
(``transformers/audio_utils.py``), so that ``from transformers import AutoModel`` fails too. Nothing here processes audio.

``None`` in ``sys.modules`` means "not installed" to ``import`` and to ``importlib.util.find_spec``, which ``transformers``
asks. The effect ends with the process; ``pip uninstall torchaudio`` does the same for programs that do not import this
package, and ``examples/environment.sh`` runs it where it is needed.
"""

import importlib
import importlib.util
import sys


def apply() -> None:
    """Call before ``transformers`` is imported. A torchaudio that works takes 0.1 s to import."""
    if importlib.util.find_spec("torchaudio") is None:
        return
    try:
        importlib.import_module("torchaudio")
    except Exception:  # OSError from the dynamic linker, ImportError, RuntimeError of a version check
        sys.modules["torchaudio"] = None
