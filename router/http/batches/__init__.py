"""OpenAI's Files and Batches.

Each line of a batch becomes a turn (`router/stored_turns`) of the lowest priority: a stored call,
which is completed even if all processes die.
"""
