"""Commands that use the model: for a prompt, a conversation, embeddings or a file of requests."""
