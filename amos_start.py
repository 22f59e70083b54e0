"""Start of the command ``amos`` and of the scripts in ``preprocess``: what must happen before PyTorch is imported.

It is outside of the package, because the current folder leaves the import path before a package with the same name is found.
"""

import sys


def start() -> None:
    """Set how this process imports, prints, waits and uses memory."""
    from amos_fairseq.process import keep_freed_memory, leave_out_current_folder, prepare_streams, wait_passively

    leave_out_current_folder()
    prepare_streams()
    wait_passively()
    keep_freed_memory()


def main() -> int:
    """Run ``amos`` and return its exit status."""
    start()
    from amos_fairseq.cli.main import main as run_command

    return run_command()


if __name__ == "__main__":
    sys.exit(main())
