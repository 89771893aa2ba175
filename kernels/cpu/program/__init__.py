"""The layers of a Llama-shaped decoder as one native program."""
