"""How fast a pretraining step is: against peers in one run, against the machine's own limits, and where its time goes."""
