"""Commands for what runs now: live requests, and the KV pools that hold their blocks."""
