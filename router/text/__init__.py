"""Tokenizers, chat templates, and grammars for structured output."""
