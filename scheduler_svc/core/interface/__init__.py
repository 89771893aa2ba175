"""What goes into the core and comes out: requests, configuration, events, errors."""
