"""Executes one step: rows, inputs, model, results."""
