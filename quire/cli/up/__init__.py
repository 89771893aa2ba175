"""`quire up`: starts a service on this machine and looks after it."""
