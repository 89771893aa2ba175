"""The JSON bodies of requests, parsed strictly."""
