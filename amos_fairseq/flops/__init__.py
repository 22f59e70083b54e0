"""What a training run costs in floating point operations, counted on the model and criterion that would be trained."""
