"""OpenEngine's API for inference engines, `openengine.v1`."""
