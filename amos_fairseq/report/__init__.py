"""One page about pretraining runs: the figures and tables of the AMOS paper for runs of one's own (``amos report``)."""
