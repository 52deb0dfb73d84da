"""Files of Hugging Face checkpoints: safetensors, quantized weights and pickled weights."""
