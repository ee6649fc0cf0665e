"""Descriptions of machines: GPUs, and the instance types of clouds that extend them."""
