"""The HTTP APIs: OpenAI's, and in `anthropic` Anthropic's."""
