"""Exchanges between ranks."""
