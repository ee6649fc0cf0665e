"""Job files for Slurm, Kubernetes, SkyPilot and containers."""
