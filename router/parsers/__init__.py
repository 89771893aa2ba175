"""Readers that separate text, thinking and function calls in a model's output."""
