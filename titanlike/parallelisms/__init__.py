"""Parallelisms and memory optimizations, each applied to a plain model from outside by one function."""
