"""Commands that show and measure the work of a service."""
