"""What a run does beyond fairseq: :mod:`amos_fairseq.run.hooks` has its moments, each other file a topic."""
