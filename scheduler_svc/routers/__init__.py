"""Streams to routers, and requests that clients may resume."""
