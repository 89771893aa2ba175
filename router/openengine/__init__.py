"""The contract for engines of the OpenEngine project, `openengine.v1`."""
