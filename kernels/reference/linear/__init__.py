"""Linear maps, in plain torch."""
