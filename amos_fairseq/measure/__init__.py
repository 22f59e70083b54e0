"""What a pretraining step costs: FLOPs, time and memory, against peers and the limits of the machine."""
