"""gpt-oss: a Llama-shaped decoder with sinks, and experts that may be in MXFP4."""
