"""A stand-in for CUDA on which programs run without a GPU: docs/performance.md."""
