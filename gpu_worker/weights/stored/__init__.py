"""How files store weights: formats, and what their bits mean."""
