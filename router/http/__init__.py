"""The HTTP APIs: OpenAI's, and Anthropic's in the folder `anthropic`."""
