"""Other processes: how they are found, connected to, and noticed to hang."""
