"""The pure scheduler: values and `now` in, values out."""
