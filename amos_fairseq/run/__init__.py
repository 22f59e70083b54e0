"""What a run does beyond fairseq: :mod:`amos_fairseq.run.hooks` has its moments, each other file a topic."""

from amos_fairseq import compat  # noqa: F401 - before anything else imports fairseq, whose warnings it silences
