"""Anthropic's Messages API, on top of the code for chats."""
