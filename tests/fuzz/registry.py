"""All targets, by name."""

from tests.fuzz import live_router, live_scheduler, live_worker, parsers

TARGETS = {
    target.name: target
    for module in (parsers, live_router, live_scheduler, live_worker)
    for target in module.TARGETS
}
