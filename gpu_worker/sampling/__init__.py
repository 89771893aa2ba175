"""Turns the logits of a step into one token per sequence."""
