"""Start of the command ``amos`` and of the scripts in ``preprocess``: what must happen before PyTorch is imported.

This module is outside the package, because ``import amos_fairseq`` imports PyTorch and fairseq and registers the plugin, which
takes five seconds. After :func:`start` it does neither: a subcommand calls ``amos_fairseq.register()`` when it needs them, so
``amos --help`` and a mistake on the command line take a fraction of a second.
"""

import sys

# Read by amos_fairseq/__init__.py. False in the processes that this one spawns, which import this module and do not start it:
# a rank of a training run must not miss the patches.
registers_later = False


def start() -> None:
    """Let ``import amos_fairseq`` return at once in this process, and set how it waits and uses memory."""
    global registers_later
    registers_later = True
    from amos_fairseq.fairseq_import import silence_text_to_speech
    from amos_fairseq.process import keep_freed_memory, wait_passively
    from amos_fairseq.python_process import leave_out_current_folder, prepare_streams

    leave_out_current_folder()
    prepare_streams()
    wait_passively()
    keep_freed_memory()
    silence_text_to_speech()


def main() -> int:
    """Run ``amos`` and return its exit status."""
    start()
    from amos_fairseq.cli.main import main as run_command

    return run_command()


if __name__ == "__main__":
    # As a module of its own name, under which the package finds it.
    from amos_start import main as main_of_module

    sys.exit(main_of_module())
