"""GET /v1/usage: the usage of requests, for operators."""

from dataclasses import asdict

from aiohttp import web

from contract.errors import InvalidArgumentError
from router.http.endpoint import CallId, endpoint, json_response, peer_of
from router.http.strict_json import excerpt
from router.operators.usage import DEFAULT_BY, UsageReports

USAGE = "/v1/usage"


def usage_route(reports: UsageReports) -> web.RouteDef:
    """Return the route."""

    async def get_usage(request: web.Request, _: CallId) -> web.Response:
        """Sum up the usage of requests by hour, day, tenant, key, model or adapter."""
        query = request.query
        if unknown := query.keys() - {"since", "until", "by"}:
            raise InvalidArgumentError(
                min(unknown), "is unknown; the parameters are since, until and by"
            )
        by = tuple(name for name in query["by"].split(",") if name) if "by" in query else DEFAULT_BY
        since, until = _time(query.get("since"), "since"), _time(query.get("until"), "until")
        rows = await reports.read(since, until, by, peer_of(request.remote))
        data = [{**row.group, **asdict(row.used)} for row in rows]
        return json_response({"object": "list", "data": data})

    return web.get(USAGE, endpoint(get_usage))


def _time(text: str | None, field: str) -> float | None:
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise InvalidArgumentError(
            field, f"is {excerpt(text)}; it must be a Unix time in seconds"
        ) from None
