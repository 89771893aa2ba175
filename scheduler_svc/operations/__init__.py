"""Operators' calls: adapters, models, moves, pool sizes, drains."""
