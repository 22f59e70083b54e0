"""The process that forks trainings imports this module first: signals, and large imports, once for all trainings."""

import os
import signal

from amos_fairseq.errors import EXIT_CODES

# Ctrl-C and `timeout` signal a whole group. The command asks its trainings to save; the process that forks them ends with it.
os.setsid()
for number in EXIT_CODES:
    signal.signal(number, signal.SIG_IGN)
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # fairseq counts the GPUs, as the number of ranks

import torch._dynamo  # noqa: E402, F401 - torch.optim imports it when the first optimizer is made

import amos_fairseq  # noqa: E402

amos_fairseq.register()
