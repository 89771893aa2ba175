"""Defragments a pool, and changes its size."""
