"""titanlike: pre-train Llama, Qwen2.5, Qwen3, Mixtral, DeepSeek, GPT-OSS, Gemma and GPT with stock PyTorch from one TOML recipe."""

__version__ = "0.1.0"
