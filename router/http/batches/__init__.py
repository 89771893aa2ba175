"""OpenAI's Files and Batches: each line of a batch is a stored turn of the lowest priority."""
