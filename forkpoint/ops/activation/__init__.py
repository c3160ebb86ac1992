"""Elementwise gates and activations."""
