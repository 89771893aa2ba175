"""The router: text in, streamed text out; it knows neither KV blocks nor torch."""
