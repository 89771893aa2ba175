"""Models: our own decoders and encoders, and the decoders that `transformers` builds."""
