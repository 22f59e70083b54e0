"""Models: one file per objective, with the same name as its criterion."""
