"""The transforms that make a plain model parallel, each applied from outside by one function."""
