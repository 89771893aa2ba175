"""What operators can do: load adapters and models, move requests, resize pools, drain workers."""
