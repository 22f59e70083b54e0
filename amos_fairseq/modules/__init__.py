"""The nn.Modules that the models consist of."""
