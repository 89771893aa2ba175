"""The OpenAI HTTP face: completions, chat completions and models over the router's domain."""
