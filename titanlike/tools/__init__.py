"""Programs and libraries that help beside training. What trains imports none of them."""
