"""All targets, by name."""

from tests.fuzz import live_router, parsers

TARGETS = {target.name: target for target in (*parsers.TARGETS, *live_router.TARGETS)}
