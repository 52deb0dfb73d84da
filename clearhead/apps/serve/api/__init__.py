"""The server: OpenAI's protocol and Hugging Face's task schema over one running batch for each model."""
