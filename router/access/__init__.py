"""Callers and their rights: API keys, tenants, quotas, priority."""
