"""The streams of routers, and the requests that their clients may resume."""
