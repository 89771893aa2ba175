"""`quire up`: starts a service on this machine and keeps it running."""
