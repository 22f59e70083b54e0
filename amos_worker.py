"""Start of the worker processes of ``amos prepare``, outside the package for the reason that ``amos_start.py`` gives.

It is not in ``amos_start.py``, which imports all commands, because the package imports this module.
"""

import pickle
from typing import Any

registers_later = False  # read by amos_fairseq/__init__.py


def start_worker(watched: Any, function_and_arguments: bytes) -> None:
    """Call the pickled function in a process of :mod:`amos_fairseq.text.encoding`, which needs neither PyTorch nor fairseq."""
    global registers_later
    registers_later = True
    function, *arguments = pickle.loads(function_and_arguments)  # from the parent process
    function(watched, *arguments)
