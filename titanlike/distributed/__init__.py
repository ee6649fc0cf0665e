"""Processes of a job: launcher environment, process group, collectives, shutdown and the watchdog."""
