"""Commands for live requests, and for the KV pools that hold their blocks."""
