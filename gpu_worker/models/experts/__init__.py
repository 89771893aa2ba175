"""Mixtures of experts, as the feed-forward part of any decoder's layers."""
