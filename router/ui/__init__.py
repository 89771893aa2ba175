"""The web page at /ui: what the service is doing, and a playground."""
