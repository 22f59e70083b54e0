"""The task of pretraining, and the base of all tasks on a binarized corpus."""
