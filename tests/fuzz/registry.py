"""All targets, by name."""

from tests.fuzz import parsers

TARGETS = {target.name: target for target in (*parsers.TARGETS,)}
