"""Owns sequences and block space; decides every step; knows no text and no torch."""
