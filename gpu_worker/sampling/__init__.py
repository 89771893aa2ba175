"""From the logits of a step to one token per sequence."""
