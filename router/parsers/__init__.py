"""Readers that tell text, thinking and function calls apart in what a model writes."""
