"""Copies between slots, for operators that cannot redirect."""
