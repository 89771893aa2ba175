"""The OpenAI API over HTTP: completions, chat completions and models."""
