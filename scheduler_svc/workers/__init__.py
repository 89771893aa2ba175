"""The workers: attaching them, one session of steps with each, and placing requests at them."""
