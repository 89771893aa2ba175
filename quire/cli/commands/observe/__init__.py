"""Commands that show and measure what a service does."""
