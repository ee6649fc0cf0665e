"""Comparison of runs from their directories: tables, a page and a picture. Does not import torch."""
