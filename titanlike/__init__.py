"""titanlike: pre-train Llama, Mistral, Qwen, Mixtral, DeepSeek, GPT-OSS, Gemma and GPT with stock PyTorch from one TOML recipe."""

__version__ = "0.1.0"
