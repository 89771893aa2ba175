"""Drafts tokens ahead and verifies them in one step."""
