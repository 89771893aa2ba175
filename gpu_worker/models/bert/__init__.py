"""BERT-shaped encoders."""
