"""The process that forks trainings imports this module first: large imports, once for all trainings, and signals."""

import os
import signal

import torch._dynamo  # noqa: F401 - torch.optim imports it when the first optimizer is made

import amos_fairseq  # noqa: F401 - the plugin

# Ctrl-C and `timeout` signal a whole group. The command asks its trainings to save; the process that forks them ends with it.
os.setsid()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
