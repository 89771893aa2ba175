"""What a Python user imports: the generated stubs in `quire.v1`, and the command line."""
