"""The streams to routers, and the requests that clients may resume."""
