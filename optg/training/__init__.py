"""Train a model from a recipe: the loop, learning rates, checkpoints and the run folder."""
