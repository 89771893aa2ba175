"""The web page at /ui, with the state of the service and a playground."""
