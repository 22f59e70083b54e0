"""Speed and memory of a pretraining step: against peers, against the limits of the machine, and by part of the step."""
