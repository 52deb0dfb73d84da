"""Server of models: OpenAI's protocol and Hugging Face's task schema, with one running batch per model."""
