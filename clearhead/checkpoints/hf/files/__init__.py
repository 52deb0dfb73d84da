"""What is on disk: safetensors files, packed and quantized weights, the hub's cache, pickled weights."""
