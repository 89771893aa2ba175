"""OpenAI's Files and Batches: each line of a file is a turn of the lowest priority."""
