"""Who calls, and what they may use: API keys, tenants, quotas, priority."""
