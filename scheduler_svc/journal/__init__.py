"""Records what a core was told and planned, and replays it."""
