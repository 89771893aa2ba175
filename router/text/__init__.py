"""Text to token ids and back: tokenizer, chat template, grammars."""
