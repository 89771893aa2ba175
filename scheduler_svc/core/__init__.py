"""The pure scheduler: it takes values and the time, and returns values."""
