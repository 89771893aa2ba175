"""Captures steps as CUDA graphs, and replays them."""
