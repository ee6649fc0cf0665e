"""Job files for Slurm, Kubernetes and containers."""
