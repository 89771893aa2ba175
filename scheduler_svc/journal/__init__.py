"""Records the calls and plans of a core, and replays them."""
