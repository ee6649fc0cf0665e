"""Float8 training: scaled matmuls in 8-bit floating point."""
