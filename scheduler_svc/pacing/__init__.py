"""How large and how early a step may be so that streams stay in time."""
