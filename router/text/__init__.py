"""Converts text to token ids and back: tokenizer, chat template and grammars."""
