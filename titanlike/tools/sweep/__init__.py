"""Hyperparameter search over the keys of a recipe. Each trial is a run of its own."""
