"""DeepSeek-V2 and V3."""
