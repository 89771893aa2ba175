"""What passes from one scheduler core to another."""
