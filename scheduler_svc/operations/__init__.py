"""Calls of operators: adapters, models, moves, pool sizes and drains."""
