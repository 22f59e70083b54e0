"""The tests of this folder take long: only ``bash tests/reliability/run.sh``, which sets AMOS_RELIABILITY, collects them."""

import os

collect_ignore_glob = [] if "AMOS_RELIABILITY" in os.environ else ["test_*.py"]
